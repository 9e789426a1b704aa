// Attention of rows to slots of a pool. A row's keys, in their logical order, are cut into chunks of
// 64 by position; every chunk gives a partial softmax, and partial states are merged from the first
// to the last. Plain steps, tree nodes and prefill rows all do exactly this, so that the same row
// has the same bits in each of them.
#pragma once

constexpr int64_t kChunk = 64;

inline void fetch(const void* from, int64_t line) {
  __builtin_prefetch(static_cast<const char*>(from) + 64 * line, 0, 2);
}

// The keys of a chunk: K turned so that a lane is a key, V where it lies. What lies `ahead` is what
// will be read next. It is fetched while this chunk is worked on, a line at a time: processors drop
// fetches that come all at once, or wait for them.
template <class T>
struct Chunk {
  using U = typename Unit<T>::type;
  std::vector<U> k;  // [units][64]
  const T* v[kChunk];
  const T *ahead_k[kChunk], *ahead_v[kChunk];
  bool fetched;  // what lies ahead

  // `count` keys, behind which so many `following` ones will be read.
  void read(const T* k_head, const T* v_head, int64_t stride, int64_t units, const int64_t* slots,
            int64_t count, int64_t following) {
    if (k.size() < size_t(units * kChunk)) k.resize(units * kChunk);
    for (int64_t j = 0; j < count; ++j) v[j] = v_head + slots[j] * stride;
    fetched = following <= 0;
    for (int64_t j = 0; j < kChunk && !fetched; ++j) {
      const int64_t slot = slots[count + std::min(j, following - 1)];
      ahead_k[j] = k_head + slot * stride;
      ahead_v[j] = v_head + slot * stride;
    }
    for (int64_t j = 0; j < count; j += 16) {
      const uint32_t* rows[16];
      for (int64_t i = 0; i < 16; ++i) {
        // Lanes without a key repeat the last one: no slot is read that the row doesn't own.
        const int64_t slot = slots[std::min(j + i, count - 1)];
        rows[i] = reinterpret_cast<const uint32_t*>(k_head + slot * stride);
      }
      auto* out = reinterpret_cast<uint32_t*>(k.data()) + j;
      int64_t u = 0;
      for (; u + 16 <= units; u += 16) {
        const uint32_t* parts[16];
        for (int i = 0; i < 16; ++i) parts[i] = rows[i] + u;
        transpose16(parts, out + u * kChunk, kChunk);
      }
      for (; u < units; ++u) {
        for (int i = 0; i < 16; ++i) out[u * kChunk + i] = rows[i][u];
      }
    }
  }
};

// The running softmax of one query head of one row.
struct State {
  float highest, sum;
  bool begun;
  float* mixed;  // [d]
};

template <class T>
struct Query {
  const Operand<T>* q;  // [units]
  State* state;
  int64_t count;  // keys of the chunk that the row reads
};

// Vectors of keys, or of a head's values, that are worked on at once for n queries.
constexpr int vectors_at_once(int n) { return std::clamp(kSums / n, 1, 4); }

// Where registers are few: what stands before it is loaded before what stands behind it. Compilers
// would else load so much at once that sums no longer fit into registers.
inline void in_order() {
  if constexpr (kSums < 8) __asm__ volatile("" ::: "memory");
}

// f with `count`, of 1 to Most, as a constant.
template <int Most, class F>
inline void with_size(int64_t count, const F& f) {
  if constexpr (Most > 1) {
    if (count < Most) return with_size<Most - 1>(count, f);
  }
  f(std::integral_constant<int, Most>());
}

// scores[n][16 * i + lane] = q . k of A vectors of keys, for N queries.
template <class T, int N, int A>
inline void dot_keys(const Chunk<T>& chunk, int64_t units, const Query<T>* queries,
                     float (*scores)[kChunk], int64_t at) {
  const Operand<T>* q[N];
  for (int n = 0; n < N; ++n) q[n] = queries[n].q;
  V acc[A][N];
  for (int i = 0; i < A; ++i) {
    for (int n = 0; n < N; ++n) acc[i][n] = zero();
  }
  const auto* k = chunk.k.data() + at;
  for (int64_t u = 0; u < units; ++u, k += kChunk) {
    for (int i = 0; i < A; ++i) {
      if (!chunk.fetched) fetch(chunk.ahead_k[at + 16 * i + u % 16], u / 16);
      dots(acc[i], k + 16 * i, [&](int n) { return q[n][u]; });
      in_order();
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int i = 0; i < A; ++i) store(scores[n] + at + 16 * i, acc[i][n]);
  }
}

