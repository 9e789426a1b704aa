// A whole decoder layer: the same operations, strung together without a return to Python.
#pragma once
#include "kernels.hpp"

namespace coppice {

// Mirrored by kernels.cpu.layer; everything is 8 bytes wide.
struct Projection {
  const void* panels;
  int64_t n, k;
  const void* bias;     // or null
  const float* scales;  // of int8 panels, or null
};

struct Layer {
  int64_t type, hidden, heads, kv_heads, d, inner;
  double eps;
  const void *input_norm, *q_norm, *k_norm, *post_norm;  // all but the last may be null
  Projection qkv, o, gate_up, down;
  int64_t gated;  // gate_up is packed for LinearArgs::gated
};

struct Pass {
  int64_t rows;
  const float *cos, *sin;  // [rows, d / 2]
  const int64_t* slots;    // [rows], where K/V go
  void *k, *v;             // pools of this layer
  const int64_t *shares, *keys;
  int64_t segments;
};

// hidden [rows, hidden] -> out [rows, hidden], which may be the same; K/V of the rows are written into the pools.
void run_layer(const Kernels& kernels, const Layer& layer, const Pass& pass, const void* hidden,
               void* out);

}  // namespace coppice
