// Choosing tokens without sorting the vocabulary. Definitions: sampling.h.
//
// A filter keeps a beginning of the order, so what all of them keep together is found among the
// tokens above a bound that is known to be low enough: the k-th largest of the groups' maxima is
// at most the k-th largest number. Only those are looked at closely.
#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "pool.h"

namespace quire {
namespace {

constexpr float kEverything = -std::numeric_limits<float>::infinity();
constexpr int64_t kNucleus = 256;  // likeliest groups that top-p looks at first
constexpr int kEverywhere = -1;
constexpr int32_t kNobody = -1;

struct Candidate {
  float y;
  int32_t id;
  int64_t weight;
};

bool before(const Candidate& a, const Candidate& b) {
  return a.y > b.y || (a.y == b.y && a.id < b.id);
}

// Memory of one thread, kept.
struct Work {
  std::vector<float> peaks, sorted, numbers;
  std::vector<int64_t> sums;
  std::vector<Candidate> found;
};
Work& work() {
  static thread_local Work mine;
  return mine;
}

// The rank-th largest, from 1; -inf if there are fewer.
float nth_largest(const std::vector<float>& from, int64_t rank, std::vector<float>& space) {
  if (rank > static_cast<int64_t>(from.size())) return kEverything;
  space = from;
  std::nth_element(space.begin(), space.begin() + (rank - 1), space.end(), std::greater<float>());
  return space[static_cast<size_t>(rank - 1)];
}

// ---- one row -----------------------------------------------------------------------------------

// Whose random numbers: a request's seed, and how many tokens it has put out.
struct Place {
  uint64_t seed, position;
};

class Row {
 public:
  Row(const Numbers& x, int64_t n) : x_(x), n_(n), w_(work()) {
    w_.peaks.resize(static_cast<size_t>(groups_of(n)));
    QUIRE_PICK(find_peaks)(x, n, w_.peaks.data());
    top_ = *std::max_element(w_.peaks.begin(), w_.peaks.end());
  }

  bool is_empty() const { return top_ == kEverything; }
  bool is_finite() const { return std::isfinite(top_); }

  int64_t likeliest() const {
    const auto group = std::find(w_.peaks.begin(), w_.peaks.end(), top_) - w_.peaks.begin();
    int64_t id = group * kGroup;
    while (id + 1 < n_ && x_[id] != top_) ++id;
    return id;
  }

  int64_t random(float temperature, int64_t top_k, double top_p, float min_p, Place place) {
    scale_ = {top_, temperature};
    floor_ = min_p;
    if (top_k > 0 && top_k < n_) {
      keep_first(top_k);
      if (static_cast<int64_t>(w_.found.size()) >= top_k) kept_ = Kept::few;
      if (top_p < 1.0) keep_share(top_p, target(top_p, mass()));
      return race_of_found(place);
    }
    if (top_p >= 1.0) return race_of_all({floor_, n_}, place);
    const int64_t wanted = target(top_p, weigh_all({floor_, n_}));
    find(std::max(bound_for(kNucleus), kNothing), kEverywhere);
    if (mass() < wanted) {
      kept_ = Kept::many;
      return race_of_all(edge_of_mass(wanted), place);
    }
    keep_share(top_p, wanted);
    return race_of_found(place);
  }

  // What a mask must allow for the same token to be picked with it; nothing, if that cannot be said
  // with `most` of them. Weights are relative to the likeliest token, so it is one of them. And the
  // number that a token runs with depends on its id alone: who wins among many wins among fewer.
  void name_witnesses(int64_t token, const Place& at, int64_t most, int32_t* out) const {
    std::fill(out, out + most, kNobody);
    if (kept_ == Kept::all) return name_two(token, out);
    if (kept_ == Kept::many) return;
    auto& found = w_.found;
    const int64_t likelier = mass_before(token);
    // Nobody without weight arrives, and who comes in the place of one has none either.
    const auto is_idle = [](const Candidate& c) { return c.weight == 0; };
    found.erase(std::remove_if(found.begin(), found.end(), is_idle), found.end());
    if (static_cast<int64_t>(found.size()) > most) {
      // Then a filter may let others in, which do no harm only to who wins among all.
      if (race_of_all({floor_, n_}, at) != token) return;
      if (share_ >= 1.0) return name_two(token, out);
      std::nth_element(found.begin(), found.begin() + (most - 1), found.end(), before);
      found.resize(static_cast<size_t>(most));
    }
    // Top-p wants a share of less where others are hidden, but at least of what these weigh. A
    // token that still belongs to it is one of these.
    if (share_ < 1.0 && likelier >= target(share_, mass())) return;
    for (const Candidate& c : found) *out++ = c.id;
  }

 private:
  Numbers x_;
  int64_t n_;
  Work& w_;
  float top_, floor_ = kEverything;
  Scale scale_{};
  // Who takes part in the race: all that min_p leaves, those found, or others.
  enum class Kept { all, few, many } kept_ = Kept::all;
  double share_ = 1.0;  // of the mass, as top-p has it

