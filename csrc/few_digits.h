// Attention of few rows over codes of one byte: digits.h, with columns made in registers as few_rows.h makes them.
// For X.isa.cpp only, where QUIRE_LONG_DOTS.
#pragma once
#include "digits.h"
#include "few_rows.h"

#ifdef QUIRE_LONG_DOTS
namespace quire {
namespace QUIRE_ISA {

template <class Byte> struct FewBytes : Few<Byte> {
  int64_t on;   // bytes from `next` to what is fetched
  bool starts;  // and where `next` starts, too
};
// Factors of keys are read with the keys, whose lines are in the nearest cache then.
struct FewKeys : FewBytes<int8_t> {
  const int32_t* shifts;  // of rows
  float* factors;         // of keys, by position
};
// Weights take factors of values before values are read. So those of the next unit are read beside the products of these: there is
// time for it, and a core that reads them by themselves waits for its second-level cache.
struct FewValues : FewBytes<uint8_t> {
  const char* const* later;  // values of the next unit, by position
  int64_t tail;              // bytes from a line to its factor
  float* factors;            // of those values, by position
};

// Where 64 bytes of a row end, with the factor behind them, which is read first. What stands before that was fetched as the end
// of another head or position, but not where a block begins: that is what `starts` is for.
template <class Byte> QUIRE_INLINE void fetch_codes(const FewBytes<Byte>& p, const char* row, int64_t i) {
  fetch(row + p.on + (i + 64 < p.dim ? i + 64 : p.dim) + kFactorBytes - 1);
  if (p.starts) fetch(row + i);
}

// Of N lines.
template <int N> QUIRE_INLINE void copy_factors(const char* const* lines, int64_t tail, float* to) {
  QUIRE_EACH for (int i = 0; i < N; ++i) copy_factor(lines[i] + tail, to + i);
}

// acc[row] += four codes at the row's `a` times 16 columns of fours.
template <int R, int64_t stride>
QUIRE_INLINE void add_queries(Vec (&acc)[R], const int8_t* a, __m512i columns) {
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    struct Four { int8_t digits[4]; };
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc[r].v) : "v"(columns), "m"(*reinterpret_cast<const Four*>(a + r * stride)));
  }
}

// Scores of R rows with 16 keys, but for the rows' own factors.
template <int R> QUIRE_INLINE void start_sums(const FewKeys& p, Vec (&acc)[R]) {
  QUIRE_EACH for (int r = 0; r < R; ++r) acc[r].v = _mm512_castsi512_ps(_mm512_set1_epi32(-p.shifts[r]));
}
template <int R> QUIRE_INLINE void store_scores(const FewKeys& p, const Vec (&acc)[R], int64_t first) {
  const Vec factors = load(p.factors + first);
  QUIRE_EACH for (int r = 0; r < R; ++r)
    store(p.c + r * p.ldc + first, mul({_mm512_cvtepi32_ps(bits_of(acc[r]))}, factors));
}

