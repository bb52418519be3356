// Rearranging keys and values for the products of attention. For X.isa.cpp only.
//
// Keys and values stand in the cache as rows, one per position and head, at `lines`. Keys are
// turned to [dimension][64 positions], so that a vector holds a dimension of many keys; values keep
// their order. For vdpbf16ps two neighbours along the sum stand side by side. Meanwhile about half
// as many lines as are read are fetched.
#pragma once
#include "byte_table.h"
#include "kv_types.h"
#include "product.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kTurned = 64;  // positions beside each other

// Rows become columns.
#if QUIRE_LEVEL >= 2
// In eight parts, which other work can stand between: four of four rows each, then four of four columns each.
// 128-bit lane L of u[4 i + j] holds column 4 L + j of rows 4 i to 4 i + 3.
QUIRE_INLINE void turn_rows(Vec a, Vec b, Vec c, Vec d, Vec* u) {
  const auto halves = [](__m512 x, __m512 y, Vec* out) __attribute__((always_inline)) {
    const __m512d one = _mm512_castps_pd(x), other = _mm512_castps_pd(y);
    out[0].v = _mm512_castpd_ps(_mm512_unpacklo_pd(one, other));
    out[1].v = _mm512_castpd_ps(_mm512_unpackhi_pd(one, other));
  };
  halves(_mm512_unpacklo_ps(a.v, b.v), _mm512_unpacklo_ps(c.v, d.v), u);
  halves(_mm512_unpackhi_ps(a.v, b.v), _mm512_unpackhi_ps(c.v, d.v), u + 2);
}
// Columns j, 4 + j, 8 + j and 12 + j.
QUIRE_INLINE void turn_columns(const Vec (&u)[16], int j, Vec (&out)[4]) {
  const __m512 even0 = _mm512_shuffle_f32x4(u[j].v, u[4 + j].v, 0x88);
  const __m512 odd0 = _mm512_shuffle_f32x4(u[j].v, u[4 + j].v, 0xdd);
  const __m512 even1 = _mm512_shuffle_f32x4(u[8 + j].v, u[12 + j].v, 0x88);
  const __m512 odd1 = _mm512_shuffle_f32x4(u[8 + j].v, u[12 + j].v, 0xdd);
  out[0].v = _mm512_shuffle_f32x4(even0, even1, 0x88);
  out[1].v = _mm512_shuffle_f32x4(odd0, odd1, 0x88);
  out[2].v = _mm512_shuffle_f32x4(even0, even1, 0xdd);
  out[3].v = _mm512_shuffle_f32x4(odd0, odd1, 0xdd);
}
QUIRE_INLINE void transpose(Vec (&v)[16]) {
  Vec u[16];
  QUIRE_EACH for (int i = 0; i < 16; i += 4) turn_rows(v[i], v[i + 1], v[i + 2], v[i + 3], u + i);
  QUIRE_EACH for (int j = 0; j < 4; ++j) {
    Vec out[4];
    turn_columns(u, j, out);
    QUIRE_EACH for (int i = 0; i < 4; ++i) v[4 * i + j] = out[i];
  }
}
#elif QUIRE_LEVEL == 1
QUIRE_INLINE void transpose(Vec (&v)[8]) {
  __m256 t[8], u[8];
  QUIRE_EACH for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(v[i].v, v[i + 1].v);
    t[i + 1] = _mm256_unpackhi_ps(v[i].v, v[i + 1].v);
  }
  QUIRE_EACH for (int i = 0; i < 8; i += 4) {
    u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  QUIRE_EACH for (int j = 0; j < 4; ++j) {
    v[j].v = _mm256_permute2f128_ps(u[j], u[4 + j], 0x20);
    v[4 + j].v = _mm256_permute2f128_ps(u[j], u[4 + j], 0x31);
  }
}
#else
QUIRE_INLINE void transpose(Vec (&v)[kLanes]) {
  QUIRE_EACH for (int i = 0; i < kLanes; ++i)
    QUIRE_EACH for (int j = 0; j < i; ++j) {
      const float x = v[i].v[j];
      v[i].v[j] = v[j].v[i];
      v[j].v[i] = x;
    }
}
#endif

