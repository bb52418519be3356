// The matrix product. Layout and arithmetic: gemm.h.
//
// Work is cut into panels of rows times tiles of 64 columns. Within a tile, k is cut into blocks
// whose weights fit the second-level cache; for each block the rows pass by, a few at a time, with
// their sums in registers. Between blocks the sums wait in memory, unrounded, so cuts change no
// bit. While one block is computed the next one is fetched: weights stream from memory during
// the arithmetic and not before it.
#include "gemm.h"
#include "math.h"
#include "pool.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// Rows of a panel: activations of one block of k that stay in the second-level cache.
constexpr int64_t kPanel = 192;
// Longest block of k for many rows: weights of 128 KiB beside the panel's activations. Up to 12 rows
// are bound by memory, which must not rest while the rows pass by twice: blocks of 8 KiB (measured:
// with 8 rows 1.3 to 1.4 times as fast as long blocks; from 13 rows on long ones are faster).
constexpr int64_t kBlock = 1024, kShortBlock = 64, kFewRows = 12;

// Tiles that a thread takes at a time, at most: threads then end at about the same time.
constexpr int64_t kMostTiles = 8;

struct Work {
  const GemmArgs& args;
  const void* x;  // rows as the kernel reads them: bf16, or float32
  int64_t stride;
  bool direct;  // bf16 rows and weights, vdpbf16ps
};

// ---- register tiles ----------------------------------------------------------------------------
//
// tile<R, P>: R rows times 64 columns over `count` steps of a block. sums[r][64] are read unless
// `fresh`, then written. Every four steps P lines of the memory at `next` are fetched.

#define QUIRE_UNROLL _Pragma("GCC unroll 16")

template <int P> QUIRE_INLINE void fetch(const char*& next) {
  QUIRE_UNROLL for (int i = 0; i < P; ++i) __builtin_prefetch(next + 64 * i, 0, 2);
  next += 64 * P;
}

#if QUIRE_LEVEL >= 3
template <int R>
QUIRE_INLINE void step_bf16(const bf16* const x, int64_t stride, const bf16* w, int64_t k,
                            __m512 (&acc)[R][4]) {
  __m512bh b[4];
  QUIRE_UNROLL for (int j = 0; j < 4; ++j) b[j] = (__m512bh)_mm512_loadu_si512(w + k * 64 + 32 * j);
  QUIRE_UNROLL for (int r = 0; r < R; ++r) {
    int32_t pair;
    __builtin_memcpy(&pair, x + r * stride + k, 4);
    const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
    QUIRE_UNROLL for (int j = 0; j < 4; ++j) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], a, b[j]);
  }
}

// Rows alone are bound by memory: they fetch their own weights, 16 steps ahead.
template <int R, int P>
void tile_bf16(const bf16* x, int64_t stride, const bf16* w, int64_t k0, int64_t k1, float* sums,
               bool fresh, const char* next) {
  __m512 acc[R][4];
  QUIRE_UNROLL for (int r = 0; r < R; ++r) QUIRE_UNROLL for (int j = 0; j < 4; ++j)
    acc[r][j] = fresh ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * 64 + j * 16);
  int64_t k = k0;
  for (; k + 8 <= k1; k += 8) {
    fetch<P>(next);
    QUIRE_UNROLL for (int s = 0; s < 4; ++s) step_bf16<R>(x, stride, w, k + 2 * s, acc);
  }
  for (; k < k1; k += 2) step_bf16<R>(x, stride, w, k, acc);
  QUIRE_UNROLL for (int r = 0; r < R; ++r) QUIRE_UNROLL for (int j = 0; j < 4; ++j)
    _mm512_storeu_ps(sums + r * 64 + j * 16, acc[r][j]);
}
#endif

// Vectors of columns per register tile, and rows: what the registers hold.
#if QUIRE_LEVEL >= 2
constexpr int kVectors = 4, kRows = 6;
#elif QUIRE_LEVEL == 1
constexpr int kVectors = 2, kRows = 6;
#else
constexpr int kVectors = 1, kRows = 4;
#endif

