// Attention of few rows, as one token of decoding has them, over keys and values of bf16 or of fp8: they become operands in
// registers and are multiplied at once. For X.isa.cpp only, levels 2 and 3.
//
// Of many rows it pays to rearrange keys and values once, in memory, for all (turn.h); of few that
// takes longer than their products. The sums have the same order, so the bits are those of `multiply`
// with what `turn_keys` and `copy_values` make.
#pragma once
#include <utility>

#include "turn.h"

#if QUIRE_LEVEL >= 2
namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kFewRows = 8;
// Elements from one row of queries to the next. It is a constant because an offset that stands in an instruction
// takes no other ones. Wider heads go the way of many rows.
constexpr int64_t kQueryStride = 608;

template <class T> struct Few {
  const T* a;  // queries by dimension, kQueryStride apart, or weights by position, kSegment apart
  float* c;    // scores by position, or weighted values by dimension; rows `ldc` apart
  int64_t ldc;
  const char* const* lines;  // of keys, or of values, by position
  int64_t begin, end;        // positions; of keys 16 at a time, of values two
  int64_t dim;
  const char* const* next;   // fetched meanwhile, by position
};
using FewRows = Few<PairRow>;

QUIRE_INLINE void fetch(const char* line) { __builtin_prefetch(line, 0, 2); }

// acc[row] += the pair at the row's `a` times 16 columns of pairs.
template <int R, int64_t stride>
QUIRE_INLINE void add_pairs(Vec (&acc)[R], const PairRow* a, __m512i columns) {
#if QUIRE_LEVEL >= 3
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    int32_t pair;
    __builtin_memcpy(&pair, a + r * stride, sizeof pair);
    acc[r].v = _mm512_dpbf16_ps(acc[r].v, (__m512bh)_mm512_set1_epi32(pair), (__m512bh)columns);
  }
#else
  QUIRE_EACH for (int k = 0; k < 2; ++k) {
    const Vec column = one_of(columns, k);
    QUIRE_EACH for (int r = 0; r < R; ++r) acc[r] = fma(splat(a[r * stride + k]), column, acc[r]);
  }
#endif
}

// Adds the products of 32 dimensions, or those that are left, of 16 keys.
template <int R, int D>
QUIRE_INLINE void add_keys(Vec (&acc)[R], const FewRows& p, const char* const* lines, int64_t d) {
  const int64_t units = (p.dim - d) / 2, some = units < kLanes ? units : kLanes;
  Vec v[kLanes];
  QUIRE_EACH for (int i = 0; i < kLanes; ++i) v[i] = Pairs<D>{lines[i]}.load(d / 2, units);
  transpose(v);
  if (some < kLanes) {
    for (int64_t i = 0; i < some; ++i) add_pairs<R, kQueryStride>(acc, p.a + d + 2 * i, bits_of(v[i]));
    return;
  }
  QUIRE_EACH for (int i = 0; i < kLanes; ++i) add_pairs<R, kQueryStride>(acc, p.a + d + 2 * i, bits_of(v[i]));
}

// Where the dimensions are a multiple of what is turned at a time, turning the next keys stands between the
// products of the last ones: a core that comes to 64 shuffles only after 100 products does one after the other.

// 32 dimensions of a key, turned by twos.
template <int D> struct Twos {
  static constexpr int64_t kDims = 32, kBytes = D == kBF16 ? 2 : 1;  // of a dimension
  inline __attribute__((always_inline)) Vec load(const char* line, int64_t d) const { return Pairs<D>{line}.load(d / 2, kLanes); }
  struct Columns {
    __m512i pairs;
  };
  inline __attribute__((always_inline)) Columns columns(const float* turned) const { return {_mm512_load_si512(turned)}; }
  template <int R>
  inline __attribute__((always_inline)) void multiply(Vec (&acc)[R], const PairRow* a, int i, const Columns& c) const {
    add_pairs<R, kQueryStride>(acc, a + 2 * i, c.pairs);
  }
};

// 64 dimensions of one byte each, turned by fours.
template <int D> struct Fours {
  static constexpr int64_t kDims = 64, kBytes = 1;
  ByteTable<D> table;
  __m512i order = order_of_fours();
  inline __attribute__((always_inline)) Vec load(const char* line, int64_t d) const { return Memory<kF32>::load(line + d, 0); }
  struct Columns {
    __m512i one, other;
  };
  inline __attribute__((always_inline)) Columns columns(const float* turned) const {
    Columns c;
    table.numbers(picked(_mm512_load_si512(turned), order), c.one, c.other);
    return c;
  }
  template <int R>
  inline __attribute__((always_inline)) void multiply(Vec (&acc)[R], const PairRow* a, int i, const Columns& c) const {
    add_pairs<R, kQueryStride>(acc, a + 4 * i, c.one);
    add_pairs<R, kQueryStride>(acc, a + 4 * i + 2, c.other);
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
static void score_in_turns(const FewRows& p, const Kind& kind, std::integer_sequence<int, part...>) {
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
      auto columns = kind.columns(now);  // of a step before the one in work: to look numbers up takes a while
      const auto both = [&](auto which) __attribute__((always_inline)) {
        constexpr int i = 2 * decltype(which)::value;
        fetch(p.next[first + i] + d * Kind::kBytes);
        const auto second = kind.columns(now + (i + 1) * kLanes);
        kind.multiply(acc, p.a + d, i, columns);
        turn_part<i / 2>(kind, lines, to, u, then);
        fetch(p.next[first + i + 1] + d * Kind::kBytes);
        if constexpr (i + 2 < kLanes) columns = kind.columns(now + (i + 2) * kLanes);
        kind.multiply(acc, p.a + d, i + 1, second);
      };
      (both(std::integral_constant<int, part>{}), ...);
      float* const was = now;
      now = then;
      then = was;
    }
    QUIRE_EACH for (int r = 0; r < R; ++r) store(p.c + r * p.ldc + first, acc[r]);
  }
}

