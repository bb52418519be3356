// Sampling and log-probabilities of whole batches. The plain twins are the steps of
// quire/sampling and quire/kernels/exact.py; the bits are theirs, on every instruction set:
//
// - The exponential is that of exact.py: separate products and sums, no fused ones.
// - A token's weight is exp(y) in multiples of 2**-43, cut off: a whole number. Sums of weights
//   are therefore exact, in any order and any grouping, which is what lets the vocabulary be
//   searched instead of sorted.
// - y = (logit - largest logit) / temperature, float32, each step rounded.
// - Order is by falling y, equal ones by rising token id.
// - A random token is the winner of a race: the one that arrives first, at E / weight, where E is
//   the exponential number of (seed, position, token id). Of equals the lowest id wins, and a
//   token without weight never arrives. E is float64; its layout: quire/sampling/race.py.
#pragma once
#include "isa.h"
#include "scalar.h"

namespace quire {

constexpr int64_t kGroup = 64;               // neighbours with a common maximum
constexpr float kWeightOne = 8796093022208.0f;  // 2**43
constexpr float kNothing = -30.0f;           // weights from here on are 0

static inline int64_t groups_of(int64_t n) { return (n + kGroup - 1) / kGroup; }

// As exact.py's `exp`.
static inline float exact_exp(float x) {
  float r = x < -87.3f ? -87.3f : x;
  r = r > 88.8f ? 88.8f : r;
  const float shifted = r * 1.4426950408889634f + 12583038.0f;
  const float n = shifted - 12583038.0f;
  r = r - n * 0.693359375f;
  r = r - n * -2.12194440054690583e-4f;
  float y = r * 1.9875691500e-4f;
  y = (y + 1.3981999507e-3f) * r;
  y = (y + 8.3334519073e-3f) * r;
  y = (y + 4.1665795894e-2f) * r;
  y = (y + 1.6666665459e-1f) * r;
  y = (y + 5.0000001201e-1f) * r;
  y = y * r + r;
  y = y + 1.0f;
  return y * 2.0f * bits_to_f32(f32_to_bits(shifted) << 23);
}
static inline int64_t weight_of(float y) {
  return static_cast<int64_t>(exact_exp(y) * kWeightOne);
}

// ---- Random numbers ----------------------------------------------------------------------------

// Philox4x32-10 (Salmon et al. 2011), as quire/sampling/philox.py.
constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kWeyl0 = 0x9E3779B9u, kWeyl1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

// The token's word: of the first half (0) or the second half (1) of its 64 bits.
static inline uint32_t random_word(uint64_t seed, uint64_t position, int64_t token, uint32_t half) {
  uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32),
                   static_cast<uint32_t>(token >> 2), half};
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t low = static_cast<uint64_t>(kPhiloxM0) * c[0];
    const uint64_t high = static_cast<uint64_t>(kPhiloxM1) * c[2];
    const uint32_t c1 = c[1], c3 = c[3];
    c[0] = static_cast<uint32_t>(high >> 32) ^ c1 ^ k0;
    c[1] = static_cast<uint32_t>(high);
    c[2] = static_cast<uint32_t>(low >> 32) ^ c3 ^ k1;
    c[3] = static_cast<uint32_t>(low);
    k0 += kWeyl0, k1 += kWeyl1;
  }
  return c[token & 3];
}

// As exact.py's `log_wide`: of a positive normal number.
static inline double exact_log(double x) {
  uint64_t bits;
  std::memcpy(&bits, &x, 8);
  double exponent = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  const uint64_t mantissa_bits = (bits & ((1ull << 52) - 1)) | (1023ull << 52);
  double mantissa;
  std::memcpy(&mantissa, &mantissa_bits, 8);
  if (mantissa > 1.4142135623730951) mantissa *= 0.5, exponent += 1.0;
  const double f = (mantissa - 1.0) / (mantissa + 1.0), square = f * f;
  double series = 1.0 / 19.0;
  for (int odd = 17; odd > 0; odd -= 2) {
    series = series * square;
    series = series + 1.0 / odd;
  }
  return exponent * 0.6931471805599453 + series * f * 2.0;
}

// Who is first in a race so far; {infinity, 0} before it begins.
struct Winner {
  double time;
  int64_t id;
};

// A token with one of its two words; the other is looked up only here.
static inline void enter(Winner& first, int64_t token, int64_t weight, uint32_t word, uint64_t seed,
                         uint64_t position) {
  if (weight == 0) return;
  const uint64_t bits =
      static_cast<uint64_t>(word) << 20 | random_word(seed, position, token, 1) >> 12;
  const double u = (static_cast<double>(bits) + 0.5) * 0x1p-52;
  const double time = -exact_log(u) / static_cast<double>(weight);
  if (time < first.time || (time == first.time && token < first.id)) first = {time, token};
}

// A first word below this one loses for certain, whatever the second is, if the weight is at most
// `most`: E < time * weight takes 1 - u < time * weight. The spare 2 and the share of a millionth
// are for the roundings.
static inline uint32_t least_word(const Winner& first, double most) {
  const double least = (1.0 - first.time * most * 1.000001) * 0x1p32 - 2.0;
  return least > 0.0 ? static_cast<uint32_t>(least) : 0u;
}

// y of a logit.
struct Scale {
  float top, temperature;
  float operator()(float x) const { return (x - top) / temperature; }
};

