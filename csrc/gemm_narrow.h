// Passes of rows by narrow weights, whose numbers are made in registers (narrow_units.h). For gemm.isa.cpp only.
#pragma once
#include "gemm_numbers.h"
#include "narrow_units.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// Rows that pass by all columns at a time, at most; more do by half of them. With 6 rows of 8-bit floats, whole columns
// left no registers for what makes the numbers (docs/cpu-kernels.md).
constexpr int kWholeUnits = QUIRE_LEVEL >= 2 && !kTiles ? 5 : 6;

#if QUIRE_LEVEL >= 2
template <int R, class S>
QUIRE_INLINE void multiply_unit(const S& source, const char* unit, const PairRow* x, int64_t stride, bool, Vec (&acc)[R][4]) {
  __m512i numbers[4];
  make_unit(source, unit, numbers);
  multiply_step<R>(x, stride, numbers, acc);
}
#elif QUIRE_LEVEL == 1
template <class S> QUIRE_INLINE Vec whole_number(Vec numbers, bool grown) {
  return S::kTimes == 1.0f || grown ? numbers : mul(numbers, splat(S::kTimes));
}

template <int R, class S>
QUIRE_INLINE void multiply_unit(const S& source, const char* unit, const float* x, int64_t, bool grown, Vec (&acc)[R][8]) {
  const Vec by[2] = {splat(x[0]), splat(x[1])};
  source.numbers(unit, [&](int k, int j, Vec numbers) __attribute__((always_inline)) {
    acc[0][j] = fma(by[k], whole_number<S>(numbers, grown), acc[0][j]);
  });
}
#endif

#if QUIRE_LEVEL >= 1
// Of so many bytes of a weight, those that one half of the columns fetches while it passes by as many.
QUIRE_INLINE int64_t half_of(const Block& b, int64_t bytes) { return bytes * b.lines / b.all_lines / 2; }

// Group by group, anew for each pass: that takes less time than reading them from a near cache, unless rows
// are many.
template <int R, class S> void tile_units(S source, const Block& b, int64_t row, float* sums, int64_t pass) {
  using T = typename S::Row;
  constexpr int V = kTile / kLanes;
  const Linear& layer = *b.work.args.layer;
  const T* x = static_cast<const T*>(b.work.x) + row * b.work.stride;
  const int64_t stride = b.work.stride, group = layer.coded.group, size = group_bytes(layer), head = group_head(layer);
  const int64_t bytes = unit_bytes(layer);
  // One pass fetches what it reads itself a little later; each of several its part of the next block.
  const bool alone = b.lines == 0;
  const int64_t ahead = alone ? bytes : 2 * half_of(b, bytes);
  const char* next = b.next + 2 * pass * half_of(b, offset_of(layer, b.k1) - offset_of(layer, b.k0));
  Block part = b;
  Vec acc[R][V];
  QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j] = zero();
  for (int64_t k = b.k0, end; k < b.k1; k = end) {
    const int64_t first = k / group * group;
    end = first + group < b.k1 ? first + group : b.k1;
    const char* at = b.weights + k / group * size;
    const char* unit = at + head + (k - first) / 2 * bytes;
    if (alone)
      for (const char* const codes = next + head; next < codes; next += 64) fetch_line(next);
    const auto multiply_units = [&]() __attribute__((always_inline)) {
      for (int64_t i = k; i < end; i += 2, unit += bytes) {
        for (int64_t at = 0; at < ahead; at += 64) fetch_line(next + at);
        next += ahead;
        multiply_unit<R>(source, unit, x + i, stride, b.work.grown, acc);
      }
    };
#if QUIRE_LEVEL == 1
    source.begin(at);
    multiply_units();
#else
    if (source.begin(at)) {
      multiply_units();
    } else {
      widen_weights(WidenArgs{&layer, b.weights, k, end, b.wide, kBF16});
      const bf16* w = static_cast<const bf16*>(b.wide);
      QUIRE_EACH for (int r = 0; r < R; ++r) S::put_in_order(acc[r]);
      for (int64_t i = k; i < end; i += 2, w += 2 * kTile) step_bf16<R>(x + i, stride, w, acc);
      QUIRE_EACH for (int r = 0; r < R; ++r) S::put_out_of_order(acc[r]);
    }
#endif
    if constexpr (S::kScalesSums) {
      part.scales = at;
      part.grows = k > b.k0;
      scale_sums<R, V, S::kDeinterleaved>(part, sums, 0, acc);
      if (end == b.k1) break;
      QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j) {
        store(sums + r * kTile + j * kLanes, acc[r][j]);
        acc[r][j] = zero();
      }
    }
  }
  QUIRE_EACH for (int r = 0; r < R; ++r) S::put_in_order(acc[r]);
  end_block<R, V>(b, row, sums, 0, acc);
}

