// Attention of few rows, as one token of decoding has them, where products take pairs of bf16: keys
// and values become operands in registers and are multiplied at once. For X.isa.cpp only, level 3.
//
// Of many rows it pays to rearrange keys and values once, in memory, for all (turn.h); of few that
// takes longer than their products. The sums have the same order, so the bits are those of `multiply`
// with what `turn_keys` and `copy_values` make.
#pragma once
#include <utility>

#include "turn.h"

#if QUIRE_LEVEL >= 3
namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kFewRows = 8;

struct FewRows {
  const bf16* a;  // queries by dimension, or weights by position; rows `lda` apart
  int64_t lda;
  float* c;  // scores by position, or weighted values by dimension; rows `ldc` apart
  int64_t ldc;
  const char* const* lines;  // of keys, or of values, by position
  int64_t begin, end;        // positions; of keys 16 at a time, of values two
  int64_t dim;
  int pulls = 0;     // lines to fetch for each that is read
};

QUIRE_INLINE void fetch(Ahead& ahead, int pulls) {
  for (; pulls > 0; --pulls) ahead.pull();
}

// acc[row] += the pair at the row's `a` times 16 columns of pairs.
template <int R>
QUIRE_INLINE void add_pairs(Vec (&acc)[R], const bf16* a, int64_t lda, __m512i columns) {
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    int32_t pair;
    __builtin_memcpy(&pair, a + r * lda, sizeof pair);
    acc[r].v = _mm512_dpbf16_ps(acc[r].v, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)columns);
  }
}
QUIRE_INLINE __m512i bits_of(Vec v) { return _mm512_castps_si512(v.v); }

// Adds the products of 32 dimensions, or those that are left, of 16 keys.
template <int R, int D>
QUIRE_INLINE void add_keys(Vec (&acc)[R], const FewRows& p, const char* const* lines, int64_t d, Ahead& ahead) {
  const int64_t units = (p.dim - d) / 2, some = units < kLanes ? units : kLanes;
  Vec v[kLanes];
  QUIRE_EACH for (int i = 0; i < kLanes; ++i) v[i] = Pairs<D>{lines[i]}.load(d / 2, units);
  transpose(v);
  if (some < kLanes) {
    for (int64_t i = 0; i < some; ++i) add_pairs<R>(acc, p.a + d + 2 * i, p.lda, bits_of(v[i]));
    return;
  }
  QUIRE_EACH for (int i = 0; i < kLanes; ++i) {
    fetch(ahead, p.pulls);
    add_pairs<R>(acc, p.a + d + 2 * i, p.lda, bits_of(v[i]));
  }
}

// Where the dimensions are a multiple of what is turned at a time, turning the next keys stands between the
// products of the last ones: a core that comes to 64 shuffles only after 100 products does one after the other.

// 32 dimensions of a key, turned by twos.
template <int D> struct Twos {
  static constexpr int64_t kDims = 32;
  inline __attribute__((always_inline)) Vec load(const char* line, int64_t d) const { return Pairs<D>{line}.load(d / 2, kLanes); }
  template <int R>
  inline __attribute__((always_inline)) void multiply(Vec (&acc)[R], const FewRows& p, int64_t d, int i, const float* turned) const {
    add_pairs<R>(acc, p.a + d + 2 * i, p.lda, _mm512_load_si512(turned));
  }
};

// 64 dimensions of one byte each, turned by fours.
template <int D> struct Fours {
  static constexpr int64_t kDims = 64;
  ByteTable<D> table;
  __m512i order = order_of_fours();
  inline __attribute__((always_inline)) Vec load(const char* line, int64_t d) const { return Memory<kF32>::load(line + d, 0); }
  template <int R>
  inline __attribute__((always_inline)) void multiply(Vec (&acc)[R], const FewRows& p, int64_t d, int i, const float* turned) const {
    __m512i one, other;
    table.numbers(picked(_mm512_load_si512(turned), order), one, other);
    add_pairs<R>(acc, p.a + d + 4 * i, p.lda, one);
    add_pairs<R>(acc, p.a + d + 4 * i + 2, p.lda, other);
  }
};

