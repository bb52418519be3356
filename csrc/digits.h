// Attention over codes of one byte (I8) by products of whole numbers. For X.isa.cpp only, where QUIRE_LONG_DOTS.
//
// Queries become codes of one byte as keys are, with one factor for a row (row_codes.h). The weights of a row in a segment
// become whole numbers c = round(w * (most / m)), m the largest of them, and their factor is m / most. `most` is 255, one digit of
// 8 bits, where the weights together are kFlat times the largest or more; else it is 255 * 256, and c = 256 high + low: what a
// large weight leaves of many small ones in one digit is too little. This depends on the row alone, and so do the bits; the low digits of
// rows that have none cost nothing. With m < 2**-100 all c are 0; with a number that is not finite all are 0 and the factor is NaN.
//
// vpdpbusd multiplies bytes without a sign by bytes with one. Digits have none, and codes of values have one. With queries, codes of
// keys count 128 more, which 128 times the sum of a row's codes takes away again. All sums are whole numbers that fit 32 bits,
// so they have the same bits in whatever order.
#pragma once
#include "row_codes.h"
#include "softmax.h"
#include "turn.h"

#ifdef QUIRE_LONG_DOTS
namespace quire {
namespace QUIRE_ISA {

constexpr float kOneDigit = 255, kTwoDigits = 255 * 256;  // times 256 values of 128 it is below 2**31
// What one digit rounds off is then about what codes of values round off, and all weights below half a unit of it are together less
// than a sixtieth of a row's.
constexpr float kFlat = 32;

// `dim` numbers of bf16 as codes, up to whole units of four. What is returned is their factor, and in `shift` what 128 more in each
// key adds to a sum.
static inline float query_codes(const bf16* x, int64_t dim, int8_t* out, int32_t& shift) {
  const RowScale scaled = row_scale(kBF16, x, 0, dim);
  __builtin_memset(out, 0, static_cast<size_t>((dim + 3) / 4 * 4));
  if (scaled.inverse != 0.0f) row_codes(kBF16, x, 0, dim, scaled.inverse, out);
  shift = 128 * sum_of_codes(out, dim);
  return scaled.scale;
}

// 64 numbers of w times `by`, at most kTwoDigits, as digits; or as one digit, where they are at most kOneDigit.
template <bool two> QUIRE_INLINE void put_digits(const float* w, Vec by, uint8_t* high, uint8_t* low) {
  const auto c = [&](int i) __attribute__((always_inline)) { return _mm512_cvtps_epi32(mul(load(w + i * kLanes), by).v); };
  const __m512i one = _mm512_packus_epi32(c(0), c(1)), other = _mm512_packus_epi32(c(2), c(3));
  // Packing leaves fours of each vector in turns.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const auto put = [&](uint8_t* to, __m512i a, __m512i b) __attribute__((always_inline)) {
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, _mm512_packus_epi16(a, b)));
  };
  if constexpr (two) {
    const __m512i byte = _mm512_set1_epi16(0xff);
    put(low, _mm512_and_si512(one, byte), _mm512_and_si512(other, byte));
    put(high, _mm512_srli_epi16(one, 8), _mm512_srli_epi16(other, 8));
  } else {
    put(high, one, other);
  }
}

// Of the weights of a row in a segment.
struct Weights {
  float sum;      // of all but the values' factors
  float largest;  // with them; NaN if one is not finite
  bool flat;      // one digit is enough
};

// Weights w[begin .. end) of a segment, 64 at a time, none below 0. What is returned is their factor; there are low digits only
// if they are not flat.
static inline float weight_digits(const float* w, int64_t begin, int64_t end, const Weights& of, uint8_t* high, uint8_t* low) {
  if (!(of.largest >= 7.888609052210118e-31f && of.largest < __builtin_inff())) {  // 2**-100
    __builtin_memset(high + begin, 0, static_cast<size_t>(end - begin));
    if (!of.flat) __builtin_memset(low + begin, 0, static_cast<size_t>(end - begin));
    return of.largest < 1.0f ? 0.0f : __builtin_nanf("");
  }
  const float most = of.flat ? kOneDigit : kTwoDigits;
  const Vec by = splat(most / of.largest);
  if (of.flat)
    for (int64_t k = begin; k < end; k += 64) put_digits<false>(w + k, by, high + k, nullptr);
  else
    for (int64_t k = begin; k < end; k += 64) put_digits<true>(w + k, by, high + k, low + k);
  return of.largest / most;
}

// Sums of codes that count 128 more, and of both digits of c.
QUIRE_INLINE Vec whole_sum(Vec sums, __m512i shift) { return {_mm512_cvtepi32_ps(_mm512_sub_epi32(bits_of(sums), shift))}; }
QUIRE_INLINE Vec whole_sum(Vec high) { return {_mm512_cvtepi32_ps(bits_of(high))}; }
QUIRE_INLINE Vec whole_sum(Vec high, Vec low) {
  return {_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(bits_of(high), 8), bits_of(low)))};
}

