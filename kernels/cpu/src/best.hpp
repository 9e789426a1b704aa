// The largest values of rows: argmax, and the likeliest tokens with their log-probabilities.
#pragma once

constexpr int64_t kPart = 256;  // values whose largest decides whether they are looked at one by one

// The `count` best of a row so far, best first; of equals the earlier one.
struct Best {
  int64_t count;
  int64_t* ids;
  float* values;

  void start() {
    std::fill(ids, ids + count, -1);
    std::fill(values, values + count, -INFINITY);
  }
  bool takes(float value) const { return value > values[count - 1]; }
  void insert(float value, int64_t id) {
    int64_t at = count - 1;
    for (; at > 0 && value > values[at - 1]; --at) {
      values[at] = values[at - 1];
      ids[at] = ids[at - 1];
    }
    values[at] = value;
    ids[at] = id;
  }
  // Places that nothing greater than -infinity came to: the first ids that are not there yet.
  void fill_up() {
    int64_t next = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (ids[i] >= 0) continue;
      while (std::find(ids, ids + count, next) != ids + count) ++next;
      ids[i] = next;
    }
  }
};

inline float largest_of(const float* x, int64_t n) {
  V most = set1(-INFINITY);
  // The value first: a NaN loses against what is second.
  vectors(n, [&](int64_t i, int64_t width) {
    most = maximum(first(load_some(x + i, width), width, -INFINITY), most);
  });
  return highest(most);
}

inline void best_of_row(const BestArgs& args, int64_t row) {
  const float* x = args.x + row * args.n;
  Best best{args.count, args.ids + row * args.count, args.values + row * args.count};
  best.start();
  for (int64_t at = 0; at < args.n; at += kPart) {
    const int64_t size = std::min(kPart, args.n - at);
    if (!best.takes(largest_of(x + at, size))) continue;
    for (int64_t i = 0; i < size; ++i) {
      if (best.takes(x[at + i])) best.insert(x[at + i], at + i);
    }
  }
  best.fill_up();
  if (!args.log_probabilities) return;
  const float highest = best.values[0];
  const V top = set1(highest);
  V total = zero();
  vectors(args.n, [&](int64_t i, int64_t width) {
    total = total + first(exponential(load_some(x + i, width) - top), width, 0.0f);
  });
  const float rest = std::log(sum(total));
  for (int64_t i = 0; i < args.count; ++i) best.values[i] = best.values[i] - highest - rest;
}

inline void best(const BestArgs& args) {
  parallel(args.rows, [&](int64_t row) { best_of_row(args, row); });
}
