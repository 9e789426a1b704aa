// Tokens drawn from rows of logits: min-p, top-k, top-p, then the inverse of the distribution over
// ascending ids. No row is sorted: a floor under the logits that can matter leaves few candidates,
// and the cut through them is found in histograms. Every mass and sum is fp64, in an order and of
// operations that are the same for every row and instruction set.
#pragma once
#include "cut.hpp"

constexpr int64_t kGroup = 128;   // logits whose largest decides if they are looked at one by one
constexpr double kLeast = -709.1; // e to less than this, beside the 1 of the best token, is nothing
// Sums of equal masses miss round values of top-p by their rounding.
constexpr double kSlack = 1e-12;

// e^z for z in [kLeast, 0], to 1e-15 of it, and 0 for kLeast: there n is -1023, and all bits of 2^n
// are zero. Plain sums and products, so that loops over it become vectors.
inline double mass_of(double z) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double shifted = z * 1.4426950408889634 + magic;
  const double n = shifted - magic;
  const double r = z - n * 6.93147180369123816490e-01 - n * 1.90821492927058770002e-10;
  // (e^r - 1) / r at Chebyshev's nodes of [-ln(2) / 2, ln(2) / 2].
  double p = 2.7620088445409746e-07;
  p = p * r + 2.763265575933203e-06;
  p = p * r + 2.4801521295954376e-05;
  p = p * r + 0.0001984119061583585;
  p = p * r + 0.0013888888917213717;
  p = p * r + 0.008333333367332009;
  p = p * r + 0.04166666666662413;
  p = p * r + 0.16666666666615607;
  p = p * r + 0.5000000000000001;
  p = p * r + 1.0000000000000013;
  uint64_t bits;  // n in the lowest ones; shifted to where the exponent is
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return (p * r + 1.0) * power;
}

