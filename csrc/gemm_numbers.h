// Passes of rows of numbers by weights that are numbers. For gemm.isa.cpp only.
//
// tile_bf16<R, P>, tile_f32<R, D>: R rows times 64 columns over the steps of a block. sums[r][64] are read unless it
// is fresh; then written, or joined. Every four steps P lines of the memory at `next` are fetched.
#pragma once
#include "gemm_block.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

#if QUIRE_LEVEL >= 2
// Two k of V vectors of columns.
#if QUIRE_LEVEL >= 3
template <int R, int V>
QUIRE_INLINE void multiply_step(const bf16* const x, int64_t stride, const __m512i (&w)[V], Vec (&acc)[R][V]) {
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    int32_t pair;
    __builtin_memcpy(&pair, x + r * stride, 4);
    const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
    QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j].v = _mm512_dpbf16_ps(acc[r][j].v, a, (__m512bh)w[j]);
  }
}
#else
template <int R, int V>
QUIRE_INLINE void multiply_step(const float* const x, int64_t stride, const __m512i (&w)[V], Vec (&acc)[R][V]) {
  QUIRE_EACH for (int k = 0; k < 2; ++k) {
    Vec b[V];
    QUIRE_EACH for (int j = 0; j < V; ++j) b[j] = one_of(w[j], k);
    QUIRE_EACH for (int r = 0; r < R; ++r) {
      const Vec a = splat(x[r * stride + k]);
      QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j] = fma(a, b[j], acc[r][j]);
    }
  }
}
#endif
template <int R, int V>
QUIRE_INLINE void step_bf16(const PairRow* const x, int64_t stride, const bf16* w, Vec (&acc)[R][V]) {
  __m512i b[V];
  QUIRE_EACH for (int j = 0; j < V; ++j) b[j] = _mm512_loadu_si512(w + 32 * j);
  multiply_step<R>(x, stride, b, acc);
}

// Rows alone are bound by memory: they fetch their own weights, 16 steps ahead.
template <int R, int P>
void tile_bf16(const Block& b, int64_t row, float* sums, const char* next) {
  constexpr int V = whole_vectors(R);
  const PairRow* x = static_cast<const PairRow*>(b.work.x) + row * b.work.stride;
  const int64_t stride = b.work.stride, k1 = b.k1;
  for (int64_t column = 0; column < kTile; column += V * kLanes) {
    float* at = sums + column;
    const bf16* w = reinterpret_cast<const bf16*>(b.weights) + (b.k0 - b.begins) * kTile + 2 * column;
    Vec acc[R][V];
    QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
      acc[r][j] = b.fresh ? zero() : load(at + r * 64 + j * 16);
    int64_t k = b.k0;
    for (; k + 8 <= k1; k += 8, w += 8 * kTile) {
      QUIRE_EACH for (int s = 0; s < 8; s += 2) {
        fetch<Share<V>::of(P)>(next, s / 2);
        step_bf16(x + k + s, stride, w + s * kTile, acc);
      }
    }
    for (; k < k1; k += 2, w += 2 * kTile) step_bf16(x + k, stride, w, acc);
    if (b.scales) scale_sums<R, V>(b, at, column, acc);
    end_block<R, V>(b, row, at, column, acc);
  }
}
#endif

// Weights of type D at one k (f32, f16) or two (bf16, `odd` picks the second).
template <int D, bool odd> QUIRE_INLINE Vec weights(const void* w, int64_t at) {
  if constexpr (D != kBF16) {
    return Memory<D>::load(w, at);
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(w) + 2 * at;
#if QUIRE_LEVEL >= 2
    return one_of(_mm512_loadu_si512(p), odd);
#elif QUIRE_LEVEL == 1
    const __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm256_castsi256_ps(odd ? _mm256_and_si256(pair, _mm256_set1_epi32(-65536))
                                    : _mm256_slli_epi32(pair, 16))};
#else
    Vec r;
    QUIRE_LANES r.v[i] = bf16_to_f32(p[2 * i + (odd ? 1 : 0)]);
    return r;
#endif
  }
}

// Whether the sums leave too few registers for pairs of bf16 and both their halves. Compilers then keep sums in
// memory, whose way there and back takes longer than the products of a step. Instead the second halves are read again,
// and sums are pinned: docs/cpu-kernels.md has figures.
template <int R, int D, int V> constexpr bool kTight = QUIRE_LEVEL == 1 && D == kBF16 && R * V >= 10;

#if QUIRE_LEVEL == 1
template <int V> QUIRE_INLINE void pin(Vec (&sums)[V]) {
  QUIRE_EACH for (int j = 0; j < V; ++j) __asm__("" : "+x"(sums[j].v));
}
#else
template <int V> QUIRE_INLINE void pin(Vec (&)[V]) {}
#endif

template <int R, int D, bool odd, int V>
QUIRE_INLINE void step_f32(const float* x, int64_t stride, const void* w, int64_t at, Vec (&acc)[R][V]) {
  Vec b[V];
  QUIRE_EACH for (int j = 0; j < V; ++j) b[j] = weights<D, odd>(w, at + j * kLanes);
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    const Vec a = splat(x[r * stride]);
    QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j] = fma(a, b[j], acc[r][j]);
    if constexpr (kTight<R, D, V>) pin(acc[r]);
  }
}

// Steps from k to k1 of some columns.
template <int R, int D, int V>
QUIRE_INLINE void steps_f32(const float* x, int64_t stride, const Block& b, int64_t column, int64_t k, int64_t k1,
                            Vec (&acc)[R][V]) {
  if constexpr (D == kBF16) {
    for (; k < k1; k += 2) {
      const int64_t at = (k - b.begins) / 2 * 64 + column;
      const char* again = b.weights;
      if constexpr (kTight<R, D, V>) __asm__("" : "+r"(again));  // as if it were another
      step_f32<R, D, false>(x + k, stride, b.weights, at, acc);
      step_f32<R, D, true>(x + k + 1, stride, again, at, acc);
    }
  } else {
    for (; k < k1; ++k) step_f32<R, D, false>(x + k, stride, b.weights, (k - b.begins) * 64 + column, acc);
  }
}

template <int R, int D> void tile_f32(const Block& b, int64_t row, float* sums, const char* next) {
  constexpr int V = vectors_of(R);
  const int64_t stride = b.work.stride;
  const float* x = static_cast<const float*>(b.work.x) + row * stride;
  for (int64_t column = 0; column < kTile; column += V * kLanes) {
    Vec acc[R][V];
    float* at = sums + column;
    QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
      acc[r][j] = b.fresh ? zero() : load(at + r * 64 + j * kLanes);
    int64_t k = b.k0;
    const int64_t lines = Share<V>::of(b.lines);
    if (next && Share<V>::has(b.lines, column))
      for (; k + 8 <= b.k1; k += 8) {
        for (int64_t i = 0; i < lines; ++i, next += 64) fetch_line(next);
        steps_f32<R, D>(x, stride, b, column, k, k + 8, acc);
      }
    steps_f32<R, D>(x, stride, b, column, k, b.k1, acc);
    constexpr bool kBySource = QUIRE_LEVEL == 1 && D == kF32;
    if (kBySource && b.scales && b.by_source && kFastDenormals) scale_sums<R, V, kBySource>(b, at, column, acc);
    else if (b.scales) scale_sums<R, V>(b, at, column, acc);
    end_block<R, V>(b, row, at, column, acc);
  }
}

}  // namespace

}  // namespace QUIRE_ISA
}  // namespace quire
