// Vectors of float32 in the width of the instruction set. For X.isa.cpp only.
//
// `Vec` has kLanes lanes. Every function is one IEEE operation per lane, so bits depend on values
// only; `sum` and `max_of` reduce in one fixed tree. `load`/`store` convert from and to f32, bf16
// and f16 memory. `*_n` forms touch only the first n lanes of memory (0 < n <= kLanes); lanes
// beyond are zero after a load.
#pragma once
#include "isa.h"
#include "scalar.h"

#if QUIRE_LEVEL >= 1
#include <immintrin.h>
#endif

// Long vectors of bytes are multiplied in one step (vpdpbusd).
#if QUIRE_LEVEL >= 2 && defined QUIRE_VNNI
#define QUIRE_LONG_DOTS
#endif

namespace quire {
namespace QUIRE_ISA {

#ifdef QUIRE_DEBUG  // a sanitizer's checks in every copy of a line take minutes to compile
#define QUIRE_INLINE static inline
#define QUIRE_EACH
#else
#define QUIRE_INLINE static inline __attribute__((always_inline))
#define QUIRE_EACH _Pragma("GCC unroll 16")
#endif

#if QUIRE_LEVEL >= 2

constexpr int kLanes = 16;
struct Vec { __m512 v; };
QUIRE_INLINE __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
QUIRE_INLINE Vec zero() { return {_mm512_setzero_ps()}; }
QUIRE_INLINE Vec splat(float x) { return {_mm512_set1_ps(x)}; }
QUIRE_INLINE Vec add(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
QUIRE_INLINE Vec sub(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
QUIRE_INLINE Vec mul(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
QUIRE_INLINE Vec div(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
QUIRE_INLINE Vec sqrt(Vec a) { return {_mm512_sqrt_ps(a.v)}; }
// The second operand wins if either is NaN, on all instruction sets.
QUIRE_INLINE Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
QUIRE_INLINE Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
// a * b + c, rounded once (twice on the portable path).
QUIRE_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
QUIRE_INLINE Vec round_even(Vec a) { return {_mm512_roundscale_ps(a.v, 8)}; }
// |a| with the sign of b.
QUIRE_INLINE Vec copy_sign(Vec a, Vec b) {
  const __m512 mask = _mm512_set1_ps(-0.0f);
  return {_mm512_or_ps(_mm512_andnot_ps(mask, a.v), _mm512_and_ps(mask, b.v))};
}
// 2**n for whole n in [-127, 128): 0 for -127.
QUIRE_INLINE Vec pow2(Vec n) {
  const __m512i e = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(e, 23))};
}
QUIRE_INLINE Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
QUIRE_INLINE void store(float* p, Vec a) { _mm512_storeu_ps(p, a.v); }
QUIRE_INLINE Vec load_n(const float* p, int64_t n) {
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
QUIRE_INLINE void store_n(float* p, Vec a, int64_t n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), a.v);
}
QUIRE_INLINE Vec widen_bf16(__m256i h) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))};
}
// The first or the second of each pair of bf16.
QUIRE_INLINE Vec one_of(__m512i pairs, int second) {
  return {_mm512_castsi512_ps(second ? _mm512_and_si512(pairs, _mm512_set1_epi32(-65536)) : _mm512_slli_epi32(pairs, 16))};
}
// Rounded to bf16, in the upper halves; what the lower ones hold means nothing.
QUIRE_INLINE __m512i upper_bf16(Vec a) {
  const __m512i u = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  const __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
}
QUIRE_INLINE __m256i narrow_bf16(Vec a) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper_bf16(a), 16)); }
QUIRE_INLINE Vec round_bf16(Vec a) {
  return {_mm512_castsi512_ps(_mm512_and_si512(upper_bf16(a), _mm512_set1_epi32(-65536)))};
}
QUIRE_INLINE Vec load_bf16(const bf16* p) {
  return widen_bf16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
QUIRE_INLINE Vec load_bf16_n(const bf16* p, int64_t n) {
  return widen_bf16(_mm256_maskz_loadu_epi16(first_lanes(n), p));
}
QUIRE_INLINE void store_bf16(bf16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow_bf16(a));
}
QUIRE_INLINE void store_bf16_n(bf16* p, Vec a, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow_bf16(a));
}
QUIRE_INLINE Vec load_f16(const f16* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
QUIRE_INLINE Vec load_f16_n(const f16* p, int64_t n) {
  return {_mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first_lanes(n), p))};
}
QUIRE_INLINE void store_f16(f16* p, Vec a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
QUIRE_INLINE void store_f16_n(f16* p, Vec a, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}

// Lanes whose bit is set; the others become `rest`.
QUIRE_INLINE Vec only(uint32_t bits, Vec a, float rest) {
  return {_mm512_mask_mov_ps(_mm512_set1_ps(rest), static_cast<__mmask16>(bits), a.v)};
}

#elif QUIRE_LEVEL == 1

constexpr int kLanes = 8;
struct Vec { __m256 v; };
QUIRE_INLINE __m256i first_lanes(int64_t n) {
  const __m256i index = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), index);
}
QUIRE_INLINE Vec zero() { return {_mm256_setzero_ps()}; }
QUIRE_INLINE Vec splat(float x) { return {_mm256_set1_ps(x)}; }
QUIRE_INLINE Vec add(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
QUIRE_INLINE Vec sub(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
QUIRE_INLINE Vec mul(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
QUIRE_INLINE Vec div(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
QUIRE_INLINE Vec sqrt(Vec a) { return {_mm256_sqrt_ps(a.v)}; }
QUIRE_INLINE Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
QUIRE_INLINE Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
QUIRE_INLINE Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
QUIRE_INLINE Vec round_even(Vec a) { return {_mm256_round_ps(a.v, 8)}; }
QUIRE_INLINE Vec copy_sign(Vec a, Vec b) {
  const __m256 mask = _mm256_set1_ps(-0.0f);
  return {_mm256_or_ps(_mm256_andnot_ps(mask, a.v), _mm256_and_ps(mask, b.v))};
}
QUIRE_INLINE Vec pow2(Vec n) {
  const __m256i e = _mm256_add_epi32(_mm256_cvtps_epi32(n.v), _mm256_set1_epi32(127));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(e, 23))};
}
QUIRE_INLINE Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
QUIRE_INLINE void store(float* p, Vec a) { _mm256_storeu_ps(p, a.v); }
QUIRE_INLINE Vec load_n(const float* p, int64_t n) { return {_mm256_maskload_ps(p, first_lanes(n))}; }
QUIRE_INLINE void store_n(float* p, Vec a, int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), a.v); }
QUIRE_INLINE __m128i load_16_n(const uint16_t* p, int64_t n) {
  uint16_t all[8] = {};
  for (int64_t i = 0; i < n && i < 8; ++i) all[i] = p[i];
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(all));
}
QUIRE_INLINE void store_16_n(uint16_t* p, __m128i h, int64_t n) {
  uint16_t all[8];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(all), h);
  for (int64_t i = 0; i < n && i < 8; ++i) p[i] = all[i];
}
QUIRE_INLINE Vec widen_bf16(__m128i h) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16))};
}
QUIRE_INLINE __m256i upper_bf16(Vec a) {
  const __m256i u = _mm256_castps_si256(a.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  const __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a.v, a.v, _CMP_UNORD_Q));
  return _mm256_blendv_epi8(r, _mm256_or_si256(u, _mm256_set1_epi32(0x400000)), nan);
}
QUIRE_INLINE __m128i narrow_bf16(Vec a) {
  const __m256i r = _mm256_srli_epi32(upper_bf16(a), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
QUIRE_INLINE Vec round_bf16(Vec a) {
  return {_mm256_castsi256_ps(_mm256_and_si256(upper_bf16(a), _mm256_set1_epi32(-65536)))};
}
QUIRE_INLINE Vec load_bf16(const bf16* p) {
  return widen_bf16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
QUIRE_INLINE Vec load_bf16_n(const bf16* p, int64_t n) { return widen_bf16(load_16_n(p, n)); }
QUIRE_INLINE void store_bf16(bf16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_bf16(a));
}
QUIRE_INLINE void store_bf16_n(bf16* p, Vec a, int64_t n) { store_16_n(p, narrow_bf16(a), n); }
QUIRE_INLINE Vec load_f16(const f16* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
QUIRE_INLINE Vec load_f16_n(const f16* p, int64_t n) {
  return {_mm256_cvtph_ps(load_16_n(p, n))};
}
QUIRE_INLINE void store_f16(f16* p, Vec a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
QUIRE_INLINE void store_f16_n(f16* p, Vec a, int64_t n) {
  store_16_n(p, _mm256_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT), n);
}

QUIRE_INLINE Vec only(uint32_t bits, Vec a, float rest) {
  const __m256i each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i all = _mm256_set1_epi32(static_cast<int>(bits));
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(all, each), each);
  return {_mm256_blendv_ps(_mm256_set1_ps(rest), a.v, _mm256_castsi256_ps(set))};
}

#else  // portable: eight lanes, which compilers turn into SSE2 or NEON

constexpr int kLanes = 8;
struct Vec { float v[kLanes]; };
#define QUIRE_LANES for (int i = 0; i < kLanes; ++i)
QUIRE_INLINE Vec splat(float x) { Vec r; QUIRE_LANES r.v[i] = x; return r; }
QUIRE_INLINE Vec zero() { return splat(0.0f); }
QUIRE_INLINE Vec add(Vec a, Vec b) { QUIRE_LANES a.v[i] += b.v[i]; return a; }
QUIRE_INLINE Vec sub(Vec a, Vec b) { QUIRE_LANES a.v[i] -= b.v[i]; return a; }
QUIRE_INLINE Vec mul(Vec a, Vec b) { QUIRE_LANES a.v[i] *= b.v[i]; return a; }
QUIRE_INLINE Vec div(Vec a, Vec b) { QUIRE_LANES a.v[i] /= b.v[i]; return a; }
QUIRE_INLINE Vec sqrt(Vec a) { QUIRE_LANES a.v[i] = __builtin_sqrtf(a.v[i]); return a; }
QUIRE_INLINE Vec max(Vec a, Vec b) { QUIRE_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
QUIRE_INLINE Vec min(Vec a, Vec b) { QUIRE_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
QUIRE_INLINE Vec fma(Vec a, Vec b, Vec c) { return add(mul(a, b), c); }
// Right for |a| < 2**22.
QUIRE_INLINE Vec round_even(Vec a) {
  const float magic = 12582912.0f;  // 1.5 * 2**23
  return sub(add(a, splat(magic)), splat(magic));
}
QUIRE_INLINE Vec copy_sign(Vec a, Vec b) {
  QUIRE_LANES a.v[i] = __builtin_copysignf(a.v[i], b.v[i]);
  return a;
}
QUIRE_INLINE Vec pow2(Vec n) {
  QUIRE_LANES n.v[i] = bits_to_f32(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23);
  return n;
}
QUIRE_INLINE Vec load(const float* p) { Vec r; QUIRE_LANES r.v[i] = p[i]; return r; }
QUIRE_INLINE void store(float* p, Vec a) { QUIRE_LANES p[i] = a.v[i]; }
QUIRE_INLINE Vec load_n(const float* p, int64_t n) {
  Vec r = zero();
  for (int64_t i = 0; i < n && i < kLanes; ++i) r.v[i] = p[i];
  return r;
}
QUIRE_INLINE void store_n(float* p, Vec a, int64_t n) { for (int64_t i = 0; i < n && i < kLanes; ++i) p[i] = a.v[i]; }
QUIRE_INLINE Vec load_bf16(const bf16* p) { Vec r; QUIRE_LANES r.v[i] = bf16_to_f32(p[i]); return r; }
QUIRE_INLINE Vec load_bf16_n(const bf16* p, int64_t n) {
  Vec r = zero();
  for (int64_t i = 0; i < n && i < kLanes; ++i) r.v[i] = bf16_to_f32(p[i]);
  return r;
}
QUIRE_INLINE void store_bf16(bf16* p, Vec a) { QUIRE_LANES p[i] = f32_to_bf16(a.v[i]); }
QUIRE_INLINE Vec round_bf16(Vec a) { QUIRE_LANES a.v[i] = bf16_to_f32(f32_to_bf16(a.v[i])); return a; }
QUIRE_INLINE void store_bf16_n(bf16* p, Vec a, int64_t n) {
  for (int64_t i = 0; i < n && i < kLanes; ++i) p[i] = f32_to_bf16(a.v[i]);
}
QUIRE_INLINE Vec load_f16(const f16* p) { Vec r; QUIRE_LANES r.v[i] = f16_to_f32(p[i]); return r; }
QUIRE_INLINE Vec load_f16_n(const f16* p, int64_t n) {
  Vec r = zero();
  for (int64_t i = 0; i < n && i < kLanes; ++i) r.v[i] = f16_to_f32(p[i]);
  return r;
}
QUIRE_INLINE void store_f16(f16* p, Vec a) { QUIRE_LANES p[i] = f32_to_f16(a.v[i]); }
QUIRE_INLINE void store_f16_n(f16* p, Vec a, int64_t n) {
  for (int64_t i = 0; i < n && i < kLanes; ++i) p[i] = f32_to_f16(a.v[i]);
}

QUIRE_INLINE Vec only(uint32_t bits, Vec a, float rest) {
  QUIRE_LANES a.v[i] = bits >> i & 1u ? a.v[i] : rest;
  return a;
}

#endif

constexpr uint32_t kAllLanes = (1u << kLanes) - 1u;

// Rows that are multiplied with weights in pairs of bf16 (two k of a column side by side): pairs as well, where one instruction
// multiplies these; else float32.
constexpr bool kRowsInPairs = QUIRE_LEVEL >= 3;
#if QUIRE_LEVEL >= 3
using PairRow = bf16;
#else
using PairRow = float;
#endif

// Memory of any element type, chosen at compile time: Memory<kBF16>::load(p, i).
template <int D> struct Memory;
template <> struct Memory<kF32> {
  using T = float;
  QUIRE_INLINE Vec load(const void* p, int64_t i) { return QUIRE_ISA::load(static_cast<const T*>(p) + i); }
  QUIRE_INLINE Vec load_n(const void* p, int64_t i, int64_t n) { return QUIRE_ISA::load_n(static_cast<const T*>(p) + i, n); }
  QUIRE_INLINE void store(void* p, int64_t i, Vec a) { QUIRE_ISA::store(static_cast<T*>(p) + i, a); }
  QUIRE_INLINE void store_n(void* p, int64_t i, Vec a, int64_t n) { QUIRE_ISA::store_n(static_cast<T*>(p) + i, a, n); }
};
template <> struct Memory<kBF16> {
  using T = bf16;
  QUIRE_INLINE Vec load(const void* p, int64_t i) { return load_bf16(static_cast<const T*>(p) + i); }
  QUIRE_INLINE Vec load_n(const void* p, int64_t i, int64_t n) { return load_bf16_n(static_cast<const T*>(p) + i, n); }
  QUIRE_INLINE void store(void* p, int64_t i, Vec a) { store_bf16(static_cast<T*>(p) + i, a); }
  QUIRE_INLINE void store_n(void* p, int64_t i, Vec a, int64_t n) { store_bf16_n(static_cast<T*>(p) + i, a, n); }
};
template <> struct Memory<kF16> {
  using T = f16;
  QUIRE_INLINE Vec load(const void* p, int64_t i) { return load_f16(static_cast<const T*>(p) + i); }
  QUIRE_INLINE Vec load_n(const void* p, int64_t i, int64_t n) { return load_f16_n(static_cast<const T*>(p) + i, n); }
  QUIRE_INLINE void store(void* p, int64_t i, Vec a) { store_f16(static_cast<T*>(p) + i, a); }
  QUIRE_INLINE void store_n(void* p, int64_t i, Vec a, int64_t n) { store_f16_n(static_cast<T*>(p) + i, a, n); }
};

// Powers of two by their exponents: 2**(x - 127), 0 for 0.
#if QUIRE_LEVEL >= 2
QUIRE_INLINE Vec load_e8m0(const uint8_t* p) {
  const __m128i b = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu8_epi32(b), 23))};
}
#elif QUIRE_LEVEL == 1
QUIRE_INLINE Vec load_e8m0(const uint8_t* p) {
  const __m128i b = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu8_epi32(b), 23))};
}
#else
QUIRE_INLINE Vec load_e8m0(const uint8_t* p) { Vec r; QUIRE_LANES r.v[i] = e8m0_to_f32(p[i]); return r; }
#endif

