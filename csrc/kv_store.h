// Writing keys and values as the cache keeps them (kv_types.h). For X.isa.cpp only.
#pragma once
#include "kv_types.h"
#include "row_codes.h"

namespace quire {
namespace QUIRE_ISA {

// `dim` numbers of `dtype` at `from[at]` as bytes.
static void store_floats(int dtype, const void* from, int64_t at, int64_t dim, int kept, float scale,
                         uint8_t* to) {
  const Vec by = splat(scale);
  for (int64_t i = 0; i < dim; i += kLanes) {
    float x[kLanes];
    store(x, div(load_any(dtype, from, at + i, dim - i), by));
    const int64_t n = dim - i < kLanes ? dim - i : kLanes;
    if (kept == kE4M3)
      for (int64_t j = 0; j < n; ++j) to[i + j] = f32_to_e4m3(x[j]);
    else
      for (int64_t j = 0; j < n; ++j) to[i + j] = f32_to_e5m2(x[j]);
  }
}

static void store_int8(int dtype, const void* from, int64_t at, int64_t dim, uint8_t* to) {
  const RowScale scaled = row_scale(dtype, from, at, dim);
  if (scaled.inverse == 0.0f) __builtin_memset(to, 0, static_cast<size_t>(dim));
  else row_codes(dtype, from, at, dim, scaled.inverse, reinterpret_cast<int8_t*>(to));
  __builtin_memcpy(to + dim, &scaled.scale, sizeof scaled.scale);
}

// `dim` numbers as the cache keeps them.
static void store_kept(int dtype, const void* from, int64_t at, int64_t dim, int kept, float scale,
                       char* to) {
  uint8_t* const bytes = reinterpret_cast<uint8_t*>(to);
  if (kept == dtype) {
    const size_t item = item_size(dtype);
    __builtin_memcpy(to, static_cast<const char*>(from) + at * static_cast<int64_t>(item),
                     static_cast<size_t>(dim) * item);
  } else if (kept == kI8) {
    store_int8(dtype, from, at, dim, bytes);
  } else if (kept > kF16) {
    store_floats(dtype, from, at, dim, kept, scale, bytes);
  } else {
    for (int64_t i = 0; i < dim; i += kLanes)
      store_any(kept, to, i, load_any(dtype, from, at + i, dim - i), dim - i);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