// weights = exp(score - highest) of the first `count` keys, for N queries, and of further ones, that
// some of the queries read, zero.
template <class T, int N>
inline void score(const Chunk<T>& chunk, int64_t units, float scale, const Query<T>* queries,
                  float (*weights)[kChunk], float* highest_of, float* sum_of) {
  int64_t most = 0;
  for (int n = 0; n < N; ++n) most = std::max(most, queries[n].count);
  constexpr int kAtOnce = vectors_at_once(N);
  for (int64_t at = 0; at < most; at += 16 * kAtOnce) {
    with_size<kAtOnce>((most - at + 15) / 16, [&](auto keys) {
      dot_keys<T, N, keys.value>(chunk, units, queries, weights, at);
    });
  }
  for (int n = 0; n < N; ++n) {
    V top = set1(-INFINITY), total = zero();
    const auto valid = [&](int64_t at) {
      return std::clamp<int64_t>(queries[n].count - at, 0, 16);
    };
    for (int64_t at = 0; at < most; at += 16) {
      const V scaled = first(load(weights[n] + at) * set1(scale), valid(at), -INFINITY);
      store(weights[n] + at, scaled);
      top = maximum(top, scaled);
    }
    highest_of[n] = highest(top);
    for (int64_t at = 0; at < most; at += 16) {
      const V shifted = load(weights[n] + at) - set1(highest_of[n]);
      const V weight = first(exponential(shifted), valid(at), 0.0f);
      store(weights[n] + at, weight);
      total = total + weight;
    }
    sum_of[n] = sum(total);
  }
}

// mixed[n][d] = sum over keys [from, to) of weights[n] * V, continued from what is there.
// W vectors of a head, `last` lanes of the last one (all of them if Whole).
template <class T, int N, int W, bool Whole>
inline void mix_tile(const Chunk<T>& chunk, int64_t at, int64_t last, int64_t from, int64_t to,
                     float (*weights)[kChunk], float* mixed, int64_t stride) {
  constexpr int64_t kLine = 64 / sizeof(T);
  V acc[N][W];
  for (int n = 0; n < N; ++n) {
    for (int i = 0; i < W; ++i) acc[n][i] = load(mixed + n * stride + at + 16 * i);
  }
  for (int64_t j = from; j < to; ++j) {
    for (int64_t i = at; i < at + 16 * W && !chunk.fetched; i += 16) {
      if (i % kLine == 0) fetch(chunk.ahead_v[j], i / kLine);
    }
    const T* row = chunk.v[j] + at;
    for (int i = 0; i < W; ++i) {
      const V value = Whole || i + 1 < W ? load(row + 16 * i) : load(row + 16 * i, last);
      for (int n = 0; n < N; ++n) acc[n][i] = fma(set1(weights[n][j]), value, acc[n][i]);
      in_order();
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int i = 0; i < W; ++i) store(mixed + n * stride + at + 16 * i, acc[n][i]);
  }
}

template <class T, int N>
inline void mix(const Chunk<T>& chunk, int64_t d, int64_t from, int64_t to,
                float (*weights)[kChunk], float* mixed, int64_t stride) {
  constexpr int kAtOnce = vectors_at_once(N);
  for (int64_t at = 0; at < d; at += 16 * kAtOnce) {
    const int64_t left = std::min<int64_t>(16 * kAtOnce, d - at), width = (left + 15) / 16;
    const int64_t last = left - 16 * (width - 1);
    with_size<kAtOnce>(width, [&](auto values) {
      constexpr int W = values.value;
      if (last == 16) {
        mix_tile<T, N, W, true>(chunk, at, last, from, to, weights, mixed, stride);
      } else {
        mix_tile<T, N, W, false>(chunk, at, last, from, to, weights, mixed, stride);
      }
    });
  }
}

inline void merge(State& state, float highest, float sum, const float* mixed, int64_t d) {
  if (!state.begun) {
    state = {highest, sum, true, state.mixed};
    std::memcpy(state.mixed, mixed, d * sizeof(float));
    return;
  }
  const float top = std::max(state.highest, highest);
  const float old_share = exponential(state.highest - top), share = exponential(highest - top);
  state.sum = state.sum * old_share + sum * share;
  state.highest = top;
  vectors(d, [&](int64_t i, int64_t n) {
    const V added = load_some(mixed + i, n) * set1(share);
    store_some(state.mixed + i, fma(load_some(state.mixed + i, n), set1(old_share), added), n);
  });
}

// One chunk for N queries, merged into their states.
template <class T, int N>
inline void attend(Chunk<T>& chunk, int64_t d, const Query<T>* queries, float* mixed) {
  alignas(64) float weights[N][kChunk];
  float highest[N], sums[N];
  const int64_t stride = (d + 15) / 16 * 16;
  score<T, N>(chunk, d / Unit<T>::size, 1.0f / std::sqrt(float(d)), queries, weights, highest, sums);
  std::fill(mixed, mixed + N * stride, 0.0f);
  int64_t common = kChunk;
  for (int n = 0; n < N; ++n) common = std::min(common, queries[n].count);
  mix<T, N>(chunk, d, 0, common, weights, mixed, stride);
  chunk.fetched = true;
  for (int n = 0; n < N; ++n) {
    if (common < queries[n].count) {
      mix<T, 1>(chunk, d, common, queries[n].count, weights + n, mixed + n * stride, stride);
    }
    merge(*queries[n].state, highest[n], sums[n], mixed + n * stride, d);
  }
}

template <class T>
inline void attend_all(Chunk<T>& chunk, int64_t d, const std::vector<Query<T>>& queries,
                       float* mixed) {
  size_t i = 0;
  for (; i + kQueries <= queries.size(); i += kQueries) {
    attend<T, kQueries>(chunk, d, queries.data() + i, mixed);
  }
  if (i < queries.size()) {
    with_size<kQueries>(queries.size() - i, [&](auto rest) {
      attend<T, rest.value>(chunk, d, queries.data() + i, mixed);
    });
  }
}
