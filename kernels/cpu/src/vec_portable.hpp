// Sixteen fp32 lanes in plain C++.
#pragma once

struct V {
  float v[16];
};
constexpr int kMostRows = 2;
constexpr int kRowsOfBlock = 2;
inline int64_t rows_of_group(int64_t left) { return left < kMostRows ? left : kMostRows; }
constexpr int kQueries = 1;
constexpr int kSums = 4;

template <class F>
inline V each(const F& f) {
  V out;
  for (int i = 0; i < 16; ++i) out.v[i] = f(i);
  return out;
}
inline float as_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}
inline V zero() {
  return each([](int) { return 0.0f; });
}
inline V set1(float x) {
  return each([=](int) { return x; });
}
inline V load(const float* p) {
  return each([=](int i) { return p[i]; });
}
inline void store(float* p, V a) { std::memcpy(p, a.v, sizeof a.v); }
inline V load(const bf16* p) {
  return each([=](int i) { return as_float(uint32_t(p[i].bits) << 16); });
}
inline V load(const int8_t* p) {
  return each([=](int i) { return float(p[i]); });
}
inline void store(bf16* p, V a) {
  for (int i = 0; i < 16; ++i) {
    uint32_t u;
    std::memcpy(&u, a.v + i, sizeof u);
    const bool nan = (u & 0x7fffffff) > 0x7f800000;
    p[i].bits = nan ? 0x7fc0 : static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
}
inline V operator+(V a, V b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline V operator-(V a, V b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline V operator*(V a, V b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline V operator/(V a, V b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
inline V fma(V a, V b, V c) { return a * b + c; }
inline V maximum(V a, V b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline V minimum(V a, V b) {
  return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
inline V pow2(V n) {
  return each([&](int i) { return as_float(uint32_t(int(n.v[i]) + 127) << 23); });
}

struct Two {
  V low, high;
};
inline V split_low(const uint32_t* p) {
  return each([=](int i) { return as_float(p[i] << 16); });
}
inline V split_high(const uint32_t* p) {
  return each([=](int i) { return as_float(p[i] & 0xffff0000u); });
}
inline Two split(const uint32_t* p) { return {split_low(p), split_high(p)}; }
#include "vec_common.hpp"

inline void transpose16(const uint32_t* const* rows, uint32_t* out, int64_t stride) {
  for (int i = 0; i < 16; ++i) {
    for (int u = 0; u < 16; ++u) out[u * stride + i] = rows[i][u];
  }
}
