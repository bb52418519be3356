// Codes of narrow weights as numbers, in registers. For X.isa.cpp only. Layout: widen.h.
//
// A source makes the 128 numbers of a unit: `begin` reads the scales of a group. On AVX-512 it says whether this
// source can make the group's numbers, and `half` makes those of half a unit, as bf16; on AVX2 `numbers` hands them on as float32,
// eight columns at a time. The columns may be out of order, and `put_in_order` brings sums to theirs.
#pragma once
#include "byte_table.h"
#include "kv_types.h"
#include "widen.h"

namespace quire {
namespace QUIRE_ISA {

#if QUIRE_LEVEL >= 2
// Exact, but for NaN, which no code of a weight is. As turn.h does it for keys and values.
QUIRE_INLINE __m512i bf16_of_e4m3(__m256i bytes) {
  alignas(64) static const uint16_t kSmallest[32] = {0x0000, 0x3b00, 0x3b80, 0x3bc0,
                                                     0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const __m512i w = _mm512_cvtepi8_epi16(bytes), size = _mm512_and_si512(w, _mm512_set1_epi16(0x7f));
  __m512i r = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
  r = _mm512_mask_permutexvar_epi16(r, small, size, _mm512_load_si512(kSmallest));
  return _mm512_ternarylogic_epi32(r, w, _mm512_set1_epi16(static_cast<short>(0x8000)), 0xf8);  // r | (w & sign)
}
#endif

// Codes of four bits whose numbers bf16 has, of at least a half or 0, times powers of two: no product is rounded.
static inline bool are_powers(const Linear& layer) {
  const Coded& c = layer.coded;
  if (layer.dtype != kTable4 || c.wide != kBF16 || c.scale_type != kE8M0 || c.group_zeros || c.group_minima) return false;
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = f32_to_bits(c.values[i]), size = bits & 0x7fffffffu;
    if (bits & 0xffffu || (size && size < f32_to_bits(0.5f)) || size > f32_to_bits(1024.0f)) return false;
  }
  return true;
}

// Weights of the type bf16 whose numbers are made as float32.
static inline bool widens_to_f32(const Linear& layer) {
  const Coded& c = layer.coded;
  const bool fits = layer.dtype == kE4M3 || (layer.dtype == kTable4 && !c.group_zeros && !c.group_minima);
  return QUIRE_LEVEL == 1 && c.wide == kBF16 && fits;
}

#if QUIRE_LEVEL == 1

// `numbers` calls use(k, j, numbers): k is 0 or 1, and vector j of eight holds eight of the 64 columns, in an order that
// `put_in_order` undoes. They are divided by kTimes, which rows can be multiplied with whose bits are below kTooLarge.
// half<h> does it for half of the columns. Of its four vectors, number j is in place(j), and in places 2 q and 2 q + 1 are
// vectors pair(h, q) and the next.

// The even ones of the columns in two vectors, and the odd ones; and back.
QUIRE_INLINE void deinterleave(Vec& one, Vec& other) {
  const __m256d even = _mm256_castps_pd(_mm256_shuffle_ps(one.v, other.v, 0x88));
  const __m256d odd = _mm256_castps_pd(_mm256_shuffle_ps(one.v, other.v, 0xdd));
  one.v = _mm256_castpd_ps(_mm256_permute4x64_pd(even, 0xd8));
  other.v = _mm256_castpd_ps(_mm256_permute4x64_pd(odd, 0xd8));
}
QUIRE_INLINE void interleave(Vec& even, Vec& odd) {
  const __m256 low = _mm256_unpacklo_ps(even.v, odd.v), high = _mm256_unpackhi_ps(even.v, odd.v);
  even.v = _mm256_permute2f128_ps(low, high, 0x20);
  odd.v = _mm256_permute2f128_ps(low, high, 0x31);
}

// What sources of E4M3 have in common: halves of neighbouring columns, and scales that belong to the sums.
struct E4M3Columns {
  using Row = float;
  static constexpr bool kScalesSums = true;
  inline __attribute__((always_inline)) void begin(const char*) {}
  static constexpr int place(int j) { return j % 4; }
  static constexpr int pair(int h, int q) { return 4 * h + 2 * q; }
};

// E4M3 whose bits are those of a float32 that is 2**-120 times as large, denormal numbers too. Vector 2 i holds the even
// ones of 16 columns, the next the odd ones.
struct E4M3Bits : E4M3Columns {
  static constexpr bool kDeinterleaved = true;
  static constexpr float kTimes = 0x1p120f;
  static constexpr uint32_t kTooLarge = 0x43000000u;  // the bits of 2**7

