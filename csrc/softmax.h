// The exponential of attention and the steps from scores to weights. For X.isa.cpp only.
#pragma once
#include "vec.h"

namespace quire {
namespace QUIRE_ISA {

// Bits 0 to 8 of each lane as sign and exponent, mantissa 0.
QUIRE_INLINE Vec exponent_bits(Vec a) {
#if QUIRE_LEVEL >= 2
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a.v), 23))};
#elif QUIRE_LEVEL == 1
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a.v), 23))};
#else
  QUIRE_LANES a.v[i] = bits_to_f32(f32_to_bits(a.v[i]) << 23);
  return a;
#endif
}

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kNever = -__builtin_inff();

// 2**t for t below 127: exactly 1 for 0, exactly 0 for t <= -126.5 and -inf; NaN stays NaN.
// t = n + r with |r| <= 1/2; 2**r by a minimax polynomial of a degree: relative error 2.9e-6 for
// degree 4 (enough where the result becomes bf16), 6e-8 for degree 6, rounding included.
template <int degree> QUIRE_INLINE Vec exp2(Vec t) {
  // The bound first: the second operand wins if either is NaN.
  t = max(splat(-127.0f), t);
  // Adding 1.5 * 2**23 rounds to a whole number; with 127 on top, its low bits are n's exponent.
  const Vec magic = splat(12583039.0f);
  const Vec shifted = add(t, magic);
  const Vec r = sub(t, sub(shifted, magic));
  Vec y;
  if constexpr (degree == 4) {
    y = splat(0.009582852944731712f);
    y = fma(y, r, splat(0.055906426161527634f));
    y = fma(y, r, splat(0.24024099111557007f));
    y = fma(y, r, splat(0.6931241750717163f));
  } else {
    y = splat(0.00015353361959569156f);
    y = fma(y, r, splat(0.0013398875016719103f));
    y = fma(y, r, splat(0.00961843691766262f));
    y = fma(y, r, splat(0.055503323674201965f));
    y = fma(y, r, splat(0.24022647738456726f));
    y = fma(y, r, splat(0.6931471824645996f));
  }
  return mul(fma(y, r, splat(1.0f)), exponent_bits(shifted));
}

// tanh; NaN stays NaN. Absolute error below 2e-7.
QUIRE_INLINE Vec tanh_of(Vec x) {
  const Vec magnitude = max(x, sub(zero(), x));
  const Vec e = exp2<6>(mul(magnitude, splat(-2.0f * kLog2e)));
  return copy_sign(div(sub(splat(1.0f), e), add(splat(1.0f), e)), x);
}

QUIRE_INLINE float exp2_of(float t) {
  float lanes[kLanes];
  store(lanes, exp2<6>(splat(t)));
  return lanes[0];
}

QUIRE_INLINE float larger(float a, float b) { return a > b ? a : b; }

// Largest of s[begin .. end), whole vectors; NaN is left out.
QUIRE_INLINE float row_max(const float* s, int64_t begin, int64_t end) {
  Vec a = splat(kNever), b = a;
  int64_t k = begin;
  for (; k + 2 * kLanes <= end; k += 2 * kLanes) {
    a = max(load(s + k), a);
    b = max(load(s + k + kLanes), b);
  }
  for (; k < end; k += kLanes) a = max(load(s + k), a);
  return max_of(max(a, b));
}

// Weights 2**(factor * s - top) of whole blocks of 32 positions, and their sum.
QUIRE_INLINE float row_weights(const float* s, float* w, int64_t begin, int64_t end, float factor,
                               float top) {
  const Vec f = splat(factor), shift = splat(-top);
  Vec total = zero();
  for (int64_t k = begin; k < end; k += kLanes) {
    const Vec p = exp2<6>(fma(load(s + k), f, shift));
    total = add(total, p);
    store(w + k, p);
  }
  return sum(total);
}

#if QUIRE_LEVEL >= 3
// The same, rounded to bf16; the sum is that of the rounded weights.
QUIRE_INLINE float row_weights(const float* s, bf16* w, int64_t begin, int64_t end, float factor,
                               float top) {
  const Vec f = splat(factor), shift = splat(-top);
  const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
  __m512 total = _mm512_setzero_ps();
  for (int64_t k = begin; k < end; k += 32) {
    const Vec low = exp2<4>(fma(load(s + k), f, shift));
    const Vec high = exp2<4>(fma(load(s + k + 16), f, shift));
    const __m512bh p = _mm512_cvtne2ps_pbh(high.v, low.v);
    total = _mm512_dpbf16_ps(total, p, ones);
    _mm512_storeu_si512(w + k, (__m512i)p);
  }
  return sum(Vec{total});
}
#endif

}  // namespace QUIRE_ISA
}  // namespace quire
