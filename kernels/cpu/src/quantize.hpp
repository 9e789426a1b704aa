// Weights in int8, one scale for each output.
#pragma once
#include "kernels.hpp"

namespace coppice {

// A weight [n, k] of `type` -> int8 panels and scales [n], see `Weight`: scale = max |w| / 127, and
// what is multiplied with it is w / scale, rounded to the nearest integer, half to even. An output
// with a weight that is not finite has the scale NaN, so that the fault shows.
void quantize(Type type, const void* weight, int64_t n, int64_t k, int8_t* panels, float* scales);

}  // namespace coppice