// Part `part` of eight of turning 16 keys.
template <int part, class Kind>
QUIRE_INLINE void turn_part(const Kind& kind, const char* const* lines, int64_t d, Vec (&u)[kLanes], float* turned) {
  if constexpr (part < 4) {
    Vec v[4];
    QUIRE_EACH for (int i = 0; i < 4; ++i) v[i] = kind.load(lines[4 * part + i], d);
    turn_rows(v[0], v[1], v[2], v[3], u + 4 * part);
  } else {
    Vec out[4];
    turn_columns(u, part - 4, out);
    QUIRE_EACH for (int i = 0; i < 4; ++i) store(turned + (4 * i + part - 4) * kLanes, out[i]);
  }
}

template <int R, class Kind, int... part>
static void score_in_turns(const FewRows& p, const Kind& kind, Ahead& later, std::integer_sequence<int, part...>) {
  Ahead ahead = later;
  alignas(64) float memory[2][kLanes * kLanes];
  float *now = memory[0], *then = memory[1];
  Vec u[kLanes];
  (turn_part<part>(kind, p.lines + p.begin, 0, u, now), ...);
  for (int64_t first = p.begin; first < p.end; first += kLanes) {
    Vec acc[R];
    QUIRE_EACH for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int64_t d = 0; d < p.dim; d += Kind::kDims) {
      // What comes next; after the last keys these once more.
      const bool same = d + Kind::kDims < p.dim || first + kLanes >= p.end;
      const char* const* lines = p.lines + first + (same ? 0 : kLanes);
      const int64_t to = d + Kind::kDims < p.dim ? d + Kind::kDims : 0;
      const auto both = [&](auto which) __attribute__((always_inline)) {
        constexpr int i = 2 * decltype(which)::value;
        fetch(ahead, p.pulls);
        kind.multiply(acc, p, d, i, now + i * kLanes);
        turn_part<i / 2>(kind, lines, to, u, then);
        fetch(ahead, p.pulls);
        kind.multiply(acc, p, d, i + 1, now + (i + 1) * kLanes);
      };
      (both(std::integral_constant<int, part>{}), ...);
      float* const was = now;
      now = then;
      then = was;
    }
    QUIRE_EACH for (int r = 0; r < R; ++r) store(p.c + r * p.ldc + first, acc[r]);
  }
  later = ahead;
}

template <int R, int D> static void score_few(const FewRows& p, Ahead& later) {
  if (p.dim % Twos<D>::kDims == 0) return score_in_turns<R>(p, Twos<D>{}, later, std::make_integer_sequence<int, 8>{});
  Ahead ahead = later;
  for (int64_t first = p.begin; first < p.end; first += kLanes) {
    Vec acc[R];
    QUIRE_EACH for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int64_t d = 0; d < p.dim; d += 32) add_keys<R, D>(acc, p, p.lines + first, d, ahead);
    QUIRE_EACH for (int r = 0; r < R; ++r) store(p.c + r * p.ldc + first, acc[r]);
  }
  later = ahead;
}

template <int R, int D> static void score_few_by_table(const FewRows& p, Ahead& later) {
  score_in_turns<R>(p, Fours<D>{}, later, std::make_integer_sequence<int, 8>{});
}

// 32 numbers of each of two lines, or those that are left, as columns of pairs.
template <int D> struct TwoLines {
  static constexpr int kPulls = D == kBF16 ? 2 : 1;  // lines of memory that are read at a time
  __m512i low = _mm512_load_si512(kInTurns), high = _mm512_load_si512(kInTurns + 32);
  inline __attribute__((always_inline)) void read(const char* const* lines, int64_t i, int64_t left, __m512i& one,
                                                  __m512i& other) const {
    const __m512i x = Pairs<D>{lines[0]}.numbers(i, left);
    const __m512i y = Pairs<D>{lines[1]}.numbers(i, left);
    one = _mm512_permutex2var_epi16(x, low, y);
    other = _mm512_permutex2var_epi16(x, high, y);
  }
};

