// Rows times a packed weight. The sum of an output runs over the inputs in their order, in one lane
// of one accumulator, however many rows the call has: a row's bits depend on that row alone.
#pragma once

template <class U, class X>
using Block = void (*)(const U*, const X*, int64_t, Fetch&, float*);

template <class U, class X, int... R>
inline Block<U, X> block_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr Block<U, X> table[] = {block<U, X, R + 1>...};
  return table[rows - 1];
}

struct Group {
  int64_t first, rows;
};

// How rows are cut into groups that fit the registers.
inline const std::vector<Group>& groups_of(int64_t rows) {
  auto& groups = kept<std::vector<Group>>();
  groups.clear();
  for (int64_t first = 0; first < rows; first += groups.back().rows) {
    groups.push_back({first, rows_of_group(rows - first)});
  }
  return groups;
}

// Groups of rows side by side, [units][rows of the group], so that a block reads one stream.
template <class T, class W>
inline void interleave(const T* x, int64_t k, const std::vector<Group>& groups,
                       Operand<T, W>* out) {
  using U = typename Unit<T, W>::type;
  constexpr int64_t kSize = Unit<T, W>::size;
  const int64_t whole = k / kSize, units = (k + kSize - 1) / kSize;
  over_rows(int64_t(groups.size()), units * kMostRows, [&](int64_t group) {
    const auto [first, count] = groups[group];
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
  const auto& groups = groups_of(args.rows);
  auto& scratch = kept<std::vector<X>>();
  if (scratch.size() < size_t(args.rows * units)) scratch.resize(args.rows * units);
  interleave<T, W>(static_cast<const T*>(args.x), k, groups, scratch.data());
  const X* x = scratch.data();
  const U* weight = static_cast<const U*>(args.weight.panels);
  const int64_t blocks = (args.weight.n + kBlock - 1) / kBlock;
  // One pass: far ahead in the stream. Several: the next block, while this one is reused.
  constexpr int64_t kFar = 8192;
  const int64_t size = units * kBlock * int64_t(sizeof(U));
  int passes = 0;
  for (const Group& group : groups) passes += group.rows > kRowsOfBlock ? 2 : 1;
  parallel(blocks, [&](int64_t index) {
    const U* w = weight + index * units * kBlock;
    Fetch fetch{reinterpret_cast<const char*>(w) + (passes == 1 ? kFar : size), 128 / passes};
    alignas(64) float acc[kMostRows * kBlock];
    [[maybe_unused]] const Mode<T> mode;
    for (const auto& [first, rows] : groups) {
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
