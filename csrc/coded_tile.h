// Products of codes: quantised weights times rows of int8 codes. For gemm.isa.cpp only.
//
// Packed weights [N, K] stand in tiles of 64 columns; K is filled up to whole groups, or to 16:
//   kCodes8  [N/64][K/4][64][4]  one byte a code, plus 128; one group, whose scales stand elsewhere
//   kCodes4  [N/64][K/8][64][4]  byte i of the four of a column: code i in the low half, 4 + i in the high
// With groups, each group of a tile begins with its 64 scales, perhaps 64 zeros (int8) and perhaps 64
// minima, of the scales' type; `group` columns of codes follow. The layout is the same on every instruction set.
//
// Arithmetic: with q the codes of a row, the sum of q * (code - zero) over a group is a whole number,
// which all instruction sets compute exactly: 127 * 255 * k < 2**31 for k up to 66,000. It is rounded
// to float32 and multiplied with the group's scale; groups are added in ascending order from 0 on,
// each product and sum rounded; then the row's scale. After each group the sum of its q times the
// minimum, rounded, is taken from the sum so far. So the bits are the same everywhere.
#pragma once
#include "gemm.h"
#include "pool.h"
#include "row_codes.h"

namespace quire {
namespace QUIRE_ISA {

// Rows as codes. Row i: codes + i * stride, scales[i], and `more` plus `times` the sum of each group's codes.
struct CodedRows {
  int8_t* codes;
  float* scales;
  int32_t* sums;  // [rows][groups]
  int64_t stride, groups;
  int32_t times, more;
  float* totals;  // nullptr or [rows][groups]: the sums of codes as they are, for minima
};

// ---- whole numbers -----------------------------------------------------------------------------
//
// dot(acc, w, x): per lane, four products of codes more. A weight as the level multiplies it is less than
// its code by kBelow (kBelow4 for codes of four bits without table), times which the row's sum is added.
//
// QUIRE_PAIRS: products of four-bit codes are summed in 16 bits first, two sums a lane: pairs4(pairs, w, x).
// A step adds at most 2 * 15 * 127 to each, so that they hold kPairSteps of them; add_pairs adds both to `acc`.

#ifdef QUIRE_LONG_DOTS

struct IVec { __m512i v; };
struct WVec { __m512i v; };
constexpr int32_t kBelow = -128, kBelow4 = 0;
QUIRE_INLINE IVec no_sum() { return {_mm512_setzero_si512()}; }
QUIRE_INLINE IVec whole(int32_t x) { return {_mm512_set1_epi32(x)}; }
QUIRE_INLINE WVec bytes_at(const char* p) { return {_mm512_loadu_si512(p)}; }
QUIRE_INLINE void halves_at(const char* p, WVec& low, WVec& high) {
  const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low.v = _mm512_and_si512(both, mask);
  high.v = _mm512_and_si512(_mm512_srli_epi16(both, 4), mask);
}
QUIRE_INLINE void halves_at(const char* p, const uint8_t* table, WVec& low, WVec& high) {
  const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  halves_at(p, low, high);
  low.v = _mm512_shuffle_epi8(all, low.v);
  high.v = _mm512_shuffle_epi8(all, high.v);
}
QUIRE_INLINE IVec dot(IVec acc, WVec w, int32_t x) {
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(x))};
}

#elif QUIRE_LEVEL == 2

