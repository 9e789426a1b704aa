// The operations for avx2.
#include "isa.hpp"
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
namespace coppice {
namespace avx2 {
namespace {
#include "vec_avx2.hpp"
#include "elements.hpp"
#include "blocks.hpp"
#include "blocks_avx2.hpp"
#include "linear.hpp"
#include "rows.hpp"
#include "chunk.hpp"
#include "attention.hpp"
#include "best.hpp"
#include "sample.hpp"
}  // namespace
}  // namespace avx2
const Kernels kAvx2 = {"avx2", avx2::linear, avx2::rms_norm, avx2::rope, avx2::silu_mul, avx2::attention, avx2::best, avx2::sample};
}  // namespace coppice
#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
