// Products on tile registers (AMX). For X.isa.cpp only. Where QUIRE_AMX is not defined, there are none.
//
// A tile register holds up to 16 rows of 64 bytes. One instruction adds to 16 x 16 numbers the products of 16 rows
// and 16 columns over a step: 64 bytes of a row, which are 32 bf16 numbers or 64 codes, and 4 KiB of a packed
// weight's 64 columns. Weights need no other layout: 16 columns of one step are 16 rows of 64 bytes, 256 apart.
//
// Arithmetic (Intel's manual of the instruction set, TDPBF16PS, TDPBSUD, TDPBUSD and TDPBSSD): of bf16, the products of even k and
// those of odd k are two sequences of fused multiply-adds from 0 on; their sum is added to what was there. Each
// result is rounded to float32; denormals count as zero. Of codes, all is exact.
//
// An instruction takes the same 16 cycles for one row as for 16.
#pragma once
#include "isa.h"
#include "vec.h"

namespace quire {
namespace QUIRE_ISA {

constexpr int64_t kTileRegisterRows = 16;

#ifndef QUIRE_AMX
constexpr bool kTiles = false;
struct TileShape {};
#else
constexpr bool kTiles = true;

// Registers: four of sums, then rows, columns, and both of a step that is shorter, which has another shape if there is
// one.
constexpr int kRowTile = 4, kColumnTile = 5, kLastRowTile = 6, kLastColumnTile = 7;
constexpr int64_t kStepBytes = 64, kStepWeights = 4096;

// Compilers are not told that these registers exist, so these statements keep their order among each other and
// towards memory.
template <int tile> QUIRE_INLINE void load_tile(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}
template <int tile> QUIRE_INLINE void store_tile(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}
template <int tile> QUIRE_INLINE void zero_tile() { __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile)); }

// What is multiplied: bf16 numbers, or codes with a sign and codes without, the other way round, or all with one.
enum Factors { kNumbers, kSignedRows, kSignedColumns, kSigned };

template <Factors factors, int sums, int rows, int columns> QUIRE_INLINE void multiply_tile() {
  if constexpr (factors == kNumbers)
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(columns));
  else if constexpr (factors == kSignedRows)
    __asm__ volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(columns));
  else if constexpr (factors == kSigned)
    __asm__ volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(columns));
  else
    __asm__ volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(rows), "i"(columns));
}

// The shape of the registers, of this thread; while it is set, they are part of what a thread's switch saves.
class TileShape {
 public:
  TileShape() = default;
  TileShape(const TileShape&) = delete;
  TileShape& operator=(const TileShape&) = delete;
  ~TileShape() {
    if (rows_ > 0) __asm__ volatile("tilerelease");
  }

  // `rows` at a time, 1 to 16; `last`: groups of four bytes in a shorter step, 0 to 15. Sums are lost if it changes.
  void set(int64_t rows, int64_t last) {
    if (rows == rows_ && last == last_) return;
    rows_ = rows;
    last_ = last;
    struct alignas(64) {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) {
      shape.bytes[tile] = kStepBytes;
      shape.rows[tile] = static_cast<uint8_t>(tile == kColumnTile || tile == kLastColumnTile ? kTileRegisterRows : rows);
    }
    if (last > 0) {
      shape.bytes[kLastRowTile] = static_cast<uint16_t>(4 * last);
      shape.rows[kLastColumnTile] = static_cast<uint8_t>(last);
    }
    __asm__ volatile("ldtilecfg %0" : : "m"(shape));
  }

 private:
  int64_t rows_ = 0, last_ = 0;
};

struct TileProduct {
  const char* rows;  // the first of them, from the first step on
  int64_t stride;    // bytes
  int64_t count;     // rows: 1 to 16, or to 32 if they pass by in two tiles
  const char* weights;
  int64_t steps;     // whole ones
  int64_t last;      // groups of four bytes in a shorter one, 0: there is none
  const float* from; // nullptr: sums begin at 0; else [count][64] to go on with
  float* to;         // [count][64], may be `from`
  const char* next;  // memory to fetch meanwhile
  int64_t lines;     // of it per step
};

// Rows of each of two tiles. If `count` is odd, both have the row in the middle, with the same sums.
static inline int64_t rows_of_two(int64_t count) { return (count + 1) / 2; }