// From scores to weights times the values' factors, in place, of whole vectors; NaN stays NaN.
static inline Weights factored_weights(float* s, const float* factors, int64_t begin, int64_t end, float factor, float top) {
  const Vec f = splat(factor), shift = splat(-top);
  Vec total = zero(), all = zero();
  __m512i most = _mm512_setzero_si512();
  for (int64_t k = begin; k < end; k += kLanes) {
    const Vec p = exp2<4>(fma(load(s + k), f, shift));
    total = add(total, p);
    const Vec w = mul(p, load(factors + k));
    all = add(all, w);
    // Without a sign, bits have the order of their numbers, and NaN comes last.
    most = _mm512_max_epu32(most, _mm512_castps_si512(w.v));
    store(s + k, w);
  }
  const float largest = bits_to_f32(_mm512_reduce_max_epu32(most));
  return {sum(total), largest, sum(all) >= kFlat * largest};
}

// ---- products ----------------------------------------------------------------------------------

// Four dimensions of 16 keys, each code 128 more, times four codes of each query; or four positions of 16 dimensions of
// values times four digits of each row.
QUIRE_INLINE __m512i add_fours(__m512i sums, __m512i columns, int32_t queries, const int8_t*) {
  return _mm512_dpbusd_epi32(sums, columns, _mm512_set1_epi32(queries));
}
QUIRE_INLINE __m512i add_fours(__m512i sums, __m512i columns, int32_t digits, const uint8_t*) {
  return _mm512_dpbusd_epi32(sums, _mm512_set1_epi32(digits), columns);
}
template <int R, int V, class Byte>
QUIRE_INLINE void step_of_fours(const Byte* a, int64_t lda, const Byte* b, Vec (&acc)[R][V]) {
  __m512i column[V];
  QUIRE_EACH for (int j = 0; j < V; ++j) column[j] = _mm512_loadu_si512(b + 64 * j);
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    int32_t four;
    __builtin_memcpy(&four, a + r * lda, sizeof four);
    QUIRE_EACH for (int j = 0; j < V; ++j)
      acc[r][j].v = _mm512_castsi512_ps(add_fours(bits_of(acc[r][j]), column[j], four, a));
  }
}
template <int R, int V> QUIRE_INLINE void step_of(const int8_t* a, int64_t lda, const int8_t* b, Vec (&acc)[R][V]) {
  step_of_fours(a, lda, b, acc);
}
template <int R, int V> QUIRE_INLINE void step_of(const uint8_t* a, int64_t lda, const uint8_t* b, Vec (&acc)[R][V]) {
  step_of_fours(a, lda, b, acc);
}

#ifdef QUIRE_AMX
template <> struct OnTiles<int8_t> {
  static constexpr bool value = true;
  static constexpr Factors factors = kSignedRows;
};
template <> struct OnTiles<uint8_t> {
  static constexpr bool value = true;
  static constexpr Factors factors = kSignedColumns;
};
#endif

// Codes, each 128 more, by fours as one unit of 32 bits. The last unit of a line may read from what stands behind the codes:
// queries are 0 there.
struct Shifted {
  const char* line;
  inline __attribute__((always_inline)) Vec load(int64_t unit, int64_t units) const {
    return {_mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(Kept<kF32>{line}.load(unit, units).v),
                                                 _mm512_set1_epi8(-128)))};
  }
};

static void turn_keys(int, const char* const* lines, int64_t count, int64_t dim, int8_t* out, Ahead& ahead) {
  turn<Shifted>(lines, count, (dim + 3) / 4, reinterpret_cast<float*>(out), ahead);
}

// Four lines of 16 bytes each, a column's four side by side.
QUIRE_INLINE void put_fours(__m128i a, __m128i b, __m128i c, __m128i d, uint8_t* to) {
  const __m128i one[2] = {_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)};
  const __m128i other[2] = {_mm_unpacklo_epi8(c, d), _mm_unpackhi_epi8(c, d)};
  const auto put = [&](int i, __m128i fours) __attribute__((always_inline)) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i, fours);
  };
  put(0, _mm_unpacklo_epi16(one[0], other[0]));
  put(1, _mm_unpackhi_epi16(one[0], other[0]));
  put(2, _mm_unpacklo_epi16(one[1], other[1]));
  put(3, _mm_unpackhi_epi16(one[1], other[1]));
}

// Values as [count / 4][width][4].
static void copy_values(int, const char* const* lines, int64_t count, int64_t dim, int64_t width, uint8_t* out,
                        Ahead& ahead) {
  for (int64_t k = 0; k < count; k += 4) {
    ahead.pull(4);
    for (int64_t i = 0; i < dim; i += kLanes) {
      const __mmask16 some = first_lanes(dim - i < kLanes ? dim - i : kLanes);
      const auto part = [&](int line) __attribute__((always_inline)) { return _mm_maskz_loadu_epi8(some, lines[k + line] + i); };
      put_fours(part(0), part(1), part(2), part(3), out + k * width + 4 * i);
    }
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
#endif
