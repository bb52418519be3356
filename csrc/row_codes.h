// Rows of numbers as int8 codes with one scale: of activations and of keys and values. For X.isa.cpp only.
// As quantise_rows in kernels/coded_linear.py.
#pragma once
#include "math.h"

namespace quire {
namespace QUIRE_ISA {

// Codes of y = x * inverse, |y| <= 127.5: rounded to whole numbers, ties to even.
QUIRE_INLINE void store_codes(int8_t* out, Vec y, int64_t n) {
  float numbers[kLanes];
  store(numbers, round_even(y));
  for (int64_t i = 0; i < kLanes && i < n; ++i) out[i] = static_cast<int8_t>(static_cast<int32_t>(numbers[i]));
}
#if QUIRE_LEVEL >= 2
QUIRE_INLINE void store_codes_whole(int8_t* out, Vec y) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(y.v)));
}
#elif QUIRE_LEVEL == 1
QUIRE_INLINE void store_codes_whole(int8_t* out, Vec y) {
  const __m256i all = _mm256_cvtps_epi32(y.v);
  const __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(halves, halves));
}
#else
QUIRE_INLINE void store_codes_whole(int8_t* out, Vec y) { store_codes(out, y, kLanes); }
#endif

struct RowScale {
  float scale;    // 0 if all numbers count as 0; NaN if one is not finite
  float inverse;  // what numbers are multiplied with; 0 if there are no codes but 0
};

// Of `n` numbers from element `from` on.
static inline RowScale row_scale(int dtype, const void* x, int64_t from, int64_t n) {
  Vec most = zero(), odd = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load_any(dtype, x, from + i, n - i);
    most = max(most, copy_sign(v, zero()));
    odd = add(odd, mul(v, zero()));  // infinity times zero: not a number
  }
  const float largest = max_of(most);
  if (sum(odd) != 0.0f) return {bits_to_f32(0x7fc00000u), 0.0f};
  if (largest < 7.888609052210118e-31f) return {0.0f, 0.0f};  // 2**-100
  return {largest / 127.0f, 127.0f / largest};
}

static inline void row_codes(int dtype, const void* x, int64_t from, int64_t n, float inverse, int8_t* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec y = mul(load_any(dtype, x, from + i, n - i), splat(inverse));
    if (n - i >= kLanes) store_codes_whole(out + i, y);
    else store_codes(out + i, y, n - i);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
