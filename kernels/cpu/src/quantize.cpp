// See quantize.hpp.
#include "quantize.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "pool.hpp"

namespace coppice {
namespace {

constexpr int64_t kBlock = 32;
constexpr float kLargest = 127.0f;

float widened(float x) { return x; }
float widened(uint16_t bf16) {
  const uint32_t bits = uint32_t(bf16) << 16;
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// One output: its `k` weights, each 32 behind the one before it in `out`.
template <class T>
float quantize_row(const T* weight, int64_t k, int8_t* out) {
  float largest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < k; ++i) {
    const float size = std::fabs(widened(weight[i]));
    finite &= std::isfinite(size);
    largest = std::max(largest, size);
  }
  if (!finite) return NAN;
  const float scale = largest / kLargest;
  if (scale == 0.0f) return scale;
  for (int64_t i = 0; i < k; ++i) {
    // The limit matters where `scale` itself was rounded, among the smallest numbers.
    const float q = std::nearbyint(widened(weight[i]) / scale);
    out[i * kBlock] = int8_t(std::min(std::max(q, -kLargest), kLargest));
  }
  return scale;
}

template <class T>
void quantize_all(const T* weight, int64_t n, int64_t k, int8_t* panels, float* scales) {
  parallel((n + kBlock - 1) / kBlock, [&](int64_t block) {
    int8_t* to = panels + block * k * kBlock;
    std::memset(to, 0, size_t(k * kBlock));
    for (int64_t row = block * kBlock; row < std::min(n, (block + 1) * kBlock); ++row, ++to) {
      scales[row] = quantize_row(weight + row * k, k, to);
    }
  });
}

}  // namespace

void quantize(Type type, const void* weight, int64_t n, int64_t k, int8_t* panels, float* scales) {
  if (type == Type::kF32) {
    quantize_all(static_cast<const float*>(weight), n, k, panels, scales);
  } else {
    quantize_all(static_cast<const uint16_t*>(weight), n, k, panels, scales);
  }
}

}  // namespace coppice
