// Attention of a batch: which rows read which chunks (chunk.hpp), shared where they are the same.
#pragma once

constexpr int64_t kRowsOfTask = 8;

// A task: some rows of a segment, the query heads of one KV head.
struct Share {
  int64_t first_row;                   // of the segment in the batch
  int64_t rows, context, tail;         // of the segment
  const int64_t *slots, *masks;        // context and tail in one; masks null: causal
  int64_t begin, end;                  // the task's rows in the segment
};

// The states of a task's chunks where they are computed apart: [chunks][queries].
struct Parts {
  State* states;
  float* mixed;  // [chunks][queries][stride]
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
    std::vector<Operand<T>> q;  // [rows, group, units]
    std::vector<int64_t> own;
  };

  void run(const Share& share, int64_t kv_head, const Parts* parts) const {
    Scratch& scratch = begin(share, kv_head);
    [[maybe_unused]] const Mode<T> mode;
    if (!share.masks) {
      shared(scratch, share, kv_head, 0, share.context + share.end, scratch.states.data());
    } else {
      const int64_t whole = share.context / kChunk * kChunk;
      if (parts) {
        join(scratch, *parts, whole / kChunk);
      } else {
        shared(scratch, share, kv_head, 0, whole, scratch.states.data());
      }
      for (int64_t row = share.begin; row < share.end; ++row) own(scratch, share, kv_head, row);
    }
    const auto count = static_cast<int64_t>(scratch.states.size());
    for (int64_t i = 0; i < count; ++i) write(scratch.states[i], share, kv_head, i);
  }

  // One chunk of the context by itself, for `join`.
  void run_part(const Share& share, int64_t kv_head, const Parts& parts, int64_t chunk) const {
    Scratch& scratch = begin(share, kv_head);
    [[maybe_unused]] const Mode<T> mode;
    const int64_t queries = (share.end - share.begin) * group;
    State* states = parts.states + chunk * queries;
    for (int64_t i = 0; i < queries; ++i) {
      states[i] = {0, 0, false, parts.mixed + (chunk * queries + i) * stride()};
    }
    // The chunk behind it is most often this thread's next one.
    const int64_t behind = share.context - (chunk + 1) * kChunk;
    shared(scratch, share, kv_head, chunk * kChunk, (chunk + 1) * kChunk, states, behind);
  }

  int64_t stride() const { return (args.d + 15) / 16 * 16; }

 private:
  Scratch& begin(const Share& share, int64_t kv_head) const {
    Scratch& scratch = kept<Scratch>();
    const int64_t queries = (share.end - share.begin) * group;
    scratch.states.resize(queries);
    scratch.mixed.resize((queries + kQueries) * stride());
    for (int64_t i = 0; i < queries; ++i) {
      scratch.states[i] = {0, 0, false, scratch.mixed.data() + (i + kQueries) * stride()};
    }
    read_queries(scratch, share, kv_head);
    return scratch;
  }

  // Chunks that were computed apart, merged from the first to the last.
  void join(Scratch& scratch, const Parts& parts, int64_t chunks) const {
    const auto queries = static_cast<int64_t>(scratch.states.size());
    for (int64_t i = 0; i < chunks * queries; ++i) {
      const State& part = parts.states[i];
      merge(scratch.states[i % queries], part.highest, part.sum, part.mixed, args.d);
    }
  }

  // Keys [begin, end), which all rows have in the same lanes; a causal row stops at itself. Of those
  // `behind` some are fetched.
  void shared(Scratch& scratch, const Share& share, int64_t kv_head, int64_t begin, int64_t end,
              State* states, int64_t behind = 0) const {
    for (int64_t at = begin; at < end; at += kChunk) {
      const int64_t count = std::min(kChunk, end - at);
      read(scratch, kv_head, share.slots + at, count, end + behind - at - count);
      scratch.queries.clear();
      for (int64_t row = share.begin; row < share.end; ++row) {
        const int64_t visible = share.masks ? count : share.context + row + 1 - at;
        if (visible > 0) add(scratch, share, row, std::min(count, visible), states);
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
      read(scratch, kv_head, scratch.own.data() + at, count, 0);
      scratch.queries.clear();
      add(scratch, share, row, count, scratch.states.data());
      attend_all(scratch.chunk, args.d, scratch.queries, scratch.mixed.data());
    }
  }

  // Reads `count` keys, and some of the `following` ones are fetched.
  void read(Scratch& scratch, int64_t kv_head, const int64_t* slots, int64_t count,
            int64_t following) const {
    const T* k = static_cast<const T*>(args.k) + kv_head * args.d;
    const T* v = static_cast<const T*>(args.v) + kv_head * args.d;
    const int64_t width = args.kv_heads * args.d;
    scratch.chunk.read(k, v, width, units, slots, count, following);
  }

  void read_queries(Scratch& scratch, const Share& share, int64_t kv_head) const {
    using U = typename Unit<T>::type;
    const int64_t width = group * units;
    scratch.q.resize((share.end - share.begin) * width);
    for (int64_t row = share.begin; row < share.end; ++row) {
      const T* q = static_cast<const T*>(args.q) +
                   ((share.first_row + row) * args.heads + kv_head * group) * args.d;
      Operand<T>* to = scratch.q.data() + (row - share.begin) * width;
      for (int64_t u = 0; u < width; ++u) to[u] = operand(reinterpret_cast<const U*>(q)[u]);
    }
  }

  void add(Scratch& scratch, const Share& share, int64_t row, int64_t count,
           State* states) const {
    for (int64_t head = 0; head < group; ++head) {
      const int64_t index = (row - share.begin) * group + head;
      scratch.queries.push_back(
          {scratch.q.data() + index * units, &states[index], count});
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

// Few rows make few tasks: then the chunks of a long context are tasks as well, so that all threads
// have work to the end. The arithmetic is the same.
template <class T>
struct Split {
  const Worker<T>& worker;
  const std::vector<Share>& shares;
  std::vector<Parts> parts;         // of each task
  std::vector<int64_t> first_part;  // of each share, and behind the last

  struct Kept {
    std::vector<State> states;
    std::vector<float> mixed;
  };

  static constexpr int64_t kTasksOfThread = 6, kLeastChunks = 4;
  static bool pays(int64_t tasks, const std::vector<Share>& shares) {
    if (tasks >= kTasksOfThread * threads()) return false;
    return std::any_of(shares.begin(), shares.end(), [](const Share& share) {
      return share.masks && share.context >= kLeastChunks * kChunk;
    });
  }

  void run() {
    const int64_t heads = worker.args.kv_heads, stride = worker.stride();
    std::vector<int64_t> first_state;
    int64_t chunks = 0, states = 0;
    for (const Share& share : shares) {
      const int64_t mine = share.masks ? share.context / kChunk : 0;
      first_part.push_back(chunks);
      chunks += mine * heads;
      for (int64_t head = 0; head < heads; ++head) {
        first_state.push_back(states);
        states += mine * (share.end - share.begin) * worker.group;
      }
    }
    first_part.push_back(chunks);
    auto& kept_here = kept<Kept>();
    if (kept_here.states.size() < size_t(states)) kept_here.states.resize(states);
    if (kept_here.mixed.size() < size_t(states * stride)) kept_here.mixed.resize(states * stride);
    for (const int64_t first : first_state) {
      parts.push_back({kept_here.states.data() + first, kept_here.mixed.data() + first * stride});
    }
    parallel(chunks, [&](int64_t part) {
      const auto after = std::upper_bound(first_part.begin(), first_part.end(), part);
      const int64_t share = after - first_part.begin() - 1, at = part - first_part[share];
      // All heads of a chunk one after the other: they are neighbours in memory.
      const int64_t head = at % heads;
      worker.run_part(shares[share], head, parts[share * heads + head], at / heads);
    });
  }
};

template <class T>
inline void attention_as(const AttentionArgs& args) {
  auto& shares = kept<std::vector<Share>>();
  shares.clear();
  shares_of(args, shares);
  const Worker<T> worker{args};
  const auto tasks = static_cast<int64_t>(shares.size()) * args.kv_heads;
  Split<T> split{worker, shares, {}, {}};
  const bool apart = Split<T>::pays(tasks, shares);
  if (apart) split.run();
  const Share* list = shares.data();
  const Parts* parts = apart ? split.parts.data() : nullptr;
  // The long ones first: in a prefill chunk those are the last rows.
  parallel(tasks, [&](int64_t index) {
    const int64_t task = tasks - 1 - index;
    const Share& share = list[task / args.kv_heads];
    worker.run(share, task % args.kv_heads, parts && share.masks ? parts + task : nullptr);
  });
}

inline void attention(const AttentionArgs& args) {
  args.type == Type::kF32 ? attention_as<float>(args) : attention_as<bf16>(args);
}
