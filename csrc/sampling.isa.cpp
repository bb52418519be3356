// Passes over a row of the vocabulary. Every step is one IEEE operation per element, so the bits
// are the same on every instruction set.
#include "sampling.h"

#include "softmax.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// As exact.py's `log`, for float32 in float64 steps.
float exact_log(float x) {
  const double wide = x;
  uint64_t bits;
  __builtin_memcpy(&bits, &wide, 8);
  double exponent = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  const uint64_t mantissa_bits = (bits & ((1ull << 52) - 1)) | (1023ull << 52);
  double mantissa;
  __builtin_memcpy(&mantissa, &mantissa_bits, 8);
  if (mantissa > 1.4142135623730951) mantissa *= 0.5, exponent += 1.0;
  const double f = (mantissa - 1.0) / (mantissa + 1.0), square = f * f;
  double series = 1.0 / 19.0;
  for (int odd = 17; odd > 0; odd -= 2) {
    series = series * square;
    series = series + 1.0 / odd;
  }
  return static_cast<float>(exponent * 0.6931471805599453 + series * f * 2.0);
}

// Sum as a binary tree anchored at index 0, as exact.py's `tree_sum`; x is used up.
float tree_sum(float* x, int64_t n) {
  int64_t half = 1;
  while (2 * half < n) half *= 2;
  while (n > 1) {
    for (int64_t i = 0; i + half < n; ++i) x[i] += x[i + half];
    n = half;
    half /= 2;
  }
  return x[0];
}

// exact_exp on vectors.
QUIRE_INLINE Vec exact_exp(Vec x) {
  const Vec magic = splat(12583038.0f);
  Vec r = min(splat(88.8f), max(splat(-87.3f), x));
  const Vec shifted = add(mul(r, splat(1.4426950408889634f)), magic);
  const Vec n = sub(shifted, magic);
  r = sub(r, mul(n, splat(0.693359375f)));
  r = sub(r, mul(n, splat(-2.12194440054690583e-4f)));
  Vec y = mul(r, splat(1.9875691500e-4f));
  y = mul(add(y, splat(1.3981999507e-3f)), r);
  y = mul(add(y, splat(8.3334519073e-3f)), r);
  y = mul(add(y, splat(4.1665795894e-2f)), r);
  y = mul(add(y, splat(1.6666665459e-1f)), r);
  y = mul(add(y, splat(5.0000001201e-1f)), r);
  y = add(add(mul(y, r), r), splat(1.0f));
  return mul(mul(y, splat(2.0f)), exponent_bits(shifted));
}

// Largest of n numbers; NaN is left out.
float largest(const float* x, int64_t n) {
  Vec a = splat(kNever), b = a;
  int64_t at = 0;
  for (; at + 2 * kLanes <= n; at += 2 * kLanes) {
    a = max(load(x + at), a);
    b = max(load(x + at + kLanes), b);
  }
  float top = max_of(max(a, b));
  for (; at < n; ++at) top = x[at] > top ? x[at] : top;
  return top;
}

// The numbers of one group, filled up with -inf.
struct Group {
  float x[kGroup];
  Group(const float* from, int64_t count) {
    for (int64_t i = 0; i < kGroup; i += kLanes)
      store(x + i, i + kLanes <= count ? load(from + i) : splat(kNever));
    for (int64_t i = count / kLanes * kLanes; i < count; ++i) x[i] = from[i];
  }
};

}  // namespace

void find_peaks(const float* x, int64_t n, float* peaks) {
  for (int64_t g = 0; g < groups_of(n); ++g)
    peaks[g] = largest(x + g * kGroup, n - g * kGroup < kGroup ? n - g * kGroup : kGroup);
}

void sum_weights(const float* x, int64_t n, const float* peaks, const Scale& scale,
                 const Edge& edge, int64_t* sums) {
  const float least = edge.y > kNothing ? edge.y : kNothing;
  const Vec top = splat(scale.top), temperature = splat(scale.temperature);
  for (int64_t g = 0; g < groups_of(n); ++g) {
    sums[g] = 0;
    if (!(scale(peaks[g]) >= least)) continue;
    const int64_t first = g * kGroup, left = n - first;
    const Group group(x + first, left < kGroup ? left : kGroup);
    float y[kGroup], e[kGroup];
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      const Vec v = div(sub(load(group.x + i), top), temperature);
      store(y + i, v);
      store(e + i, mul(exact_exp(v), splat(kWeightOne)));
    }
    int64_t total = 0;
    for (int64_t i = 0; i < kGroup; ++i) {
      const bool stays = (y[i] > least) | ((y[i] == least) & (first + i <= edge.id));
      total += stays ? static_cast<int64_t>(e[i]) : 0;
    }
    sums[g] = total;
  }
}

void sum_bins(const float* x, int64_t n, const float* peaks, const Scale& scale, float floor,
              int64_t* bins) {
  const float least = floor > kNothing ? floor : kNothing;
  const Vec top = splat(scale.top), temperature = splat(scale.temperature);
  for (int i = 0; i < kBins; ++i) bins[i] = 0;
  for (int64_t g = 0; g < groups_of(n); ++g) {
    if (!(scale(peaks[g]) >= least)) continue;
    const int64_t left = n - g * kGroup;
    const Group group(x + g * kGroup, left < kGroup ? left : kGroup);
    float y[kGroup], e[kGroup];
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      const Vec v = div(sub(load(group.x + i), top), temperature);
      store(y + i, v);
      store(e + i, mul(exact_exp(v), splat(kWeightOne)));
    }
    for (int64_t i = 0; i < kGroup; ++i)
      if (y[i] >= least) bins[bin_of(y[i])] += static_cast<int64_t>(e[i]);
  }
}

void are_finite(const float* x, int64_t n, bool* answer) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i)
    bad |= (f32_to_bits(x[i]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  *answer = bad == 0;
}

void count_before(const float* x, int64_t n, int64_t id, int64_t* count) {
  const float mine = x[id];
  int32_t above = 0, equal = 0;  // a vocabulary has fewer than 2**31 tokens
  for (int64_t i = 0; i < n; ++i) above += x[i] > mine ? 1 : 0;
  for (int64_t i = 0; i < id; ++i) equal += x[i] == mine ? 1 : 0;
  *count = static_cast<int64_t>(above) + equal;
}

void log_softmax_row(const float* x, int64_t n, float* work, float* out) {
  const float top = largest(x, n);
  int64_t at = 0;
  for (; at + kLanes <= n; at += kLanes) {
    const Vec v = sub(load(x + at), splat(top));
    store(out + at, v);
    store(work + at, exact_exp(v));
  }
  for (; at < n; ++at) {
    out[at] = x[at] - top;
    work[at] = quire::exact_exp(out[at]);
  }
  const float total = tree_sum(work, n);
  // The largest number adds 1. Less is no number: NaN in the row, or nothing finite.
  const float shift = total >= 1.0f ? exact_log(total) : __builtin_nanf("");
  for (int64_t i = 0; i < n; ++i) out[i] = out[i] - shift;
}

}  // namespace QUIRE_ISA
}  // namespace quire
