// Packing of weights, and reading rows back out of a packed weight. Layout: gemm.h.
#include "gemm.h"
#include "math.h"
#include "pool.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// The place of row `row` of the layer: tile and column.
struct Place {
  int64_t tile, column;
};
Place place_of(const PackArgs& a, int64_t row) {
  if (!a.gated) return {row / kTile, row % kTile};
  const int64_t half = a.total_rows / 2, width = kTile / 2;
  const int64_t up = row >= half ? 1 : 0, i = row - up * half;
  return {i / width, i % width + up * width};
}

float number(int dtype, const void* p, int64_t i) {
  if (dtype == kF32) return static_cast<const float*>(p)[i];
  const uint16_t u = static_cast<const uint16_t*>(p)[i];
  return dtype == kBF16 ? bf16_to_f32(u) : f16_to_f32(u);
}

// Some rows' numbers [k0, k1) converted into `out[row][kStrip]`, zeros beyond k.
constexpr int64_t kStrip = 64;
template <class T> void convert(const PackArgs& a, int64_t row, int64_t k0, T* out) {
  const int64_t left = a.k - k0 < kStrip ? a.k - k0 : kStrip;
  const int64_t from = row * a.k + k0;
  for (int64_t i = left > 0 ? left : 0; i < kStrip; ++i) out[i] = 0;
  if (a.source_dtype == a.dtype) {
    if (left > 0)
      __builtin_memcpy(out, static_cast<const T*>(a.weight) + from,
                       static_cast<size_t>(left) * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < left; ++i) {
    const float x = number(a.source_dtype, a.weight, from + i);
    if constexpr (sizeof(T) == 4) out[i] = x;
    else out[i] = a.dtype == kBF16 ? f32_to_bf16(x) : f32_to_f16(x);
  }
}

// A run of rows that stand side by side in one tile. U is what stays together: a float32, a pair
// of bf16, one f16.
template <class T, class U> void pack_run(const PackArgs& a, int64_t row, int64_t count) {
  constexpr int64_t group = sizeof(U) / sizeof(T);
  const Place place = place_of(a, a.first_row + row);
  const int64_t k = packed_k(a.k, a.dtype);
  U* tile = static_cast<U*>(a.packed) + (place.tile * kTile * k) / group + place.column;
  union {
    T numbers[kTile][kStrip];
    U units[kTile][kStrip / group];
  } strip;
  for (int64_t k0 = 0; k0 < k; k0 += kStrip) {
    for (int64_t r = 0; r < count; ++r) convert<T>(a, row + r, k0, strip.numbers[r]);
    const int64_t end = (k - k0 < kStrip ? k - k0 : kStrip) / group;
    U* to = tile + k0 / group * kTile;
    for (int64_t i = 0; i < end; ++i)
      for (int64_t r = 0; r < count; ++r) to[i * kTile + r] = strip.units[r][i];
  }
}

}  // namespace

void pack(const PackArgs& a) {
  const int64_t width = a.gated ? kTile / 2 : kTile;
  // Work on runs that end where the layer's tiles end.
  const int64_t first = a.first_row / width, last = (a.first_row + a.rows - 1) / width;
  parallel_for(last - first + 1, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = first + begin; i < first + end; ++i) {
      int64_t row = i * width - a.first_row, stop = row + width;
      if (row < 0) row = 0;
      if (stop > a.rows) stop = a.rows;
      while (row < stop) {  // a run also ends where gates end and ups begin
        const Place at = place_of(a, a.first_row + row);
        int64_t count = 1;
        while (row + count < stop) {
          const Place other = place_of(a, a.first_row + row + count);
          if (other.tile != at.tile || other.column != at.column + count) break;
          ++count;
        }
        if (a.dtype == kF32) pack_run<float, float>(a, row, count);
        else if (a.dtype == kBF16) pack_run<uint16_t, uint32_t>(a, row, count);
        else pack_run<uint16_t, uint16_t>(a, row, count);
        row += count;
      }
    }
  });
}

void gather(const GatherArgs& a) {
  const int64_t k = packed_k(a.k, a.dtype), group = a.dtype == kBF16 ? 2 : 1;
  const size_t item = item_size(a.dtype);
  parallel_for(a.count, 16, [&](int64_t begin, int64_t end) {
    const size_t whole = static_cast<size_t>((a.k + 16) / 16 * 16);
    auto* line = static_cast<char*>(scratch(0, whole * 4));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t id = a.ids[i];
      if (id < 0 || id >= a.n) {
        __builtin_memset(line, 0, whole * item);
      } else {
        const char* from = static_cast<const char*>(a.packed) +
                           (id / kTile * k * kTile + id % kTile * group) * item;
        for (int64_t j = 0; j < k; j += group)
          __builtin_memcpy(line + j * item, from + j * kTile * item, group * item);
      }
      for (int64_t j = 0; j < a.k; j += kLanes)
        store_any(a.out_dtype, a.out, i * a.k + j, load_any(a.dtype, line, j, a.k - j), a.k - j);
    }
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire
