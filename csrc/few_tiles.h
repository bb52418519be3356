// Attention of few rows over keys and values of one byte, on tile registers (AMX). For X.isa.cpp only.
//
// Keys are the rows of a product and queries its columns, so that keys are multiplied in the order in which they
// stand. Scores are turned instead, which are fewer. Values become columns of pairs 32 positions at a time, which the
// first-level cache holds until they are multiplied. Steps are those of `multiply` (product.h), filled up with zeros
// where it has a shorter one, so the bits are the same.
#pragma once
#include "few_rows.h"

#ifdef QUIRE_AMX
namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kFewTileRows = kTileRegisterRows;

// Which types come here. Of bf16, turned keys in memory are as fast, and fetching goes on in all parts of the work.
static inline bool in_few_tiles(int dtype) { return dtype == kE4M3 || dtype == kE5M2; }

constexpr int64_t kStepNumbers = kStepBytes / 2, kColumnStep = kTileRegisterRows * kStepBytes;

// Dimensions of a head in whole steps.
static inline int64_t whole_steps(int64_t dim) { return (dim + kStepNumbers - 1) / kStepNumbers * kStepNumbers; }

// Queries as columns [dim / 2][16][2], zeros after the last: `row(i)` points to one.
template <class Row> static void queries_as_columns(int64_t rows, int64_t dim, const Row& row, bf16* out) {
  for (int64_t d = 0; d < dim; d += kStepNumbers) {
    Vec v[kLanes];
    for (int64_t i = 0; i < kLanes; ++i)
      v[i] = i < rows ? Pairs<kBF16>{reinterpret_cast<const char*>(row(i))}.load(d / 2, (dim - d) / 2) : zero();
    transpose(v);
    float* const to = reinterpret_cast<float*>(out + d * kLanes);
    for (int64_t i = 0; i < kLanes; ++i) store(to + i * kLanes, v[i]);
  }
}

// A key as numbers, zeros up to a whole step.
template <int D> struct OneLine {
  inline __attribute__((always_inline)) void copy(const char* line, int64_t dim, bf16* to) const {
    const Pairs<D> numbers{line};
    int64_t d = 0;
    for (; d + 32 <= dim; d += 32) _mm512_storeu_si512(to + d, numbers.numbers(d, 32));
    if (d < dim) _mm512_storeu_si512(to + d, numbers.numbers(d, dim - d));
  }
};

// The same by a table; `dim` is a multiple of 64.
template <int D> struct OneLineByTable {
  ByteTable<D> table;
  __m512i order;
  OneLineByTable() {
    alignas(64) uint8_t from[64];
    for (int i = 0; i < 64; ++i) from[ByteTable<D>::place(i)] = static_cast<uint8_t>(i);
    order = _mm512_load_si512(from);
  }
  inline __attribute__((always_inline)) void copy(const char* line, int64_t dim, bf16* to) const {
    for (int64_t d = 0; d < dim; d += 64) {
      __m512i one, other;
      table.numbers(picked(_mm512_loadu_si512(line + d), order), one, other);
      _mm512_storeu_si512(to + d, one);
      _mm512_storeu_si512(to + d + 32, other);
    }
  }
};

// Scores [16 keys][16 rows] of up to 8 or 16 rows, by key.
static void turn_scores(const float* from, int64_t rows, float* to, int64_t ldc) {
  Vec v[kLanes];
  if (rows > 8) {
    QUIRE_EACH for (int i = 0; i < kLanes; ++i) v[i] = load(from + i * kLanes);
    transpose(v);
  } else {
    Vec half[8], u[8];
    QUIRE_EACH for (int i = 0; i < 8; ++i) {
      const float* const low = from + (i < 4 ? i : 4 + i) * kLanes;
      half[i].v = _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(_mm512_castps256_ps512(_mm256_loadu_ps(low))),
                                                      _mm256_castps_pd(_mm256_loadu_ps(low + 4 * kLanes)), 1));
    }
    QUIRE_EACH for (int i = 0; i < 8; i += 4) turn_rows(half[i], half[i + 1], half[i + 2], half[i + 3], u + i);
    QUIRE_EACH for (int j = 0; j < 4; ++j) {
      v[j].v = _mm512_shuffle_f32x4(u[j].v, u[4 + j].v, 0x88);
      v[4 + j].v = _mm512_shuffle_f32x4(u[j].v, u[4 + j].v, 0xdd);
    }
  }
  for (int64_t r = 0; r < rows; ++r) store(to + r * ldc, v[r]);
}

// What few rows need besides: `room` for keys [kSpan][whole_steps(dim)].
struct OnFewTiles {
  int64_t rows;
  TileShape& shape;
  bf16* room;
};