// Up to 16 rows by all 64 columns, so that weights are read once, from front to back. `fetch` is called between them.
template <Factors factors, int rows, int columns, int others, class F>
QUIRE_INLINE void one_step_of_one(const TileProduct& p, const char* x, const char* w, const F& fetch) {
  load_tile<rows>(x, p.stride);
  fetch();
  load_tile<columns>(w, 256);
  multiply_tile<factors, 0, rows, columns>();
  fetch();
  load_tile<others>(w + 64, 256);
  multiply_tile<factors, 1, rows, others>();
  fetch();
  load_tile<columns>(w + 128, 256);
  multiply_tile<factors, 2, rows, columns>();
  fetch();
  load_tile<others>(w + 192, 256);
  multiply_tile<factors, 3, rows, others>();
}

QUIRE_INLINE void begin_sums_of_one(const TileProduct& p) {
  if (p.from) {
    load_tile<0>(p.from, 256);
    load_tile<1>(p.from + 16, 256);
    load_tile<2>(p.from + 32, 256);
    load_tile<3>(p.from + 48, 256);
  } else {
    zero_tile<0>();
    zero_tile<1>();
    zero_tile<2>();
    zero_tile<3>();
  }
}
QUIRE_INLINE void store_sums_of_one(const TileProduct& p) {
  store_tile<0>(p.to, 256);
  store_tile<1>(p.to + 16, 256);
  store_tile<2>(p.to + 32, 256);
  store_tile<3>(p.to + 48, 256);
}

template <Factors factors> static void multiply_one(const TileProduct& p) {
  begin_sums_of_one(p);
  const char *x = p.rows, *w = p.weights, *next = p.next;
  const auto fetch = [&]() __attribute__((always_inline)) {
    for (int64_t i = 0; i < p.lines / 4; ++i, next += 64) __builtin_prefetch(next, 0, 2);
  };
  if (p.last == 0) {  // all registers have the same shape, and no product waits for one that the one before reads
    for (int64_t step = 0; step < p.steps; ++step, x += kStepBytes, w += kStepWeights)
      one_step_of_one<factors, kRowTile, kColumnTile, kLastColumnTile>(p, x, w, fetch);
  } else {
    for (int64_t step = 0; step < p.steps; ++step, x += kStepBytes, w += kStepWeights)
      one_step_of_one<factors, kRowTile, kColumnTile, kColumnTile>(p, x, w, fetch);
    one_step_of_one<factors, kLastRowTile, kLastColumnTile, kLastColumnTile>(p, x, w, fetch);
  }
  store_sums_of_one(p);
}

// The same of weights that do not stand in memory: make(step, to) writes those of a step there, into one of two places
// at `made`, while the step before is still to be multiplied. Tiles wait until what they load is in the cache.
template <Factors factors, class F> static void multiply_one(const TileProduct& p, char* made, const F& make) {
  begin_sums_of_one(p);
  const char* x = p.rows;
  const int64_t all = p.steps + (p.last > 0);
  const auto fetch = [] {};
  make(0, made);
  for (int64_t step = 0; step < all; ++step, x += kStepBytes) {
    const char* w = made + step % 2 * kStepWeights;
    if (step + 1 < all) make(step + 1, made + (step + 1) % 2 * kStepWeights);
    if (step < p.steps) one_step_of_one<factors, kRowTile, kColumnTile, kColumnTile>(p, x, w, fetch);
    else one_step_of_one<factors, kLastRowTile, kLastColumnTile, kLastColumnTile>(p, x, w, fetch);
  }
  store_sums_of_one(p);
}

// Up to 16 rows by 16 columns, whose sums [rows][16] begin at 0, where the shape is already set.
struct SomeRows {
  const void* first;
  int64_t apart;  // bytes
};
struct SomeColumns {
  const void* first;
  int64_t apart, step;  // bytes from four of k to the next, and to the next step
};

template <Factors factors, int sums, int rows, int columns>
QUIRE_INLINE void one_step_of_some(const char* x, int64_t x_apart, const char* w, int64_t w_apart) {
  load_tile<rows>(x, x_apart);
  load_tile<columns>(w, w_apart);
  multiply_tile<factors, sums, rows, columns>();
}

template <Factors factors, int sums>
QUIRE_INLINE void multiply_some(const SomeRows& rows, const SomeColumns& columns, int64_t steps, bool last) {
  const char *x = static_cast<const char*>(rows.first), *w = static_cast<const char*>(columns.first);
  zero_tile<sums>();
  for (int64_t step = 0; step < steps; ++step, x += kStepBytes, w += columns.step)
    one_step_of_some<factors, sums, kRowTile, kColumnTile>(x, rows.apart, w, columns.apart);
  if (last) one_step_of_some<factors, sums, kLastRowTile, kLastColumnTile>(x, rows.apart, w, columns.apart);
}