  // All tokens with y at least `bound`, in order of id; only those of a bin if one is given.
  void find(float bound, int bin) {
    w_.found.clear();
    for (int64_t g = 0; g < groups_of(n_); ++g) {
      if (!(scale_(w_.peaks[static_cast<size_t>(g)]) >= bound)) continue;
      const int64_t end = std::min(n_, (g + 1) * kGroup);
      for (int64_t i = g * kGroup; i < end; ++i) {
        const float y = scale_(x_[i]);
        if (y >= bound && (bin == kEverywhere || bin_of(y) == bin))
          w_.found.push_back({y, static_cast<int32_t>(i), weight_of(y)});
      }
    }
  }

  // A bound that at least `rank` tokens reach, or min-p's.
  float bound_for(int64_t rank) {
    return std::max(floor_, scale_(nth_largest(w_.peaks, rank, w_.sorted)));
  }

  void keep_first(int64_t count) {
    find(bound_for(count), kEverywhere);
    if (static_cast<int64_t>(w_.found.size()) <= count) return;
    std::nth_element(w_.found.begin(), w_.found.begin() + (count - 1), w_.found.end(), before);
    w_.found.resize(static_cast<size_t>(count));
  }

  int64_t mass() const {
    int64_t total = 0;
    for (const Candidate& c : w_.found) total += c.weight;
    return total;
  }

  static int64_t target(double share, int64_t total) {
    return static_cast<int64_t>(std::ceil(static_cast<double>(total) * share));
  }

  // Keeps the shortest beginning, at least one token, whose mass reaches `wanted`.
  void keep_mass(int64_t wanted) {
    size_t low = 0, high = w_.found.size();
    const auto begin = w_.found.begin();
    const auto at = [&](size_t i) { return begin + static_cast<std::ptrdiff_t>(i); };
    int64_t so_far = 0;  // mass of those before `low`; the beginning ends in (low, high]
    while (high - low > 32) {
      const size_t middle = (low + high) / 2;
      std::nth_element(at(low), at(middle), at(high), before);
      int64_t part = 0;
      for (size_t i = low; i < middle; ++i) part += w_.found[i].weight;
      if (so_far + part >= wanted) {
        high = middle;
      } else {
        so_far += part;
        low = middle;
      }
    }
    std::sort(at(low), at(high), before);
    size_t end = low;
    do so_far += w_.found[end++].weight;
    while (end < high && so_far < wanted);
    w_.found.resize(end);
  }

  void keep_share(double share, int64_t wanted) {
    share_ = share, kept_ = Kept::few;
    keep_mass(wanted);
  }

  void name_two(int64_t token, int32_t* out) const {
    out[0] = static_cast<int32_t>(token), out[1] = static_cast<int32_t>(likeliest());
  }

  // Of those found that come before a token, which is one.
  int64_t mass_before(int64_t token) const {
    const auto mine = std::find_if(w_.found.begin(), w_.found.end(),
                                   [&](const Candidate& c) { return c.id == token; });
    int64_t total = 0;
    for (const Candidate& c : w_.found) total += before(c, *mine) ? c.weight : 0;
    return total;
  }

  // The last token of the shortest beginning of the row whose mass reaches `wanted`, for when
  // that is long: by bins of y, of which only the last is looked at closely.
  Edge edge_of_mass(int64_t wanted) {
    int64_t bins[kBins];
    QUIRE_PICK(sum_bins)(x_, n_, w_.peaks.data(), scale_, floor_, bins);
    int bin = 0;
    for (; bin + 1 < kBins && bins[bin] < wanted; ++bin) wanted -= bins[bin];
    find(std::max(floor_, kNothing), bin);
    keep_mass(wanted);
    const Candidate& last = *std::max_element(w_.found.begin(), w_.found.end(), before);
    return {last.y, last.id};
  }

  int64_t race_of_found(const Place& at) const {
    Winner winner{std::numeric_limits<double>::infinity(), 0};
    for (const Candidate& c : w_.found) {
      const uint32_t word = random_word(at.seed, at.position, c.id, 0);
      if (word >= least_word(winner, static_cast<double>(c.weight)))
        enter(winner, c.id, c.weight, word, at.seed, at.position);
    }
    return winner.id;
  }

  int64_t race_of_all(const Edge& edge, const Place& at) const {
    int64_t winner;
    QUIRE_PICK(race)(x_, n_, w_.peaks.data(), scale_, edge, at.seed, at.position, &winner);
    return winner;
  }

