// Packing of weights, and reading rows back out of a packed weight. Layout: gemm.h.
#include "gemm.h"
#include "math.h"
#include "pool.h"
#include "widen.h"

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
  if (dtype == kE8M0) return e8m0_to_f32(static_cast<const uint8_t*>(p)[i]);
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

namespace {

// Row `id` of a weight of codes as float32, in the order of x.
void gather_coded(const Linear& layer, int64_t id, float* line) {
  const Coded& c = layer.coded;
  const int64_t column = id % kTile;
  const char* tile = static_cast<const char*>(layer.weight) + id / kTile * tile_bytes(layer);
  const int64_t group = c.group ? c.group : layer.k;
  for (int64_t k0 = 0; k0 < layer.k; k0 += group) {
    const char* codes = tile + offset_of(layer, k0);
    float scale, least = 0.0f;
    int32_t zero = c.zero;
    if (c.group) {
      scale = number(c.scale_type, codes, column);
      if (c.group_minima) least = number(c.scale_type, codes + minima_at(layer), column);
      if (c.group_zeros) zero = reinterpret_cast<const int8_t*>(codes + kTile * item_size(c.scale_type))[column];
      codes += group_head(layer);
    } else {
      scale = c.scales[id];
      if (c.zeros) zero = c.zeros[id];
    }
    for (int64_t i = 0; i < group && k0 + i < layer.k; ++i) {
      int32_t code;
      if (layer.dtype == kCodes8) {
        code = static_cast<uint8_t>(codes[(i / 4 * kTile + column) * 4 + i % 4]) - 128;
      } else {
        const auto byte = static_cast<uint8_t>(codes[(i / 8 * kTile + column) * 4 + i % 4]);
        code = i % 8 < 4 ? byte & 15 : byte >> 4;
        if (c.table) code = c.table[code] - 128;
      }
      line[c.order ? c.order[k0 + i] : k0 + i] = static_cast<float>(code - zero) * scale - least;
    }
  }
}

float narrow_value(const Linear& layer, const char* unit, int64_t place) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(unit);
  switch (layer.dtype) {
    case kE4M3: return e4m3_to_f32(bytes[place]);
    case kE5M2: return e5m2_to_f32(bytes[place]);
    case kI8: return static_cast<float>(static_cast<int8_t>(bytes[place]));
  }
  const uint8_t both = bytes[place % 16 * 4 + place / 32];
  return layer.coded.values[place / 16 % 2 ? both >> 4 : both & 15];
}

float rounded_to(int dtype, float x) {
  return dtype == kBF16 ? bf16_to_f32(f32_to_bf16(x)) : dtype == kF16 ? f16_to_f32(f32_to_f16(x)) : x;
}

// Row `id` of a narrow weight as float32.
void gather_narrow(const Linear& layer, int64_t id, float* line) {
  const Coded& c = layer.coded;
  const int64_t column = id % kTile, zeros_at = kTile * static_cast<int64_t>(item_size(c.scale_type));
  const char* tile = static_cast<const char*>(layer.weight) + id / kTile * tile_bytes(layer);
  for (int64_t k0 = 0; k0 < layer.k; k0 += c.group, tile += group_bytes(layer)) {
    const float scale = number(c.scale_type, tile, column);
    const float least = c.group_minima ? number(c.scale_type, tile + minima_at(layer), column) : 0.0f;
    const int8_t zero = c.group_zeros ? static_cast<int8_t>(tile[zeros_at + column]) : int8_t{0};
    for (int64_t i = 0; i < c.group && k0 + i < layer.k; ++i) {
      const char* unit = tile + group_head(layer) + i / 2 * unit_bytes(layer);
      const float value = narrow_value(layer, unit, place_in_unit(c.wide, i, column));
      line[k0 + i] = rounded_to(c.wide, (value - static_cast<float>(zero)) * scale - least);
    }
  }
}

}  // namespace

void gather(const GatherArgs& a) {
  const Linear& layer = *a.layer;
  const bool coded = is_coded(layer), narrow = is_narrow(layer);
  const int dtype = coded || narrow ? static_cast<int>(kF32) : layer.dtype;
  const int64_t k = packed_k(layer.k, dtype), group = dtype == kBF16 ? 2 : 1;
  const size_t item = item_size(dtype);
  parallel_for(a.count, 16, [&](int64_t begin, int64_t end) {
    const size_t whole = static_cast<size_t>((layer.k + 16) / 16 * 16);
    auto* line = static_cast<char*>(scratch(0, whole * 4));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t id = a.ids[i];
      if (id < 0 || id >= layer.n) {
        __builtin_memset(line, 0, whole * item);
      } else if (coded) {
        gather_coded(layer, id, reinterpret_cast<float*>(line));
      } else if (narrow) {
        gather_narrow(layer, id, reinterpret_cast<float*>(line));
      } else {
        const char* from = static_cast<const char*>(layer.weight) +
                           (id / kTile * k * kTile + id % kTile * group) * item;
        for (int64_t j = 0; j < k; j += group)
          __builtin_memcpy(line + j * item, from + j * kTile * item, group * item);
      }
      for (int64_t j = 0; j < layer.k; j += kLanes)
        store_any(a.out_dtype, a.out, i * layer.k + j, load_any(dtype, line, j, layer.k - j),
                  layer.k - j);
    }
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire
