// What the operations need of an element type, and the functions that all of them use.
#pragma once

// Of a reduction over rows of T and a weight of W: what one `dot` takes of a row, and, for each
// output, of the panels.
template <class T, class W = T>
struct Unit;
template <>
struct Unit<float> {
  using type = float;
  using panel = float;
  static constexpr int64_t size = 1;
};
template <>
struct Unit<bf16> {
  using type = uint32_t;
  using panel = uint32_t;
  static constexpr int64_t size = 2;
};
template <class T>
struct Unit<T, int8_t> {  // multiplied in fp32
  using type = T;
  using panel = int8_t;
  static constexpr int64_t size = 1;
};

inline float operand(bf16 x) { return halves(x.bits).low; }
// What a unit is kept in while it is multiplied with many others.
template <class T, class W = T>
using Operand = decltype(operand(typename Unit<T, W>::type()));

struct Plainly {
  ~Plainly() {}
};
// How the processor computes while one of these lives.
template <class T>
using Mode = std::conditional_t<std::is_same_v<T, bf16>, FlushDenormals, Plainly>;

// This thread's S, kept between calls. The barrier keeps the compiler from looking the address up
// once more at every use, inner loops included.
template <class S>
inline S& kept() {
  static thread_local S mine;
  S* address = &mine;
  asm("" : "+r"(address));
  return *address;
}

// Cephes' expf; the arguments here are never above 88, and what is below -87 comes out as e^-87.
inline V exponential(V x) {
  x = minimum(maximum(x, set1(-87.0f)), set1(88.0f));
  const V magic = set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const V n = x * set1(1.44269504088896341f) + magic - magic;
  V r = fma(n, set1(-0.693359375f), x);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  return (fma(p * r, r, r) + set1(1.0f)) * pow2(n);
}
inline float exponential(float x) {
  float lane[16];
  store(lane, exponential(set1(x)));
  return lane[0];
}

// Rounds to T and back, where the reference has an intermediate result in T.
inline V rounded(V a, const float*) { return a; }
inline V rounded(V a, const bf16*) {
  bf16 lane[16];
  store(lane, a);
  return load(lane);
}

// x / (1 + e^-x), rounded to T.
template <class T>
inline V silu(V x, const T* type) {
  return rounded(x / (set1(1.0f) + exponential(zero() - x)), type);
}

// f(i, n) for every vector of up to 16 elements in [0, d): the tail is the same code, masked.
template <class F>
inline void vectors(int64_t d, const F& f) {
  for (int64_t i = 0; i < d; i += 16) f(i, d - i < 16 ? d - i : 16);
}
template <class T>
inline V load_some(const T* p, int64_t n) {
  return n == 16 ? load(p) : load(p, n);
}
template <class T>
inline void store_some(T* p, V a, int64_t n) {
  n == 16 ? store(p, a) : store(p, a, n);
}

// Rows in as many tasks as make each worth a thread.
template <class F>
inline void over_rows(int64_t rows, int64_t work_per_row, const F& body) {
  constexpr int64_t kWorth = 16384;
  const int64_t step = std::max<int64_t>(1, kWorth / std::max<int64_t>(work_per_row, 1));
  parallel((rows + step - 1) / step, [&](int64_t task) {
    for (int64_t row = task * step; row < std::min(rows, (task + 1) * step); ++row) body(row);
  });
}