inline double sum_of(const double* mass, int64_t n) {
  double lane[8] = {};
  const int64_t whole = n / 8 * 8;
  for (int64_t i = 0; i < whole; i += 8) {
    for (int64_t j = 0; j < 8; ++j) lane[j] += mass[i + j];
  }
  for (int64_t i = whole; i < n; ++i) lane[i - whole] += mass[i];
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

// The first place at which the sum of masses exceeds `target`, or else the last that has any.
inline int64_t place_of(const double* mass, int64_t n, double target, double below = 0.0) {
  int64_t last = 0;
  for (int64_t i = 0; i < n; ++i) {
    below += mass[i];
    if (below > target) return i;
    if (mass[i] > 0.0) last = i;
  }
  return last;
}

// What a thread keeps between rows.
struct Drawing {
  std::vector<float> tops, ordered;  // the largest logit of every group, and a partition of them
  std::vector<double> sums;          // masses of the groups
  Candidates candidates;
};

class Draw {
 public:
  Draw(const SampleArgs& args, int64_t row)
      : args_(args),
        x_(args.x + row * args.n),
        uniform_(args.uniforms[row]),
        heat_(1.0 / args.temperature),
        groups_((args.n + kGroup - 1) / kGroup),
        kept_(kept<Drawing>()) {}

  int64_t token() {
    // A row with NaN or infinity, or of nothing else than -infinity, has no distribution.
    if (!survey() || top_ == -INFINITY) return likeliest();
    const bool few = args_.top_k > 0 && args_.top_k < args_.n;
    if (args_.min_p <= 0.0 && !few) {
      const double total = weigh_all();
      if (args_.top_p >= 1.0) return pick_of_all(uniform_ * total);
      gather_nucleus(total);
      return pick();
    }
    double floor = top_ + kLeast * args_.temperature;
    if (args_.min_p > 0.0) floor = std::max(floor, under(args_.min_p));
    if (few && args_.top_k <= groups_) floor = std::max(floor, double(top_of_rank(args_.top_k)));
    gather(floor);
    if (few) keep_until(all(), double(args_.top_k), [](int64_t) { return 1.0; });
    if (args_.top_p < 1.0) keep_nucleus((args_.top_p - kSlack) * mass());
    return pick();
  }

 private:
  Candidates& all() { return kept_.candidates; }
  double mass() { return sum_of(all().masses.data(), all().count); }
  int64_t size_of(int64_t group) const { return std::min(kGroup, args_.n - group * kGroup); }

  // The largest logits; whether all are numbers, or -infinity.
  bool survey() {
    kept_.tops.resize(groups_);
    const V least = set1(-3.4028234663852886e38f), none = set1(-INFINITY);
    V wrong = zero();
    for (int64_t group = 0; group < groups_; ++group) {
      V most = none;
      vectors(size_of(group), [&](int64_t i, int64_t width) {
        V value = load_some(x_ + group * kGroup + i, width);
        if (width < 16) value = first(value, width, -INFINITY);
        most = maximum(value, most);  // the second, if the first is no number
        wrong = wrong + maximum(least, value) * zero();
      });
      kept_.tops[group] = highest(most);
    }
    top_ = *std::max_element(kept_.tops.begin(), kept_.tops.end());
    return sum(wrong) == 0.0f;
  }

  int64_t likeliest() const {
    if (top_ == -INFINITY) return 0;
    const auto group = std::find(kept_.tops.begin(), kept_.tops.end(), top_) - kept_.tops.begin();
    return std::find(x_ + group * kGroup, x_ + args_.n, top_) - x_;
  }

  // A logit surely below all that have at least `mass` (of the best one's).
  double under(double mass) const {
    return top_ + args_.temperature * (std::log(mass) - 1e-9) - 1e-12 * std::abs(double(top_));
  }

  // The rank-th largest of the groups' largest logits: at least so many logits reach it.
  float top_of_rank(int64_t rank) {
    std::vector<float>& ordered = kept_.ordered;
    ordered = kept_.tops;
    const auto at = ordered.end() - rank;
    std::nth_element(ordered.begin(), at, ordered.end());
    return *at;
  }

  void weigh(const float* logits, int64_t n, double* masses) const {
    const double top = top_, heat = heat_;
    // In two loops, since the compiler makes a branch of what follows from the bound in one.
    for (int64_t i = 0; i < n; ++i) {
      const double z = (double(logits[i]) - top) * heat;
      masses[i] = z < kLeast ? kLeast : z;
    }
    for (int64_t i = 0; i < n; ++i) masses[i] = mass_of(masses[i]);
  }

  double weigh_all() {
    kept_.sums.resize(groups_);
    double masses[kGroup], total = 0.0;
    for (int64_t group = 0; group < groups_; ++group) {
      weigh(x_ + group * kGroup, size_of(group), masses);
      kept_.sums[group] = sum_of(masses, size_of(group));
      total += kept_.sums[group];
    }
    return total;
  }

  int64_t pick_of_all(double target) {
    const int64_t group = place_of(kept_.sums.data(), groups_, target);
    double masses[kGroup], below = 0.0;
    for (int64_t i = 0; i < group; ++i) below += kept_.sums[i];
    weigh(x_ + group * kGroup, size_of(group), masses);
    return group * kGroup + place_of(masses, size_of(group), target, below);
  }

  // The nucleus of all that weigh `total`: nearly always some of the best groups' logits.
  void gather_nucleus(double total) {
    const double bound = (args_.top_p - kSlack) * total;
    // All that have less would not be missed even if every token were one of them.
    const double least = under((1.0 - args_.top_p) * total / double(args_.n));
    gather(std::max(least, double(top_of_rank((groups_ + 3) / 4))));
    if (mass() < bound) gather(least);
    keep_nucleus(bound);
  }

  void keep_nucleus(double bound) {
    const double* masses = all().masses.data();
    keep_until(all(), bound, [=](int64_t i) { return masses[i]; });
  }

  int64_t pick() {
    return all().ids[place_of(all().masses.data(), all().count, uniform_ * mass())];
  }

  // The candidates: logits from `floor` on whose masses min-p keeps.
  void gather(double floor) {
    all().reserve(args_.n);
    int64_t count = 0;
    for (int64_t group = 0; group < groups_; ++group) {
      if (kept_.tops[group] < floor) continue;
      const int64_t begin = group * kGroup, end = begin + size_of(group);
      for (int64_t i = begin; i < end; ++i) {
        all().ids[count] = i;
        all().logits[count] = x_[i];
        count += x_[i] >= floor;
      }
    }
    all().count = count;
    weigh(all().logits.data(), count, all().masses.data());
    const double least = args_.min_p;
    if (least > 0.0) all().keep([&](int64_t i) { return all().masses[i] >= least; });
  }

  const SampleArgs& args_;
  const float* x_;
  const double uniform_, heat_;
  const int64_t groups_;
  Drawing& kept_;
  float top_ = 0.0f;
};

inline void sample(const SampleArgs& args) {
  parallel(args.rows, [&](int64_t row) { args.ids[row] = Draw(args, row).token(); });
}