// Weights of type D at one k (f32, f16) or two (bf16, `odd` picks the second).
template <int D, bool odd> QUIRE_INLINE Vec weights(const void* w, int64_t at) {
  if constexpr (D != kBF16) {
    return Memory<D>::load(w, at);
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(w) + 2 * at;
#if QUIRE_LEVEL >= 2
    const __m512i pair = _mm512_loadu_si512(p);
    return {_mm512_castsi512_ps(odd ? _mm512_and_si512(pair, _mm512_set1_epi32(-65536))
                                    : _mm512_slli_epi32(pair, 16))};
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

template <int R, int D, bool odd>
QUIRE_INLINE void step_f32(const float* x, int64_t stride, const void* w, int64_t at,
                           Vec (&acc)[R][kVectors]) {
  Vec b[kVectors];
  QUIRE_UNROLL for (int j = 0; j < kVectors; ++j) b[j] = weights<D, odd>(w, at + j * kLanes);
  QUIRE_UNROLL for (int r = 0; r < R; ++r) {
    const Vec a = splat(x[r * stride]);
    QUIRE_UNROLL for (int j = 0; j < kVectors; ++j) acc[r][j] = fma(a, b[j], acc[r][j]);
  }
}

template <int R, int D>
void tile_f32(const float* x, int64_t stride, const void* w, int64_t k0, int64_t k1, float* sums,
              bool fresh) {
  for (int64_t column = 0; column < kTile; column += kVectors * kLanes) {
    Vec acc[R][kVectors];
    QUIRE_UNROLL for (int r = 0; r < R; ++r) QUIRE_UNROLL for (int j = 0; j < kVectors; ++j)
      acc[r][j] = fresh ? zero() : load(sums + r * 64 + column + j * kLanes);
    if constexpr (D == kBF16) {
      for (int64_t k = k0; k < k1; k += 2) {
        step_f32<R, D, false>(x + k, stride, w, k / 2 * 64 + column, acc);
        step_f32<R, D, true>(x + k + 1, stride, w, k / 2 * 64 + column, acc);
      }
    } else {
      for (int64_t k = k0; k < k1; ++k) step_f32<R, D, false>(x + k, stride, w, k * 64 + column, acc);
    }
    QUIRE_UNROLL for (int r = 0; r < R; ++r) QUIRE_UNROLL for (int j = 0; j < kVectors; ++j)
      store(sums + r * 64 + column + j * kLanes, acc[r][j]);
  }
}

struct Block {
  const Work& work;
  const char* weights;  // the tile
  int64_t k0, k1;
  bool fresh;
  const char* next;    // what to fetch meanwhile
  int64_t lines;       // of 64 bytes to fetch per four steps and pass
};

template <int R, int D> void rows_f32(const Block& b, int64_t row, float* sums) {
  const float* x = static_cast<const float*>(b.work.x) + row * b.work.stride;
  tile_f32<R, D>(x, b.work.stride, b.weights, b.k0, b.k1, sums, b.fresh);
}

template <int R> void rows(const Block& b, int64_t row, float* sums, int64_t pass) {
#if QUIRE_LEVEL >= 3
  if (b.work.direct) {
    const bf16* x = static_cast<const bf16*>(b.work.x) + row * b.work.stride;
    const bf16* w = reinterpret_cast<const bf16*>(b.weights);
    const char* next = b.next + pass * ((b.k1 - b.k0) / 8) * b.lines * 64;
    const int64_t s = b.work.stride;
    switch (b.lines) {
      case 16: return tile_bf16<R, 16>(x, s, w, b.k0, b.k1, sums, b.fresh, next);
      case 8: return tile_bf16<R, 8>(x, s, w, b.k0, b.k1, sums, b.fresh, next);
      case 4: return tile_bf16<R, 4>(x, s, w, b.k0, b.k1, sums, b.fresh, next);
      case 2: return tile_bf16<R, 2>(x, s, w, b.k0, b.k1, sums, b.fresh, next);
      case 1: return tile_bf16<R, 1>(x, s, w, b.k0, b.k1, sums, b.fresh, next);
      default: return tile_bf16<R, 0>(x, s, w, b.k0, b.k1, sums, b.fresh, next);
    }
  }
#endif
  (void)pass;
  switch (b.work.args.layer->dtype) {
    case kBF16: return rows_f32<R, kBF16>(b, row, sums);
    case kF16: return rows_f32<R, kF16>(b, row, sums);
    default: return rows_f32<R, kF32>(b, row, sums);
  }
}

void some_rows(const Block& b, int64_t row, int64_t count, float* sums, int64_t pass) {
  switch (count) {
    case 1: return rows<1>(b, row, sums, pass);
    case 2: return rows<2>(b, row, sums, pass);
    case 3: return rows<3>(b, row, sums, pass);
    case 4: return rows<4>(b, row, sums, pass);
#if QUIRE_LEVEL >= 1
    case 5: return rows<5>(b, row, sums, pass);
    default: return rows<6>(b, row, sums, pass);
#endif
  }
}

// ---- after the sums ----------------------------------------------------------------------------

// Writes `count` sums to columns from `column` on of a row; `gate` null or the gate's sums.
void put(const GemmArgs& a, int64_t row, int64_t width, int64_t column, const float* sums,
         const float* gate, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes) {
    Vec y = load(sums + i);
    if (gate) y = mul(activate(a.activation, load(gate + i)), y);
    else if (!a.split) y = activate(a.activation, y);
    const int64_t at = row * width + column + i;
    if (a.residual) y = add(y, load_any(a.out_dtype, a.residual, at, count - i));
#if QUIRE_LEVEL >= 3
    if (a.out_dtype == kBF16 && count - i >= kLanes) {
      const __m256bh half = _mm512_cvtneps_pbh(y.v);  // denormals become zero
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<bf16*>(a.out) + at), (__m256i)half);
      continue;
    }
#endif
    store_any(a.out_dtype, a.out, at, y, count - i);
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

// ---- one tile of a panel -----------------------------------------------------------------------

int64_t lines_per_pass(int64_t passes) {
  int64_t lines = 16;  // four steps of bf16 are 16 lines of 64 bytes
  while (lines > 1 && lines / 2 * passes >= 16) lines /= 2;
  return lines;
}

void one_tile(const Work& work, int64_t row0, int64_t row1, int64_t tile, float* sums) {
  const Linear& layer = *work.args.layer;
  const int64_t k = packed_k(layer.k, layer.dtype);
  const size_t item = item_size(layer.dtype);
  const char* weights = static_cast<const char*>(layer.weight) + tile * kTile * k * item;
  const int64_t passes = (row1 - row0 + kRows - 1) / kRows;
  const int64_t most = passes == 1 ? k : row1 - row0 <= kFewRows ? kShortBlock : kBlock;
  const int64_t blocks = (k + most - 1) / most;
  const int64_t length = ((k + blocks - 1) / blocks + 7) / 8 * 8;
  for (int64_t k0 = 0; k0 < k; k0 += length) {
    const int64_t k1 = k0 + length < k ? k0 + length : k;
    // Steps of one pass read 256 bytes each: alone it fetches 4 KiB ahead of itself, among others
    // its share of the next block.
    const char* next = weights + (passes == 1 ? k0 * kTile * item + 4096 : k1 * kTile * item);
    const Block block{work, weights, k0, k1, k0 == 0, next, lines_per_pass(passes)};
    for (int64_t row = row0, pass = 0; row < row1; row += kRows, ++pass) {
      const int64_t count = row1 - row < kRows ? row1 - row : kRows;
      some_rows(block, row, count, sums + (row - row0) * kTile, pass);
      if (k1 == k)
        for (int64_t r = row; r < row + count; ++r)
          finish_row(work.args, r, tile, sums + (r - row0) * kTile);
    }
  }
}

// Rows as float32, or (for vdpbf16ps) bf16 filled up to an even length.
void widen_rows(const GemmArgs& a, const void* x, int64_t stride, bool direct, void* out,
                int64_t width) {
  const int64_t k = a.layer->k;
  parallel_for(a.m, 8192 / k + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (direct) {
        bf16* to = static_cast<bf16*>(out) + row * width;
        const bf16* from = static_cast<const bf16*>(x) + row * stride;
        __builtin_memcpy(to, from, static_cast<size_t>(k) * 2);
        for (int64_t i = k; i < width; ++i) to[i] = 0;
        continue;
      }
      float* to = static_cast<float*>(out) + row * width;
      for (int64_t i = 0; i < width; i += kLanes) {
        const int64_t left = k - i;
        const Vec v = left > 0 ? load_any(a.x_dtype, x, row * stride + i, left) : zero();
        if (width - i < kLanes) store_n(to + i, v, width - i);
        else store(to + i, v);
      }
    }
  });
}

}  // namespace