#if QUIRE_LEVEL >= 2
// Numbers in memory, of a step, in the order of half h of a source.
template <class S> QUIRE_INLINE void out_of_order(const bf16* w, int h, __m512i (&out)[2]) {
  alignas(64) int32_t from[kTile], to[kTile];
  __builtin_memcpy(from, w, sizeof from);
  for (int i = 0; i < kTile; ++i) to[i] = from[S::column(i)];
  QUIRE_EACH for (int j = 0; j < 2; ++j) out[j] = _mm512_load_si512(to + (2 * h + j) * kLanes);
}

// Half h of the columns of R rows, so that more of them pass by together: numbers are made once for all. Sums stay in the
// order of the source.
template <int R, int h, class S> void tile_half(S source, const Block& b, int64_t row, float* sums, const char* next) {
  const Linear& layer = *b.work.args.layer;
  const PairRow* x = static_cast<const PairRow*>(b.work.x) + row * b.work.stride;
  const int64_t stride = b.work.stride, group = layer.coded.group, size = group_bytes(layer), head = group_head(layer);
  const int64_t bytes = unit_bytes(layer), ahead = half_of(b, bytes);
  float* const at = sums + h * kTile / 2;
  Block part = b;
  Vec acc[R][2];
  const auto clear = [&]() __attribute__((always_inline)) {
    QUIRE_EACH for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
  };
  const auto keep = [&]() __attribute__((always_inline)) {
    QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < 2; ++j) store(at + r * kTile + j * kLanes, acc[r][j]);
  };
  clear();
  for (int64_t k = b.k0, end; k < b.k1; k = end) {
    const int64_t first = k / group * group;
    end = first + group < b.k1 ? first + group : b.k1;
    const char* codes = b.weights + k / group * size;
    const char* unit = codes + head + (k - first) / 2 * bytes;
    for (const char* const behind = next + half_of(b, head); next < behind; next += 64) fetch_line(next);
    __m512i numbers[2];
    if (source.begin(codes)) {
      for (int64_t i = k; i < end; i += 2, unit += bytes, next += ahead) {
        fetch_line(next);
        source.half(unit, h, numbers);
        multiply_step<R>(x + i, stride, numbers, acc);
      }
    } else {
      widen_weights(WidenArgs{&layer, b.weights, k, end, b.wide, kBF16});
      const bf16* w = static_cast<const bf16*>(b.wide);
      for (int64_t i = k; i < end; i += 2, w += 2 * kTile) {
        out_of_order<S>(w, h, numbers);
        multiply_step<R>(x + i, stride, numbers, acc);
      }
    }
    if constexpr (S::kScalesSums) {
      part.scales = codes;
      part.grows = k > b.k0;
      scale_sums<R, 2>(part, at, h * kTile / 2, acc);
      if (end == b.k1) break;
      keep();
      clear();
    }
  }
  if constexpr (S::kInOrder) end_block<R, 2>(b, row, at, h * kTile / 2, acc);
  else keep();
}

template <int R, class S> void tile_halves(const S& source, const Block& b, int64_t row, float* sums, int64_t pass) {
  const Linear& layer = *b.work.args.layer;
  const int64_t half = half_of(b, offset_of(layer, b.k1) - offset_of(layer, b.k0));
  tile_half<R, 0>(source, b, row, sums, b.next + 2 * pass * half);
  tile_half<R, 1>(source, b, row, sums, b.next + (2 * pass + 1) * half);
  if constexpr (!S::kInOrder)
    for (int64_t r = 0; r < R; ++r, sums += kTile) {
      Vec y[1][4];
      QUIRE_EACH for (int j = 0; j < 4; ++j) y[0][j] = load(sums + j * kLanes);
      S::put_in_order(y[0]);
      end_block<1, 4>(b, row + r, sums, 0, y);
    }
}
#endif