struct IVec { __m512i v; };
struct WVec { __m512i size; __mmask64 below; };
constexpr int32_t kBelow = 0, kBelow4 = 0;
QUIRE_INLINE IVec no_sum() { return {_mm512_setzero_si512()}; }
QUIRE_INLINE IVec whole(int32_t x) { return {_mm512_set1_epi32(x)}; }
QUIRE_INLINE WVec signed_bytes(__m512i above) {
  const __m512i w = _mm512_xor_si512(above, _mm512_set1_epi8(-128));
  return {_mm512_abs_epi8(w), _mm512_movepi8_mask(w)};
}
QUIRE_INLINE WVec bytes_at(const char* p) { return signed_bytes(_mm512_loadu_si512(p)); }
QUIRE_INLINE void halves_at(const char* p, WVec& low, WVec& high) {
  const __m512i both = _mm512_loadu_si512(p), mask = _mm512_set1_epi8(15);
  low = {_mm512_and_si512(both, mask), 0};
  high = {_mm512_and_si512(_mm512_srli_epi16(both, 4), mask), 0};
}
QUIRE_INLINE void halves_at(const char* p, const uint8_t* table, WVec& low, WVec& high) {
  const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  halves_at(p, low, high);
  low = signed_bytes(_mm512_shuffle_epi8(all, low.size));
  high = signed_bytes(_mm512_shuffle_epi8(all, high.size));
}
#define QUIRE_PAIRS
QUIRE_INLINE IVec pairs4(IVec pairs, WVec w, int32_t x) {
  return {_mm512_add_epi16(pairs.v, _mm512_maddubs_epi16(w.size, _mm512_set1_epi32(x)))};
}
QUIRE_INLINE IVec add_pairs(IVec acc, IVec pairs) {
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs.v, _mm512_set1_epi16(1)))};
}
// Pairs of products are at most 2 * 128 * 127: they fit 16 bits.
QUIRE_INLINE IVec dot(IVec acc, WVec w, int32_t x) {
  const __m512i all = _mm512_set1_epi32(x);
  const __m512i turned = _mm512_mask_sub_epi8(all, w.below, _mm512_setzero_si512(), all);
  const __m512i pairs = _mm512_maddubs_epi16(w.size, turned);
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}

#elif defined(QUIRE_VNNI)

struct IVec { __m256i v; };
struct WVec { __m256i v; };
constexpr int32_t kBelow = -128, kBelow4 = 0;
QUIRE_INLINE IVec no_sum() { return {_mm256_setzero_si256()}; }
QUIRE_INLINE IVec whole(int32_t x) { return {_mm256_set1_epi32(x)}; }
QUIRE_INLINE WVec bytes_at(const char* p) { return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))}; }
QUIRE_INLINE void halves_at(const char* p, WVec& low, WVec& high) {
  const __m256i both = bytes_at(p).v, mask = _mm256_set1_epi8(15);
  low.v = _mm256_and_si256(both, mask);
  high.v = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
}
QUIRE_INLINE void halves_at(const char* p, const uint8_t* table, WVec& low, WVec& high) {
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  halves_at(p, low, high);
  low.v = _mm256_shuffle_epi8(all, low.v);
  high.v = _mm256_shuffle_epi8(all, high.v);
}
QUIRE_INLINE IVec dot(IVec acc, WVec w, int32_t x) {
  return {_mm256_dpbusd_avx_epi32(acc.v, w.v, _mm256_set1_epi32(x))};
}

#elif QUIRE_LEVEL == 1

