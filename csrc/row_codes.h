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

// The largest magnitude of `n` numbers from element `from` on; NaN if one is not finite.
template <int D> static inline float largest_of(const void* x, int64_t from, int64_t n) {
  Vec most = zero(), odd = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load_any(D, x, from + i, n - i);
    most = max(most, copy_sign(v, zero()));
    odd = add(odd, mul(v, zero()));  // infinity times zero: not a number
  }
  return sum(odd) != 0.0f ? bits_to_f32(0x7fc00000u) : max_of(most);
}
// Without sign, bits have the order of their numbers; those of what is not finite come last.
template <> inline float largest_of<kBF16>(const void* x, int64_t from, int64_t n) {
  const bf16* p = static_cast<const bf16*>(x) + from;
  uint32_t most = 0;
  int64_t i = 0;
#if QUIRE_LEVEL >= 1
#if QUIRE_LEVEL >= 2
  __m512i all = _mm512_setzero_si512();
  for (; i + 32 <= n; i += 32)
    all = _mm512_max_epu16(all, _mm512_and_si512(_mm512_loadu_si512(p + i), _mm512_set1_epi16(0x7fff)));
  const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
#else
  __m256i half = _mm256_setzero_si256();
  for (; i + 16 <= n; i += 16) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i));
    half = _mm256_max_epu16(half, _mm256_and_si256(bits, _mm256_set1_epi16(0x7fff)));
  }
#endif
  // The smallest of eight is found at once.
  const __m128i eight = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
  const __m128i least = _mm_minpos_epu16(_mm_sub_epi16(_mm_set1_epi16(0x7fff), eight));
  most = 0x7fffu - static_cast<uint32_t>(_mm_extract_epi16(least, 0));
#endif
  for (; i < n; ++i) {
    const uint32_t bits = p[i] & 0x7fffu;
    most = bits > most ? bits : most;
  }
  return most >= 0x7f80u ? bits_to_f32(0x7fc00000u) : bf16_to_f32(static_cast<bf16>(most));
}

// Of `n` numbers from element `from` on.
static inline RowScale row_scale(int dtype, const void* x, int64_t from, int64_t n) {
  const float largest = dtype == kBF16  ? largest_of<kBF16>(x, from, n)
                        : dtype == kF16 ? largest_of<kF16>(x, from, n)
                                        : largest_of<kF32>(x, from, n);
  if (largest != largest) return {largest, 0.0f};
  if (largest < 7.888609052210118e-31f) return {0.0f, 0.0f};  // 2**-100
  return {largest / 127.0f, 127.0f / largest};
}

template <int D> static inline void codes_of(const void* x, int64_t from, int64_t n, float inverse, int8_t* out) {
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec y = mul(load_any(D, x, from + i, n - i), splat(inverse));
    if (n - i >= kLanes) store_codes_whole(out + i, y);
    else store_codes(out + i, y, n - i);
  }
}

static inline void row_codes(int dtype, const void* x, int64_t from, int64_t n, float inverse, int8_t* out) {
  if (dtype == kBF16) codes_of<kBF16>(x, from, n, inverse, out);
  else if (dtype == kF16) codes_of<kF16>(x, from, n, inverse, out);
  else codes_of<kF32>(x, from, n, inverse, out);
}

static inline int32_t sum_of_codes(const int8_t* codes, int64_t n) {
  int32_t total = 0;
  int64_t i = 0;
#if QUIRE_LEVEL >= 1
  // Bytes are summed by eight without sign, so 128 more each.
  const __m256i zero = _mm256_setzero_si256(), more = _mm256_set1_epi8(-128);
  __m256i sums = zero;
  for (; i + 32 <= n; i += 32) {
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i));
    sums = _mm256_add_epi64(sums, _mm256_sad_epu8(_mm256_xor_si256(bytes, more), zero));
  }
  const __m128i two = _mm_add_epi64(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  total = _mm_cvtsi128_si32(_mm_add_epi64(two, _mm_unpackhi_epi64(two, two))) - static_cast<int32_t>(128 * i);
#endif
  for (; i < n; ++i) total += codes[i];
  return total;
}

}  // namespace QUIRE_ISA
}  // namespace quire
