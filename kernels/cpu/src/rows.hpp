// Operations on each row by itself: norm, rotary embedding, gated activation.
#pragma once

template <class T>
inline void rms_norm_as(const NormArgs& args) {
  const T* weight = static_cast<const T*>(args.weight);
  over_rows(args.rows, args.d, [&](int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.stride;
    T* out = static_cast<T*>(args.out) + row * args.d;
    V squares = zero();
    vectors(args.d, [&](int64_t i, int64_t n) {
      const V value = load_some(x + i, n);
      squares = fma(value, value, squares);
    });
    const V scale = set1(1.0f / std::sqrt(sum(squares) / float(args.d) + args.eps));
    vectors(args.d, [&](int64_t i, int64_t n) {
      const V normed = rounded(load_some(x + i, n) * scale, x);
      store_some(out + i, normed * load_some(weight + i, n), n);
    });
  });
}

template <class T>
inline void rope_as(const RopeArgs& args) {
  const int64_t half = args.d / 2, width = args.heads * args.d;
  over_rows(args.rows, width, [&](int64_t row) {
    const T* x = static_cast<const T*>(args.x) + row * args.stride;
    T* out = static_cast<T*>(args.out) + (args.slots ? args.slots[row] : row) * width;
    for (int64_t head = 0; head < args.heads; ++head, x += args.d, out += args.d) {
      vectors(half, [&](int64_t i, int64_t n) {
        const V cos = load_some(args.cos + row * half + i, n);
        const V sin = load_some(args.sin + row * half + i, n);
        const V a = load_some(x + i, n), b = load_some(x + half + i, n);
        store_some(out + i, a * cos - b * sin, n);
        store_some(out + half + i, b * cos + a * sin, n);
      });
    }
  });
}

template <class T>
inline void silu_mul_as(const void* gate_up, void* result, int64_t rows, int64_t d) {
  over_rows(rows, 4 * d, [&](int64_t row) {
    [[maybe_unused]] const Mode<T> mode;  // as in a gated linear
    const T* gate = static_cast<const T*>(gate_up) + row * 2 * d;
    T* out = static_cast<T*>(result) + row * d;
    vectors(d, [&](int64_t i, int64_t n) {
      store_some(out + i, silu(load_some(gate + i, n), gate) * load_some(gate + d + i, n), n);
    });
  });
}

inline void rms_norm(const NormArgs& args) {
  args.type == Type::kF32 ? rms_norm_as<float>(args) : rms_norm_as<bf16>(args);
}
inline void rope(const RopeArgs& args) {
  args.type == Type::kF32 ? rope_as<float>(args) : rope_as<bf16>(args);
}
inline void silu_mul(Type type, const void* gate_up, void* out, int64_t rows, int64_t d) {
  type == Type::kF32 ? silu_mul_as<float>(gate_up, out, rows, d)
                     : silu_mul_as<bf16>(gate_up, out, rows, d);
}
