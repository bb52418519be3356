// Codes of narrow weights as bf16 numbers, in registers. For X.isa.cpp only. Layout: widen.h.
//
// A source makes the 128 numbers of a unit, in their order: `begin` reads the scales of a group and says
// whether this source can make its numbers; `unit` makes those of one unit.
#pragma once
#include "byte_table.h"
#include "kv_types.h"
#include "widen.h"

namespace quire {
namespace QUIRE_ISA {

#if QUIRE_LEVEL == 1
// Exact, but for NaN, which no code of a weight is. As turn.h does it for keys and values.
QUIRE_INLINE __m256i bf16_of_e4m3(__m128i bytes) {
  const __m256i smallest = _mm256_broadcastsi128_si256(
      _mm_setr_epi16(0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
  const __m256i w = _mm256_cvtepi8_epi16(bytes), size = _mm256_and_si256(w, _mm256_set1_epi16(0x7f));
  const __m256i large = _mm256_add_epi16(_mm256_slli_epi16(size, 4), _mm256_set1_epi16(120 << 7));
  const __m256i places = _mm256_add_epi16(_mm256_mullo_epi16(size, _mm256_set1_epi16(0x0202)), _mm256_set1_epi16(0x0100));
  const __m256i small = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), size);
  const __m256i r = _mm256_blendv_epi8(large, _mm256_shuffle_epi8(smallest, places), small);
  return _mm256_or_si256(r, _mm256_and_si256(w, _mm256_set1_epi16(static_cast<short>(0x8000))));
}
#endif

#if QUIRE_LEVEL >= 2
// The same.
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

#if QUIRE_LEVEL >= 3

// E4M3 by arithmetic of whole numbers; scales belong to the sums.
struct E4M3Units {
  static constexpr bool kScalesSums = true;
  explicit E4M3Units(const Linear&) {}
  inline __attribute__((always_inline)) bool begin(const char*) { return true; }
  inline __attribute__((always_inline)) void unit(const char* p, __m512i (&out)[4]) const {
    _Pragma("GCC unroll 4") for (int m = 0; m < 4; ++m)
      out[m] = bf16_of_e4m3(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32 * m)));
  }
};

// The same by tables.
struct E4M3Table {
  static constexpr bool kScalesSums = true;
  ByteTable table;
  __m512i order;

  explicit E4M3Table(const Linear&) {
    alignas(64) uint8_t from[64];
    for (int i = 0; i < 64; ++i) from[ByteTable::place(i)] = static_cast<uint8_t>(i);
    order = _mm512_load_si512(from);
  }
  inline __attribute__((always_inline)) bool begin(const char*) { return true; }
  inline __attribute__((always_inline)) void unit(const char* p, __m512i (&out)[4]) const {
    _Pragma("GCC unroll 4") for (int m = 0; m < 2; ++m)
      table.numbers(picked(_mm512_loadu_si512(p + 64 * m), order), out[2 * m], out[2 * m + 1]);
  }
};

// Codes of four bits whose numbers bf16 has, of at least a half or 0, times powers of two: whole numbers
// alone, and the bits of a product rounded.
struct PowerUnits {
  static constexpr bool kScalesSums = false;
  __m512i all, low, high, shifts[2], exponents[4];

  explicit PowerUnits(const Linear& layer) {
    alignas(64) uint16_t table[32], places[32], shift[2][32];
    for (int i = 0; i < 32; ++i) {
      table[i] = static_cast<uint16_t>(f32_to_bits(layer.coded.values[i % 16]) >> 16);
      places[i] = static_cast<uint16_t>(2 * (i % 16));
      shift[0][i] = i < 16 ? 0 : 4;
      shift[1][i] = i < 16 ? 8 : 12;
    }
    all = _mm512_load_si512(table);
    low = _mm512_load_si512(places);
    high = _mm512_add_epi16(low, _mm512_set1_epi16(1));
    for (int i = 0; i < 2; ++i) shifts[i] = _mm512_load_si512(shift[i]);
  }
  static bool fits(const Linear& layer) {
    const Coded& c = layer.coded;
    if (layer.dtype != kTable4 || c.wide != kBF16 || c.scale_type != kE8M0 || c.group_zeros || c.group_minima) return false;
    for (int i = 0; i < 16; ++i) {
      const uint32_t bits = f32_to_bits(c.values[i]), size = bits & 0x7fffffffu;
      if (bits & 0xffffu || (size && size < f32_to_bits(0.5f)) || size > f32_to_bits(1024.0f)) return false;
    }
    return true;
  }
  inline __attribute__((always_inline)) bool begin(const char* head) {
    const __m512i by = _mm512_loadu_si512(head);
    _Pragma("GCC unroll 4") for (int m = 0; m < 4; ++m) {
      const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(head + 16 * m)));
      const __m512i grown = _mm512_slli_epi32(_mm512_sub_epi32(e, _mm512_set1_epi32(127)), 7);
      exponents[m] = _mm512_mask_mov_epi16(_mm512_slli_epi32(grown, 16), 0x55555555u, grown);
    }
    return _mm512_test_epi8_mask(by, by) == ~__mmask64{0};  // no scale is 0
  }
  inline __attribute__((always_inline)) void unit(const char* p, __m512i (&out)[4]) const {
    const __m512i words = _mm512_loadu_si512(p), any = _mm512_set1_epi16(0x7fff);
    const __m512i half[2] = {_mm512_permutexvar_epi16(low, words), _mm512_permutexvar_epi16(high, words)};
    _Pragma("GCC unroll 4") for (int m = 0; m < 4; ++m) {
      const __m512i codes = _mm512_srlv_epi16(half[m / 2], shifts[m % 2]);
      const __m512i x = _mm512_permutexvar_epi16(codes, all);  // by the lowest five bits
      out[m] = _mm512_mask_add_epi16(x, _mm512_test_epi16_mask(x, any), x, exponents[m]);
    }
  }
};

#endif

}  // namespace QUIRE_ISA
}  // namespace quire
