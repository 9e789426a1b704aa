// What AVX2 and plain C++ make of their few primitives: tails, reductions, pairs of bf16.
#pragma once

inline V load(const float* p, int64_t n) {
  float lane[16] = {};
  std::memcpy(lane, p, n * sizeof(float));
  return load(lane);
}
inline V load(const bf16* p, int64_t n) {
  bf16 lane[16] = {};
  std::memcpy(lane, p, n * sizeof(bf16));
  return load(lane);
}
template <class T>
inline void store(T* p, V a, int64_t n) {
  T lane[16];
  store(lane, a);
  std::memcpy(p, lane, n * sizeof(T));
}
inline V first(V a, int64_t n, float other) {
  if (n == 16) return a;
  float lane[16];
  store(lane, a);
  for (int64_t i = n; i < 16; ++i) lane[i] = other;
  return load(lane);
}
template <class F>
inline float fold(V a, const F& f) {
  float lane[16];
  store(lane, a);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] = f(lane[i], lane[i + width]);
  }
  return lane[0];
}
inline float sum(V a) {
  return fold(a, [](float x, float y) { return x + y; });
}
inline float highest(V a) {
  return fold(a, [](float x, float y) { return x > y ? x : y; });
}

template <class T>
struct Weights;
template <>
struct Weights<float> {
  V w;
};
template <>
struct Weights<bf16> {
  Two w;
};
inline Weights<float> load_weights(const float* p) { return {load(p)}; }
inline Weights<float> load_weights(const int8_t* p) { return {load(p)}; }
inline Weights<bf16> load_weights(const uint32_t* p) { return {split(p)}; }
inline float operand(float x) { return x; }
inline Halves operand(uint32_t pair) { return halves(pair); }
inline V broadcast(float x) { return set1(x); }
inline Two broadcast(Halves x) { return {set1(x.low), set1(x.high)}; }
inline Two broadcast(uint32_t x) { return broadcast(halves(x)); }
inline V dot(V acc, const Weights<float>& w, V x) { return fma(w.w, x, acc); }
// The order, and with denormals flushed the bits, of `vdpbf16ps`.
inline V dot(V acc, const Weights<bf16>& w, const Two& x) {
  return fma(w.w.low, x.low, fma(w.w.high, x.high, acc));
}
// `dot` for R rows, x(r) of each: all high halves first, so that half of a weight is in registers at
// a time.
template <int R, class F>
inline void dots(V (&acc)[R], const uint32_t* w, const F& x) {
  const V high = split_high(w);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = fma(high, set1(x(r).high), acc[r]);
  const V low = split_low(w);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = fma(low, set1(x(r).low), acc[r]);
}
template <int R, class U, class F>
inline void dots(V (&acc)[R], const U* w, const F& x) {
  const V weights = load(w);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = fma(weights, set1(x(r)), acc[r]);
}
// Likewise for both panels of a block, one after the other: a row is loaded twice, or its values would
// take the registers of sums.
template <int R, class U, class X>
inline void dots_of_block(V (&first)[R], V (&second)[R], const U* w, const X* x) {
  dots(first, w, [x](int r) { return x[r]; });
  __asm__("" : "+r"(x));
  dots(second, w + 16, [x](int r) { return x[r]; });
}