// Of keys of whole vectors. The first half of turning the next ones stands between the products of the last ones, the second half
// after them: all of it in registers, because on Zen 4 a store takes as much time as two products.
template <int R> static void score_vectors(const FewKeys& of) {
  const FewKeys p = of;  // no store can change this one
  const char* const* lines = p.lines + p.begin;
  Vec u[kLanes], v[kLanes];
  QUIRE_EACH for (int i = 0; i < kLanes; ++i) v[i] = Shifted{lines[i]}.load(0, kLanes);
  transpose(v);
  copy_factors<kLanes>(lines, p.dim, p.factors + p.begin);
  for (int64_t first = p.begin; first < p.end; first += kLanes, lines += kLanes) {
    Vec acc[R];
    start_sums(p, acc);
    for (int64_t d = 0; d < p.dim; d += 64) {
      // What comes next; after the last keys these once more.
      const int64_t on = first + kLanes < p.end ? kLanes : 0, to = d + 64 < p.dim ? d + 64 : 0;
      const char *const *const after = to > 0 ? lines : lines + on, *const *const next = p.next + first;
      QUIRE_EACH for (int j = 0; j < 4; ++j) {
        QUIRE_EACH for (int i = 4 * j; i < 4 * j + 4; ++i) {
          fetch_codes(p, next[i], d);
          add_queries<R, kQueryStride>(acc, p.a + d + 4 * i, bits_of(v[i]));
        }
        Vec rows[4];
        QUIRE_EACH for (int i = 0; i < 4; ++i) rows[i] = Shifted{after[4 * j + i] + to}.load(0, kLanes);
        if (to == 0 && on > 0) copy_factors<4>(after + 4 * j, p.dim, p.factors + first + on + 4 * j);
        turn_rows(rows[0], rows[1], rows[2], rows[3], u + 4 * j);
      }
      QUIRE_EACH for (int j = 0; j < 4; ++j) {
        Vec out[4];
        turn_columns(u, j, out);
        QUIRE_EACH for (int i = 0; i < 4; ++i) v[4 * i + j] = out[i];
      }
    }
    store_scores(p, acc, first);
  }
}

template <int R> static void score_codes(const FewKeys& p) {
  if (p.dim % 64 == 0) return score_vectors<R>(p);
  const int64_t units = (p.dim + 3) / 4;
  for (int64_t first = p.begin; first < p.end; first += kLanes) {
    Vec acc[R];
    start_sums(p, acc);
    for (int64_t unit = 0; unit < units; unit += kLanes) {
      const int64_t left = units - unit < kLanes ? units - unit : kLanes;
      for (int64_t i = 0; i < kLanes; ++i) fetch_codes(p, p.next[first + i], 4 * unit);
      Vec v[kLanes];
      QUIRE_EACH for (int i = 0; i < kLanes; ++i) v[i] = Shifted{p.lines[first + i]}.load(unit, left);
      transpose(v);
      for (int64_t i = 0; i < left; ++i) add_queries<R, kQueryStride>(acc, p.a + 4 * (unit + i), bits_of(v[i]));
    }
    copy_factors<kLanes>(p.lines + first, p.dim, p.factors + first);
    store_scores(p, acc, first);
  }
}

// Four vectors of fours are 64 dimensions of four positions; a pass makes as many as there are registers for sums.
// Of vector `j`, 128 bits number L hold dimensions 16 L + 4 j to 16 L + 4 j + 3.
template <int V> QUIRE_INLINE void read_fours(const char* const* lines, int64_t i, int64_t left, int first, __m512i (&out)[V]) {
  const auto line = [&](int k) __attribute__((always_inline)) {
    if (left >= 64) return _mm512_loadu_si512(lines[k] + i);  // a constant where it can be: few_rows.h
    return _mm512_maskz_loadu_epi8((uint64_t{1} << left) - 1, lines[k] + i);
  };
  const __m512i a = line(0), b = line(1), c = line(2), d = line(3);
  const auto fours = [&](__m512i one, __m512i other, int at) __attribute__((always_inline)) {
    if (at >= first && at < first + V) out[at - first] = _mm512_unpacklo_epi16(one, other);
    if (at + 1 >= first && at + 1 < first + V)
      out[at + 1 - first] = _mm512_unpackhi_epi16(one, other);
  };
  if (first < 2) fours(_mm512_unpacklo_epi8(a, b), _mm512_unpacklo_epi8(c, d), 0);
  if (first + V > 2) fours(_mm512_unpackhi_epi8(a, b), _mm512_unpackhi_epi8(c, d), 2);
}

// Stores vectors of sums, as `read_fours` has their columns, where they belong: by fours, 16 apart, `lanes` of them. It is a
// function of its own because compilers, seeing it among the products, did not keep the sums in registers.
static __attribute__((noinline)) void spread(const float* sums, float* to, int64_t lanes) {
  for (int j = 0; j < 4; ++j)
    for (int64_t lane = 0; lane < lanes && lane < 4; ++lane)
      __builtin_memcpy(to + 16 * lane + 4 * j, sums + kLanes * j + 4 * lane, 4 * sizeof(float));
}