// Scales of quantised weights, kLanes of them from number i on.
QUIRE_INLINE Vec load_scales(int type, const char* p, int64_t i) {
  if (type == kF16) return Memory<kF16>::load(p, i);
  if (type == kBF16) return Memory<kBF16>::load(p, i);
  if (type == kE8M0) return load_e8m0(reinterpret_cast<const uint8_t*>(p) + i);
  return Memory<kF32>::load(p, i);
}

// Lanes folded in halves: lane i takes lane i + h.
QUIRE_INLINE float sum(Vec a) {
  float t[kLanes];
  store(t, a);
  for (int h = kLanes / 2; h > 0; h /= 2)
    for (int i = 0; i < h; ++i) t[i] += t[i + h];
  return t[0];
}
#if QUIRE_LEVEL >= 1
QUIRE_INLINE float max_of(Vec a) {
#if QUIRE_LEVEL >= 2
  const __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(a.v), high);
#else
  const __m256 half = a.v;
#endif
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}
#else
QUIRE_INLINE float max_of(Vec a) {
  float t[kLanes];
  store(t, a);
  for (int h = kLanes / 2; h > 0; h /= 2)
    for (int i = 0; i < h; ++i) t[i] = t[i] > t[i + h] ? t[i] : t[i + h];
  return t[0];
}
#endif

// e**x within 2 units in the last place; exactly 0 for x < -86.98 (-inf too), inf above 88.73.
// NaN becomes 0 or inf: check for it elsewhere. Method: x = n ln 2 + r, Cephes' polynomial for r.
QUIRE_INLINE Vec exp(Vec x) {
  x = min(max(x, splat(-87.68f)), splat(88.73f));
  const Vec n = round_even(mul(x, splat(1.44269504088896341f)));
  Vec r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440054690583e-4f), r);
  Vec y = splat(1.9875691500e-4f);
  y = fma(y, r, splat(1.3981999507e-3f));
  y = fma(y, r, splat(8.3334519073e-3f));
  y = fma(y, r, splat(4.1665795894e-2f));
  y = fma(y, r, splat(1.6666665459e-1f));
  y = fma(y, r, splat(5.0000001201e-1f));
  y = add(fma(mul(y, r), r, r), splat(1.0f));
  // n reaches 128: 2**n as 2 * 2**(n - 1), whose bits are those of 0 for n = -126.
  return mul(mul(y, splat(2.0f)), pow2(sub(n, splat(1.0f))));
}

}  // namespace QUIRE_ISA
}  // namespace quire