// `Row{line}.load(unit, n)` gives the units of a line from one on, n of them left.
template <class Row>
static void turn(const char* const* lines, int64_t count, int64_t units, float* out, Ahead& ahead) {
  for (int64_t first = 0; first < count; first += kLanes) {
    for (int64_t unit = 0; unit < units; unit += kLanes) {
      const int64_t some = units - unit < kLanes ? units - unit : kLanes;
      Vec v[kLanes];
      if (some == kLanes)
        QUIRE_EACH for (int i = 0; i < kLanes; ++i) v[i] = Row{lines[first + i]}.load(unit, kLanes);
      else
        QUIRE_EACH for (int i = 0; i < kLanes; ++i) v[i] = Row{lines[first + i]}.load(unit, some);
      ahead.pull(kLanes / 2);
      transpose(v);
      float* to = out + unit * kTurned + first;
      if (some == kLanes)
        QUIRE_EACH for (int i = 0; i < kLanes; ++i) store(to + i * kTurned, v[i]);
      else
        for (int64_t i = 0; i < some; ++i) store(to + i * kTurned, v[i]);
    }
  }
}

template <int D>
static void widen(const char* const* lines, int64_t count, int64_t dim, int64_t width, float* out,
                  Ahead& ahead) {
  for (int64_t k = 0; k < count; ++k) {
    ahead.pull(k & 1);
    const Kept<D> kept{lines[k]};
    for (int64_t i = 0; i < width; i += kLanes)
      store(out + k * width + i, i < dim ? kept.load(i, dim - i) : zero());
  }
}

#if QUIRE_LEVEL == 1
// Numbers of one byte by sixteens: codes become upper halves of words, words go through memory, where reading
// them as eight numbers is half the work of moving the upper half of a register down first. The bits of `Kept`.
template <int D> struct Words {
  static constexpr bool kHasNaN = D == kE4M3;  // which is a number among float16
  QUIRE_INLINE __m256i of_upper(__m256i v) {
    if constexpr (D == kI8) return _mm256_srai_epi16(v, 8);
    if constexpr (D == kE5M2) return _mm256_and_si256(v, _mm256_set1_epi16(static_cast<short>(0xff00)));
    return _mm256_and_si256(_mm256_srai_epi16(v, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  }
  QUIRE_INLINE __m256i of_lower(__m256i v) { return of_upper(_mm256_slli_epi16(v, 8)); }
  QUIRE_INLINE __m256i are_nan(__m256i v) {
    const __m256i ones = _mm256_set1_epi8(0x7f);
    return _mm256_cmpeq_epi8(_mm256_and_si256(v, ones), ones);
  }
  QUIRE_INLINE Vec number(const __m128i* words) {
    const __m128i w = _mm_load_si128(words);
    if constexpr (D == kI8) return {_mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(w))};
    const Vec v{_mm256_cvtph_ps(w)};
    return D == kE4M3 ? mul(v, splat(256.0f)) : v;  // as float16 it is 2**-8 times as large
  }
};

// Two words of 16 numbers each, apart from each other.
struct alignas(32) TwoWords {
  __m128i at[2][2];
  inline __attribute__((always_inline)) void put(__m256i one, __m256i other) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(at[0]), one);
    _mm256_store_si256(reinterpret_cast<__m256i*>(at[1]), other);
    asm("" : "+m"(at));  // or the compiler would keep them in registers
  }
};

