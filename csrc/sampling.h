// Sampling and log-probabilities of whole batches. The plain twins are the steps of
// quire/sampling and quire/kernels/exact.py; the bits are theirs, on every instruction set:
//
// - The exponential is that of exact.py: separate products and sums, no fused ones.
// - A token's weight is exp(y) in multiples of 2**-43, cut off: a whole number. Sums of weights
//   are therefore exact, in any order and any grouping, which is what lets the vocabulary be
//   searched instead of sorted.
// - y = (logit - largest logit) / temperature, float32, each step rounded.
// - Order is by falling y, equal ones by rising token id.
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

// y of a logit.
struct Scale {
  float top, temperature;
  float operator()(float x) const { return (x - top) / temperature; }
};

// Largest number of each group of x[0 .. n); NaN is left out.
QUIRE_KERNEL(find_peaks, (const float* x, int64_t n, float* peaks))
// The last one of those kept, in the order: all with larger y stay, and of equals those with an id
// up to this one's.
struct Edge {
  float y;
  int64_t id;
};
// Sum of the weights of each group's tokens up to an edge; peaks as above.
QUIRE_KERNEL(sum_weights, (const float* x, int64_t n, const float* peaks, const Scale& scale,
                           const Edge& edge, int64_t* sums))

// Tokens by about their y, likeliest first.
constexpr int kBins = 1024;
static inline int bin_of(float y) {
  const int bin = static_cast<int>(y * (kBins / kNothing));
  return bin < kBins ? bin : kBins - 1;
}
// Sum of the weights of each bin, of tokens with y at least `floor`.
QUIRE_KERNEL(sum_bins, (const float* x, int64_t n, const float* peaks, const Scale& scale,
                        float floor, int64_t* bins))
// Whether all of x[0 .. n) are finite.
QUIRE_KERNEL(are_finite, (const float* x, int64_t n, bool* answer))
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
  const int64_t* positions;   // [rows]: number of output tokens so far
  int64_t* tokens;            // [rows]
};
void pick_tokens(const PickArgs& args);

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

void finite_rows(const float* x, int64_t rows, int64_t n, int64_t stride, bool* answers);
void log_softmax(const float* x, int64_t rows, int64_t n, int64_t stride, float* out);

}  // namespace quire
