// The C interface: plain pointers and sizes, so that building needs neither Python's nor torch's
// headers.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <vector>

#include "kernels.hpp"
#include "layer.hpp"
#include "pool.hpp"
#include "quantize.hpp"

#define COPPICE_API extern "C" __attribute__((visibility("default")))

namespace coppice {
namespace {

bool runs_here(const Kernels& kernels) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  if (&kernels == &kAvx512Bf16) return avx512 && __builtin_cpu_supports("avx512bf16");
  if (&kernels == &kAvx512) return avx512;
  if (&kernels == &kAvx2) return avx2;
#endif
  return &kernels == &kPortable;
}

#if defined(__x86_64__)
double seconds(const Kernels& kernels, const LinearArgs& args) {
  const auto start = std::chrono::steady_clock::now();
  kernels.linear(args);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// Some processors take two cycles and more for a bf16 dot product that two fp32 FMAs do in one; the
// bits are the same (see `dot`), so the faster one is used.
const Kernels& fastest_bf16() {
  static const Kernels chosen = [] {
    // Several blocks, so that the products outweigh the conversion of the rows.
    constexpr int64_t kOutputs = 512, kInputs = 512, kRows = 12;
    std::vector<uint16_t> panels(kOutputs * kInputs, 0x3f80), x(kRows * kInputs, 0x3f80);
    std::vector<float> out(kRows * kOutputs);
    const LinearArgs args{Type::kBf16, {panels.data(), kOutputs, kInputs}, x.data(), nullptr, nullptr,
                          out.data(), kRows, 1, 0};
    // In turn and often: wide registers take some 20 us to come to full speed.
    double pairs = 1.0, halves = 1.0;
    for (int i = 0; i < 64; ++i) {
      pairs = std::min(pairs, seconds(kAvx512Bf16, args));
      halves = std::min(halves, seconds(kAvx512, args));
    }
    Kernels best = kAvx512Bf16;
    if (halves < pairs) {
      best.linear = kAvx512.linear;
      best.attention = kAvx512.attention;
    }
    return best;
  }();
  return chosen;
}
#endif

// Best first.
const Kernels* const kAll[] = {
#if defined(__x86_64__)
    &kAvx512Bf16, &kAvx512, &kAvx2,
#endif
    &kPortable};

template <class U, int64_t Size>
void pack(const U* weight, int64_t n, int64_t k, U* out) {
  constexpr int64_t kBlock = 32;
  const int64_t units = (k + Size - 1) / Size;
  parallel((n + kBlock - 1) / kBlock, [&](int64_t block) {
    U* to = out + block * units * kBlock * Size;
    for (int64_t u = 0; u < units; ++u) {
      for (int64_t i = 0; i < kBlock; ++i) {
        for (int64_t s = 0; s < Size; ++s, ++to) {
          const int64_t row = block * kBlock + i, column = u * Size + s;
          *to = row < n && column < k ? weight[row * k + column] : U(0);
        }
      }
    }
  });
}

}  // namespace
}  // namespace coppice

using namespace coppice;

COPPICE_API int coppice_threads() { return threads(); }
COPPICE_API void coppice_set_threads(int count) { set_threads(count); }

// The `index`-th instruction set from the best to the plainest; null behind the last. `name` is
// empty where this processor lacks it.
COPPICE_API const Kernels* coppice_kernels(int index, const char** name) {
  if (index < 0 || index >= int(sizeof kAll / sizeof *kAll)) return nullptr;
  const bool runs = runs_here(*kAll[index]);
  *name = runs ? kAll[index]->name : "";
#if defined(__x86_64__)
  if (runs && kAll[index] == &kAvx512Bf16) return &fastest_bf16();
#endif
  return kAll[index];
}