  explicit E4M3Bits(const Linear&) {}
  template <class F> inline __attribute__((always_inline)) void numbers(const char* unit, const F& use) const {
    half<0>(unit, use);
    half<1>(unit, use);
  }
  template <int h, class F> inline __attribute__((always_inline)) void half(const char* unit, const F& use) const {
    const __m256i kept = _mm256_set1_epi32(static_cast<int>(0x87f00000u));
    _Pragma("GCC unroll 2") for (int i = 2 * h; i < 2 * h + 2; ++i) {
      const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit) + i);
      const __m256i each[2] = {_mm256_srai_epi16(_mm256_slli_epi16(second, 8), 4), _mm256_srai_epi16(second, 4)};
      _Pragma("GCC unroll 2") for (int k = 0; k < 2; ++k) {
        use(k, 2 * i, Vec{_mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(each[k], 16), kept))});
        use(k, 2 * i + 1, Vec{_mm256_castsi256_ps(_mm256_and_si256(each[k], kept))});
      }
    }
  }
  static inline __attribute__((always_inline)) void put_in_order(Vec (&v)[8]) {
    _Pragma("GCC unroll 4") for (int i = 0; i < 8; i += 2) interleave(v[i], v[i + 1]);
  }
};

// E4M3 by way of float16, which is 2**-8 times as large and whose conversion knows denormal numbers: where processors
// are slow to multiply these.
struct E4M3Halves : E4M3Columns {
  static constexpr bool kDeinterleaved = false;
  static constexpr float kTimes = 256.0f;
  static constexpr uint32_t kTooLarge = 0x71800000u;  // the bits of 2**100

  explicit E4M3Halves(const Linear&) {}
  template <class F> inline __attribute__((always_inline)) void numbers(const char* unit, const F& use) const {
    half<0>(unit, use);
    half<1>(unit, use);
  }
  template <int h, class F> inline __attribute__((always_inline)) void half(const char* unit, const F& use) const {
    const __m256i kept = _mm256_set1_epi16(static_cast<short>(0xbf80));
    alignas(32) uint16_t halves[2][16];
    _Pragma("GCC unroll 2") for (int i = 2 * h; i < 2 * h + 2; ++i) {
      const __m256i second = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit) + i);
      const __m256i first = _mm256_slli_epi16(second, 8);
      auto* to = reinterpret_cast<__m256i*>(halves);
      _mm256_store_si256(to, _mm256_and_si256(_mm256_srai_epi16(first, 1), kept));
      _mm256_store_si256(to + 1, _mm256_and_si256(_mm256_srai_epi16(second, 1), kept));
      // Converting from memory is half the work of moving the upper half of a register down first.
      asm("" : "+m"(halves));
      _Pragma("GCC unroll 2") for (int k = 0; k < 2; ++k) {
        const auto* from = reinterpret_cast<const __m128i*>(halves[k]);
        use(k, 2 * i, Vec{_mm256_cvtph_ps(_mm_load_si128(from))});
        use(k, 2 * i + 1, Vec{_mm256_cvtph_ps(_mm_load_si128(from + 1))});
      }
    }
  }
  static inline __attribute__((always_inline)) void put_in_order(Vec (&)[8]) {}
};

// To a number that bf16 has, ties to even; denormal ones and the sign of 0 are left to chance.
QUIRE_INLINE Vec rounded_bf16(Vec x) {
  // One and a half times the power of two whose sum with x has just the digits of bf16 left.
  const __m256 power = _mm256_and_ps(x.v, _mm256_castsi256_ps(_mm256_set1_epi32(0x7f800000)));
  const Vec magic = mul({power}, splat(98304.0f));
  return sub(add(x, magic), magic);
}

