// Small matrix products of attention, operands in cache. For X.isa.cpp only.
//
// c[row][column] = sum over steps, in ascending order, of a[row][step] * b[step][column]; a step is
// one float32 number, or two bf16 numbers side by side (vdpbf16ps).
#pragma once
#include "tile_registers.h"
#include "vec.h"

namespace quire {
namespace QUIRE_ISA {

// What the registers hold: rows, and vectors of columns.
#if QUIRE_LEVEL >= 2
constexpr int kTileRows = 6, kTileVectors = 4;
#elif QUIRE_LEVEL == 1
constexpr int kTileRows = 6, kTileVectors = 2;
#else
constexpr int kTileRows = 4, kTileVectors = 1;
#endif

template <int R, int V>
QUIRE_INLINE void step_of(const float* a, int64_t lda, const float* b, Vec (&acc)[R][V]) {
  Vec column[V];
  QUIRE_EACH for (int j = 0; j < V; ++j) column[j] = load(b + j * kLanes);
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    const Vec x = splat(a[r * lda]);
    QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j] = fma(x, column[j], acc[r][j]);
  }
}

#if QUIRE_LEVEL >= 3
template <int R, int V>
QUIRE_INLINE void step_of(const bf16* a, int64_t lda, const bf16* b, Vec (&acc)[R][V]) {
  __m512bh column[V];
  QUIRE_EACH for (int j = 0; j < V; ++j) column[j] = (__m512bh)_mm512_loadu_si512(b + 32 * j);
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    int32_t pair;
    __builtin_memcpy(&pair, a + r * lda, 4);
    const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
    QUIRE_EACH for (int j = 0; j < V; ++j)
      acc[r][j].v = _mm512_dpbf16_ps(acc[r][j].v, x, column[j]);
  }
}
#endif

// Addresses of `bytes` each.
struct Lines {
  const char* const* row;
  const char* const* last;
  int64_t bytes;
};

// Memory to bring closer during the arithmetic, a line of 64 bytes at a time: a core waits where
// many are asked for at once. The very last address is repeated for ever.
struct Ahead {
  Lines now;
  Lines later[2];  // then these
  int left;        // of them
  int pulls;       // lines per step and tile: 0, 1, 2 or 4; nothing is fetched at all if 0
  int64_t offset = 0;

  inline __attribute__((always_inline)) void pull() {
    __builtin_prefetch(*now.row + offset, 0, 2);
    offset += 64;
    if (offset < now.bytes) return;
    offset = 0;
    if (now.row != now.last) ++now.row;
    else if (left > 0) now = later[--left];
  }
  inline __attribute__((always_inline)) void pull(int64_t lines) {
    if (pulls > 0)
      for (; lines > 0; --lines) pull();
  }
};

template <class T> struct Product {
  static constexpr int64_t kStep = sizeof(float) / sizeof(T);
  const T* a;
  int64_t lda;
  const T* b;
  int64_t ldb;  // columns of b
  int64_t steps;
  float* c;
  int64_t ldc;
  bool fresh;  // c is overwritten, not added to
  Ahead* ahead;
  TileShape* shape;  // of this thread's tile registers, if there are some
};

template <int R, int V, int pulls, class T>
static __attribute__((noinline)) void tile_of(const Product<T>& p, int64_t row, int64_t column) {
  constexpr int64_t kStep = Product<T>::kStep;
  float* c = p.c + row * p.ldc + column;
  Vec acc[R][V];
  QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
    acc[r][j] = p.fresh ? zero() : load(c + r * p.ldc + j * kLanes);
  const T* a = p.a + row * p.lda;
  const T* b = p.b + column * kStep;
  const int64_t lda = p.lda, next = p.ldb * kStep;
  Ahead ahead{};
  if constexpr (pulls > 0) ahead = *p.ahead;
  _Pragma("GCC unroll 2") for (int64_t k = p.steps; k > 0; --k) {
    QUIRE_EACH for (int i = 0; i < pulls; ++i) ahead.pull();
    step_of<R, V>(a, lda, b, acc);
    a += kStep;
    b += next;
  }
  if constexpr (pulls > 0) *p.ahead = ahead;
  QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
    store(c + r * p.ldc + j * kLanes, acc[r][j]);
}

template <int R, class T>
static void columns_of(const Product<T>& p, int64_t row, int64_t columns) {
  for (int64_t column = 0; column < columns;) {
    const int64_t vectors = (columns - column) / kLanes;
    if (vectors >= kTileVectors) {
      switch (p.ahead->pulls) {
        case 0: tile_of<R, kTileVectors, 0>(p, row, column); break;
        case 1: tile_of<R, kTileVectors, 1>(p, row, column); break;
        case 2: tile_of<R, kTileVectors, 2>(p, row, column); break;
        default: tile_of<R, kTileVectors, 4>(p, row, column);
      }
      column += kTileVectors * kLanes;
#if QUIRE_LEVEL >= 2
    } else if (vectors == 3) {
      tile_of<R, 3, 0>(p, row, column);
      column += 3 * kLanes;
    } else if (vectors == 2) {
      tile_of<R, 2, 0>(p, row, column);
      column += 2 * kLanes;
#endif
    } else {
      tile_of<R, 1, 0>(p, row, column);
      column += kLanes;
    }
  }
}

