// Attention of rows to slots of a pool. A row's keys, in their logical order, are cut into chunks of
// 64 by position; every chunk gives a partial softmax, and partial states are merged from the first
// to the last. Plain steps, tree nodes and prefill rows all do exactly this, so that the same row
// has the same bits in each of them.
#pragma once

constexpr int64_t kChunk = 64;
constexpr int64_t kTile = 64;  // values of a head that are accumulated at once

// Fetches what `Chunk::read` and the mixing will need of `count` keys.
template <class T>
inline void fetch_keys(const T* k_head, const T* v_head, int64_t stride, int64_t d,
                       const int64_t* slots, int64_t count) {
  const int64_t size = d * int64_t(sizeof(T));
  for (int64_t j = 0; j < count; ++j) {
    const auto* k = reinterpret_cast<const char*>(k_head + slots[j] * stride);
    const auto* v = reinterpret_cast<const char*>(v_head + slots[j] * stride);
    for (int64_t at = 0; at < size; at += 64) {
      __builtin_prefetch(k + at, 0, 2);
      __builtin_prefetch(v + at, 0, 2);
    }
  }
}

// The keys of a chunk: K turned so that a lane is a key, V where it lies.
template <class T>
struct Chunk {
  using U = typename Unit<T>::type;
  std::vector<U> k;  // [units][64]
  const T* v[kChunk];

  void read(const T* k_head, const T* v_head, int64_t stride, int64_t units, const int64_t* slots,
            int64_t count) {
    if (k.size() < size_t(units * kChunk)) k.resize(units * kChunk);
    for (int64_t j = 0; j < count; ++j) v[j] = v_head + slots[j] * stride;
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

// weights = exp(score - highest) of the first `count` keys, for N queries. A: vectors of keys that
// any of the queries reads; what the others would add is zero.
template <class T, int N, int A>
inline void score_some(const Chunk<T>& chunk, int64_t units, float scale, const Query<T>* queries,
                       float (*weights)[kChunk], float* highest_of, float* sum_of) {
  V acc[N][A];
  for (int n = 0; n < N; ++n) {
    for (int i = 0; i < A; ++i) acc[n][i] = zero();
  }
  const auto* k = chunk.k.data();
  for (int64_t u = 0; u < units; ++u, k += kChunk) {
    Weights<T> keys[A];
    for (int i = 0; i < A; ++i) keys[i] = load_weights(k + 16 * i);
    for (int n = 0; n < N; ++n) {
      const auto value = broadcast(queries[n].q[u]);
      for (int i = 0; i < A; ++i) acc[n][i] = dot(acc[n][i], keys[i], value);
    }
  }
  for (int n = 0; n < N; ++n) {
    V top = set1(-INFINITY), total = zero();
    const auto valid = [&](int i) {
      return std::clamp<int64_t>(queries[n].count - 16 * i, 0, 16);
    };
    for (int i = 0; i < A; ++i) {
      acc[n][i] = first(acc[n][i] * set1(scale), valid(i), -INFINITY);
      top = maximum(top, acc[n][i]);
    }
    highest_of[n] = highest(top);
    for (int i = 0; i < A; ++i) {
      const V weight = first(exponential(acc[n][i] - set1(highest_of[n])), valid(i), 0.0f);
      store(weights[n] + 16 * i, weight);
      total = total + weight;
    }
    sum_of[n] = sum(total);
  }
}

template <class T, int N>
inline void score(const Chunk<T>& chunk, int64_t units, float scale, const Query<T>* queries,
                  float (*weights)[kChunk], float* highest_of, float* sum_of) {
  int64_t most = 0;
  for (int n = 0; n < N; ++n) most = std::max(most, queries[n].count);
  const auto run = [&](auto vectors) {
    score_some<T, N, vectors.value>(chunk, units, scale, queries, weights, highest_of, sum_of);
  };
  switch ((most + 15) / 16) {
    case 1: return run(std::integral_constant<int, 1>());
    case 2: return run(std::integral_constant<int, 2>());
    case 3: return run(std::integral_constant<int, 3>());
    default: return run(std::integral_constant<int, 4>());
  }
}

// mixed[n][d] = sum over keys [from, to) of weights[n] * V, continued from what is there.
// W vectors of a head, `last` lanes of the last one (all of them if Whole).
template <class T, int N, int W, bool Whole>
inline void mix_tile(const Chunk<T>& chunk, int64_t at, int64_t last, int64_t from, int64_t to,
                     float (*weights)[kChunk], float* mixed, int64_t stride) {
  V acc[N][W];
  for (int n = 0; n < N; ++n) {
    for (int i = 0; i < W; ++i) acc[n][i] = load(mixed + n * stride + at + 16 * i);
  }
  for (int64_t j = from; j < to; ++j) {
    const T* row = chunk.v[j] + at;
    V value[W];
    for (int i = 0; i < W; ++i) {
      value[i] = Whole || i + 1 < W ? load(row + 16 * i) : load(row + 16 * i, last);
    }
    for (int n = 0; n < N; ++n) {
      const V weight = set1(weights[n][j]);
      for (int i = 0; i < W; ++i) acc[n][i] = fma(weight, value[i], acc[n][i]);
    }
  }
  for (int n = 0; n < N; ++n) {
    for (int i = 0; i < W; ++i) store(mixed + n * stride + at + 16 * i, acc[n][i]);
  }
}

template <class T, int N>
inline void mix(const Chunk<T>& chunk, int64_t d, int64_t from, int64_t to,
                float (*weights)[kChunk], float* mixed, int64_t stride) {
  for (int64_t at = 0; at < d; at += kTile) {
    const int64_t left = std::min(kTile, d - at), width = (left + 15) / 16;
    const int64_t last = left - 16 * (width - 1);
    const auto tile = [&](auto vectors, auto whole) {
      mix_tile<T, N, vectors.value, whole.value>(chunk, at, last, from, to, weights, mixed, stride);
    };
    const auto sized = [&](auto whole) {
      switch (width) {
        case 1: return tile(std::integral_constant<int, 1>(), whole);
        case 2: return tile(std::integral_constant<int, 2>(), whole);
        case 3: return tile(std::integral_constant<int, 3>(), whole);
        default: return tile(std::integral_constant<int, 4>(), whole);
      }
    };
    last == 16 ? sized(std::true_type()) : sized(std::false_type());
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
inline void attend(const Chunk<T>& chunk, int64_t d, const Query<T>* queries, float* mixed) {
  alignas(64) float weights[N][kChunk];
  float highest[N], sums[N];
  const int64_t stride = (d + 15) / 16 * 16;
  score<T, N>(chunk, d / Unit<T>::size, 1.0f / std::sqrt(float(d)), queries, weights, highest, sums);
  std::fill(mixed, mixed + N * stride, 0.0f);
  int64_t common = kChunk;
  for (int n = 0; n < N; ++n) common = std::min(common, queries[n].count);
  mix<T, N>(chunk, d, 0, common, weights, mixed, stride);
  for (int n = 0; n < N; ++n) {
    if (common < queries[n].count) {
      mix<T, 1>(chunk, d, common, queries[n].count, weights + n, mixed + n * stride, stride);
    }
    merge(*queries[n].state, highest[n], sums[n], mixed + n * stride, d);
  }
}

template <class T>
inline void attend_all(const Chunk<T>& chunk, int64_t d, const std::vector<Query<T>>& queries,
                       float* mixed) {
  size_t i = 0;
  for (; i + kQueries <= queries.size(); i += kQueries) {
    attend<T, kQueries>(chunk, d, queries.data() + i, mixed);
  }
  const Query<T>* rest = queries.data() + i;
  switch (queries.size() - i) {
    case 0: return;
    case 1: return attend<T, 1>(chunk, d, rest, mixed);
    case 2: return attend<T, std::min(2, kQueries)>(chunk, d, rest, mixed);
    default: return attend<T, std::min(3, kQueries)>(chunk, d, rest, mixed);
  }
}
