// The operations that every instruction set implements, as a table of functions.
#pragma once
#include <cstdint>

namespace coppice {

enum class Type : int64_t { kBf16 = 0, kF32 = 1 };

// A weight [n, k] in panels: [n / 32][k / 2][32][2] of bf16 or [n / 32][k][32] of fp32 or int8,
// padded with zeros, so that one block of 32 outputs is one stream of memory.
struct Weight {
  const void* panels;
  int64_t n, k;
  const float* scales = nullptr;  // [n], of the outputs of int8 panels; null: panels of the rows' type
};

struct LinearArgs {
  Type type;
  Weight weight;
  const void* x;         // [rows, k]
  const void* bias;      // [n] or null
  const void* residual;  // [rows, n] or null
  void* out;             // [rows, n]
  int64_t rows;
  int64_t wide;  // out in fp32 whatever the type
  // Every block of outputs is 16 gates and their 16 ups: out [rows, n / 2] = silu(gate) * up. The
  // bias is all gates, then all ups.
  int64_t gated;
};

struct NormArgs {
  Type type;
  const void* x;  // rows of d, `stride` elements apart
  const void* weight;
  void* out;  // [rows, d]
  int64_t rows, d, stride;
  float eps;
};

struct RopeArgs {
  Type type;
  const void* x;           // [rows, heads, d], rows `stride` elements apart
  const float *cos, *sin;  // [rows, d / 2]
  const int64_t* slots;    // row i goes to out[slots[i]]; null: to out[i]
  void* out;               // [.., heads, d]
  int64_t rows, heads, d, stride;
};

struct AttentionArgs {
  Type type;
  const void *q, *k, *v;  // q [rows, heads, d]; pools [slots, kv_heads, d]
  void* out;              // [rows, heads, d]
  int64_t heads, kv_heads, d;
  const int64_t* shares;  // [segments, 4]: rows, context, tail, whether masked
  const int64_t* keys;    // per segment: context and tail slots, then the rows' masks if masked
  int64_t segments;
};

struct BestArgs {
  const float* x;  // [rows, n]
  int64_t rows, n, count;
  int64_t* ids;               // [rows, count]
  float* values;              // [rows, count]
  int64_t log_probabilities;  // values become those of a softmax over the row
};

struct SampleArgs {
  const float* x;           // [rows, n]
  const double* uniforms;   // [rows], in [0, 1)
  int64_t rows, n, top_k;   // 0 keeps all
  double temperature, top_p, min_p;
  int64_t* ids;  // [rows]
};

struct Kernels {
  const char* name;
  void (*linear)(const LinearArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*rope)(const RopeArgs&);
  void (*silu_mul)(Type, const void* gate_up, void* out, int64_t rows, int64_t d);
  void (*attention)(const AttentionArgs&);
  void (*best)(const BestArgs&);
  void (*sample)(const SampleArgs&);
};

#if defined(__x86_64__)
extern const Kernels kAvx512Bf16, kAvx512, kAvx2;
#endif
extern const Kernels kPortable;

}  // namespace coppice
