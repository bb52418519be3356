// Activations on vectors. For X.isa.cpp only.
#pragma once
#include "gemm.h"
#include "vec.h"

namespace quire {
namespace QUIRE_ISA {

// x / (1 + e**-x)
QUIRE_INLINE Vec silu(Vec x) { return div(x, add(exp(sub(zero(), x)), splat(1.0f))); }

// 1 - 2 / (e**2x + 1); exp saturates at both ends
QUIRE_INLINE Vec tanh(Vec x) {
  const Vec e = exp(add(x, x));
  return sub(splat(1.0f), div(splat(2.0f), add(e, splat(1.0f))));
}

// Abramowitz & Stegun 7.1.26: absolute error below 1.5e-7.
QUIRE_INLINE Vec erf(Vec x) {
  const Vec a = max(x, sub(zero(), x));
  const Vec t = div(splat(1.0f), fma(a, splat(0.3275911f), splat(1.0f)));
  Vec p = splat(1.061405429f);
  p = fma(p, t, splat(-1.453152027f));
  p = fma(p, t, splat(1.421413741f));
  p = fma(p, t, splat(-0.284496736f));
  p = fma(p, t, splat(0.254829592f));
  p = mul(p, t);
  const Vec y = sub(splat(1.0f), mul(p, exp(sub(zero(), mul(a, a)))));
  return copy_sign(y, x);
}

QUIRE_INLINE Vec activate(int kind, Vec x) {
  switch (kind) {
    case kSilu: return silu(x);
    case kGelu:
      return mul(mul(x, splat(0.5f)), add(splat(1.0f), erf(mul(x, splat(0.70710678118654752f)))));
    case kGeluTanh: {
      const Vec cube = mul(mul(x, x), x);
      const Vec inner = mul(fma(cube, splat(0.044715f), x), splat(0.79788456080286536f));
      return mul(mul(x, splat(0.5f)), add(splat(1.0f), tanh(inner)));
    }
    default: return x;
  }
}

// Memory of an element type known only at run time.
QUIRE_INLINE Vec load_any(int dtype, const void* p, int64_t i, int64_t n) {
  if (n >= kLanes) {
    if (dtype == kBF16) return Memory<kBF16>::load(p, i);
    if (dtype == kF16) return Memory<kF16>::load(p, i);
    return Memory<kF32>::load(p, i);
  }
  if (dtype == kBF16) return Memory<kBF16>::load_n(p, i, n);
  if (dtype == kF16) return Memory<kF16>::load_n(p, i, n);
  return Memory<kF32>::load_n(p, i, n);
}
QUIRE_INLINE void store_any(int dtype, void* p, int64_t i, Vec a, int64_t n) {
  if (n >= kLanes) {
    if (dtype == kBF16) return Memory<kBF16>::store(p, i, a);
    if (dtype == kF16) return Memory<kF16>::store(p, i, a);
    return Memory<kF32>::store(p, i, a);
  }
  if (dtype == kBF16) return Memory<kBF16>::store_n(p, i, a, n);
  if (dtype == kF16) return Memory<kF16>::store_n(p, i, a, n);
  return Memory<kF32>::store_n(p, i, a, n);
}

// Rounded to a type and back.
QUIRE_INLINE Vec rounded(int dtype, Vec a) {
  if (dtype == kF32) return a;
  if (dtype == kBF16) return round_bf16(a);
  uint16_t t[kLanes];
  store_f16(t, a);
  return load_f16(t);
}

}  // namespace QUIRE_ISA
}  // namespace quire