#if QUIRE_LEVEL == 1
// One half of the columns of R rows: more sums than those would leave registers. They stay in the source's order.
template <int R, int h, class S> void tile_half(S source, const Block& b, int64_t row, float* sums) {
  const Linear& layer = *b.work.args.layer;
  const float* x = static_cast<const float*>(b.work.x) + row * b.work.stride;
  const int64_t stride = b.work.stride, group = layer.coded.group, size = group_bytes(layer), head = group_head(layer);
  const int64_t bytes = unit_bytes(layer), lines = h == 0 ? bytes / 64 : 0;
  const bool grown = b.work.grown;
  const char* next = b.next;
  Block part = b;
  Vec acc[2][R][2];
  const auto each = [&](auto what) __attribute__((always_inline)) {
    QUIRE_EACH for (int q = 0; q < 2; ++q) what(sums + S::pair(h, q) * kLanes, S::pair(h, q) * kLanes, acc[q]);
  };
  const auto clear = [&](float*, int, Vec (&some)[R][2]) __attribute__((always_inline)) {
    QUIRE_EACH for (int r = 0; r < R; ++r) some[r][0] = some[r][1] = zero();
  };
  each(clear);
  for (int64_t k = b.k0, end; k < b.k1; k = end) {
    const int64_t first = k / group * group;
    end = first + group < b.k1 ? first + group : b.k1;
    const char* at = b.weights + k / group * size;
    const char* unit = at + head + (k - first) / 2 * bytes;
    if (h == 0)
      for (const char* const codes = next + head; next < codes; next += 64) fetch_line(next);
    source.begin(at);
    for (int64_t i = k; i < end; i += 2, unit += bytes) {
      for (int64_t line = 0; line < lines; ++line, next += 64) fetch_line(next);
      source.template half<h>(unit, [&](int odd, int j, Vec numbers) __attribute__((always_inline)) {
        const Vec w = whole_number<S>(numbers, grown);
        const int place = S::place(j);
        QUIRE_EACH for (int r = 0; r < R; ++r) {
          Vec& sum = acc[place / 2][r][place % 2];
          sum = fma(splat(x[r * stride + i + odd]), w, sum);
        }
      });
    }
    if constexpr (S::kScalesSums) {
      part.scales = at;
      part.grows = k > b.k0;
      each([&](float* to, int column, Vec (&some)[R][2]) __attribute__((always_inline)) {
        scale_sums<R, 2, S::kDeinterleaved>(part, to, column, some);
        if (end == b.k1) return;
        QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < 2; ++j) store(to + r * kTile + j * kLanes, some[r][j]);
      });
      if (end == b.k1) break;
      each(clear);
    }
  }
  each([&](float* to, int column, Vec (&some)[R][2]) __attribute__((always_inline)) { end_block<R, 2>(b, row, to, column, some); });
}
#endif

template <int R> void narrow_rows(const Block& b, int64_t row, float* sums, int64_t pass) {
  const Linear& layer = *b.work.args.layer;
#if QUIRE_LEVEL >= 2
  const auto multiply = [&](const auto& source) {
    if constexpr (R <= kWholeUnits) tile_units<R>(source, b, row, sums, pass);
    else tile_halves<R>(source, b, row, sums, pass);
  };
  if (layer.dtype == kTable4) return multiply(PowerColumns(layer));
  if (kLooksUpBytes) return multiply(E4M3Table(layer));
  multiply(E4M3Units(layer));
#else
  with_columns(layer, [&](const auto& source) {
    if constexpr (R == 1) return tile_units<R>(source, b, row, sums, pass);
    tile_half<R, 0>(source, b, row, sums);
    tile_half<R, 1>(source, b, row, sums);
  });
#endif
}
#endif

}  // namespace

}  // namespace QUIRE_ISA
}  // namespace quire