// Keys; `dim` is a multiple of 32. Pairs of dimensions are turned, then become numbers.
template <int D>
static void turn_words(const char* const* lines, int64_t count, int64_t dim, float* out, Ahead& ahead) {
  using W = Words<D>;
  for (int64_t first = 0; first < count; first += 8) {
    const char* const* mine = lines + first;
    __m256i odd = _mm256_setzero_si256();
    for (int64_t d = 0; d < dim; d += 32) {
      __m256i v[8], t[8];
      QUIRE_EACH for (int i = 0; i < 8; ++i) {
        v[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(mine[i] + d));
        if constexpr (W::kHasNaN) odd = _mm256_or_si256(odd, W::are_nan(v[i]));
      }
      ahead.pull(8);
      QUIRE_EACH for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi16(v[i], v[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi16(v[i], v[i + 1]);
      }
      QUIRE_EACH for (int i = 0; i < 8; i += 4) QUIRE_EACH for (int j = 0; j < 2; ++j) {
        v[i + 2 * j] = _mm256_unpacklo_epi32(t[i + j], t[i + 2 + j]);
        v[i + 2 * j + 1] = _mm256_unpackhi_epi32(t[i + j], t[i + 2 + j]);
      }
      // Lane L of a pair holds dimensions 16 L + 2 j and the next of eight positions.
      QUIRE_EACH for (int j = 0; j < 8; ++j) {
        const __m256i pair = j % 2 ? _mm256_unpackhi_epi64(v[j / 2], v[4 + j / 2])
                                   : _mm256_unpacklo_epi64(v[j / 2], v[4 + j / 2]);
        TwoWords words;
        words.put(W::of_lower(pair), W::of_upper(pair));
        float* to = out + (d + 2 * j) * kTurned + first;
        QUIRE_EACH for (int i = 0; i < 2; ++i) QUIRE_EACH for (int lane = 0; lane < 2; ++lane)
          store(to + (16 * lane + i) * kTurned, W::number(&words.at[i][lane]));
      }
    }
    if (W::kHasNaN && !_mm256_testz_si256(odd, odd)) turn<Kept<D>>(mine, 8, dim, out + first, ahead);
  }
}

// Values; `dim` is a multiple of 32.
template <int D>
static void widen_words(const char* const* lines, int64_t count, int64_t dim, float* out, Ahead& ahead) {
  using W = Words<D>;
  for (int64_t k = 0; k < count; ++k, out += dim) {
    ahead.pull(k & 1);
    __m256i odd = _mm256_setzero_si256();
    for (int64_t d = 0; d < dim; d += 32) {
      const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines[k] + d)), none = _mm256_setzero_si256();
      if constexpr (W::kHasNaN) odd = _mm256_or_si256(odd, W::are_nan(v));
      TwoWords words;
      words.put(W::of_upper(_mm256_unpacklo_epi8(none, v)), W::of_upper(_mm256_unpackhi_epi8(none, v)));
      QUIRE_EACH for (int i = 0; i < 2; ++i) QUIRE_EACH for (int lane = 0; lane < 2; ++lane)
        store(out + d + 16 * lane + 8 * i, W::number(&words.at[i][lane]));
    }
    if (W::kHasNaN && !_mm256_testz_si256(odd, odd)) widen<D>(lines + k, 1, dim, dim, out, ahead);
  }
}
#endif

// Keys of any type as float32; `count` is a multiple of 16, at most 64.
static void turn_keys(int dtype, const char* const* lines, int64_t count, int64_t dim, float* out,
                      Ahead& ahead) {
#if QUIRE_LEVEL == 1
  if (dim % 32 == 0) {
    if (dtype == kE4M3) return turn_words<kE4M3>(lines, count, dim, out, ahead);
    if (dtype == kE5M2) return turn_words<kE5M2>(lines, count, dim, out, ahead);
    if (dtype == kI8) return turn_words<kI8>(lines, count, dim, out, ahead);
  }
#endif
  switch (dtype) {
    case kBF16: return turn<Kept<kBF16>>(lines, count, dim, out, ahead);
    case kF16: return turn<Kept<kF16>>(lines, count, dim, out, ahead);
    case kE4M3: return turn<Kept<kE4M3>>(lines, count, dim, out, ahead);
    case kE5M2: return turn<Kept<kE5M2>>(lines, count, dim, out, ahead);
    case kI8: return turn<Kept<kI8>>(lines, count, dim, out, ahead);
    default: return turn<Kept<kF32>>(lines, count, dim, out, ahead);
  }
}

// Values of any type as float32 [count][width], zeros from `dim` on.
static void copy_values(int dtype, const char* const* lines, int64_t count, int64_t dim,
                        int64_t width, float* out, Ahead& ahead) {
#if QUIRE_LEVEL == 1
  if (dim % 32 == 0) {
    if (dtype == kE4M3) return widen_words<kE4M3>(lines, count, dim, out, ahead);
    if (dtype == kE5M2) return widen_words<kE5M2>(lines, count, dim, out, ahead);
    if (dtype == kI8) return widen_words<kI8>(lines, count, dim, out, ahead);
  }
#endif
  switch (dtype) {
    case kBF16: return widen<kBF16>(lines, count, dim, width, out, ahead);
    case kF16: return widen<kF16>(lines, count, dim, width, out, ahead);
    case kE4M3: return widen<kE4M3>(lines, count, dim, width, out, ahead);
    case kE5M2: return widen<kE5M2>(lines, count, dim, width, out, ahead);
    case kI8: return widen<kI8>(lines, count, dim, width, out, ahead);
    default: return widen<kF32>(lines, count, dim, width, out, ahead);
  }
}

#if QUIRE_LEVEL >= 2
QUIRE_INLINE __m512i bits_of(Vec v) { return _mm512_castps_si512(v.v); }

// Numbers that bf16 has, those of `low` before those of `high`.
QUIRE_INLINE __m512i as_bf16(Vec low, Vec high) {
#if QUIRE_LEVEL >= 3
  return (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v);
#else
  return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(bits_of(low), 16))),
                            _mm512_cvtepi32_epi16(_mm512_srli_epi32(bits_of(high), 16)), 1);
