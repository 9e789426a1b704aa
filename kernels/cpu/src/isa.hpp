// The body of an instruction set's translation unit: everything is compiled once more in its own
// namespace. Standard headers must come before the target pragma, or their inline functions would
// be compiled for that target and might be the copies that the linker keeps for all.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "kernels.hpp"
#include "pool.hpp"
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace coppice {
struct bf16 {
  uint16_t bits;
};
}  // namespace coppice
