// Attention over codes of one byte (I8) by products of whole numbers. For X.isa.cpp only, level 3.
//
// Queries become codes of one byte as keys are, with one factor for a row (row_codes.h). The weights of a row in a segment
// become whole numbers c of 15 bits with one factor: c = round(w * (kMost / m)), m the largest of them; the factor is
// m / kMost. With m < 2**-100 all c are 0; with a number that is not finite all are 0 and the factor is NaN. They need
// more bits than a query: a small weight counts as much as a large one where there are many of them.
//
// vpdpbusd multiplies bytes without a sign by bytes with one, so c = 256 high + low, digits of 8 bits, and a byte
// from the cache counts 128 more, which 128 times the sum of a row's numbers takes away again. All sums are whole
// numbers that fit 32 bits, so they have the same bits in whatever order.
#pragma once
#include "row_codes.h"
#include "softmax.h"
#include "turn.h"

#if QUIRE_LEVEL >= 3
namespace quire {
namespace QUIRE_ISA {

constexpr float kMost = 127 * 256;  // high is 127 at most; 256 weights times 128 make 30 bits
constexpr int64_t kPlanes = 2;      // rows of digits to a row of weights: high, then low

// `dim` numbers of bf16 as codes, up to whole units of four. What is returned is their factor, and in `shift` what 128 more in each
// key adds to a sum.
static inline float query_codes(const bf16* x, int64_t dim, int8_t* out, int32_t& shift) {
  const RowScale scaled = row_scale(kBF16, x, 0, dim);
  __builtin_memset(out, 0, static_cast<size_t>((dim + 3) / 4 * 4));
  if (scaled.inverse != 0.0f) row_codes(kBF16, x, 0, dim, scaled.inverse, out);
  shift = 128 * sum_of_codes(out, dim);
  return scaled.scale;
}

// 64 numbers of w times `by`, at most kMost, as digits. The sum of c is added to `total`, in lanes.
QUIRE_INLINE void put_digits(const float* w, Vec by, int8_t* high, int8_t* low, __m512i& total) {
  const auto c = [&](int i) __attribute__((always_inline)) { return _mm512_cvtps_epi32(mul(load(w + i * kLanes), by).v); };
  const __m512i one = _mm512_packs_epi32(c(0), c(1)), other = _mm512_packs_epi32(c(2), c(3));
  const __m512i ones = _mm512_set1_epi16(1), byte = _mm512_set1_epi16(0xff), half = _mm512_set1_epi16(128);
  total = _mm512_dpwssd_epi32(_mm512_dpwssd_epi32(total, one, ones), other, ones);
  // Packing leaves fours of each vector in turns.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const auto put = [&](int8_t* to, __m512i bytes) __attribute__((always_inline)) {
    _mm512_storeu_si512(to, _mm512_permutexvar_epi32(order, bytes));
  };
  put(low, _mm512_packus_epi16(_mm512_and_si512(one, byte), _mm512_and_si512(other, byte)));
  const auto upper = [&](__m512i x) __attribute__((always_inline)) { return _mm512_srli_epi16(_mm512_add_epi16(x, half), 8); };
  put(high, _mm512_packus_epi16(upper(one), upper(other)));
}

// Weights w[begin .. end) of a segment, 64 at a time, none below 0, of which `largest` is the largest, or NaN. What is returned is
// the factor, and in `shift` what 128 more in each value adds to a sum.
static inline float weight_digits(const float* w, int64_t begin, int64_t end, float largest, int8_t* high, int8_t* low,
                                  int32_t& shift) {
  shift = 0;
  if (largest >= 7.888609052210118e-31f && largest < __builtin_inff()) {  // 2**-100
    const Vec by = splat(kMost / largest);
    __m512i total = _mm512_setzero_si512();
    for (int64_t k = begin; k < end; k += 64) put_digits(w + k, by, high + k, low + k, total);
    shift = 128 * _mm512_reduce_add_epi32(total);
    return largest / kMost;
  }
  __builtin_memset(high + begin, 0, static_cast<size_t>(end - begin));
  __builtin_memset(low + begin, 0, static_cast<size_t>(end - begin));
  return largest < 1.0f ? 0.0f : __builtin_nanf("");
}

// Sums of codes or, of both digits, of c.
QUIRE_INLINE Vec whole_sum(Vec sums, __m512i shift) { return {_mm512_cvtepi32_ps(_mm512_sub_epi32(bits_of(sums), shift))}; }
QUIRE_INLINE Vec whole_sum(Vec high, Vec low, __m512i shift) {
  return {_mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_add_epi32(_mm512_slli_epi32(bits_of(high), 8), bits_of(low)), shift))};
}

// From scores to weights times the values' factors, in place, of whole vectors; NaN stays NaN. `largest`
// is the largest of them, or NaN if there is one; what is returned is the sum of the weights alone.
static inline float factored_weights(float* s, const float* factors, int64_t begin, int64_t end, float factor,
                                     float top, float& largest) {
  const Vec f = splat(factor), shift = splat(-top);
  Vec total = zero();
  __m512i most = _mm512_setzero_si512();
  for (int64_t k = begin; k < end; k += kLanes) {
    const Vec p = exp2<4>(fma(load(s + k), f, shift));
    total = add(total, p);
    const Vec w = mul(p, load(factors + k));
    // Without a sign, bits have the order of their numbers, and NaN comes last.
    most = _mm512_max_epu32(most, _mm512_castps_si512(w.v));
    store(s + k, w);
  }
  largest = bits_to_f32(_mm512_reduce_max_epu32(most));
  return sum(total);
}

// ---- products ----------------------------------------------------------------------------------

// Four dimensions, or positions, of 16 columns, times four codes or digits of each row.
template <int R, int V>
QUIRE_INLINE void step_of(const int8_t* a, int64_t lda, const int8_t* b, Vec (&acc)[R][V]) {
  __m512i column[V];
  QUIRE_EACH for (int j = 0; j < V; ++j) column[j] = _mm512_loadu_si512(b + 64 * j);
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    int32_t four;
    __builtin_memcpy(&four, a + r * lda, sizeof four);
    const __m512i x = _mm512_set1_epi32(four);
    QUIRE_EACH for (int j = 0; j < V; ++j)
      acc[r][j].v = _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(acc[r][j].v), column[j], x));
  }
}

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
QUIRE_INLINE void put_fours(__m128i a, __m128i b, __m128i c, __m128i d, int8_t* to) {
  const __m128i more = _mm_set1_epi8(-128);
  const __m128i one[2] = {_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)};
  const __m128i other[2] = {_mm_unpacklo_epi8(c, d), _mm_unpackhi_epi8(c, d)};
  const auto put = [&](int i, __m128i fours) __attribute__((always_inline)) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i, _mm_xor_si128(fours, more));
  };
  put(0, _mm_unpacklo_epi16(one[0], other[0]));
  put(1, _mm_unpackhi_epi16(one[0], other[0]));
  put(2, _mm_unpacklo_epi16(one[1], other[1]));
  put(3, _mm_unpackhi_epi16(one[1], other[1]));
}

// Values as [count / 4][width][4], each 128 more.
static void copy_values(int, const char* const* lines, int64_t count, int64_t dim, int64_t width, int8_t* out,
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
