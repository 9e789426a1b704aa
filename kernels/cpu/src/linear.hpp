// Rows times a packed weight. The sum of an output runs over the inputs in their order, in one lane
// of one accumulator, however many rows the call has: a row's bits depend on that row alone.
#pragma once

constexpr int64_t kBlock = 32;  // outputs of a block: two panels of 16

// Brings weights near while others are multiplied: the processor's own prefetchers fall behind a
// stream whose lines are worked on for long. What is far comes into the second-level cache, spread
// over the passes that are made over a block, so that memory does not rest.
struct Fetch {
  const char* far;
  int passes;
  int waited = 0;  // calls since the last line, of two passes or more

  inline void next(const void* w) {
    constexpr int64_t kNear = 2048;
    __builtin_prefetch(static_cast<const char*>(w) + kNear, 0, 3);
    __builtin_prefetch(static_cast<const char*>(w) + kNear + 64, 0, 3);
    if (passes == 1) {
      __builtin_prefetch(far, 0, 2);
      __builtin_prefetch(far + 64, 0, 2);
      far += 128;
    } else if ((waited += 2) >= passes) {
      __builtin_prefetch(far, 0, 2);
      far += 64;
      waited = 0;
    }
  }
};

// One panel of a block for R rows: x [units][R], w [units][32] -> 16 of out [R][32]. With so many
// rows both panels' sums do not fit the registers.
template <class U, class X, int R>
inline void panel(const U* w, const X* x, int64_t units, Fetch& fetched, float* out) {
  Fetch fetch = fetched;  // in registers
  constexpr int64_t kEvery = 128 / (kBlock * sizeof(U));
  V acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  for (int64_t u = 0; u < units; ++u, w += kBlock, x += R) {
    if (u % kEvery == 0) fetch.next(w);
    dots(acc, w, [x](int r) { return x[r]; });
  }
  for (int r = 0; r < R; ++r) store(out + r * kBlock, acc[r]);
  fetched = fetch;
}

// One block for R rows: x [units][R], w [units][32] -> out [R][32].
template <class U, class X, int R>
inline void block(const U* w, const X* x, int64_t units, Fetch& fetched, float* out) {
  if constexpr (R > kRowsOfBlock) {
    panel<U, X, R>(w, x, units, fetched, out);
    return panel<U, X, R>(w + 16, x, units, fetched, out + 16);
  }
  Fetch fetch = fetched;
  constexpr int64_t kEvery = 128 / (kBlock * sizeof(U));  // units in two lines
  V acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
  for (int64_t u = 0; u < units; ++u, w += kBlock, x += R) {
    if (u % kEvery == 0) fetch.next(w);
    const auto w0 = load_weights(w), w1 = load_weights(w + 16);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto value = broadcast(x[r]);
      acc[r][0] = dot(acc[r][0], w0, value);
      acc[r][1] = dot(acc[r][1], w1, value);
    }
  }
  for (int r = 0; r < R; ++r) {
    store(out + r * kBlock, acc[r][0]);
    store(out + r * kBlock + 16, acc[r][1]);
  }
  fetched = fetch;
}

template <class U, class X>
using Block = void (*)(const U*, const X*, int64_t, Fetch&, float*);

template <class U, class X, int... R>
inline Block<U, X> block_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr Block<U, X> table[] = {block<U, X, R + 1>...};
  return table[rows - 1];
}

// How rows are cut into groups of nearly equal size that fit the registers.
struct Groups {
  int64_t rows, count;
  explicit Groups(int64_t rows) : rows(rows), count((rows + kMostRows - 1) / kMostRows) {}
  int64_t begin(int64_t group) const { return rows * group / count; }
};

// Groups of rows side by side, [units][rows of the group], so that a block reads one stream.
template <class T, class W>
inline void interleave(const T* x, int64_t k, const Groups& groups, Operand<T, W>* out) {
  using U = typename Unit<T, W>::type;
  constexpr int64_t kSize = Unit<T, W>::size;
  const int64_t whole = k / kSize, units = (k + kSize - 1) / kSize;
  over_rows(groups.count, units * kMostRows, [&](int64_t group) {
    const int64_t first = groups.begin(group), count = groups.begin(group + 1) - first;
    for (int64_t r = 0; r < count; ++r) {
      const T* row = x + (first + r) * k;
      Operand<T, W>* to = out + first * units + r;
      for (int64_t u = 0; u < whole; ++u) {
        U unit;
        std::memcpy(&unit, row + u * kSize, sizeof unit);
        to[u * count] = operand(unit);
      }
      if (whole < units) {
        U last{};
        std::memcpy(&last, row + whole * kSize, sizeof(T));
        to[whole * count] = operand(last);
      }
    }
  });
}