// Codes of four bits. Vector j holds columns c, c + 32, c + 1, c + 33 and so on, from c = 4 * j on. `whole`:
// there are numbers that bf16 has not; `rounds`: products with scales are to be rounded.
template <bool whole, bool rounds> struct TableColumns {
  using Row = float;
  static constexpr bool kScalesSums = false, kDeinterleaved = false;
  static constexpr float kTimes = 1.0f;
  static constexpr uint32_t kTooLarge = ~0u;
  int scale_type;
  __m256i bytes[4];  // of the numbers, the lowest first
  Vec scales[8];

  explicit TableColumns(const Linear& layer) : scale_type(layer.coded.scale_type) {
    uint8_t all[16];
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 16; ++j) all[j] = static_cast<uint8_t>(f32_to_bits(layer.coded.values[j]) >> 8 * i);
      bytes[i] = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(all)));
    }
  }
  inline __attribute__((always_inline)) void begin(const char* head) {
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
      scales[2 * i] = load_scales(scale_type, head, 8 * i);
      scales[2 * i + 1] = load_scales(scale_type, head, kTile / 2 + 8 * i);
      interleave(scales[2 * i], scales[2 * i + 1]);
    }
  }
  template <class F> inline __attribute__((always_inline)) void numbers(const char* unit, const F& use) const {
    by_words(unit, [&](int k, __m256i words) __attribute__((always_inline)) { of_one<0, 4>(k, words, use); });
  }
  static constexpr int place(int j) { return j / 4 * 2 + j % 2; }
  static constexpr int pair(int h, int q) { return 2 * h + 4 * q; }
  template <int h, class F> inline __attribute__((always_inline)) void half(const char* unit, const F& use) const {
    by_words(unit, [&](int k, __m256i words) __attribute__((always_inline)) { of_one<2 * h, 2 * h + 2>(k, words, use); });
  }
  // of(k, words): codes of the columns at one k. Lane i has those of column i / 4 * 2 + i % 2 + i % 4 / 2 * 4 and of
  // every eighth after it.
  template <class F> static inline __attribute__((always_inline)) void by_words(const char* unit, const F& of) {
    const __m256 one = _mm256_loadu_ps(reinterpret_cast<const float*>(unit));
    const __m256 other = _mm256_loadu_ps(reinterpret_cast<const float*>(unit) + 8);
    of(0, _mm256_castps_si256(_mm256_shuffle_ps(one, other, 0x88)));
    of(1, _mm256_castps_si256(_mm256_shuffle_ps(one, other, 0xdd)));
  }
  static inline __attribute__((always_inline)) void put_in_order(Vec (&v)[8]) {
    Vec out[8];
    _Pragma("GCC unroll 4") for (int i = 0; i < 4; ++i) {
      deinterleave(v[2 * i], v[2 * i + 1]);
      out[i] = v[2 * i];
      out[4 + i] = v[2 * i + 1];
    }
    _Pragma("GCC unroll 8") for (int i = 0; i < 8; ++i) v[i] = out[i];
  }

 private:
  // Bytes of numbers beside each other, of the lower or upper half of the codes in each lane.
  static inline __attribute__((always_inline)) __m256i pairs(__m256i low, __m256i high, __m256i codes, int half) {
    low = _mm256_shuffle_epi8(low, codes);
    high = _mm256_shuffle_epi8(high, codes);
    return half ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
  }
  inline __attribute__((always_inline)) Vec made(__m256i bits, int j) const {
    const Vec v = mul({_mm256_castsi256_ps(bits)}, scales[j]);
    return rounds ? rounded_bf16(v) : v;
  }
  // Numbers from, from + 4, from + 1 and so on.
  template <int from, int to, class F>
  inline __attribute__((always_inline)) void of_one(int k, __m256i words, const F& use) const {
    const __m256i mask = _mm256_set1_epi8(15), upper = _mm256_set1_epi32(-65536);
    _Pragma("GCC unroll 4") for (int j = from; j < to; ++j) {
      const __m256i codes = _mm256_and_si256(j < 2 ? words : _mm256_srli_epi16(words, 4), mask);
      const __m256i above = pairs(bytes[2], bytes[3], codes, j % 2);
      __m256i one = _mm256_slli_epi32(above, 16), other = _mm256_and_si256(above, upper);
      if constexpr (whole) {
        const __m256i below = pairs(bytes[0], bytes[1], codes, j % 2);
        one = _mm256_blend_epi16(one, below, 0x55);
        other = _mm256_blend_epi16(_mm256_srli_epi32(below, 16), above, 0xaa);
      }
      use(k, j, made(one, j));
      use(k, 4 + j, made(other, 4 + j));
    }
  }
};