#endif
}
// Two neighbours of a line as one unit of 32 bits.
template <int D> struct Pairs {
  const char* line;
  // 32 numbers from number i on, `left` of them there; zeros after these.
  inline __attribute__((always_inline)) __m512i numbers(int64_t i, int64_t left) const {
    const Kept<D> kept{line};
    const Vec low = kept.load(i, left);
    const Vec high = left > kLanes ? kept.load(i + kLanes, left - kLanes) : zero();
    return as_bf16(low, high);
  }
  inline __attribute__((always_inline)) Vec load(int64_t unit, int64_t units) const {
    return {_mm512_castsi512_ps(numbers(2 * unit, 2 * units))};
  }
};
template <> struct Pairs<kBF16> {
  const char* line;
  inline __attribute__((always_inline)) __m512i numbers(int64_t i, int64_t left) const {
    const __mmask32 some = left < 32 ? (1u << left) - 1u : ~0u;
    return _mm512_maskz_loadu_epi16(some, reinterpret_cast<const bf16*>(line) + i);
  }
  inline __attribute__((always_inline)) Vec load(int64_t unit, int64_t units) const {
    return Kept<kF32>{line}.load(unit, units);
  }
};

// By whole numbers, in half the steps that the way through float32 takes: exponent and fraction move to
// their places and the bias grows by 120, but the eight smallest numbers, which bf16 has as normal
// ones, come from a table, and all ones is NaN.
template <> struct Pairs<kE4M3> {
  const char* line;
  inline __attribute__((always_inline)) __m512i numbers(int64_t i, int64_t left) const {
    alignas(64) static const uint16_t kSmallest[32] = {0x0000, 0x3b00, 0x3b80, 0x3bc0,
                                                       0x3c00, 0x3c20, 0x3c40, 0x3c60};
    const __mmask32 some = left < 32 ? (1u << left) - 1u : ~0u;
    const __m512i w = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(some, line + i));
    const __m512i size = _mm512_and_si512(w, _mm512_set1_epi16(0x7f));
    __m512i r = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(120 << 7));
    const __mmask32 small = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
    r = _mm512_mask_permutexvar_epi16(r, small, size, _mm512_load_si512(kSmallest));
    const __mmask32 nan = _mm512_cmpeq_epi16_mask(size, _mm512_set1_epi16(0x7f));
    r = _mm512_mask_mov_epi16(r, nan, _mm512_set1_epi16(0x7fc0));
    const __m512i sign = _mm512_set1_epi16(static_cast<short>(0x8000));
    return _mm512_ternarylogic_epi32(r, w, sign, 0xf8);  // r | (w & sign)
  }
  inline __attribute__((always_inline)) Vec load(int64_t unit, int64_t units) const {
    return {_mm512_castsi512_ps(numbers(2 * unit, 2 * units))};
  }
};

// Where bytes go that were turned by fours: of four dimensions of a position the first two, then the
// last two.
static __m512i order_of_fours() {
  alignas(64) uint8_t from[64];
  for (int i = 0; i < 64; ++i)
    from[ByteTable<kE4M3>::place(i)] = static_cast<uint8_t>(i % 32 / 2 * 4 + i / 32 * 2 + i % 2);
  return _mm512_load_si512(from);
}

// Numbers of two lines in turns.
alignas(64) static const uint16_t kInTurns[64] = {
    0,  32, 1,  33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
    8,  40, 9,  41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47,
    16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55,
    24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63};

#endif

#if QUIRE_LEVEL >= 3
// Keys of one byte by tables: bytes are turned by fours, then become numbers. The bits of `Pairs`.
template <int D>
static void turn_by_table(const char* const* lines, int64_t count, int64_t dim, float* out, Ahead& ahead) {
  const ByteTable<D> table;
  const __m512i order = order_of_fours();
  for (int64_t first = 0; first < count; first += kLanes) {
    for (int64_t unit = 0; unit < dim / 4; unit += kLanes) {
      const int64_t some = dim / 4 - unit < kLanes ? dim / 4 - unit : kLanes;
      Vec v[kLanes];
      QUIRE_EACH for (int i = 0; i < kLanes; ++i)
        v[i] = some == kLanes ? Memory<kF32>::load(lines[first + i], unit) : Memory<kF32>::load_n(lines[first + i], unit, some);
      ahead.pull(kLanes);
      transpose(v);
      float* to = out + 2 * unit * kTurned + first;
      const auto put = [&](int64_t i, Vec fours) {
        __m512i one, other;
        table.numbers(picked(_mm512_castps_si512(fours.v), order), one, other);
        _mm512_storeu_si512(to + 2 * i * kTurned, one);
        _mm512_storeu_si512(to + (2 * i + 1) * kTurned, other);
      };
      if (some == kLanes)
        QUIRE_EACH for (int i = 0; i < kLanes; ++i) put(i, v[i]);
      else
        for (int64_t i = 0; i < some; ++i) put(i, v[i]);
    }
  }
}