// The same by a table; 32 are left.
template <int D> struct TwoLinesByTable {
  static constexpr int kPulls = 1;
  ByteTable<D> table;
  __m512i order;
  TwoLinesByTable() {
    alignas(64) uint8_t from[64];
    for (int i = 0; i < 64; ++i) from[ByteTable<D>::place(i)] = static_cast<uint8_t>(i % 2 * 32 + i / 2);
    order = _mm512_load_si512(from);
  }
  inline __attribute__((always_inline)) void read(const char* const* lines, int64_t i, int64_t, __m512i& one,
                                                  __m512i& other) const {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines[0] + i));
    const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(lines[1] + i));
    table.numbers(picked(_mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1), order), one, other);
  }
};

template <int R, class Reader>
static void sum_few(const FewRows& p, const Reader& reader, Ahead& later) {
  Ahead ahead = later;
  for (int64_t i = 0; i < p.dim; i += 32) {
    Vec one[R], other[R];
    QUIRE_EACH for (int r = 0; r < R; ++r) one[r] = other[r] = zero();
    for (int64_t k = p.begin; k < p.end; k += 2) {
      QUIRE_EACH for (int n = 0; n < Reader::kPulls; ++n) fetch(ahead, p.pulls);
      __m512i x, y;
      reader.read(p.lines + k, i, p.dim - i, x, y);
      add_pairs<R>(one, p.a + k, p.lda, x);
      add_pairs<R>(other, p.a + k, p.lda, y);
    }
    QUIRE_EACH for (int r = 0; r < R; ++r) {
      store(p.c + r * p.ldc + i, one[r]);
      if (p.dim - i > kLanes) store(p.c + r * p.ldc + i + kLanes, other[r]);
    }
  }
  later = ahead;
}

template <int R> static void score_rows(int dtype, const FewRows& p, Ahead& ahead) {
  if (kLooksUpBytes && p.dim % 64 == 0) {
    if (dtype == kE4M3) return score_few_by_table<R, kE4M3>(p, ahead);
    if (dtype == kE5M2) return score_few_by_table<R, kE5M2>(p, ahead);
    if (dtype == kI8) return score_few_by_table<R, kI8>(p, ahead);
  }
  switch (dtype) {
    case kE4M3: return score_few<R, kE4M3>(p, ahead);
    case kE5M2: return score_few<R, kE5M2>(p, ahead);
    case kI8: return score_few<R, kI8>(p, ahead);
    default: return score_few<R, kBF16>(p, ahead);
  }
}

template <int R> static void sum_rows(int dtype, const FewRows& p, Ahead& ahead) {
  if (kLooksUpBytes && p.dim % 32 == 0) {
    if (dtype == kE4M3) return sum_few<R>(p, TwoLinesByTable<kE4M3>(), ahead);
    if (dtype == kE5M2) return sum_few<R>(p, TwoLinesByTable<kE5M2>(), ahead);
    if (dtype == kI8) return sum_few<R>(p, TwoLinesByTable<kI8>(), ahead);
  }
  switch (dtype) {
    case kE4M3: return sum_few<R>(p, TwoLines<kE4M3>{}, ahead);
    case kE5M2: return sum_few<R>(p, TwoLines<kE5M2>{}, ahead);
    case kI8: return sum_few<R>(p, TwoLines<kI8>{}, ahead);
    default: return sum_few<R>(p, TwoLines<kBF16>{}, ahead);
  }
}

using OfRows = void (*)(int dtype, const FewRows& p, Ahead& ahead);

// Scores of rows up to kFewRows.
static void score_few_rows(int64_t rows, int dtype, const FewRows& p, Ahead& ahead) {
  static constexpr OfRows kScore[kFewRows] = {score_rows<1>, score_rows<2>, score_rows<3>, score_rows<4>,
                                              score_rows<5>, score_rows<6>, score_rows<7>, score_rows<8>};
  kScore[rows - 1](dtype, p, ahead);
}

// Their weighted values.
static void sum_few_rows(int64_t rows, int dtype, const FewRows& p, Ahead& ahead) {
  static constexpr OfRows kSum[kFewRows] = {sum_rows<1>, sum_rows<2>, sum_rows<3>, sum_rows<4>,
                                            sum_rows<5>, sum_rows<6>, sum_rows<7>, sum_rows<8>};
  kSum[rows - 1](dtype, p, ahead);
}

}  // namespace QUIRE_ISA
}  // namespace quire
#endif