template <class T, class O>
inline void finish(const LinearArgs& args, const float* acc, int64_t row, int64_t output) {
  const auto* bias = static_cast<const T*>(args.bias);
  const auto* residual = static_cast<const T*>(args.residual);
  const int64_t at = row * args.weight.n + output;
  vectors(std::min(kBlock, args.weight.n - output), [&](int64_t i, int64_t n) {
    V value = load(acc + i);
    if (args.weight.scales) value = value * load_some(args.weight.scales + output + i, n);
    if (bias) value = value + load_some(bias + output + i, n);
    if (residual) value = rounded(value, static_cast<const T*>(nullptr)) +
                          load_some(residual + at + i, n);
    store_some(static_cast<O*>(args.out) + at + i, value, n);
  });
}

// A block's gates and ups, each as `finish` would have written it, then as `silu_mul` joins them.
template <class T>
inline void finish_gated(const LinearArgs& args, const float* acc, int64_t row, int64_t output) {
  const auto* bias = static_cast<const T*>(args.bias);
  const T* type = nullptr;
  V gate = load(acc), up = load(acc + 16);
  if (const float* scales = args.weight.scales) {
    gate = gate * load(scales + output);
    up = up * load(scales + output + 16);
  }
  if (bias) {
    gate = gate + load(bias + output / 2);
    up = up + load(bias + (args.weight.n + output) / 2);
  }
  T* out = static_cast<T*>(args.out) + (row * args.weight.n + output) / 2;
  store(out, silu(rounded(gate, type), type) * rounded(up, type));
}

// Rows of T, a weight of W, a result of O.
template <class T, class W, class O>
inline void linear_as(const LinearArgs& args) {
  using U = typename Unit<T, W>::panel;
  using X = Operand<T, W>;
  const int64_t k = args.weight.k, units = (k + Unit<T, W>::size - 1) / Unit<T, W>::size;
  const Groups groups(args.rows);
  auto& scratch = kept<std::vector<X>>();
  if (scratch.size() < size_t(args.rows * units)) scratch.resize(args.rows * units);
  interleave<T, W>(static_cast<const T*>(args.x), k, groups, scratch.data());
  const X* x = scratch.data();
  const U* weight = static_cast<const U*>(args.weight.panels);
  const int64_t blocks = (args.weight.n + kBlock - 1) / kBlock;
  // One pass: far ahead in the stream. Several: the next block, while this one is reused.
  constexpr int64_t kFar = 8192;
  const int64_t size = units * kBlock * int64_t(sizeof(U));
  const int passes = int(groups.count) * (args.rows > groups.count * kRowsOfBlock ? 2 : 1);
  parallel(blocks, [&](int64_t index) {
    const U* w = weight + index * units * kBlock;
    Fetch fetch{reinterpret_cast<const char*>(w) + (passes == 1 ? kFar : size), passes};
    alignas(64) float acc[kMostRows * kBlock];
    [[maybe_unused]] const Mode<T> mode;
    for (int64_t group = 0; group < groups.count; ++group) {
      const int64_t first = groups.begin(group), rows = groups.begin(group + 1) - first;
      const auto run = block_of<U, X>(int(rows), std::make_integer_sequence<int, kMostRows>());
      run(w, x + first * units, units, fetch, acc);
      for (int64_t r = 0; r < rows; ++r) {
        if (args.gated) {
          finish_gated<T>(args, acc + r * kBlock, first + r, index * kBlock);
        } else {
          finish<T, O>(args, acc + r * kBlock, first + r, index * kBlock);
        }
      }
    }
  });
}

template <class T, class O>
inline void linear_to(const LinearArgs& args) {
  args.weight.scales ? linear_as<T, int8_t, O>(args) : linear_as<T, T, O>(args);
}

inline void linear(const LinearArgs& args) {
  if (args.type == Type::kF32) return linear_to<float, float>(args);
  if (args.wide) return linear_to<bf16, float>(args);
  return linear_to<bf16, bf16>(args);
}
