// Small matrix products of attention, operands in cache. For X.isa.cpp only.
//
// c[row][column] = sum over steps, in ascending order, of a[row][step] * b[step][column]; a step is
// one float32 number, or two bf16 numbers side by side (vdpbf16ps).
#pragma once
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

// `columns` is a whole number of vectors.
template <class T> static void multiply(const Product<T>& p, int64_t rows, int64_t columns) {
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