template <class Reader> static void score_on_tiles(const FewRows& p, const OnFewTiles& with, const Reader& reader) {
  const int64_t width = whole_steps(p.dim), steps = width / kStepNumbers;
  alignas(64) float by_key[kSpan * kLanes];
  with.shape.set(kTileRegisterRows, 0);
  for (int64_t first = p.begin; first < p.end; first += kSpan) {
    const int64_t count = p.end - first < kSpan ? p.end - first : kSpan;
    for (int64_t k = 0; k < count; ++k) {
      for (int64_t at = 0; at < p.dim; at += 64) fetch(p.next[first + k] + at);
      reader.copy(p.lines[first + k], p.dim, with.room + k * width);
    }
    multiply_four<kNumbers>({with.room, width * 2}, kLanes * width * 2, {p.a, kStepBytes, kColumnStep}, 0, steps, false,
                            count / kLanes, by_key);
    for (int64_t k = 0; k < count; k += kLanes) turn_scores(by_key + k * kLanes, with.rows, p.c + first + k, p.ldc);
  }
}

// 64 dimensions from i on of 32 positions from k on, as columns of pairs, four times 16 dimensions.
template <class Reader>
QUIRE_INLINE void values_as_columns(const FewRows& p, const Reader& reader, int64_t k, int64_t i, __m512i (&out)[4][kLanes]) {
  const __m512i none = _mm512_setzero_si512();
  for (int64_t pair = 0; pair < kLanes; ++pair, k += 2) {
    __m512i v[4] = {none, none, none, none};
    if (k < p.end) {
      fetch(p.next[k] + i);
      fetch(p.next[k + 1] + i);
      reader.read(p.lines + k, i, p.dim - i, v[0], v[1]);
      if (p.dim - i > 32) reader.read(p.lines + k, i + 32, p.dim - i - 32, v[2], v[3]);
    }
    QUIRE_EACH for (int j = 0; j < 4; ++j) out[j][pair] = v[j];
  }
}

template <class Reader> static void sum_on_tiles(const FewRows& p, const OnFewTiles& with, const Reader& reader) {
  alignas(64) __m512i columns[4][kLanes];
  with.shape.set(with.rows, 0);
  for (int64_t i = 0; i < p.dim; i += 64) {
    const int64_t tiles = (p.ldc - i) / kLanes;  // 4, or fewer at the end
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
    for (int64_t k = p.begin; k < p.end; k += kStepNumbers) {
      values_as_columns(p, reader, k, i, columns);
      load_tile<kRowTile>(p.a + k, kSegment * 2);
      load_tile<kColumnTile>(columns[0], kStepBytes);
      multiply_tile<kNumbers, 0, kRowTile, kColumnTile>();
      load_tile<kColumnTile>(columns[1], kStepBytes);
      multiply_tile<kNumbers, 1, kRowTile, kColumnTile>();
      load_tile<kColumnTile>(columns[2], kStepBytes);
      multiply_tile<kNumbers, 2, kRowTile, kColumnTile>();
      load_tile<kColumnTile>(columns[3], kStepBytes);
      multiply_tile<kNumbers, 3, kRowTile, kColumnTile>();
    }
    store_tile<0>(p.c + i, p.ldc * 4);
    if (tiles > 1) store_tile<1>(p.c + i + 16, p.ldc * 4);
    if (tiles > 2) store_tile<2>(p.c + i + 32, p.ldc * 4);
    if (tiles > 3) store_tile<3>(p.c + i + 48, p.ldc * 4);
  }
}

template <int D> static void score_few_rows(const OnFewTiles& with, const FewRows& p) {
  if (kLooksUpBytes && p.dim % 64 == 0) score_on_tiles(p, with, OneLineByTable<D>());
  else score_on_tiles(p, with, OneLine<D>());
}
static void score_few_rows(const OnFewTiles& with, int dtype, const FewRows& p) {
  dtype == kE4M3 ? score_few_rows<kE4M3>(with, p) : score_few_rows<kE5M2>(with, p);
}

template <int D> static void sum_few_rows(const OnFewTiles& with, const FewRows& p) {
  if (kLooksUpBytes && p.dim % 32 == 0) sum_on_tiles(p, with, TwoLinesByTable<D>());
  else sum_on_tiles(p, with, TwoLines<D>{});
}
static void sum_few_rows(const OnFewTiles& with, int dtype, const FewRows& p) {
  dtype == kE4M3 ? sum_few_rows<kE4M3>(with, p) : sum_few_rows<kE5M2>(with, p);
}

}  // namespace QUIRE_ISA
}  // namespace quire
#endif