struct IVec { __m256i v; };
struct WVec { __m256i size, w; };
constexpr int32_t kBelow = 0, kBelow4 = 0;
QUIRE_INLINE IVec no_sum() { return {_mm256_setzero_si256()}; }
QUIRE_INLINE IVec whole(int32_t x) { return {_mm256_set1_epi32(x)}; }
QUIRE_INLINE __m256i load_bytes(const char* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
QUIRE_INLINE WVec signed_bytes(__m256i above) {
  const __m256i w = _mm256_xor_si256(above, _mm256_set1_epi8(-128));
  return {_mm256_abs_epi8(w), w};
}
QUIRE_INLINE WVec bytes_at(const char* p) { return signed_bytes(load_bytes(p)); }
QUIRE_INLINE void halves_at(const char* p, WVec& low, WVec& high) {
  const __m256i both = load_bytes(p), mask = _mm256_set1_epi8(15);
  low.size = low.w = _mm256_and_si256(both, mask);
  high.size = high.w = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
}
QUIRE_INLINE void halves_at(const char* p, const uint8_t* table, WVec& low, WVec& high) {
  const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
  halves_at(p, low, high);
  low = signed_bytes(_mm256_shuffle_epi8(all, low.size));
  high = signed_bytes(_mm256_shuffle_epi8(all, high.size));
}
#define QUIRE_PAIRS
QUIRE_INLINE IVec pairs4(IVec pairs, WVec w, int32_t x) {
  return {_mm256_add_epi16(pairs.v, _mm256_maddubs_epi16(w.size, _mm256_set1_epi32(x)))};
}
QUIRE_INLINE IVec add_pairs(IVec acc, IVec pairs) {
  return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(pairs.v, _mm256_set1_epi16(1)))};
}
// Pairs of products are at most 2 * 128 * 127: they fit 16 bits.
QUIRE_INLINE IVec dot(IVec acc, WVec w, int32_t x) {
  const __m256i turned = _mm256_sign_epi8(_mm256_set1_epi32(x), w.w);
  const __m256i pairs = _mm256_maddubs_epi16(w.size, turned);
  return {_mm256_add_epi32(acc.v, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))};
}

#else

struct IVec { int32_t v[kLanes]; };
struct WVec { int16_t v[4][kLanes]; };
constexpr int32_t kBelow = 0, kBelow4 = 0;
QUIRE_INLINE IVec whole(int32_t x) { IVec r; QUIRE_LANES r.v[i] = x; return r; }
QUIRE_INLINE IVec no_sum() { return whole(0); }
QUIRE_INLINE WVec bytes_at(const char* p) {
  WVec w;
  for (int s = 0; s < 4; ++s) QUIRE_LANES w.v[s][i] = static_cast<int16_t>(static_cast<uint8_t>(p[4 * i + s]) - 128);
  return w;
}
QUIRE_INLINE void halves_at(const char* p, WVec& low, WVec& high) {
  for (int s = 0; s < 4; ++s) QUIRE_LANES {
    const auto both = static_cast<uint8_t>(p[4 * i + s]);
    low.v[s][i] = both & 15;
    high.v[s][i] = both >> 4;
  }
}
QUIRE_INLINE void halves_at(const char* p, const uint8_t* table, WVec& low, WVec& high) {
  halves_at(p, low, high);
  for (int s = 0; s < 4; ++s) QUIRE_LANES {
    low.v[s][i] = static_cast<int16_t>(table[low.v[s][i]] - 128);
    high.v[s][i] = static_cast<int16_t>(table[high.v[s][i]] - 128);
  }
}
QUIRE_INLINE IVec dot(IVec acc, WVec w, int32_t x) {
  int8_t q[4];
  __builtin_memcpy(q, &x, 4);
  for (int s = 0; s < 4; ++s) QUIRE_LANES acc.v[i] += w.v[s][i] * q[s];
  return acc;
}

#endif

// Takes a sum for one that nothing is known of, in a register: compilers keep arrays of sums in memory, or make
// all products before they add the first.
QUIRE_INLINE void as_new(IVec& acc) {
#if QUIRE_LEVEL >= 1
  __asm__ volatile("" : "+v"(acc.v));
#else
  __asm__ volatile("" : "+m"(acc.v));
#endif
}

// Whether compilers have to be told that a sum stays where it is, or they copy it from one register to another, or to
// memory and back, with each product: of codes of eight bits and of four, as was measured (docs/cpu-kernels.md).
#ifdef QUIRE_VNNI
constexpr bool kVnni = true;
#else
constexpr bool kVnni = false;
#endif
constexpr bool kInPlace8 = QUIRE_LEVEL == 2 || (QUIRE_LEVEL == 1 && !kVnni);
constexpr bool kInPlace4 = QUIRE_LEVEL == 2 || (QUIRE_LEVEL == 1 && kVnni);
template <bool in_place> QUIRE_INLINE void add_dot(IVec& acc, WVec w, int32_t x) {
  acc = dot(acc, w, x);
  if constexpr (in_place) as_new(acc);
}