void gemm(const GemmArgs& a) {
  if (a.m == 0) return;
  const Linear& layer = *a.layer;
  const void* x = a.x;
  int64_t stride = a.x_stride;
  const int64_t k = packed_k(layer.k, layer.dtype);
  const bool direct = QUIRE_LEVEL >= 3 && a.x_dtype == kBF16 && layer.dtype == kBF16;
  const bool ready = k == layer.k && (direct || a.x_dtype == kF32);
  if (!ready) {
    void* wide = scratch(2, static_cast<size_t>(a.m * k) * (direct ? 2 : 4));
    widen_rows(a, x, stride, direct, wide, k);
    x = wide;
    stride = k;
  }
  const Work work{a, x, stride, direct};
  const int64_t tiles = packed_tiles(layer.n);
  const int64_t panels = (a.m + kPanel - 1) / kPanel;
  // Panels of about equal height, each a whole number of register tiles.
  const int64_t height = ((a.m + panels - 1) / panels + kRows - 1) / kRows * kRows;
  int64_t grain = tiles / (num_threads() * 8);
  grain = grain < 1 ? 1 : grain > kMostTiles ? kMostTiles : grain;
  parallel_for((a.m + height - 1) / height * tiles, grain, [&](int64_t begin, int64_t end) {
    auto* sums = static_cast<float*>(scratch(3, kPanel * kTile * sizeof(float)));
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row0 = i / tiles * height;
      const int64_t row1 = row0 + height < a.m ? row0 + height : a.m;
      one_tile(work, row0, row1, i % tiles, sums);
    }
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire
