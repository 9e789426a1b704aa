// Attention of a batch: which rows read which chunks (chunk.hpp), shared where they are the same.
#pragma once

constexpr int64_t kRowsOfTask = 4;

// A task: some rows of a segment, the query heads of one KV head.
struct Share {
  int64_t first_row;                   // of the segment in the batch
  int64_t rows, context, tail;         // of the segment
  const int64_t *slots, *masks;        // context and tail in one; masks null: causal
  int64_t begin, end;                  // the task's rows in the segment
};

template <class T>
struct Worker {
  const AttentionArgs& args;
  const int64_t group = args.heads / args.kv_heads;
  const int64_t units = args.d / Unit<T>::size;

  // Kept between calls: a call's share is too short for allocations.
  struct Scratch {
    Chunk<T> chunk;
    std::vector<State> states;
    std::vector<float> mixed;
    std::vector<Query<T>> queries;
    std::vector<int64_t> own;
  };

  void run(const Share& share, int64_t kv_head) const {
    Scratch& scratch = kept<Scratch>();
    const int64_t rows = share.end - share.begin, stride = (args.d + 15) / 16 * 16;
    scratch.states.resize(rows * group);
    scratch.mixed.resize((rows * group + kQueries) * stride);
    for (int64_t i = 0; i < rows * group; ++i) {
      scratch.states[i] = {0, 0, false, scratch.mixed.data() + (i + kQueries) * stride};
    }
    if (share.masks) {
      shared(scratch, share, kv_head, share.context / kChunk * kChunk);
      for (int64_t row = share.begin; row < share.end; ++row) own(scratch, share, kv_head, row);
    } else {
      shared(scratch, share, kv_head, share.context + share.end);
    }
    for (int64_t i = 0; i < rows * group; ++i) write(scratch.states[i], share, kv_head, i);
  }

  // Keys [0, length), which all rows have in the same lanes; a causal row stops at itself.
  void shared(Scratch& scratch, const Share& share, int64_t kv_head, int64_t length) const {
    for (int64_t at = 0; at < length; at += kChunk) {
      const int64_t count = std::min(kChunk, length - at);
      read(scratch, kv_head, share.slots + at, count);
      scratch.queries.clear();
      for (int64_t row = share.begin; row < share.end; ++row) {
        const int64_t visible = share.masks ? count : share.context + row + 1 - at;
        if (visible > 0) add(scratch, share, kv_head, row, std::min(count, visible));
      }
      attend_all(scratch.chunk, args.d, scratch.queries, scratch.mixed.data());
    }
  }

  // What is left of the context and the row's own path: gathered, so that no lane is a gap.
  void own(Scratch& scratch, const Share& share, int64_t kv_head, int64_t row) const {
    const int64_t shared_keys = share.context / kChunk * kChunk;
    scratch.own.assign(share.slots + shared_keys, share.slots + share.context);
    const auto mask = static_cast<uint64_t>(share.masks[row]);
    for (int64_t j = 0; j < share.tail; ++j) {
      if (mask >> j & 1) scratch.own.push_back(share.slots[share.context + j]);
    }
    const auto length = static_cast<int64_t>(scratch.own.size());
    for (int64_t at = 0; at < length; at += kChunk) {
      const int64_t count = std::min(kChunk, length - at);
      read(scratch, kv_head, scratch.own.data() + at, count);
      scratch.queries.clear();
      add(scratch, share, kv_head, row, count);
      attend_all(scratch.chunk, args.d, scratch.queries, scratch.mixed.data());
    }
  }

  void read(Scratch& scratch, int64_t kv_head, const int64_t* slots, int64_t count) const {
    const T* k = static_cast<const T*>(args.k) + kv_head * args.d;
    const T* v = static_cast<const T*>(args.v) + kv_head * args.d;
    scratch.chunk.read(k, v, args.kv_heads * args.d, units, slots, count);
  }

  void add(Scratch& scratch, const Share& share, int64_t kv_head, int64_t row,
           int64_t count) const {
    const auto* q = static_cast<const T*>(args.q) +
                    ((share.first_row + row) * args.heads + kv_head * group) * args.d;
    for (int64_t head = 0; head < group; ++head, q += args.d) {
      State* state = &scratch.states[(row - share.begin) * group + head];
      scratch.queries.push_back({reinterpret_cast<const typename Unit<T>::type*>(q), state, count});
    }
  }

  void write(const State& state, const Share& share, int64_t kv_head, int64_t index) const {
    const int64_t row = share.first_row + share.begin + index / group;
    T* out = static_cast<T*>(args.out) +
             (row * args.heads + kv_head * group + index % group) * args.d;
    vectors(args.d, [&](int64_t i, int64_t n) {
      store_some(out + i, load_some(state.mixed + i, n) / set1(state.sum), n);
    });
  }
};

inline void shares_of(const AttentionArgs& args, std::vector<Share>& out) {
  const int64_t *share = args.shares, *keys = args.keys;
  int64_t first = 0;
  for (int64_t s = 0; s < args.segments; ++s, share += 4) {
    const int64_t rows = share[0], length = share[1] + share[2];
    const int64_t* masks = share[3] ? keys + length : nullptr;
    for (int64_t begin = 0; begin < rows; begin += kRowsOfTask) {
      const int64_t end = std::min(rows, begin + kRowsOfTask);
      out.push_back({first, rows, share[1], share[2], keys, masks, begin, end});
    }
    keys += length + (masks ? rows : 0);
    first += rows;
  }
}

template <class T>
inline void attention_as(const AttentionArgs& args) {
  auto& shares = kept<std::vector<Share>>();
  shares.clear();
  shares_of(args, shares);
  const Worker<T> worker{args};
  const Share* list = shares.data();
  // The long ones first: in a prefill chunk those are the last rows.
  const auto count = static_cast<int64_t>(shares.size());
  parallel(count * args.kv_heads, [&](int64_t task) {
    worker.run(list[count - 1 - task / args.kv_heads], task % args.kv_heads);
  });
}

inline void attention(const AttentionArgs& args) {
  args.type == Type::kF32 ? attention_as<float>(args) : attention_as<bf16>(args);
}