// The same numbers of codes that are_powers, by whole numbers alone: a number's magnitude, as bf16, is kept larger by
// kept_more, so that what a scale takes from it leaves 0 of 0, by saturation, and the sign, above the magnitude, is left
// alone. There is no -0 in the table (`native_narrow.py`).
struct PowerColumns {
  using Row = float;
  static constexpr bool kScalesSums = false, kDeinterleaved = false;
  static constexpr float kTimes = 1.0f;
  static constexpr uint32_t kTooLarge = ~0u;
  using Table = TableColumns<false, false>;
  Table table;            // for scales whose numbers would be denormal, or infinite
  __m256i below, above;   // bytes of the numbers, by code
  __m256i taken[4];       // from the magnitudes
  int kept_more;
  bool fits;

  explicit PowerColumns(const Linear& layer) : table(layer) {
    uint32_t most = 0;
    for (int i = 0; i < 16; ++i) {
      const uint32_t size = bits_of(layer, i) & 0x7fffu;
      most = size > most ? size : most;
    }
    kept_more = 0x7f7f - static_cast<int>(most);
    uint8_t low[16], high[16];
    for (int i = 0; i < 16; ++i) {
      const uint32_t bits = bits_of(layer, i), kept = bits ? bits + static_cast<uint32_t>(kept_more) : 0;
      low[i] = static_cast<uint8_t>(kept);
      high[i] = static_cast<uint8_t>(kept >> 8);
    }
    below = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(low)));
    above = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(high)));
  }
  inline __attribute__((always_inline)) void begin(const char* head) {
    const __m256i least = _mm256_set1_epi8(2), largest = _mm256_set1_epi8(static_cast<char>(127 + kept_more / 128));
    const auto* all = reinterpret_cast<const __m256i*>(head);
    __m256i kept = _mm256_set1_epi8(-1);
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; ++i) {
      const __m256i by = _mm256_loadu_si256(all + i);
      kept = _mm256_and_si256(kept, _mm256_cmpeq_epi8(by, _mm256_min_epu8(_mm256_max_epu8(by, least), largest)));
    }
    fits = _mm256_movemask_epi8(kept) == -1;
    if (!fits) return table.begin(head);
    const __m256i most = _mm256_set1_epi16(static_cast<short>(kept_more + 127 * 128));
    _Pragma("GCC unroll 2") for (int i = 0; i < 2; ++i) {
      // Scales of the first eight columns of every 16, or the second: four of a column beside each other.
      __m128i each[4];
      _Pragma("GCC unroll 4") for (int b = 0; b < 4; ++b)
        each[b] = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(head + 16 * b + 8 * i));
      const __m128i one = _mm_unpacklo_epi8(each[0], each[1]), other = _mm_unpacklo_epi8(each[2], each[3]);
      const __m128i fours[2] = {_mm_unpacklo_epi16(one, other), _mm_unpackhi_epi16(one, other)};
      _Pragma("GCC unroll 2") for (int half = 0; half < 2; ++half)
        taken[2 * i + half] = _mm256_sub_epi16(most, _mm256_slli_epi16(_mm256_cvtepu8_epi16(fours[half]), 7));
    }
  }
  template <class F> inline __attribute__((always_inline)) void numbers(const char* unit, const F& use) const {
    if (!fits) return table.numbers(unit, use);
    Table::by_words(unit, [&](int k, __m256i words) __attribute__((always_inline)) {
      of_one<0>(k, words, use);
      of_one<1>(k, words, use);
    });
  }
  static constexpr int place(int j) { return Table::place(j); }
  static constexpr int pair(int h, int q) { return Table::pair(h, q); }
  template <int h, class F> inline __attribute__((always_inline)) void half(const char* unit, const F& use) const {
    if (!fits) return table.half<h>(unit, use);
    Table::by_words(unit, [&](int k, __m256i words) __attribute__((always_inline)) { of_one<h>(k, words, use); });
  }
  static inline __attribute__((always_inline)) void put_in_order(Vec (&v)[8]) { Table::put_in_order(v); }

 private:
  static uint32_t bits_of(const Linear& layer, int code) { return f32_to_bits(layer.coded.values[code]) >> 16; }
  template <int h, class F> inline __attribute__((always_inline)) void of_one(int k, __m256i words, const F& use) const {
    const __m256i codes = _mm256_and_si256(h ? _mm256_srli_epi16(words, 4) : words, _mm256_set1_epi8(15));
    const __m256i low = _mm256_shuffle_epi8(below, codes), high = _mm256_shuffle_epi8(above, codes);
    _Pragma("GCC unroll 2") for (int j = 2 * h; j < 2 * h + 2; ++j) {
      const __m256i kept = j % 2 ? _mm256_unpackhi_epi8(low, high) : _mm256_unpacklo_epi8(low, high);
      const __m256i bits = _mm256_subs_epu16(kept, taken[j]);
      use(k, j, Vec{_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))});
      use(k, 4 + j, Vec{_mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(-65536)))});
    }
  }
};