// Four such products at a time, the next `rows_on` and `columns_on` bytes further: what is stored has to wait until it
// is multiplied, which takes longer than to begin the next. Sums [4][16][16]; of the last ones, `count` are made.
template <Factors factors>
QUIRE_INLINE void multiply_four(SomeRows rows, int64_t rows_on, SomeColumns columns, int64_t columns_on, int64_t steps,
                                bool last, int64_t count, void* to) {
  const auto next = [&]() __attribute__((always_inline)) {
    rows.first = static_cast<const char*>(rows.first) + rows_on;
    columns.first = static_cast<const char*>(columns.first) + columns_on;
  };
  multiply_some<factors, 0>(rows, columns, steps, last);
  next();
  if (count > 1) multiply_some<factors, 1>(rows, columns, steps, last);
  next();
  if (count > 2) multiply_some<factors, 2>(rows, columns, steps, last);
  next();
  if (count > 3) multiply_some<factors, 3>(rows, columns, steps, last);
  auto* const sums = static_cast<float*>(to);
  store_tile<0>(sums, kStepBytes);
  if (count > 1) store_tile<1>(sums + 256, kStepBytes);
  if (count > 2) store_tile<2>(sums + 512, kStepBytes);
  if (count > 3) store_tile<3>(sums + 768, kStepBytes);
}

// Two of these products, in registers from `first` on; to be stored when the next ones are under way, because until then
// they are not made.
template <Factors factors, int first>
QUIRE_INLINE void multiply_pair(SomeRows rows, int64_t rows_on, SomeColumns columns, int64_t columns_on, int64_t steps,
                                bool last) {
  multiply_some<factors, first>(rows, columns, steps, last);
  rows.first = static_cast<const char*>(rows.first) + rows_on;
  columns.first = static_cast<const char*>(columns.first) + columns_on;
  multiply_some<factors, first + 1>(rows, columns, steps, last);
}
template <int first> QUIRE_INLINE void store_pair(int32_t* to) {
  store_tile<first>(to, kStepBytes);
  store_tile<first + 1>(to + 256, kStepBytes);
}

// Up to 32 rows, 32 columns at a time, so that each tile that is read is multiplied twice.
template <Factors factors, int rows, int columns, class F>
QUIRE_INLINE void one_step_of_two(const TileProduct& p, const char* x, const char* y, const char* w, const F& fetch) {
  load_tile<rows>(x, p.stride);
  fetch();
  load_tile<columns>(w, 256);
  multiply_tile<factors, 0, rows, columns>();
  load_tile<rows>(y, p.stride);
  multiply_tile<factors, 2, rows, columns>();
  fetch();
  load_tile<columns>(w + 64, 256);
  multiply_tile<factors, 3, rows, columns>();
  load_tile<rows>(x, p.stride);
  multiply_tile<factors, 1, rows, columns>();
}

template <Factors factors> static void multiply_two(const TileProduct& p) {
  const int64_t second = p.count - rows_of_two(p.count);  // its first row
  const char* next = p.next;
  for (int64_t column = 0; column < 64; column += 32) {
    if (p.from) {
      const float* from = p.from + column;
      load_tile<0>(from, 256);
      load_tile<1>(from + 16, 256);
      load_tile<2>(from + second * 64, 256);
      load_tile<3>(from + second * 64 + 16, 256);
    } else {
      zero_tile<0>();
      zero_tile<1>();
      zero_tile<2>();
      zero_tile<3>();
    }
    const char *x = p.rows, *y = p.rows + second * p.stride, *w = p.weights + column * 4;
    const int64_t lines = column == 0 ? (p.lines + 1) / 2 : p.lines / 2;
    const auto fetch = [&]() __attribute__((always_inline)) {
      for (int64_t i = 0; i < lines / 2; ++i, next += 64) __builtin_prefetch(next, 0, 2);
    };
    for (int64_t step = 0; step < p.steps; ++step, x += kStepBytes, y += kStepBytes, w += kStepWeights)
      one_step_of_two<factors, kRowTile, kColumnTile>(p, x, y, w, fetch);
    if (p.last > 0) one_step_of_two<factors, kLastRowTile, kLastColumnTile>(p, x, y, w, fetch);
    float* to = p.to + column;
    store_tile<0>(to, 256);
    store_tile<1>(to + 16, 256);
    store_tile<2>(to + second * 64, 256);
    store_tile<3>(to + second * 64 + 16, 256);
  }
}

template <Factors factors> static void multiply_tiles(TileShape& shape, const TileProduct& p) {
  const bool two = p.count > kTileRegisterRows;
  shape.set(two ? rows_of_two(p.count) : p.count, p.last);
  two ? multiply_two<factors>(p) : multiply_one<factors>(p);
}

#endif

}  // namespace QUIRE_ISA
}  // namespace quire