constexpr int64_t kPairSteps = 8, kRun = 4 * kPairSteps;  // and the codes of a row in them

#if QUIRE_LEVEL >= 2
QUIRE_INLINE Vec rounded(IVec a) { return {_mm512_cvtepi32_ps(a.v)}; }
QUIRE_INLINE Vec bits_as_floats(IVec a) { return {_mm512_castsi512_ps(a.v)}; }
QUIRE_INLINE IVec load_whole(const void* p) { return {_mm512_loadu_si512(p)}; }
QUIRE_INLINE void store_whole(void* p, IVec a) { _mm512_storeu_si512(p, a.v); }
QUIRE_INLINE IVec less(IVec a, IVec b) { return {_mm512_sub_epi32(a.v, b.v)}; }
QUIRE_INLINE IVec plus(IVec a, IVec b) { return {_mm512_add_epi32(a.v, b.v)}; }
QUIRE_INLINE IVec times(IVec a, IVec b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
QUIRE_INLINE IVec load_int8(const int8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
#elif QUIRE_LEVEL == 1
QUIRE_INLINE Vec rounded(IVec a) { return {_mm256_cvtepi32_ps(a.v)}; }
QUIRE_INLINE Vec bits_as_floats(IVec a) { return {_mm256_castsi256_ps(a.v)}; }
QUIRE_INLINE IVec load_whole(const void* p) { return {_mm256_loadu_si256(static_cast<const __m256i*>(p))}; }
QUIRE_INLINE void store_whole(void* p, IVec a) { _mm256_storeu_si256(static_cast<__m256i*>(p), a.v); }
QUIRE_INLINE IVec less(IVec a, IVec b) { return {_mm256_sub_epi32(a.v, b.v)}; }
QUIRE_INLINE IVec plus(IVec a, IVec b) { return {_mm256_add_epi32(a.v, b.v)}; }
QUIRE_INLINE IVec times(IVec a, IVec b) { return {_mm256_mullo_epi32(a.v, b.v)}; }
QUIRE_INLINE IVec load_int8(const int8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
#else
QUIRE_INLINE Vec rounded(IVec a) { Vec r; QUIRE_LANES r.v[i] = static_cast<float>(a.v[i]); return r; }
QUIRE_INLINE Vec bits_as_floats(IVec a) { Vec r; __builtin_memcpy(&r, &a, sizeof r); return r; }
QUIRE_INLINE IVec load_whole(const void* p) { IVec r; __builtin_memcpy(&r, p, sizeof r); return r; }
QUIRE_INLINE void store_whole(void* p, IVec a) { __builtin_memcpy(p, &a, sizeof a); }
QUIRE_INLINE IVec less(IVec a, IVec b) { QUIRE_LANES a.v[i] -= b.v[i]; return a; }
QUIRE_INLINE IVec plus(IVec a, IVec b) { QUIRE_LANES a.v[i] += b.v[i]; return a; }
QUIRE_INLINE IVec times(IVec a, IVec b) { QUIRE_LANES a.v[i] *= b.v[i]; return a; }
QUIRE_INLINE IVec load_int8(const int8_t* p) { IVec r; QUIRE_LANES r.v[i] = p[i]; return r; }
#endif

// ---- a group's sum times its scale -------------------------------------------------------------
//
// A whole number n is rounded to float32 and multiplied: two steps. Where sums begin at the bits of kBegin, 1.5 * 2**23,
// whose last place is 1, their bits are those of the float kBegin + n, as long as |n| < 2**22. Then one step does:
// fma(kBegin + n, scale, -kBegin * scale) is n * scale, rounded once, because kBegin * scale is exact if the scale has
// two bits less than a float32 holds, and finite if it is at most 2**100.
// Not where fma rounds twice, nor with tile registers, whose sums begin at 0.
#if QUIRE_LEVEL >= 1 && !defined QUIRE_AMX
constexpr bool kFuses = true;
#else
constexpr bool kFuses = false;
#endif
constexpr float kBegin = 12582912.0f;
constexpr int32_t kBeginBits = 0x4b400000;
// Whether it is so with a layer: its scales allow it, and no group is so long that a sum could reach 2**22.
QUIRE_INLINE bool fuses(const Linear& layer) { return kFuses && layer.coded.short_scales; }

// ---- rows to codes -----------------------------------------------------------------------------

// What the sum of a group's codes is multiplied with before it is added to the products: minus the zero
// where all are the same; else the tile does the rest.
static inline int32_t sum_factor(const Linear& layer) {
  const Coded& c = layer.coded;
  if (!c.group) return 1;
  if (c.group_zeros) return -1;
  return (layer.dtype == kCodes4 && !c.table ? kBelow4 : kBelow) - c.zero;
}

// Where the codes of `m` rows are, in scratch memory of this thread: the norm before a product makes them in
// passing, or the product itself.
static inline CodedRows room_for_codes(const Linear& layer, int64_t m) {
  const int64_t k = padded_k(layer), groups = layer.coded.group ? k / layer.coded.group : 1;
  const int64_t bytes = (m * k + 63) / 64 * 64;
  const bool minima = layer.coded.group_minima;
  // Tile registers pass by 16 rows at a time; what they find after the last is dropped.
  const int64_t sums = (m + 15) * groups * 4;
  const int64_t all = bytes + m * 4 + (minima ? 2 * sums : sums);
  auto* memory = static_cast<char*>(scratch(2, static_cast<size_t>(all)));
  char* const after = memory + bytes + m * 4;
  const int32_t more = fuses(layer) && !layer.coded.group_zeros ? kBeginBits : 0;
  return {reinterpret_cast<int8_t*>(memory), reinterpret_cast<float*>(memory + bytes),
          reinterpret_cast<int32_t*>(after), k, groups, sum_factor(layer), more,
          minima ? reinterpret_cast<float*>(after + sums) : nullptr};
}

// For a row whose codes have another order than its numbers; nullptr if the layer has none such.
static inline int8_t* unordered_codes(const Linear& layer) {
  if (!layer.coded.order) return nullptr;
  return static_cast<int8_t*>(scratch(5, static_cast<size_t>(padded_k(layer))));
}

// Row `row`, of numbers that begin at element `from` of `x`. As quantise_rows in kernels/coded_linear.py.
static inline void quantise_row(const Linear& layer, int x_dtype, const void* x, int64_t from,
                                const CodedRows& to, int64_t row, int8_t* unordered) {
  const int64_t k = layer.k;
  const RowScale scaled = row_scale(x_dtype, x, from, k);
  int8_t* const codes = to.codes + row * to.stride;
  to.scales[row] = scaled.scale;
  int32_t* const sums = to.sums + row * to.groups;
  float* const totals = to.totals ? to.totals + row * to.groups : nullptr;
  if (scaled.inverse == 0.0f) {
    __builtin_memset(codes, 0, static_cast<size_t>(to.stride));
    for (int64_t g = 0; g < to.groups; ++g) sums[g] = to.more;
    if (totals) __builtin_memset(totals, 0, static_cast<size_t>(to.groups) * sizeof *totals);
    return;
  }
  row_codes(x_dtype, x, from, k, scaled.inverse, layer.coded.order ? unordered : codes);
  if (layer.coded.order)
    for (int64_t i = 0; i < k; ++i) codes[i] = unordered[layer.coded.order[i]];
  __builtin_memset(codes + k, 0, static_cast<size_t>(to.stride - k));
  const int64_t group = layer.coded.group ? layer.coded.group : to.stride;
  for (int64_t g = 0; g < to.groups; ++g) {
    const int32_t total = sum_of_codes(codes + g * group, group);
    sums[g] = total * to.times + to.more;
    if (totals) totals[g] = static_cast<float>(total);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