COPPICE_API void coppice_pack(int64_t type, const void* weight, int64_t n, int64_t k, void* out) {
  if (Type(type) == Type::kF32) {
    pack<uint32_t, 1>(static_cast<const uint32_t*>(weight), n, k, static_cast<uint32_t*>(out));
  } else {
    pack<uint16_t, 2>(static_cast<const uint16_t*>(weight), n, k, static_cast<uint16_t*>(out));
  }
}

COPPICE_API void coppice_quantize(int64_t type, const void* weight, int64_t n, int64_t k,
                                  int8_t* panels, float* scales) {
  quantize(Type(type), weight, n, k, panels, scales);
}

COPPICE_API void coppice_linear(const Kernels* kernels, int64_t type, const void* panels, int64_t n,
                                int64_t k, const float* scales, const void* x, int64_t rows,
                                const void* bias, const void* residual, int64_t wide,
                                int64_t gated, void* out) {
  kernels->linear({Type(type), {panels, n, k, scales}, x, bias, residual, out, rows, wide, gated});
}

COPPICE_API void coppice_rms_norm(const Kernels* kernels, int64_t type, const void* x,
                                  const void* weight, int64_t rows, int64_t d, float eps,
                                  void* out) {
  kernels->rms_norm({Type(type), x, weight, out, rows, d, d, eps});
}

COPPICE_API void coppice_rope(const Kernels* kernels, int64_t type, const void* x, const float* cos,
                              const float* sin, int64_t rows, int64_t heads, int64_t d,
                              int64_t stride, void* out) {
  kernels->rope({Type(type), x, cos, sin, nullptr, out, rows, heads, d, stride});
}

COPPICE_API void coppice_silu_mul(const Kernels* kernels, int64_t type, const void* gate_up,
                                  int64_t rows, int64_t d, void* out) {
  kernels->silu_mul(Type(type), gate_up, out, rows, d);
}

COPPICE_API void coppice_attention(const Kernels* kernels, int64_t type, const void* q,
                                   const void* k, const void* v, int64_t heads, int64_t kv_heads,
                                   int64_t d, const int64_t* shares, const int64_t* keys,
                                   int64_t segments, void* out) {
  kernels->attention({Type(type), q, k, v, out, heads, kv_heads, d, shares, keys, segments});
}

// Layer after layer over hidden [rows, hidden], which is changed in place; the pools of a layer are
// `pool_bytes` behind those of the layer before it.
COPPICE_API void coppice_layers(const Kernels* kernels, const Layer* const* layers, int64_t count,
                                void* hidden, int64_t rows, const float* cos, const float* sin,
                                const int64_t* slots, char* k, char* v, int64_t pool_bytes,
                                const int64_t* shares, const int64_t* keys, int64_t segments) {
  for (int64_t i = 0; i < count; ++i, k += pool_bytes, v += pool_bytes) {
    const Pass pass{rows, cos, sin, slots, k, v, shares, keys, segments};
    run_layer(*kernels, *layers[i], pass, hidden, hidden);
  }
}

COPPICE_API void coppice_best(const Kernels* kernels, const float* x, int64_t rows, int64_t n,
                              int64_t count, int64_t* ids, float* values,
                              int64_t log_probabilities) {
  kernels->best({x, rows, n, count, ids, values, log_probabilities});
}

COPPICE_API void coppice_sample(const Kernels* kernels, const float* x, int64_t rows, int64_t n,
                                double temperature, int64_t top_k, double top_p, double min_p,
                                const double* uniforms, int64_t* ids) {
  kernels->sample({x, uniforms, rows, n, top_k, temperature, top_p, min_p, ids});
}

// libm for every element alike: vector code beside a scalar tail would make a row's angles depend
// on its place in the batch.
COPPICE_API void coppice_angles(const int64_t* positions, const float* frequencies, int64_t rows,
                                int64_t half, float scale, float* cos, float* sin) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t i = 0; i < half; ++i) {
      const float angle = float(positions[row]) * frequencies[i];
      cos[row * half + i] = std::cos(angle) * scale;
      sin[row * half + i] = std::sin(angle) * scale;
    }
  }
}