template <int R> using Sums = float[R][4][kLanes];

// Adds vectors first .. first + V of the dimensions from i on, `left` of them, of positions k .. end.
template <int R, int V, int first>
QUIRE_INLINE void sum_vectors(const FewValues& of, int64_t k, int64_t end, int64_t i, int64_t left, Sums<R>& sums) {
  const FewValues p = of;  // no store can change this one
  Vec acc[R][V];
  QUIRE_EACH for (int r = 0; r < R; ++r)
    QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j] = k == p.begin ? zero() : load(sums[r][first + j]);
  for (; k < end; k += 4) {
    QUIRE_EACH for (int one = first; one < first + V; ++one) fetch_codes(p, p.next[k + one], i);  // each pass its share
    if (first == 0 && i == 0) copy_factors<4>(p.later + k, p.tail, p.factors + k);
    __m512i columns[V];
    read_fours<V>(p.lines + k, i, left, first, columns);
    QUIRE_EACH for (int r = 0; r < R; ++r) {
      int32_t four;
      __builtin_memcpy(&four, p.a + k + r * kSegment, sizeof four);
      QUIRE_EACH for (int j = 0; j < V; ++j)
        acc[r][j].v = _mm512_castsi512_ps(add_fours(bits_of(acc[r][j]), columns[j], four, p.a));
    }
  }
  QUIRE_EACH for (int r = 0; r < R; ++r)
    QUIRE_EACH for (int j = 0; j < V; ++j) store(sums[r][first + j], acc[r][j]);
}

// Several passes take so many positions in turns that the later ones find them in the nearest cache.
template <int R, int V, int... pass>
QUIRE_INLINE void sum_passes(const FewValues& p, int64_t i, int64_t left, std::integer_sequence<int, pass...>) {
  constexpr int64_t kTurn = V < 4 ? 64 : kSegment;
  alignas(64) Sums<R> sums;
  for (int64_t k = p.begin; k < p.end; k += kTurn)
    (sum_vectors<R, V, V * pass>(p, k, k + kTurn < p.end ? k + kTurn : p.end, i, left, sums), ...);
  for (int r = 0; r < R; ++r) spread(sums[r][0], p.c + r * p.ldc + i, (left + 15) / 16);
}

template <int R> static void sum_digits(const FewValues& p) {
  // 7 rows of 4 take one register more than there are. To keep a sum in memory takes less time than to read all twice.
  constexpr int V = R <= 7 ? 4 : R <= 14 ? 2 : 1;
  int64_t i = 0;
  for (; i + 64 <= p.dim; i += 64) sum_passes<R, V>(p, i, 64, std::make_integer_sequence<int, 4 / V>{});
  if (i < p.dim) sum_passes<R, V>(p, i, p.dim - i, std::make_integer_sequence<int, 4 / V>{});
}

// Rows up to kFewRows, and of digits twice as many.
static void score_few_rows(int64_t rows, const FewKeys& p) {
  static constexpr void (*kScore[kFewRows])(const FewKeys&) = {
      score_codes<1>, score_codes<2>, score_codes<3>, score_codes<4>,
      score_codes<5>, score_codes<6>, score_codes<7>, score_codes<8>};
  kScore[rows - 1](p);
}
static void sum_few_rows(int64_t rows, const FewValues& p) {
  static constexpr void (*kSum[2 * kFewRows])(const FewValues&) = {
      sum_digits<1>, sum_digits<2>, sum_digits<3>, sum_digits<4>, sum_digits<5>, sum_digits<6>, sum_digits<7>, sum_digits<8>,
      sum_digits<9>, sum_digits<10>, sum_digits<11>, sum_digits<12>, sum_digits<13>, sum_digits<14>, sum_digits<15>,
      sum_digits<16>};
  kSum[rows - 1](p);
}

}  // namespace QUIRE_ISA
}  // namespace quire
#endif
