// Some rows times a block of a packed weight: the inner loops of `linear`.
#pragma once

constexpr int64_t kBlock = 32;  // outputs of a block: two panels of 16
template <class U>
constexpr int64_t kEvery = 128 / (kBlock * sizeof(U));  // units in two lines

// Brings weights near while others are multiplied: the processor's own prefetchers fall behind a
// stream whose lines are worked on for long. What is far comes into the second-level cache, spread
// over the passes that are made over a block, so that memory does not rest.
struct Fetch {
  static constexpr int64_t kNear = 2048;
  const char* far;
  int64_t step;  // of `far`, for two lines of the block

  inline void next(const void* w) {
    __builtin_prefetch(static_cast<const char*>(w) + kNear, 0, 3);
    __builtin_prefetch(static_cast<const char*>(w) + kNear + 64, 0, 3);
    __builtin_prefetch(far, 0, 2);
    __builtin_prefetch(far + 64, 0, 2);
    far += step;
  }
};

// One panel of a block for R rows: x [units][R], w [units][32] -> 16 of out [R][32]. With so many
// rows both panels' sums do not fit the registers.
template <class U, class X, int R>
inline void panel(const U* w, const X* x, int64_t units, Fetch& fetched, float* out) {
  Fetch fetch = fetched;  // in registers
  V acc[R];
  for (int r = 0; r < R; ++r) acc[r] = zero();
  for (int64_t u = 0; u < units; ++u, w += kBlock, x += R) {
    if (u % kEvery<U> == 0) fetch.next(w);
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
    panel<U, X, R>(w + 16, x, units, fetched, out + 16);
  } else {
    Fetch fetch = fetched;
    V first[R], second[R];
    for (int r = 0; r < R; ++r) first[r] = zero();
    for (int r = 0; r < R; ++r) second[r] = zero();
    for (int64_t u = 0; u < units; ++u, w += kBlock, x += R) {
      if (u % kEvery<U> == 0) fetch.next(w);
      dots_of_block(first, second, w, x);
    }
    for (int r = 0; r < R; ++r) {
      store(out + r * kBlock, first[r]);
      store(out + r * kBlock + 16, second[r]);
    }
    fetched = fetch;
  }
}