template <int R, int D> static void score_few(const FewRows& p) {
  if (p.dim % Twos<D>::kDims == 0) return score_in_turns<R>(p, Twos<D>{}, std::make_integer_sequence<int, 8>{});
  for (int64_t first = p.begin; first < p.end; first += kLanes) {
    Vec acc[R];
    QUIRE_EACH for (int r = 0; r < R; ++r) acc[r] = zero();
    for (int64_t d = 0; d < p.dim; d += 32) {
      for (int64_t i = 0; i < kLanes; ++i) fetch(p.next[first + i] + d * Twos<D>::kBytes);
      add_keys<R, D>(acc, p, p.lines + first, d);
    }
    QUIRE_EACH for (int r = 0; r < R; ++r) store(p.c + r * p.ldc + first, acc[r]);
  }
}

template <int R, int D> static void score_few_by_table(const FewRows& p) {
  score_in_turns<R>(p, Fours<D>{}, std::make_integer_sequence<int, 8>{});
}

// 32 numbers of each of two lines, or those that are left, as columns of pairs.
template <int D> struct TwoLines {
  static constexpr int64_t kBytes = D == kBF16 ? 2 : 1;  // of a dimension
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
  static constexpr int64_t kBytes = 1;
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

// `left` dimensions from i on, at most 32.
template <int R, class Reader>
QUIRE_INLINE void sum_dimensions(const FewRows& p, const Reader& reader, int64_t i, int64_t left) {
  Vec one[R], other[R];
  QUIRE_EACH for (int r = 0; r < R; ++r) one[r] = other[r] = zero();
  // Of one byte each, 64 dimensions are a line: every second 32 the lines of every second position.
  const int64_t line = i * Reader::kBytes / 64 * 64, from = Reader::kBytes == 1 ? i / 32 % 2 : 0;
  for (int64_t k = p.begin; k < p.end; k += 2) {
    fetch(p.next[k + from] + line);
    if (Reader::kBytes > 1) fetch(p.next[k + 1] + line);
    __m512i x, y;
    reader.read(p.lines + k, i, left, x, y);
    add_pairs<R, kSegment>(one, p.a + k, x);
    add_pairs<R, kSegment>(other, p.a + k, y);
  }
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    store(p.c + r * p.ldc + i, one[r]);
    if (left > kLanes) store(p.c + r * p.ldc + i + kLanes, other[r]);
  }
}

template <int R, class Reader>
static void sum_few(const FewRows& p, const Reader& reader) {
  // A constant where it can be: masks would take a part of the time.
  int64_t i = 0;
  for (; i + 32 <= p.dim; i += 32) sum_dimensions<R>(p, reader, i, 32);
  if (i < p.dim) sum_dimensions<R>(p, reader, i, p.dim - i);
}

template <int R> static void score_rows(int dtype, const FewRows& p) {
  if (kLooksUpBytes && p.dim % 64 == 0) {
    if (dtype == kE4M3) return score_few_by_table<R, kE4M3>(p);
    if (dtype == kE5M2) return score_few_by_table<R, kE5M2>(p);
  }
  switch (dtype) {
    case kE4M3: return score_few<R, kE4M3>(p);
    case kE5M2: return score_few<R, kE5M2>(p);
    default: return score_few<R, kBF16>(p);
  }
}

template <int R> static void sum_rows(int dtype, const FewRows& p) {
  if (kLooksUpBytes && p.dim % 32 == 0) {
    if (dtype == kE4M3) return sum_few<R>(p, TwoLinesByTable<kE4M3>());
    if (dtype == kE5M2) return sum_few<R>(p, TwoLinesByTable<kE5M2>());
  }
  switch (dtype) {
    case kE4M3: return sum_few<R>(p, TwoLines<kE4M3>{});
    case kE5M2: return sum_few<R>(p, TwoLines<kE5M2>{});
    default: return sum_few<R>(p, TwoLines<kBF16>{});
  }
}

#ifndef QUIRE_AMX  // few_tiles.h has its own
using OfRows = void (*)(int dtype, const FewRows& p);

// Scores of rows up to kFewRows.
static void score_few_rows(int64_t rows, int dtype, const FewRows& p) {
  static constexpr OfRows kScore[kFewRows] = {score_rows<1>, score_rows<2>, score_rows<3>, score_rows<4>,
                                              score_rows<5>, score_rows<6>, score_rows<7>, score_rows<8>};
  kScore[rows - 1](dtype, p);
}

// Their weighted values.
static void sum_few_rows(int64_t rows, int dtype, const FewRows& p) {
  static constexpr OfRows kSum[kFewRows] = {sum_rows<1>, sum_rows<2>, sum_rows<3>, sum_rows<4>,
                                            sum_rows<5>, sum_rows<6>, sum_rows<7>, sum_rows<8>};
  kSum[rows - 1](dtype, p);
}
#endif

}  // namespace QUIRE_ISA
}  // namespace quire
#endif
