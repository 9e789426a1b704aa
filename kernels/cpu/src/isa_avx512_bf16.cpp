// The operations for avx512_bf16.
#include "isa.hpp"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx2,fma")
#endif
#define COPPICE_BF16 1
namespace coppice {
namespace avx512_bf16 {
namespace {
#include "vec_avx512.hpp"
#include "elements.hpp"
#include "blocks.hpp"
#include "linear.hpp"
#include "rows.hpp"
#include "chunk.hpp"
#include "attention.hpp"
#include "best.hpp"
#include "sample.hpp"
}  // namespace
}  // namespace avx512_bf16
const Kernels kAvx512Bf16 = {"avx512_bf16", avx512_bf16::linear, avx512_bf16::rms_norm, avx512_bf16::rope, avx512_bf16::silu_mul, avx512_bf16::attention, avx512_bf16::best, avx512_bf16::sample};
}  // namespace coppice
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
