// Writing keys and values as the cache keeps them (kv_types.h). For X.isa.cpp only.
#pragma once
#include "kv_types.h"

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

static void store_codes(int dtype, const void* from, int64_t at, int64_t dim, uint8_t* to) {
  constexpr float kLeast = 7.888609052210118e-31f, kHuge = 3.4028234663852886e38f;
  float most = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < dim; i += kLanes) {
    float x[kLanes];
    store(x, load_any(dtype, from, at + i, dim - i));  // zeros from `dim` on
    for (int j = 0; j < kLanes; ++j) {
      const float a = __builtin_fabsf(x[j]);
      finite &= a <= kHuge;
      most = a > most ? a : most;
    }
  }
  const bool counts = finite && most >= kLeast;
  const Vec inverse = splat(counts ? 127.0f / most : 0.0f);
  const float factor = counts ? most / 127.0f : finite ? 0.0f : __builtin_nanf("");
  for (int64_t i = 0; i < dim; i += kLanes) {
    float x[kLanes];
    store(x, round_even(mul(load_any(dtype, from, at + i, dim - i), inverse)));
    const int64_t n = dim - i < kLanes ? dim - i : kLanes;
    for (int64_t j = 0; j < n; ++j)
      to[i + j] = counts ? static_cast<uint8_t>(static_cast<int8_t>(x[j])) : 0;
  }
  __builtin_memcpy(to + dim, &factor, sizeof factor);
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
    store_codes(dtype, from, at, dim, bytes);
  } else if (kept > kF16) {
    store_floats(dtype, from, at, dim, kept, scale, bytes);
  } else {
    for (int64_t i = 0; i < dim; i += kLanes)
      store_any(kept, to, i, load_any(dtype, from, at + i, dim - i), dim - i);
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
