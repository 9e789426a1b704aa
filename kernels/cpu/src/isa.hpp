// The body of an instruction set's translation unit: everything is compiled once more in its own
// namespace. Standard headers must come before the target pragma, or their inline functions would
// be compiled for that target and might be the copies that the linker keeps for all.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
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
// Two neighbouring bf16 values, widened.
struct Halves {
  float low, high;
};
inline Halves halves(uint32_t pair) {
  const uint32_t parts[2] = {pair << 16, pair & 0xffff0000u};
  Halves out;
  std::memcpy(&out, parts, sizeof out);
  return out;
}

#if defined(__x86_64__)
// While it lives, denormal numbers count as zero, as in the bf16 dot products of the processor.
class FlushDenormals {
 public:
  FlushDenormals() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040); }
  ~FlushDenormals() { _mm_setcsr(before_); }
  FlushDenormals(const FlushDenormals&) = delete;
  FlushDenormals& operator=(const FlushDenormals&) = delete;

 private:
  unsigned before_;
};
#else
struct FlushDenormals {
  ~FlushDenormals() {}
};
#endif
}  // namespace coppice