// Numbers of a row that a mask may hide. Nobody writes -inf in the place of hidden ones: that would
// take longer than all that reads them.
struct Numbers {
  const float* x;
  const uint32_t* allowed;  // x[i] is if bit i % 32 of word i / 32 is set; nullptr: all are
  bool has(int64_t i) const { return !allowed || (allowed[i / 32] >> (i % 32) & 1u); }
  float operator[](int64_t i) const { return has(i) ? x[i] : -__builtin_inff(); }
};

// Largest number of each group of the first n; NaN is left out.
QUIRE_KERNEL(find_peaks, (const Numbers& x, int64_t n, float* peaks))
// The last one of those kept, in the order: all with larger y stay, and of equals those with an id
// up to this one's.
struct Edge {
  float y;
  int64_t id;
};
// Sum of the weights of each group's tokens up to an edge; peaks as above.
QUIRE_KERNEL(sum_weights, (const Numbers& x, int64_t n, const float* peaks, const Scale& scale,
                           const Edge& edge, int64_t* sums))

// The race of the tokens up to an edge; peaks as above.
QUIRE_KERNEL(race, (const Numbers& x, int64_t n, const float* peaks, const Scale& scale,
                    const Edge& edge, uint64_t seed, uint64_t position, int64_t* winner))

// Tokens by about their y, likeliest first.
constexpr int kBins = 1024;
static inline int bin_of(float y) {
  const int bin = static_cast<int>(y * (kBins / kNothing));
  return bin < kBins ? bin : kBins - 1;
}
// Sum of the weights of each bin, of tokens with y at least `floor`.
QUIRE_KERNEL(sum_bins, (const Numbers& x, int64_t n, const float* peaks, const Scale& scale,
                        float floor, int64_t* bins))
// Whether all of x[0 .. n) are finite.
QUIRE_KERNEL(are_finite, (const float* x, int64_t n, bool* answer))
// Puts -inf in place of every x[i] whose bit, i % 32 of words[i / 32], is not set. `best` is the
// largest number left; -inf if none is. No NaN.
QUIRE_KERNEL(keep_allowed_row, (float* x, int64_t n, const uint32_t* words, float* best))
// How many of x[0 .. n) come before x[id] in the order.
QUIRE_KERNEL(count_before, (const float* x, int64_t n, int64_t id, int64_t* count))
// Natural logarithms of probabilities, as exact.py's `log_softmax`; `work` holds n numbers.
QUIRE_KERNEL(log_softmax_row, (const float* x, int64_t n, float* work, float* out))

struct PickArgs {
  const float* logits;  // [rows, vocab], rows `stride` apart
  int64_t rows, vocab, stride;
  // [rows, 4]: temperature (0: the likeliest token), top_k (0: off), top_p (1: off), ln of min_p
  // (-inf: off); nullptr: all rows take their likeliest token.
  const double* numbers;
  const uint64_t* seeds;      // [rows]
  const int64_t* positions;   // [rows]: number of output tokens so far; not negative
  // [rows], each as `Numbers::allowed`; nullptr: all tokens of all rows are allowed.
  const uint32_t* const* masks;
  int64_t* tokens;            // [rows]; -1: no allowed token has a logit above -inf
  // [rows, num_witnesses]: tokens that decided: with any mask that allows all of them the pick is
  // the same. Filled up with -1; only -1: that cannot be said with so few. nullptr: nobody asks.
  int32_t* witnesses;
  int64_t num_witnesses;  // at least 2
};
void pick_tokens(const PickArgs& args);

// What a request's tokens so far do to its logits. The plain twin: quire/sampling/penalties.py.
struct Penalties {
  const int64_t* ids;   // [count]: tokens of output, and of prompt if repetition counts, each once
  const float* counts;  // [count]: how often each stands in the output
  int64_t count;
  float repetition, frequency, presence;  // 1, 0 and 0: none
};
constexpr int64_t kNotANumber = -1, kOutOfRange = -2;
// pick_tokens from a model's own logits, which are args.logits and are overwritten; penalties [rows].
// kNotANumber: some logit is not finite; kOutOfRange: no largest one is, after the penalties.
void pick_next(float* logits, const Penalties* penalties, const PickArgs& args);

struct TopArgs {
  const float* logprobs;  // [rows, vocab], contiguous
  int64_t rows, vocab;
  const int64_t* chosen;  // [rows]
  const int64_t* counts;  // [rows], each at most `most`
  int64_t most;
  int64_t* ids;    // [rows, most]; -1 where there is none
  float* values;   // [rows, most]
  int64_t* ranks;  // [rows], from 1
};
void top_logprobs(const TopArgs& args);

struct MaskArgs {
  float* logits;  // rows of `vocab`, `stride` apart; overwritten
  int64_t vocab, stride;
  const int64_t* which;   // [rows]: the rows of `logits` that have masks, each once
  int64_t rows;
  const uint32_t* masks;  // [rows, ceil(vocab / 32)]
  float* best;            // [rows]: the largest number left; -inf if none is
};
void keep_allowed(const MaskArgs& args);

void finite_rows(const float* x, int64_t rows, int64_t n, int64_t stride, bool* answers);
void log_softmax(const float* x, int64_t rows, int64_t n, int64_t stride, float* out);

}  // namespace quire
