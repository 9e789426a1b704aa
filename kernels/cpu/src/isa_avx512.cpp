// The operations for avx512.
#include "isa.hpp"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#endif
#define COPPICE_BF16 0
namespace coppice {
namespace avx512 {
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
}  // namespace avx512
const Kernels kAvx512 = {"avx512", avx512::linear, avx512::rms_norm, avx512::rope, avx512::silu_mul, avx512::attention, avx512::best, avx512::sample};
}  // namespace coppice
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
