// Sixteen fp32 lanes in one AVX-512 register.
#pragma once

struct V {
  __m512 v;
};
constexpr int kMostRows = 12;  // 12 rows x 2 panels of accumulators, of 32 registers
constexpr int kRowsOfBlock = 12;
// Of nearly equal size.
inline int64_t rows_of_group(int64_t left) {
  return left / ((left + kMostRows - 1) / kMostRows);
}
constexpr int kQueries = 4;    // 4 queries x 4 vectors of keys or values
constexpr int kSums = 16;

inline __mmask16 lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
inline V zero() { return {_mm512_setzero_ps()}; }
inline V set1(float x) { return {_mm512_set1_ps(x)}; }
inline V load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline V load(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(lanes(n), p)}; }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a.v); }
inline void store(float* p, V a, int64_t n) { _mm512_mask_storeu_ps(p, lanes(n), a.v); }

inline V widen(__m256i h) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
inline V load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline V load(const bf16* p, int64_t n) { return widen(_mm256_maskz_loadu_epi16(lanes(n), p)); }
inline __m256i narrow(V a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i even = _mm512_add_epi32(_mm512_add_epi32(u, odd), _mm512_set1_epi32(0x7fff));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  const __m512i top = _mm512_srli_epi32(even, 16);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(top, nan, _mm512_set1_epi32(0x7fc0)));
}
inline void store(bf16* p, V a) { _mm256_storeu_si256((__m256i*)p, narrow(a)); }
inline void store(bf16* p, V a, int64_t n) {
  _mm256_mask_storeu_epi16(p, lanes(n), narrow(a));
}

inline V operator+(V a, V b) { return {_mm512_add_ps(a.v, b.v)}; }
inline V operator-(V a, V b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline V operator*(V a, V b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline V operator/(V a, V b) { return {_mm512_div_ps(a.v, b.v)}; }
inline V fma(V a, V b, V c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline V maximum(V a, V b) { return {_mm512_max_ps(a.v, b.v)}; }
inline V minimum(V a, V b) { return {_mm512_min_ps(a.v, b.v)}; }
// 2 to the power of an integral n.
inline V pow2(V n) {
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
// The first n lanes of a, `other` in the rest.
inline V first(V a, int64_t n, float other) {
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), lanes(n), a.v)};
}
inline float sum(V a) { return _mm512_reduce_add_ps(a.v); }
inline float highest(V a) { return _mm512_reduce_max_ps(a.v); }

// Units of the reduction: one fp32 value, or two neighbouring bf16 values.
template <class T>
struct Weights;
template <>
struct Weights<float> {
  V w;
};
#if COPPICE_BF16
template <>
struct Weights<bf16> {
  __m512i w;
};
inline Weights<bf16> load_weights(const uint32_t* p) { return {_mm512_loadu_si512(p)}; }
#else
struct Two {
  V low, high;
};
template <>
struct Weights<bf16> {
  Two w;
};
inline Weights<bf16> load_weights(const uint32_t* p) {
  const __m512i pairs = _mm512_loadu_si512(p);
  const __m512i high = _mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000)));
  return {{{_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}, {_mm512_castsi512_ps(high)}}};
}
#endif
inline Weights<float> load_weights(const float* p) { return {load(p)}; }
inline Weights<float> load_weights(const int8_t* p) {
  return {{_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)))}};
}
inline float operand(float x) { return x; }
inline V broadcast(float x) { return set1(x); }
inline V dot(V acc, const Weights<float>& w, V x) { return fma(w.w, x, acc); }

#if COPPICE_BF16
// What a row of x is kept in, a unit each, while it is multiplied.
inline uint32_t operand(uint32_t pair) { return pair; }
inline __m512i broadcast(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline V dot(V acc, Weights<bf16> w, __m512i x) {
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)w.w, (__m512bh)x)};
}
#else
inline Halves operand(uint32_t pair) { return halves(pair); }
inline Two broadcast(Halves x) { return {set1(x.low), set1(x.high)}; }
inline Two broadcast(uint32_t x) { return broadcast(halves(x)); }
// The order, and with denormals flushed the bits, of `vdpbf16ps`.
inline V dot(V acc, const Weights<bf16>& w, const Two& x) {
  return fma(w.w.low, x.low, fma(w.w.high, x.high, acc));
}
#endif

// `dot` for R rows, x(r) of each.
template <int R, class U, class F>
inline void dots(V (&acc)[R], const U* w, const F& x) {
  const auto weights = load_weights(w);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) acc[r] = dot(acc[r], weights, broadcast(x(r)));
}
// Likewise for both panels of a block.
template <int R, class U, class X>
inline void dots_of_block(V (&first)[R], V (&second)[R], const U* w, const X* x) {
  const auto w0 = load_weights(w), w1 = load_weights(w + 16);
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    const auto value = broadcast(x[r]);
    first[r] = dot(first[r], w0, value);
    second[r] = dot(second[r], w1, value);
  }
}

// out[u * stride + i] = rows[i][u] for 16 rows and 16 units.
inline void transpose16(const uint32_t* const* rows, uint32_t* out, int64_t stride) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i]);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(out + i * stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
    _mm512_storeu_si512(out + (i + 8) * stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
    _mm512_storeu_si512(out + (i + 4) * stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
    _mm512_storeu_si512(out + (i + 12) * stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
  }
}