  int64_t weigh_all(const Edge& edge) {
    w_.sums.resize(w_.peaks.size());
    QUIRE_PICK(sum_weights)(x_, n_, w_.peaks.data(), scale_, edge, w_.sums.data());
    int64_t total = 0;
    for (const int64_t sum : w_.sums) total += sum;
    return total;
  }
};

Place place_of(const PickArgs& a, int64_t at) {
  return {a.seeds[at], static_cast<uint64_t>(a.positions[at])};
}

int64_t pick_of(Row& row, const PickArgs& a, int64_t at) {
  const double* number = a.numbers ? a.numbers + 4 * at : nullptr;
  if (!number || number[0] <= 0.0) return row.likeliest();
  return row.random(static_cast<float>(number[0]), static_cast<int64_t>(number[1]), number[2],
                    static_cast<float>(number[3]), place_of(a, at));
}

void pick_row(const PickArgs& a, int64_t at) {
  Row row({a.logits + at * a.stride, a.masks ? a.masks[at] : nullptr}, a.vocab);
  a.tokens[at] = a.masks && row.is_empty() ? -1 : pick_of(row, a, at);
  const int64_t most = a.num_witnesses;
  if (a.witnesses)
    row.name_witnesses(a.tokens[at], place_of(a, at), most, a.witnesses + at * most);
}

void penalise(float* x, const Penalties& p) {
  for (int64_t i = 0; i < p.count; ++i) {
    float y = x[p.ids[i]];
    y = y > 0.0f ? y / p.repetition : y * p.repetition;
    y -= p.frequency * p.counts[i];
    x[p.ids[i]] = p.counts[i] > 0.0f ? y - p.presence : y;
  }
}

int64_t next_of(float* x, const Penalties& penalties, const PickArgs& a, int64_t at) {
  bool finite;
  QUIRE_PICK(are_finite)(x, a.vocab, &finite);
  if (!finite) return kNotANumber;
  penalise(x, penalties);
  Row row({x, nullptr}, a.vocab);
  return row.is_finite() ? pick_of(row, a, at) : kOutOfRange;
}

void top_row(const TopArgs& a, int64_t row) {
  const float* x = a.logprobs + row * a.vocab;
  QUIRE_PICK(count_before)(x, a.vocab, a.chosen[row], a.ranks + row);
  a.ranks[row] += 1;
  const int64_t count = a.counts[row];
  int64_t* ids = a.ids + row * a.most;
  float* values = a.values + row * a.most;
  std::fill(ids, ids + a.most, -1);
  if (count == 0) return;
  Work& w = work();
  w.peaks.resize(static_cast<size_t>(groups_of(a.vocab)));
  QUIRE_PICK(find_peaks)({x, nullptr}, a.vocab, w.peaks.data());
  const float bound = nth_largest(w.peaks, count, w.sorted);
  w.found.clear();
  for (size_t g = 0; g < w.peaks.size(); ++g) {
    if (!(w.peaks[g] >= bound)) continue;
    const int64_t end = std::min(a.vocab, static_cast<int64_t>(g + 1) * kGroup);
    for (int64_t i = static_cast<int64_t>(g) * kGroup; i < end; ++i)
      if (x[i] >= bound) w.found.push_back({x[i], static_cast<int32_t>(i), 0});
  }
  const int64_t kept = std::min(count, static_cast<int64_t>(w.found.size()));
  std::partial_sort(w.found.begin(), w.found.begin() + kept, w.found.end(), before);
  for (int64_t i = 0; i < kept; ++i) {
    ids[i] = w.found[static_cast<size_t>(i)].id;
    values[i] = w.found[static_cast<size_t>(i)].y;
  }
}

template <class F> void each_row(int64_t rows, F&& body) {
  parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

}  // namespace

void pick_tokens(const PickArgs& args) {
  each_row(args.rows, [&](int64_t row) { pick_row(args, row); });
}

void pick_next(float* logits, const Penalties* penalties, const PickArgs& args) {
  each_row(args.rows, [&](int64_t row) {
    args.tokens[row] = next_of(logits + row * args.stride, penalties[row], args, row);
  });
}

void top_logprobs(const TopArgs& args) {
  each_row(args.rows, [&](int64_t row) { top_row(args, row); });
}

void keep_allowed(const MaskArgs& a) {
  const int64_t words = (a.vocab + 31) / 32;
  each_row(a.rows, [&](int64_t row) {
    QUIRE_PICK(keep_allowed_row)
    (a.logits + a.which[row] * a.stride, a.vocab, a.masks + row * words, a.best + row);
  });
}

void finite_rows(const float* x, int64_t rows, int64_t n, int64_t stride, bool* answers) {
  each_row(rows, [&](int64_t row) { QUIRE_PICK(are_finite)(x + row * stride, n, answers + row); });
}

void log_softmax(const float* x, int64_t rows, int64_t n, int64_t stride, float* out) {
  each_row(rows, [&](int64_t row) {
    auto& numbers = work().numbers;
    numbers.resize(static_cast<size_t>(n));
    QUIRE_PICK(log_softmax_row)(x + row * stride, n, numbers.data(), out + row * n);
  });
}

}  // namespace quire