// Keys of bf16, or that become bf16, two dimensions as one unit of 32 bits.
static void turn_keys(int dtype, const char* const* lines, int64_t count, int64_t dim, bf16* out,
                      Ahead& ahead) {
  float* const to = reinterpret_cast<float*>(out);
  if (kLooksUpBytes && dim % 4 == 0) {
    if (dtype == kE4M3) return turn_by_table<kE4M3>(lines, count, dim, to, ahead);
    if (dtype == kE5M2) return turn_by_table<kE5M2>(lines, count, dim, to, ahead);
  }
  switch (dtype) {
    case kE4M3: return turn<Pairs<kE4M3>>(lines, count, dim / 2, to, ahead);
    case kE5M2: return turn<Pairs<kE5M2>>(lines, count, dim / 2, to, ahead);
    default: return turn<Pairs<kBF16>>(lines, count, dim / 2, to, ahead);
  }
}

template <int D>
static void pair_values(const char* const* lines, int64_t count, int64_t dim, int64_t width,
                        bf16* out, Ahead& ahead) {
  const __m512i low = _mm512_load_si512(kInTurns), high = _mm512_load_si512(kInTurns + 32);
  for (int64_t k = 0; k < count; k += 2) {
    const Pairs<D> a{lines[k]}, b{lines[k + 1]};
    bf16* to = out + k * width;
    for (int64_t i = 0; i < dim; i += 32) {
      ahead.pull(1);
      const __m512i x = a.numbers(i, dim - i), y = b.numbers(i, dim - i);
      _mm512_storeu_si512(to + 2 * i, _mm512_permutex2var_epi16(x, low, y));
      if (width - i >= 32)
        _mm512_storeu_si512(to + 2 * i + 32, _mm512_permutex2var_epi16(x, high, y));
    }
  }
}

// Values of one byte by tables; `dim` is a multiple of 64. The bits of `pair_values`.
template <int D>
static void pair_by_table(const char* const* lines, int64_t count, int64_t dim, bf16* out, Ahead& ahead) {
  const ByteTable<D> table;
  alignas(64) uint8_t from[2][64];
  for (int i = 0; i < 128; ++i)  // numbers of both lines in turns
    from[i / 64][ByteTable<D>::place(i % 64)] = static_cast<uint8_t>(i % 2 * 64 + i / 2);
  const __m512i order[2] = {_mm512_load_si512(from[0]), _mm512_load_si512(from[1])};
  for (int64_t k = 0; k < count; k += 2) {
    for (int64_t i = 0; i < dim; i += 64) {
      ahead.pull(2);
      const __m512i one = _mm512_loadu_si512(lines[k] + i), other = _mm512_loadu_si512(lines[k + 1] + i);
      bf16* to = out + k * dim + 2 * i;
      QUIRE_EACH for (int m = 0; m < 2; ++m) {
        __m512i first, second;
        table.numbers(picked(one, other, order[m]), first, second);
        _mm512_storeu_si512(to + 64 * m, first);
        _mm512_storeu_si512(to + 64 * m + 32, second);
      }
    }
  }
}

// Values of bf16, or that become bf16, as [count / 2][width][2].
static void copy_values(int dtype, const char* const* lines, int64_t count, int64_t dim,
                        int64_t width, bf16* out, Ahead& ahead) {
  if (kLooksUpBytes && dim % 64 == 0) {
    if (dtype == kE4M3) return pair_by_table<kE4M3>(lines, count, dim, out, ahead);
    if (dtype == kE5M2) return pair_by_table<kE5M2>(lines, count, dim, out, ahead);
  }
  switch (dtype) {
    case kE4M3: return pair_values<kE4M3>(lines, count, dim, width, out, ahead);
    case kE5M2: return pair_values<kE5M2>(lines, count, dim, width, out, ahead);
    default: return pair_values<kBF16>(lines, count, dim, width, out, ahead);
  }
}
#endif

}  // namespace QUIRE_ISA
}  // namespace quire