#ifdef QUIRE_AMX
// What tile registers multiply; a step of theirs is 16 of a product's.
template <class T> struct OnTiles { static constexpr bool value = false; };
template <> struct OnTiles<bf16> {
  static constexpr bool value = true;
  static constexpr Factors factors = kNumbers;
};

template <int rows, int columns, class T>
QUIRE_INLINE void tile_step(const T* x, const T* y, int64_t lda, const char* b, int64_t stride, bool wide) {
  constexpr Factors factors = OnTiles<T>::factors;
  load_tile<rows>(x, lda);
  load_tile<columns>(b, stride);
  multiply_tile<factors, 0, rows, columns>();
  load_tile<rows>(y, lda);
  multiply_tile<factors, 2, rows, columns>();
  if (!wide) return;
  load_tile<columns>(b + 64, stride);
  multiply_tile<factors, 3, rows, columns>();
  load_tile<rows>(x, lda);
  multiply_tile<factors, 1, rows, columns>();
}

// 16 rows of `count` from `row` on and as many before the last, by 16 or 32 columns.
template <class T>
static void tiles_of(const Product<T>& p, int64_t row, int64_t count, int64_t column, bool wide, int64_t pulls) {
  constexpr int64_t kItem = sizeof(T), kUnits = kStepBytes / 4;
  const int64_t second = count - rows_of_two(count), lda = p.lda * kItem, stride = p.ldb * 4, ldc = p.ldc * 4;
  float *const one = p.c + row * p.ldc + column, *const other = one + second * p.ldc;
  if (p.fresh) {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  } else {
    load_tile<0>(one, ldc);
    load_tile<2>(other, ldc);
    if (wide) load_tile<1>(one + 16, ldc);
    if (wide) load_tile<3>(other + 16, ldc);
  }
  const T *x = p.a + row * p.lda, *y = x + second * p.lda;
  const char* b = reinterpret_cast<const char*>(p.b) + column * 4;
  for (int64_t left = p.steps / kUnits; left > 0; --left, x += kStepBytes / kItem, y += kStepBytes / kItem, b += kUnits * stride) {
    p.ahead->pull(pulls);
    tile_step<kRowTile, kColumnTile>(x, y, lda, b, stride, wide);
  }
  if (p.steps % kUnits > 0) {
    p.ahead->pull(pulls);
    tile_step<kLastRowTile, kLastColumnTile>(x, y, lda, b, stride, wide);
  }
  store_tile<0>(one, ldc);
  store_tile<2>(other, ldc);
  if (wide) store_tile<1>(one + 16, ldc);
  if (wide) store_tile<3>(other + 16, ldc);
}

template <class T> static void multiply_tiles(const Product<T>& p, int64_t rows, int64_t columns) {
  constexpr int64_t kTwo = 2 * kTileRegisterRows, kUnits = kStepBytes / 4;
  const int64_t passes = (rows + kTwo - 1) / kTwo;
  // As many lines as without tile registers, a few with each step.
  const int64_t steps = (p.steps + kUnits - 1) / kUnits * passes * ((columns + 31) / 32);
  const int64_t lines = p.ahead->pulls * p.steps * ((rows + kTileRows - 1) / kTileRows) * ((columns + 63) / 64);
  for (int64_t row = 0, pass = 0, count; pass < passes; ++pass, row += count) {
    count = (rows - row + passes - pass - 1) / (passes - pass);
    p.shape->set(rows_of_two(count), p.steps % kUnits);
    for (int64_t column = 0; column < columns; column += 32)
      tiles_of(p, row, count, column, columns - column >= 32, (lines + steps - 1) / steps);
  }
}
#endif

// `columns` is a whole number of vectors.
template <class T> static void multiply(const Product<T>& p, int64_t rows, int64_t columns) {
#ifdef QUIRE_AMX
  if constexpr (OnTiles<T>::value) return multiply_tiles(p, rows, columns);
#endif
  // Groups of about equal size: five and five rather than six and four.
  const int64_t groups = (rows + kTileRows - 1) / kTileRows;
  int64_t row = 0;
  for (int64_t left = groups; left > 0; --left) {
    const int64_t count = (rows - row + left - 1) / left;
    switch (count) {
      case 1: columns_of<1>(p, row, columns); break;
      case 2: columns_of<2>(p, row, columns); break;
      case 3: columns_of<3>(p, row, columns); break;
#if QUIRE_LEVEL >= 1
      case 4: columns_of<4>(p, row, columns); break;
      case 5: columns_of<5>(p, row, columns); break;
      default: columns_of<6>(p, row, columns);
#else
      default: columns_of<4>(p, row, columns);
#endif
    }
    row += count;
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
