// What becomes of whole sums: bias, activation, residual, rounding; the likeliest token; or a leaf of a mixture. For
// gemm.isa.cpp only.
#pragma once
#include "gemm.h"
#include "math.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// Rounds to the output's type. Denormals become zero where vdpbf16ps takes them for zero anyway.
template <int D> QUIRE_INLINE void put_vector(void* out, int64_t at, Vec y) {
#if QUIRE_LEVEL >= 3
  if constexpr (D == kBF16) {
    const __m256bh half = _mm512_cvtneps_pbh(y.v);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<bf16*>(out) + at), (__m256i)half);
    return;
  }
#endif
  Memory<D>::store(out, at, y);
}

// Rows of a whole tile, its kind known to the compiler: nothing is decided in the loop, so the
// vectors' long chains (e**x, a division) run beside each other.
template <int A, bool gated, int D>
void finish_whole(const GemmArgs& a, int64_t row, int64_t count, int64_t tile, const float* sums) {
  constexpr int64_t kWidth = gated ? kTile / 2 : kTile;
  const Linear& layer = *a.layer;
  const float* bias = layer.bias ? layer.bias + tile * kTile : nullptr;
  const auto biased = [&](const float* s, int64_t i) {
    return bias ? add(load(s + i), load(bias + i)) : load(s + i);
  };
  const int64_t columns = gated ? layer.n / 2 : layer.n;
  for (int64_t r = 0; r < count; ++r, sums += kTile) {
    const int64_t first = (row + r) * columns + tile * kWidth;
    QUIRE_EACH for (int64_t i = 0; i < kWidth; i += kLanes) {
      Vec y;
      if constexpr (gated) y = mul(activate(A, biased(sums, i)), biased(sums, kWidth + i));
      else y = activate(A, biased(sums, i));
      if (a.residual) y = add(y, Memory<D>::load(a.residual, first + i));
      put_vector<D>(a.out, first + i, y);
    }
  }
}

template <int A>
void finish_whole(const GemmArgs& a, int64_t row, int64_t count, int64_t tile, const float* sums) {
  const bool gated = a.layer->gated, wide = a.out_dtype == kF32;
  (gated ? wide ? finish_whole<A, true, kF32> : finish_whole<A, true, kBF16>
         : wide ? finish_whole<A, false, kF32> : finish_whole<A, false, kBF16>)(a, row, count, tile, sums);
}

// Writes `count` sums to columns from `column` on of a row; `gate` null or the gate's sums.
void put(const GemmArgs& a, int64_t row, int64_t width, int64_t column, const float* sums,
         const float* gate, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec y = load(sums + i);
    if (gate) y = mul(activate(a.activation, load(gate + i)), y);
    else if (!a.split) y = activate(a.activation, y);
    const int64_t at = row * width + column + i;
    if (a.residual) y = add(y, load_any(a.out_dtype, a.residual, at, count - i));
    if (a.out_dtype == kBF16 && count - i >= kLanes) put_vector<kBF16>(a.out, at, y);
    else store_any(a.out_dtype, a.out, at, y, count - i);
  }
}

void finish_row(const GemmArgs& a, int64_t row, int64_t tile, float* sums) {
  const Linear& layer = *a.layer;
  if (layer.bias)
    for (int i = 0; i < kTile; i += kLanes)
      store(sums + i, add(load(sums + i), load(layer.bias + tile * kTile + i)));
  const int64_t half = layer.n / 2;
  const int64_t width = layer.gated ? kTile / 2 : kTile, first = tile * width;
  const int64_t left = (layer.gated ? half : layer.n) - first, count = left < width ? left : width;
  if (!layer.gated) return put(a, row, layer.n, first, sums, nullptr, count);
  if (!a.split) return put(a, row, half, first, sums + width, sums, count);
  put(a, row, layer.n, first, sums, nullptr, count);
  put(a, row, layer.n, half + first, sums + width, nullptr, count);
}

void raise(uint64_t* best, uint64_t mine) {
  uint64_t old = __atomic_load_n(best, __ATOMIC_RELAXED);
  while (old < mine && !__atomic_compare_exchange_n(best, &old, mine, true, __ATOMIC_RELAXED,
                                                    __ATOMIC_RELAXED)) {
  }
}

// Looks for a row's largest number among the columns of a tile.
void keep_best(const GemmArgs& a, int64_t row, int64_t tile, float* sums) {
  const Linear& layer = *a.layer;
  const int64_t first = tile * kTile;
  if (layer.bias)
    for (int i = 0; i < kTile; i += kLanes)
      store(sums + i, add(load(sums + i), load(layer.bias + first + i)));
  // Columns that fill up the last tile: never before the first one.
  for (int64_t i = layer.n - first; i < kTile; ++i) sums[i] = sums[0];
  Vec top = load(sums), odd = mul(top, zero());  // infinity times zero: not a number
  for (int i = kLanes; i < kTile; i += kLanes) {
    const Vec y = load(sums + i);
    top = max(top, y);
    odd = add(odd, mul(y, zero()));
  }
  uint64_t* best = a.best + row;
  if (sum(odd) != 0.0f) return raise(best, kNotFinite);
  const float largest = max_of(top);
  if (best_key(largest, first) <= __atomic_load_n(best, __ATOMIC_RELAXED)) return;
  int64_t at = 0;
  while (sums[at] != largest) ++at;
  raise(best, best_key(largest, first + at));
}

void finish_rows(const GemmArgs& a, int64_t row, int64_t count, int64_t tile, float* sums) {
  if (a.best) {
    for (int64_t r = 0; r < count; ++r) keep_best(a, row + r, tile, sums + r * kTile);
    return;
  }
  const int64_t left = a.layer->n - tile * kTile;
  if (left >= kTile && !a.split && a.out_dtype != kF16) {
    switch (a.activation) {
      case kSilu: return finish_whole<kSilu>(a, row, count, tile, sums);
      case kGelu: return finish_whole<kGelu>(a, row, count, tile, sums);
      case kGeluTanh: return finish_whole<kGeluTanh>(a, row, count, tile, sums);
      default: return finish_whole<kNone>(a, row, count, tile, sums);
    }
  }
  for (int64_t r = 0; r < count; ++r) finish_row(a, row + r, tile, sums + r * kTile);
}

// Where the weighed sums of one leaf go.
float* leaf_row(const GemmArgs& a, int64_t leaf, int64_t row, int64_t tile) {
  return static_cast<float*>(a.out) + (leaf * a.out_rows + a.rows[row]) * a.layer->n + tile * kTile;
}

// Fetches it before the product: the rows of a long prompt, of all leaves, fit no near cache.
void fetch_leaf(const GemmArgs& a, int64_t leaf, int64_t row, int64_t count, int64_t tile) {
  for (int64_t r = 0; r < count; ++r) {
    const float* out = leaf_row(a, leaf, row + r, tile);
    QUIRE_EACH for (int64_t i = 0; i < kTile; i += 16) __builtin_prefetch(out + i, 1);
  }
}

// A product and a sum, each rounded.
void add_leaf(const GemmArgs& a, int64_t leaf, int64_t row, int64_t count, int64_t tile,
              const float* sums) {
  const int64_t left = a.layer->n - tile * kTile;
  for (int64_t r = 0; r < count; ++r, sums += kTile) {
    const Vec share = splat(a.shares[row + r]);
    float* out = leaf_row(a, leaf, row + r, tile);
    for (int64_t i = 0; i < kTile && i < left; i += kLanes) {
      const Vec said = mul(load(sums + i), share);
      if (left - i >= kLanes) store(out + i, add(load(out + i), said));
      else store_n(out + i, add(load_n(out + i, left - i), said), left - i);
    }
  }
}

}  // namespace

}  // namespace QUIRE_ISA
}  // namespace quire
