// The likeliest of a row's candidates, found in histograms: nothing but a few of them is sorted.
#pragma once

// Candidates, by ascending id.
struct Candidates {
  int64_t count = 0;
  std::vector<int64_t> ids, members;
  std::vector<float> logits;
  std::vector<double> masses;

  void reserve(int64_t most) {
    count = 0;
    if (int64_t(ids.size()) >= most) return;
    ids.resize(most), members.resize(most), logits.resize(most), masses.resize(most);
  }
  template <class F>
  void keep(const F& kept) {
    int64_t next = 0;
    for (int64_t i = 0; i < count; ++i) {
      const bool stays = kept(i);
      ids[next] = ids[i], logits[next] = logits[i], masses[next] = masses[i];
      next += stays;
    }
    count = next;
  }
};

// Where the candidates, best first and of equals the lowest id, come to `bound`: of those at
// members[0, size), of which all better ones have amounts `before` together.
template <class Amount>
class Cut {
 public:
  Cut(Candidates& all, double bound, const Amount& amount)
      : all_(all), bound_(bound), amount_(amount) {
    for (int64_t i = 0; i < all.count; ++i) all.members[i] = i;
    for (int64_t size = all.count; size > 0;) size = narrower(size);
  }
  bool keeps(int64_t i) const {
    return all_.logits[i] > last_ || (all_.logits[i] == last_ && i <= place_);
  }

 private:
  static constexpr int64_t kBuckets = 256, kFew = 64;

  // How many members remain, 0 when the place is found.
  int64_t narrower(int64_t size) {
    int64_t* members = all_.members.data();
    float low = INFINITY, high = -INFINITY;
    for (int64_t i = 0; i < size; ++i) {
      low = std::min(low, all_.logits[members[i]]);
      high = std::max(high, all_.logits[members[i]]);
    }
    if (size <= kFew || low == high) return finish(size);
    // Falling in the logit, rounding included.
    const double scale = (kBuckets - 1) / (double(high) - low);
    const auto bucket_of = [=](float logit) { return int64_t((double(high) - logit) * scale); };
    const auto bucket = [&](int64_t i) { return bucket_of(all_.logits[members[i]]); };
    double sums[kBuckets] = {};
    for (int64_t i = 0; i < size; ++i) sums[bucket(i)] += amount_(members[i]);
    // Where all together don't come to the bound, the last one; by rounding it may be the last but
    // one of all buckets.
    const int64_t last = bucket_of(low);
    int64_t chosen = 0;
    while (chosen < last && before_ + sums[chosen] < bound_) before_ += sums[chosen++];
    int64_t next = 0;
    for (int64_t i = 0; i < size; ++i) {
      const bool stays = bucket(i) == chosen;
      members[next] = members[i];
      next += stays;
    }
    return next;
  }

  int64_t finish(int64_t size) {
    int64_t* members = all_.members.data();
    // Members are in ascending order already where all are equal.
    if (size <= kFew) {
      std::sort(members, members + size, [&](int64_t a, int64_t b) {
        const float x = all_.logits[a], y = all_.logits[b];
        return x != y ? x > y : a < b;
      });
    }
    for (int64_t i = 0; i < size; ++i) {
      place_ = members[i];
      before_ += amount_(place_);
      if (before_ >= bound_) break;
    }
    last_ = all_.logits[place_];
    return 0;
  }

  Candidates& all_;
  const double bound_;
  const Amount& amount_;
  double before_ = 0.0;
  int64_t place_ = 0;  // of the last one that is kept
  float last_ = 0.0f;  // its logit
};

template <class Amount>
inline void keep_until(Candidates& all, double bound, const Amount& amount) {
  const Cut<Amount> cut(all, bound, amount);
  all.keep([&](int64_t i) { return cut.keeps(i); });
}
