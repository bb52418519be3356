// Keys and values of one byte, and how they are read. For X.isa.cpp only; writing: kv_store.h.
//
//   E4M3, E5M2   number / the layer's scale, rounded to nearest even, cut at the largest number; reading
//                gives the number before the scale, which belongs to the scores and sums
//   I8           round(x * (127 / m)), m the largest magnitude of that token's head; the float32 m / 127
//                stands behind the head's codes. With m < 2**-100 both are 0; with a number that is not
//                finite the codes are 0 and the scale is NaN. Reading gives the code; the scale of a key is
//                multiplied with its scores, that of a value with its weights (attention.isa.cpp)
//
// So reading is exact in every type that enters the products; or codes enter as they are (digits.h).
#pragma once
#include "math.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kFactorBytes = 4;  // behind the codes of a head
QUIRE_INLINE void copy_factor(const char* from, float* to) { __builtin_memcpy(to, from, kFactorBytes); }
QUIRE_INLINE int64_t tail_bytes(int dtype) { return dtype == kI8 ? kFactorBytes : 0; }

#if QUIRE_LEVEL >= 2
// E4M3 as float16 is 2**-8 times as large, which the conversion of subnormal numbers keeps exact.
QUIRE_INLINE Vec widen_e4m3(__m128i b) {
  const __m256i w = _mm256_cvtepi8_epi16(b), ones = _mm256_set1_epi16(0x7f);
  const __m256i h = _mm256_and_si256(_mm256_slli_epi16(w, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __mmask16 nan = _mm256_cmpeq_epi16_mask(_mm256_and_si256(w, ones), ones);
  const __m512 x = _mm512_mul_ps(_mm512_cvtph_ps(h), _mm512_set1_ps(256.0f));
  return {_mm512_mask_mov_ps(x, nan, _mm512_set1_ps(__builtin_nanf("")))};
}
QUIRE_INLINE Vec widen_e5m2(__m128i b) {
  return {_mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(b), 8))};
}
QUIRE_INLINE Vec widen_i8(__m128i b) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(b))}; }
QUIRE_INLINE __m128i load_8(const uint8_t* p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
}
QUIRE_INLINE __m128i load_8_n(const uint8_t* p, int64_t n) {
  return _mm_maskz_loadu_epi8(first_lanes(n), p);
}
#elif QUIRE_LEVEL == 1
QUIRE_INLINE Vec widen_e4m3(__m128i b) {
  const __m128i w = _mm_cvtepi8_epi16(b), ones = _mm_set1_epi16(0x7f);
  const __m128i h = _mm_and_si128(_mm_slli_epi16(w, 7), _mm_set1_epi16(static_cast<short>(0xbf80)));
  const __m128i nan = _mm_cmpeq_epi16(_mm_and_si128(w, ones), ones);
  const __m256 x = _mm256_mul_ps(_mm256_cvtph_ps(h), _mm256_set1_ps(256.0f));
  return {_mm256_or_ps(x, _mm256_castsi256_ps(_mm256_cvtepi16_epi32(nan)))};
}
QUIRE_INLINE Vec widen_e5m2(__m128i b) {
  return {_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(b), 8))};
}
QUIRE_INLINE Vec widen_i8(__m128i b) { return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(b))}; }
QUIRE_INLINE __m128i load_8(const uint8_t* p) {
  return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
}
QUIRE_INLINE __m128i load_8_n(const uint8_t* p, int64_t n) {
  uint8_t all[8] = {};
  for (int64_t i = 0; i < n && i < 8; ++i) all[i] = p[i];
  return load_8(all);
}
#else
struct Bytes { uint8_t v[kLanes]; };
QUIRE_INLINE Vec widen_e4m3(Bytes b) { Vec r; QUIRE_LANES r.v[i] = e4m3_to_f32(b.v[i]); return r; }
QUIRE_INLINE Vec widen_e5m2(Bytes b) { Vec r; QUIRE_LANES r.v[i] = e5m2_to_f32(b.v[i]); return r; }
QUIRE_INLINE Vec widen_i8(Bytes b) {
  Vec r;
  QUIRE_LANES r.v[i] = static_cast<float>(static_cast<int8_t>(b.v[i]));
  return r;
}
QUIRE_INLINE Bytes load_8_n(const uint8_t* p, int64_t n) {
  Bytes b = {};
  for (int64_t i = 0; i < n && i < kLanes; ++i) b.v[i] = p[i];
  return b;
}
QUIRE_INLINE Bytes load_8(const uint8_t* p) { return load_8_n(p, kLanes); }
#endif

#define QUIRE_KEPT(D, widen)                                                        \
  template <> struct Memory<D> {                                                    \
    QUIRE_INLINE Vec load(const void* p, int64_t i) {                               \
      return widen(load_8(static_cast<const uint8_t*>(p) + i));                     \
    }                                                                               \
    QUIRE_INLINE Vec load_n(const void* p, int64_t i, int64_t n) {                  \
      return widen(load_8_n(static_cast<const uint8_t*>(p) + i, n));                \
    }                                                                               \
  };
QUIRE_KEPT(kE4M3, widen_e4m3)
QUIRE_KEPT(kE5M2, widen_e5m2)
QUIRE_KEPT(kI8, widen_i8)
#undef QUIRE_KEPT

// A head's numbers in memory, as they enter the products.
template <int D> struct Kept {
  const char* line;
  inline __attribute__((always_inline)) Vec load(int64_t i, int64_t left) const {
    return left >= kLanes ? Memory<D>::load(line, i) : Memory<D>::load_n(line, i, left);
  }
};

}  // namespace QUIRE_ISA
}  // namespace quire
