// Sixteen fp32 lanes in two AVX2 registers.
#pragma once

struct V {
  __m256 a, b;
};
constexpr int kMostRows = 6;  // 6 rows x a panel of two registers, of 16
constexpr int kRowsOfBlock = 3;  // 3 rows x a block of two panels
// Fewer than 10 sums leave the multipliers waiting for what is added before, as four rows of a panel
// do: 5 + 5, not 6 + 4, and what is left over with three rows or fewer.
inline int64_t rows_of_group(int64_t left) {
  if (left <= kMostRows) return left;
  const int64_t rest = left % kMostRows;
  return rest == 0 || rest == 3 || rest == 5 ? kMostRows : kMostRows - 1;
}
constexpr int kQueries = 6;  // likewise, x 1 vector of keys or values
constexpr int kSums = 6;

inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, V x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline __m256 widen(__m128i h) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
inline V load(const bf16* p) {
  return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)p + 1))};
}
inline __m256 widen_int8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline V load(const int8_t* p) { return {widen_int8(p), widen_int8(p + 8)}; }
inline __m256i top_half(__m256 x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i even = _mm256_add_epi32(_mm256_add_epi32(u, odd), _mm256_set1_epi32(0x7fff));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(_mm256_srli_epi32(even, 16), _mm256_set1_epi32(0x7fc0), nan);
}
inline void store(bf16* p, V x) {
  const __m256i packed = _mm256_packus_epi32(top_half(x.a), top_half(x.b));
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(packed, 0xd8));
}

inline V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline V fma(V x, V y, V z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline V maximum(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline V minimum(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline __m256 pow2(__m256 n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
}
inline V pow2(V n) { return {pow2(n.a), pow2(n.b)}; }

struct Two {
  V low, high;
};
inline __m256 low(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
inline __m256 high(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(int(0xffff0000))));
}
inline __m256i raw(const uint32_t* p) { return _mm256_loadu_si256((const __m256i*)p); }
inline Two split(const uint32_t* p) {
  return {{low(raw(p)), low(raw(p + 8))}, {high(raw(p)), high(raw(p + 8))}};
}
inline V split_low(const uint32_t* p) { return split(p).low; }
// Without a mask, which would take a register: six rows leave none.
inline V split_high(const uint32_t* p) {
  const __m256i a = _mm256_srli_epi32(raw(p), 16), b = _mm256_srli_epi32(raw(p + 8), 16);
  return {low(a), low(b)};
}
#include "vec_common.hpp"

// out[u * stride + i] = rows[i][u] for 8 rows and 8 units.
inline void transpose8(const uint32_t* const* rows, int64_t at, uint32_t* out, int64_t stride) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; ++i) a[i] = _mm256_castsi256_ps(raw(rows[i] + at));
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
    a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
    a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
    a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
  }
  auto* to = reinterpret_cast<float*>(out);
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps(to + i * stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(to + (i + 4) * stride, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}
inline void transpose16(const uint32_t* const* rows, uint32_t* out, int64_t stride) {
  for (int i = 0; i < 16; i += 8) {
    transpose8(rows + i, 0, out + i, stride);
    transpose8(rows + i, 8, out + 8 * stride + i, stride);
  }
}