// use(source) with what makes the numbers of a layer that widens_to_f32.
template <class F> static inline void with_columns(const Linear& layer, const F& use) {
  if (layer.dtype == kE4M3) return kFastDenormals ? use(E4M3Bits(layer)) : use(E4M3Halves(layer));
  if (are_powers(layer)) return use(PowerColumns(layer));
  for (int i = 0; i < 16; ++i)
    if (f32_to_bits(layer.coded.values[i]) & 0xffffu) return use(TableColumns<true, true>(layer));
  use(TableColumns<false, true>(layer));
}

// What rows of a layer are multiplied with, and the bits of what cannot be.
struct Growth {
  float times;
  uint32_t too_large;
};
static inline Growth growth_of(const Linear& layer) {
  Growth found;
  with_columns(layer, [&](const auto& source) { found = {source.kTimes, source.kTooLarge}; });
  return found;
}

// Sums of rows times the numbers of such a layer, which are in the order of these, kTile of each row.
static inline void put_sums_in_order(const Linear& layer, float* sums, int64_t rows) {
  with_columns(layer, [&](const auto& source) {
    for (int64_t row = 0; row < rows; ++row, sums += kTile) {
      Vec v[8];
      _Pragma("GCC unroll 8") for (int j = 0; j < 8; ++j) v[j] = load(sums + j * kLanes);
      source.put_in_order(v);
      _Pragma("GCC unroll 8") for (int j = 0; j < 8; ++j) store(sums + j * kLanes, v[j]);
    }
  });
}

#endif

#if QUIRE_LEVEL >= 2

// half(unit, h, out) makes vectors 2 h and 2 h + 1 of a unit's four.
template <class S> QUIRE_INLINE void make_unit(const S& source, const char* unit, __m512i (&out)[4]) {
  __m512i halves[2][2];
  source.half(unit, 0, halves[0]);
  source.half(unit, 1, halves[1]);
  _Pragma("GCC unroll 4") for (int m = 0; m < 4; ++m) out[m] = halves[m / 2][m % 2];
}

// What sources of E4M3 have in common: columns are in order, and scales belong to the sums.
struct E4M3InOrder {
  using Row = PairRow;
  static constexpr bool kScalesSums = true, kDeinterleaved = false, kInOrder = true;
  inline __attribute__((always_inline)) bool begin(const char*) { return true; }
  static inline __attribute__((always_inline)) void put_in_order(Vec (&)[4]) {}
  static inline __attribute__((always_inline)) void put_out_of_order(Vec (&)[4]) {}
  static constexpr int column(int lane) { return lane; }
};

// By arithmetic of whole numbers.
struct E4M3Units : E4M3InOrder {
  explicit E4M3Units(const Linear&) {}
  inline __attribute__((always_inline)) void half(const char* p, int h, __m512i (&out)[2]) const {
    _Pragma("GCC unroll 2") for (int m = 0; m < 2; ++m)
      out[m] = bf16_of_e4m3(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 * h + 32 * m)));
  }
};

// The same by tables.
struct E4M3Table : E4M3InOrder {
  ByteTable<kE4M3> table;
  __m512i order;

  explicit E4M3Table(const Linear&) {
    alignas(64) static const struct Places {
      uint8_t from[64];
      Places() {
        for (int i = 0; i < 64; ++i) from[ByteTable<kE4M3>::place(i)] = static_cast<uint8_t>(i);
      }
    } places;
    order = _mm512_load_si512(places.from);
  }
  inline __attribute__((always_inline)) void half(const char* p, int h, __m512i (&out)[2]) const {
    table.numbers(picked(_mm512_loadu_si512(p + 64 * h), order), out[0], out[1]);
  }
};

// The smallest scale of a group whose numbers PowerUnits and PowerColumns make: 0 is no power, and half of a smaller one than
// 2**-125 is denormal, which pairs of bf16 take for 0 and float32 does not.
constexpr char kLeastPower = QUIRE_LEVEL >= 3 ? 1 : 2;

// Codes that are_powers, by whole numbers alone, with the bits of a product rounded.
struct PowerUnits {
  using Row = PairRow;
  static constexpr bool kScalesSums = false, kDeinterleaved = false;
  __m512i all, low, high, shifts[2], exponents[4];

  explicit PowerUnits(const Linear& layer) {
    const __m512i bits = _mm512_loadu_si512(layer.coded.values);
    all = _mm512_broadcast_i64x4(_mm512_cvtepi32_epi16(_mm512_srli_epi32(bits, 16)));
    low = _mm512_broadcast_i64x4(_mm256_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30));
    high = _mm512_add_epi16(low, _mm512_set1_epi16(1));
    for (int i = 0; i < 2; ++i)
      shifts[i] = _mm512_inserti64x4(_mm512_set1_epi16(static_cast<short>(8 * i)), _mm256_set1_epi16(static_cast<short>(8 * i + 4)), 1);
  }
  inline __attribute__((always_inline)) bool begin(const char* head) {
    const __m512i by = _mm512_loadu_si512(head);
    _Pragma("GCC unroll 4") for (int m = 0; m < 4; ++m) {
      const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(head + 16 * m)));
      const __m512i grown = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(127)), 7);
      exponents[m] = _mm512_mask_mov_epi16(_mm512_slli_epi32(grown, 16), 0x55555555u, grown);
    }
    return _mm512_cmpge_epu8_mask(by, _mm512_set1_epi8(kLeastPower)) == ~__mmask64{0};
  }
  inline __attribute__((always_inline)) void half(const char* p, int h, __m512i (&out)[2]) const {
    const __m512i words = _mm512_permutexvar_epi16(h ? high : low, _mm512_loadu_si512(p));
    _Pragma("GCC unroll 2") for (int m = 0; m < 2; ++m) {
      const __m512i x = _mm512_permutexvar_epi16(_mm512_srlv_epi16(words, shifts[m]), all);  // by the lowest five bits
      out[m] = _mm512_mask_add_epi16(x, _mm512_test_epi16_mask(x, _mm512_set1_epi16(0x7fff)), x, exponents[2 * h + m]);
    }
  }
};

// The same for rows that take them at once, out of order: a lookup within 16 bytes takes half as long as one that
// crosses them. Lane 4 q + b of vector m holds column 16 b + 2 q + m % 2 + m / 2 * 8; put_in_order brings sums to theirs.
//
// A number's magnitude is kept larger by kept_more, so that what a scale takes from it leaves 0 of 0, by saturation, and
// the sign, above the magnitude, is left alone. There is no -0 in the table (`native_narrow.py`).
struct PowerColumns {
  using Row = PairRow;
  static constexpr bool kScalesSums = false, kDeinterleaved = false, kInOrder = false;
  __m512i above, below;         // bytes of the numbers, by code
  __m512i turned, from[2];      // orders of bytes, and of scales
  __m512i taken[4];             // from the magnitudes
  int kept_more;

  explicit PowerColumns(const Linear& layer) {
    const __m512i bits = _mm512_srli_epi32(_mm512_loadu_si512(layer.coded.values), 16);
    const __m512i size = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fff));
    kept_more = 0x7fff - static_cast<int>(_mm512_reduce_max_epu32(size));
    const __m512i kept = _mm512_maskz_add_epi32(_mm512_test_epi32_mask(size, size), bits, _mm512_set1_epi32(kept_more));
    below = _mm512_broadcast_i32x4(_mm512_cvtepi32_epi8(kept));
    above = _mm512_broadcast_i32x4(_mm512_cvtepi32_epi8(_mm512_srli_epi32(kept, 8)));
    turned = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    const __m512i words = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    from[0] = _mm512_or_si512(words, _mm512_slli_epi32(words, 16));
    from[1] = _mm512_add_epi16(from[0], _mm512_set1_epi16(4));
  }
  inline __attribute__((always_inline)) bool begin(const char* head) {
    const __m512i scales = _mm512_loadu_si512(head), one = _mm512_set1_epi16(255);
    const __m512i most = _mm512_set1_epi16(static_cast<short>(kept_more + 127 * 128));
    _Pragma("GCC unroll 2") for (int half = 0; half < 2; ++half) {
      const __m512i two = _mm512_permutexvar_epi16(from[half], scales);
      taken[2 * half] = _mm512_sub_epi16(most, _mm512_slli_epi16(_mm512_and_si512(two, one), 7));
      taken[2 * half + 1] = _mm512_sub_epi16(most, _mm512_slli_epi16(_mm512_srli_epi16(two, 8), 7));
    }
    // None is so large that something would be added.
    const __m512i least = _mm512_set1_epi8(kLeastPower), largest = _mm512_set1_epi8(static_cast<char>(127 + (kept_more - 1) / 128));
    return (_mm512_cmplt_epu8_mask(scales, least) | _mm512_cmpgt_epu8_mask(scales, largest)) == 0;
  }
  inline __attribute__((always_inline)) void half(const char* p, int h, __m512i (&out)[2]) const {
    const __m512i both = _mm512_shuffle_epi8(_mm512_loadu_si512(p), turned);
    const __m512i codes = _mm512_and_si512(h ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
    const __m512i low = _mm512_shuffle_epi8(below, codes), high = _mm512_shuffle_epi8(above, codes);
    out[0] = _mm512_subs_epu16(_mm512_unpacklo_epi8(low, high), taken[2 * h]);
    out[1] = _mm512_subs_epu16(_mm512_unpackhi_epi8(low, high), taken[2 * h + 1]);
  }
  // Which column lane `lane` of all 64 holds.
  static constexpr int column(int lane) { return 16 * (lane % 4) + 2 * (lane / 4 % 4) + lane / 16 % 2 + lane / 32 * 8; }
  static inline __attribute__((always_inline)) void put_in_order(Vec (&v)[4]) {
    const __m512i at = _mm512_setr_epi32(0, 16, 4, 20, 8, 24, 12, 28, 0, 16, 4, 20, 8, 24, 12, 28);
    Vec out[4];
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; ++j) {
      const __m512i mine = _mm512_add_epi32(at, _mm512_set1_epi32(j));
      out[j].v = _mm512_mask_blend_ps(0xff00, _mm512_permutex2var_ps(v[0].v, mine, v[1].v),
                                      _mm512_permutex2var_ps(v[2].v, mine, v[3].v));
    }
    _Pragma("GCC unroll 4") for (int j = 0; j < 4; ++j) v[j] = out[j];
  }
  static inline __attribute__((always_inline)) void put_out_of_order(Vec (&v)[4]) {
    alignas(64) float in[kTile], out[kTile];
    for (int j = 0; j < 4; ++j) store(in + 16 * j, v[j]);
    for (int i = 0; i < kTile; ++i) out[i] = in[column(i)];
    for (int j = 0; j < 4; ++j) v[j] = load(out + 16 * j);
  }
};

#endif

}  // namespace QUIRE_ISA
}  // namespace quire
