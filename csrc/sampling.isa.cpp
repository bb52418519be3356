// Passes over a row of the vocabulary. Every step is one IEEE operation per element, so the bits
// are the same on every instruction set.
#include "sampling.h"

#include "softmax.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

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

// The lanes from number i on that are allowed; i is a multiple of kLanes.
QUIRE_INLINE uint32_t lanes_of(const uint32_t* allowed, int64_t i) {
  return allowed[i / 32] >> (i % 32) & kAllLanes;
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
  Group(const Numbers& from, int64_t first, int64_t n) {
    const int64_t count = n - first < kGroup ? n - first : kGroup;
    for (int64_t i = 0; i < kGroup; i += kLanes) {
      Vec v = splat(kNever);
      if (i + kLanes <= count) {
        v = load(from.x + first + i);
        if (from.allowed) v = only(lanes_of(from.allowed, first + i), v, kNever);
      }
      store(x + i, v);
    }
    for (int64_t i = count / kLanes * kLanes; i < count; ++i) x[i] = from[first + i];
  }
};

constexpr int64_t kLine = 64 / sizeof(float);

// Largest of the allowed numbers of a group. Most groups of most masks are allowed as a whole, or
// not at all.
float largest_allowed(const Numbers& x, int64_t first, int64_t n) {
  const int64_t end = first + kGroup < n ? first + kGroup : n;
  uint32_t any = 0, all = ~0u;
  for (int64_t at = first; at < end; at += 32)
    any |= x.allowed[at / 32], all &= x.allowed[at / 32];
  if (any == 0) return kNever;
  // The processor does not see by itself where this goes, and would wait for each group.
  for (int64_t i = 0; i < kGroup; i += kLine) __builtin_prefetch(x.x + first + 8 * kGroup + i);
  if (all == ~0u) return largest(x.x + first, end - first);
  const Group group(x, first, n);
  return largest(group.x, end - first);
}

// ---- The race ----------------------------------------------------------------------------------

constexpr int kCalls = kGroup / 4;  // of Philox for a group: each gives the words of four tokens

// Philox words of kCalls counters at once, in as many vectors as it takes.
#if QUIRE_LEVEL >= 2
struct Words { __m512i v; };
constexpr int kAtOnce = 16;
QUIRE_INLINE Words all_of(uint32_t x) { return {_mm512_set1_epi32(static_cast<int>(x))}; }
QUIRE_INLINE Words count_from(uint32_t x) {
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(x)), lanes)};
}
QUIRE_INLINE Words exclusive_or(Words a, Words b) { return {_mm512_xor_si512(a.v, b.v)}; }
QUIRE_INLINE void product(Words a, uint32_t by, Words* high, Words* low) {
  const __m512i m = _mm512_set1_epi32(static_cast<int>(by));
  const __m512i even = _mm512_mul_epu32(a.v, m);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), m);
  high->v = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xAAAA, odd);
  low->v = _mm512_mask_mov_epi32(even, 0xAAAA, _mm512_slli_epi64(odd, 32));
}
QUIRE_INLINE void put(uint32_t* p, Words a) { _mm512_storeu_si512(p, a.v); }
#elif QUIRE_LEVEL == 1
struct Words { __m256i v; };
constexpr int kAtOnce = 8;
QUIRE_INLINE Words all_of(uint32_t x) { return {_mm256_set1_epi32(static_cast<int>(x))}; }
QUIRE_INLINE Words count_from(uint32_t x) {
  return {_mm256_add_epi32(_mm256_set1_epi32(static_cast<int>(x)),
                           _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))};
}
QUIRE_INLINE Words exclusive_or(Words a, Words b) { return {_mm256_xor_si256(a.v, b.v)}; }
QUIRE_INLINE void product(Words a, uint32_t by, Words* high, Words* low) {
  const __m256i m = _mm256_set1_epi32(static_cast<int>(by));
  const __m256i even = _mm256_mul_epu32(a.v, m);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a.v, 32), m);
  high->v = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  low->v = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
QUIRE_INLINE void put(uint32_t* p, Words a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.v);
}
#else
constexpr int kAtOnce = 8;
struct Words { uint32_t v[kAtOnce]; };
#define QUIRE_WORDS for (int i = 0; i < kAtOnce; ++i)
QUIRE_INLINE Words all_of(uint32_t x) { Words r; QUIRE_WORDS r.v[i] = x; return r; }
QUIRE_INLINE Words count_from(uint32_t x) {
  Words r;
  QUIRE_WORDS r.v[i] = x + static_cast<uint32_t>(i);
  return r;
}
QUIRE_INLINE Words exclusive_or(Words a, Words b) { QUIRE_WORDS a.v[i] ^= b.v[i]; return a; }
QUIRE_INLINE void product(Words a, uint32_t by, Words* high, Words* low) {
  QUIRE_WORDS {
    const uint64_t p = static_cast<uint64_t>(by) * a.v[i];
    high->v[i] = static_cast<uint32_t>(p >> 32), low->v[i] = static_cast<uint32_t>(p);
  }
}
QUIRE_INLINE void put(uint32_t* p, Words a) { QUIRE_WORDS p[i] = a.v[i]; }
#endif

// First words of a group's tokens: words[j][i] is that of token 4 i + j.
QUIRE_INLINE void group_words(uint64_t seed, uint64_t position, int64_t group,
                              uint32_t words[4][kCalls]) {
  for (int at = 0; at < kCalls; at += kAtOnce) {
    Words c0 = all_of(static_cast<uint32_t>(position));
    Words c1 = all_of(static_cast<uint32_t>(position >> 32));
    Words c2 = count_from(static_cast<uint32_t>(group * kCalls + at)), c3 = all_of(0);
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      Words low_high, low, high_high, high;
      product(c0, kPhiloxM0, &low_high, &low);
      product(c2, kPhiloxM1, &high_high, &high);
      c0 = exclusive_or(exclusive_or(high_high, c1), all_of(k0));
      c1 = high;
      c2 = exclusive_or(exclusive_or(low_high, c3), all_of(k1));
      c3 = low;
      k0 += kWeyl0, k1 += kWeyl1;
    }
    put(words[0] + at, c0), put(words[1] + at, c1);
    put(words[2] + at, c2), put(words[3] + at, c3);
  }
}

// Whether one of a group's words is at least `least`.
QUIRE_INLINE bool any_from(const uint32_t words[4][kCalls], uint32_t least) {
  // By the largest, which compilers look for in whole vectors; to compare each took longer than to make them.
  uint32_t most = 0;
  for (int i = 0; i < kCalls; ++i)
    for (int j = 0; j < 4; ++j) most = words[j][i] > most ? words[j][i] : most;
  return most >= least;
}

}  // namespace

void find_peaks(const Numbers& x, int64_t n, float* peaks) {
  for (int64_t g = 0; g < groups_of(n); ++g) {
    const int64_t first = g * kGroup, count = n - first < kGroup ? n - first : kGroup;
    peaks[g] = x.allowed ? largest_allowed(x, first, n) : largest(x.x + first, count);
  }
}

void sum_weights(const Numbers& x, int64_t n, const float* peaks, const Scale& scale,
                 const Edge& edge, int64_t* sums) {
  const float least = edge.y > kNothing ? edge.y : kNothing;
  const Vec top = splat(scale.top), temperature = splat(scale.temperature);
  for (int64_t g = 0; g < groups_of(n); ++g) {
    sums[g] = 0;
    if (!(scale(peaks[g]) >= least)) continue;
    const int64_t first = g * kGroup;
    const Group group(x, first, n);
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

void sum_bins(const Numbers& x, int64_t n, const float* peaks, const Scale& scale, float floor,
              int64_t* bins) {
  const float least = floor > kNothing ? floor : kNothing;
  const Vec top = splat(scale.top), temperature = splat(scale.temperature);
  for (int i = 0; i < kBins; ++i) bins[i] = 0;
  for (int64_t g = 0; g < groups_of(n); ++g) {
    if (!(scale(peaks[g]) >= least)) continue;
    const Group group(x, g * kGroup, n);
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

// Most tokens need no logarithm, and no weight of their own: who is to win must arrive before the
// first so far, and the largest logit of a group says which words that takes there.
void race(const Numbers& x, int64_t n, const float* peaks, const Scale& scale, const Edge& edge,
          uint64_t seed, uint64_t position, int64_t* winner) {
  const float least = edge.y > kNothing ? edge.y : kNothing;
  Winner first{__builtin_inf(), 0};
  const auto run = [&](int64_t g, double most) {
    uint32_t words[4][kCalls];
    group_words(seed, position, g, words);
    if (!any_from(words, least_word(first, most))) return;
    const int64_t begin = g * kGroup, end = begin + kGroup < n ? begin + kGroup : n;
    for (int64_t i = begin; i < end; ++i) {
      const uint32_t word = words[i & 3][(i - begin) >> 2];
      const float y = scale(x.x[i]);
      const bool stays = y > least || (y == least && i <= edge.id);
      if (stays && word >= least_word(first, most) && x.has(i))  // who is hidden is asked last
        enter(first, i, weight_of(y), word, seed, position);
    }
  };
  const int64_t groups = groups_of(n);
  int64_t top = 0;
  while (top + 1 < groups && peaks[top] != scale.top) ++top;
  run(top, static_cast<double>(kWeightOne));  // who runs first, has the others stopped early
  for (int64_t g = 0; g < groups; ++g) {
    const float y = scale(peaks[g]);
    if (g == top || !(y >= least)) continue;
    run(g, static_cast<double>(quire::exact_exp(y) * kWeightOne) * 1.00001);
  }
  *winner = first.id;
}

void are_finite(const float* x, int64_t n, bool* answer) {
  uint32_t bad = 0;
  for (int64_t i = 0; i < n; ++i)
    bad |= (f32_to_bits(x[i]) & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
  *answer = bad == 0;
}

void keep_allowed_row(float* x, int64_t n, const uint32_t* words, float* best) {
  Vec top = splat(kNever);
  int64_t at = 0;
  for (; at + 32 <= n; at += 32) {
    const uint32_t word = words[at / 32];
    for (int lane = 0; lane < 32; lane += kLanes) {
      // Most words of most masks are all ones or all zeros.
      const uint32_t bits = word >> lane & kAllLanes;
      Vec v = splat(kNever);
      if (bits != 0) v = load(x + at + lane);
      if (bits != 0 && bits != kAllLanes) v = only(bits, v, kNever);
      if (bits != kAllLanes) store(x + at + lane, v);
      top = max(v, top);
    }
  }
  float found = max_of(top);
  for (; at < n; ++at) {
    if (!(words[at / 32] >> (at % 32) & 1u)) x[at] = kNever;
    found = x[at] > found ? x[at] : found;
  }
  *best = found;
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
  const float log_total = static_cast<float>(exact_log(static_cast<double>(total)));
  const float shift = total >= 1.0f ? log_total : __builtin_nanf("");
  for (int64_t i = 0; i < n; ++i) out[i] = out[i] - shift;
}

}  // namespace QUIRE_ISA
}  // namespace quire
