// See layer.hpp.
#include "layer.hpp"

#include <cstring>
#include <vector>

namespace coppice {
namespace {

// Intermediate rows, kept between calls: a step is too short for fresh pages.
class Scratch {
 public:
  char* take(size_t bytes) {
    if (buffer_.size() < bytes) buffer_.resize(bytes);
    return buffer_.data();
  }

 private:
  std::vector<char> buffer_;
};

struct Buffers {
  Scratch normed, qkv, q, mixed, hidden, gate_up, gated;
};

class Run {
 public:
  Run(const Kernels& kernels, const Layer& layer, const Pass& pass, Buffers& buffers)
      : kernels_(kernels), layer_(layer), pass_(pass), buffers_(buffers) {}

  void operator()(const void* hidden, void* out) const {
    const Layer& w = layer_;
    const void* normed = w.input_norm ? norm(hidden, w.input_norm) : hidden;
    char* qkv = buffers_.qkv.take(bytes(w.qkv.n));
    linear(w.qkv, normed, nullptr, qkv);
    const char* mixed = attend(qkv);
    char* between = buffers_.hidden.take(bytes(w.hidden));
    linear(w.o, mixed, hidden, between);
    linear(w.down, gate(norm(between, w.post_norm)), between, out);
  }

 private:
  Type type() const { return Type(layer_.type); }
  size_t width() const { return type() == Type::kF32 ? 4 : 2; }
  size_t bytes(int64_t per_row) const { return size_t(pass_.rows * per_row) * width(); }

  const char* norm(const void* x, const void* weight) const {
    char* out = buffers_.normed.take(bytes(layer_.hidden));
    kernels_.rms_norm({type(), x, weight, out, pass_.rows, layer_.hidden, layer_.hidden,
                       float(layer_.eps)});
    return out;
  }

  void linear(const Projection& to, const void* x, const void* residual, void* out,
              bool gated = false) const {
    kernels_.linear({type(), {to.panels, to.n, to.k, to.scales}, x, to.bias, residual, out,
                     pass_.rows, false, gated});
  }

  const char* gate(const void* x) const {
    const Layer& w = layer_;
    char* gated = buffers_.gated.take(bytes(w.inner));
    if (w.gated) {
      linear(w.gate_up, x, nullptr, gated, true);
      return gated;
    }
    char* gate_up = buffers_.gate_up.take(bytes(w.gate_up.n));
    linear(w.gate_up, x, nullptr, gate_up);
    kernels_.silu_mul(type(), gate_up, gated, pass_.rows, w.inner);
    return gated;
  }

  const char* attend(char* qkv) const {
    const Layer& w = layer_;
    char* k = qkv + w.heads * w.d * width();
    char* v = k + w.kv_heads * w.d * width();
    if (w.q_norm) norm_heads(qkv, w.q_norm, w.heads);
    if (w.k_norm) norm_heads(k, w.k_norm, w.kv_heads);
    rope(k, w.kv_heads, pass_.slots, pass_.k);
    const size_t kv_bytes = w.kv_heads * w.d * width(), stride = w.qkv.n * width();
    for (int64_t row = 0; row < pass_.rows; ++row) {
      std::memcpy(static_cast<char*>(pass_.v) + pass_.slots[row] * kv_bytes, v + row * stride,
                  kv_bytes);
    }
    char* q = buffers_.q.take(bytes(w.heads * w.d));
    rope(qkv, w.heads, nullptr, q);
    char* mixed = buffers_.mixed.take(bytes(w.heads * w.d));
    kernels_.attention({type(), q, pass_.k, pass_.v, mixed, w.heads, w.kv_heads, w.d, pass_.shares,
                        pass_.keys, pass_.segments});
    return mixed;
  }

  void norm_heads(char* x, const void* weight, int64_t heads) const {
    for (int64_t row = 0; row < pass_.rows; ++row, x += layer_.qkv.n * width()) {
      kernels_.rms_norm({type(), x, weight, x, heads, layer_.d, layer_.d, float(layer_.eps)});
    }
  }

  void rope(const char* x, int64_t heads, const int64_t* slots, void* out) const {
    kernels_.rope({type(), x, pass_.cos, pass_.sin, slots, out, pass_.rows, heads, layer_.d,
                   layer_.qkv.n});
  }

  const Kernels& kernels_;
  const Layer& layer_;
  const Pass& pass_;
  Buffers& buffers_;
};

}  // namespace

void run_layer(const Kernels& kernels, const Layer& layer, const Pass& pass, const void* hidden,
               void* out) {
  static thread_local Buffers buffers;
  Run(kernels, layer, pass, buffers)(hidden, out);
}

}  // namespace coppice
