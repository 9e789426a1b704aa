// Rows times a packed weight. The sum of an output runs over the inputs in their order, in one lane
// of one accumulator, however many rows the call has: a row's bits depend on that row alone.
#pragma once

constexpr int64_t kBlock = 32;  // outputs of a block: two panels of 16

// One block for R rows: x [units][R], w [units][32] -> acc [R][32]. `ahead` is fetched meanwhile,
// `lines` cache lines per unit.
template <class T, int R>
inline void block(const typename Unit<T>::type* w, const typename Unit<T>::type* x, int64_t units,
                  const char* ahead, int lines, float* out) {
  V acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
  for (int64_t u = 0; u < units; ++u, w += kBlock, x += R) {
    for (int i = 0; i < lines; ++i, ahead += 64) __builtin_prefetch(ahead, 0, 2);
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
}

template <class T>
using Block = void (*)(const typename Unit<T>::type*, const typename Unit<T>::type*, int64_t,
                       const char*, int, float*);

template <class T, int... R>
inline Block<T> block_of(int rows, std::integer_sequence<int, R...>) {
  static constexpr Block<T> table[] = {block<T, R + 1>...};
  return table[rows - 1];
}

// How rows are cut into groups of nearly equal size that fit the registers.
struct Groups {
  int64_t rows, count;
  explicit Groups(int64_t rows) : rows(rows), count((rows + kMostRows - 1) / kMostRows) {}
  int64_t begin(int64_t group) const { return rows * group / count; }
};

// Groups of rows side by side, [units][rows of the group], so that a block reads one stream.
template <class T>
inline void interleave(const T* x, int64_t k, const Groups& groups, typename Unit<T>::type* out) {
  using U = typename Unit<T>::type;
  const int64_t whole = k / Unit<T>::size, units = (k + Unit<T>::size - 1) / Unit<T>::size;
  over_rows(groups.count, units * kMostRows, [&](int64_t group) {
    const int64_t first = groups.begin(group), count = groups.begin(group + 1) - first;
    for (int64_t r = 0; r < count; ++r) {
      const T* row = x + (first + r) * k;
      U* to = out + first * units + r;
      for (int64_t u = 0; u < whole; ++u) {
        std::memcpy(to + u * count, row + u * Unit<T>::size, sizeof(U));
      }
      if (whole < units) {
        U last = 0;
        std::memcpy(&last, row + whole * Unit<T>::size, sizeof(T));
        to[whole * count] = last;
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
    if (bias) value = value + load_some(bias + output + i, n);
    if (residual) value = rounded(value, static_cast<const T*>(nullptr)) +
                          load_some(residual + at + i, n);
    store_some(static_cast<O*>(args.out) + at + i, value, n);
  });
}

template <class T, class O>
inline void linear_as(const LinearArgs& args) {
  using U = typename Unit<T>::type;
  const int64_t k = args.weight.k, units = (k + Unit<T>::size - 1) / Unit<T>::size;
  const Groups groups(args.rows);
  const U* x = static_cast<const U*>(args.x);
  if (args.rows > 1 || k % Unit<T>::size != 0) {
    auto& scratch = kept<std::vector<U>>();
    if (scratch.size() < size_t(args.rows * units)) scratch.resize(args.rows * units);
    interleave(static_cast<const T*>(args.x), k, groups, scratch.data());
    x = scratch.data();
  }
  const U* weight = static_cast<const U*>(args.weight.panels);
  const int64_t blocks = (args.weight.n + kBlock - 1) / kBlock;
  // One group: fetch ahead in the stream, the further the longer a unit takes. Several: fetch the
  // next block while this one is reused.
  const int64_t size = units * kBlock * int64_t(sizeof(U));
  const bool once = groups.count < 2;
  const int64_t ahead = once ? (args.rows < 3 ? 4096 : 8192) : size;
  const int lines = once ? 2 : 1;
  parallel(blocks, [&](int64_t index) {
    const U* w = weight + index * units * kBlock;
    const char* next = reinterpret_cast<const char*>(w) + ahead;
    alignas(64) float acc[kMostRows * kBlock];
    for (int64_t group = 0; group < groups.count; ++group) {
      const int64_t first = groups.begin(group), rows = groups.begin(group + 1) - first;
      const auto run = block_of<T>(int(rows), std::make_integer_sequence<int, kMostRows>());
      const bool fetch = group < 2;
      run(w, x + first * units, units, next + (fetch ? group * units * 64 : 0), fetch ? lines : 0,
          acc);
      for (int64_t r = 0; r < rows; ++r) {
        finish<T, O>(args, acc + r * kBlock, first + r, index * kBlock);
      }
    }
  });
}

inline void linear(const LinearArgs& args) {
  if (args.type == Type::kF32) return linear_as<float, float>(args);
  if (args.wide) return linear_as<bf16, float>(args);
  return linear_as<bf16, bf16>(args);
}
