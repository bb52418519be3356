// E4M3 and E5M2 as bf16 by two tables of 128 bytes, for the upper and the lower halves of the numbers.
// For X.isa.cpp only, of levels 2 and 3, where kLooksUpBytes: AVX512_VBMI, which not every machine has. Its instructions
// are written out, so that no compiler uses them elsewhere.
#pragma once
#include "vec.h"

#if QUIRE_LEVEL >= 2
namespace quire {
namespace QUIRE_ISA {

// Bytes in the order that `from` says.
QUIRE_INLINE __m512i picked(__m512i bytes, __m512i from) {
  __m512i r;
  asm("vpermb %1, %2, %0" : "=v"(r) : "v"(bytes), "v"(from));
  return r;
}
// The same from two vectors: `from` counts from 0 to 127.
QUIRE_INLINE __m512i picked(__m512i low, __m512i high, __m512i from) {
  asm("vpermi2b %2, %1, %0" : "+v"(from) : "v"(low), "v"(high));
  return from;
}

template <int D> struct ByteTable {
  __m512i above[2], below[2];

  ByteTable() {
    alignas(64) static const struct Bytes {
      uint8_t above[128], below[128];
      Bytes() {
        for (int i = 0; i < 128; ++i) {
          const uint8_t code = static_cast<uint8_t>(i);
          uint32_t bits = f32_to_bits(D == kE5M2 ? e5m2_to_f32(code) : e4m3_to_f32(code));
          if ((bits & 0x7fffffffu) > 0x7f800000u) bits |= 0x400000u;  // NaN as conversions give it
          above[i] = static_cast<uint8_t>(bits >> 24);
          below[i] = static_cast<uint8_t>(bits >> 16);
        }
      }
    } bytes;
    for (int i = 0; i < 2; ++i) {
      above[i] = _mm512_loadu_si512(bytes.above + 64 * i);
      below[i] = _mm512_loadu_si512(bytes.below + 64 * i);
    }
  }

  // Of each 16 codes the first eight as numbers in `first`, the others in `second`: `place(i)` says for
  // number i of both, one behind the other, where its code is to be.
  inline __attribute__((always_inline)) void numbers(__m512i codes, __m512i& first, __m512i& second) const {
    // Tables are of magnitudes: the sign is no part of a place in 128 bytes.
    const __m512i low = picked(below[0], below[1], codes), sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const __m512i high = _mm512_ternarylogic_epi32(picked(above[0], above[1], codes), codes, sign, 0xf8);
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }
  static int place(int i) { return i / 8 % 4 * 16 + i / 32 * 8 + i % 8; }
};

}  // namespace QUIRE_ISA
}  // namespace quire
#endif
