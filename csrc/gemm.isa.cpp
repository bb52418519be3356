// The matrix product. Layout and arithmetic: gemm.h.
//
// Work is cut into panels of rows times tiles of 64 columns. Within a tile, k is cut into blocks
// whose weights fit the second-level cache; for each block the rows pass by, a few at a time, with
// their sums in registers. Between blocks the sums wait in memory, unrounded, so cuts change no
// bit. No block reaches over the end of a leaf; there its sums join those of the leaves before. While
// one block is computed the next one is fetched: weights stream from memory during the arithmetic and
// not before it.
#include "coded_tile.h"
#include "gemm.h"
#include "math.h"
#include "narrow_units.h"
#include "pool.h"
#include "tile_registers.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// Rows of a panel: activations of one block of k that stay in the second-level cache. Tile registers multiply so fast
// that fewer rows would read the weights from memory too often.
constexpr int64_t kPanel = kTiles ? 512 : 192;
// Block of k for many rows, about: weights of 128 KiB beside the panel's activations. Few rows are
// bound by memory, which must not rest while they pass by more than once: blocks of 8 KiB, which the
// first-level cache holds meanwhile (with 8 and 16 rows on Zen 4, 128 and 256 steps were up to 4 % slower
// than 64; with 32 rows long blocks are 5 % faster).
constexpr int64_t kBlock = 1024, kShortBlock = 64, kFewRows = 18;
// The same of codes, of which as many bytes are more. Where vectors are short, so is the second-level cache, and
// fewer columns pass by at a time: on Zen 3 (512 KiB) 32 rows are 1.04 (int8) and 1.11 times (int4) as fast with
// these as with blocks of 128 KiB; half of them are no faster.
constexpr int64_t kBlock8 = QUIRE_LEVEL >= 2 ? 2 * kBlock : kBlock, kBlock4 = QUIRE_LEVEL >= 2 ? 4 * kBlock : kBlock / 2;
// A byte of codes takes longer to multiply, so reading it from the second level costs less in comparison, and beginning
// and ending a block more: short blocks of 16 and 32 KiB (docs/cpu-kernels.md).
constexpr int64_t kShortBlock8 = 256, kShortBlock4 = 1024;
// Of tile registers: numbers or codes of 32 KiB, beside which the rows and their sums have room in the first-level cache,
// so that these alone come from the second, which is what they wait for (docs/cpu-kernels.md). Codes of groups, 16 KiB,
// pass by four times.
constexpr int64_t kTileBlock = 256, kTileBlockOfGroups = 256;
// Rows that pass by two tile registers at a time, at most.
constexpr int64_t kMostTwo = 2 * kTileRegisterRows;

// Block of k of a narrow weight for rows that pass by together: numbers of 16 KiB, or of 8 with tile
// registers, which are slow to load what was just stored.
constexpr int64_t kNarrowBlock = kTiles ? 64 : 128;
// bf16 numbers of a column in a step of tile registers.
constexpr int64_t kTileStep = 32;
// The same where numbers are float32 and rows many: 64 KiB, beside which a small second-level cache has room for rows.
constexpr int64_t kNarrowBlock32 = 256;
// Rows for which numbers of narrow weights are made in registers, at most; and of codes of four bits.
constexpr int64_t kInRegisters = QUIRE_LEVEL >= 3 ? 96 : QUIRE_LEVEL == 1 ? 3 : 0;
constexpr int64_t kInRegisters4 = QUIRE_LEVEL >= 3 ? 24 : kInRegisters;

// Tiles that a thread takes at a time, at most: threads then end at about the same time.
constexpr int64_t kMostTiles = 2;

template <int n> struct Number { static constexpr int value = n; };

struct Work {
  const GemmArgs& args;
  const void* x;  // rows as the kernel reads them: bf16, or float32
  int64_t stride;
  bool direct;  // bf16 rows and weights, vdpbf16ps
  CodedRows coded = {};
  bool grown = false;  // the rows are multiplied with kTimes of the source (narrow_units.h)
};

// What is multiplied while its weights are in a cache: some steps of one leaf.
//
// Sums of leaves that wait for their neighbour in the tree stand one behind the other, the oldest
// first. As many wait as the number of leaves that are done has ones in binary: with eight leaves
// three at most. The last block of a leaf joins its sums to those of which it completes a branch.
struct Block {
  const Work& work;
  const char* weights;  // the tile, from k = begins on
  int64_t begins;
  int64_t k0, k1;
  bool fresh;           // begins its leaf
  int64_t joins;        // how many of those that wait it joins
  int64_t apart;        // from the sums of one that waits to the next
  const char* next;     // what to fetch meanwhile
  int64_t lines;        // of 64 bytes to fetch per four steps and pass
  int64_t all_lines;    // of all passes together
  float* into;          // nullptr, or what the weighed sums of the leaf are added to, not written to `sums`
  bool ends = false;    // its leaf
  int64_t extra = 0;    // lines to fetch per group and pass
  // Of 8-bit floats (widen.h). The scales of the group that ends here, or nullptr; and whether the sums of
  // the groups before it are in `sums`.
  const char* scales = nullptr;
  bool grows = false;
  // nullptr, or memory for numbers: `weights` are the codes of a narrow tile, k0 .. k1 a leaf, or with tile registers
  // perhaps one group of it.
  void* wide = nullptr;
  int type = kF32;  // of the numbers at `weights`
  // nullptr, or the shape of the tile registers that multiply it; and nullptr, or codes of four bits in bytes.
  TileShape* shape = nullptr;
  const char* bytes = nullptr;
  bool whole_tiles = false;  // its rows fill these registers, but for the last ones
  // Whether the numbers at `weights`, and so the sums, have their columns in the order of a source (narrow_units.h); and
  // what is added to, as to `into`, when they are in their own again.
  bool by_source = false;
  float* in_order = nullptr;
};

// The end of a group: its sums times its scales join those before it. `deinterleaved`: even and odd columns are.
template <int R, int V, bool deinterleaved = false>
QUIRE_INLINE void scale_sums(const Block& b, const float* sums, int64_t column, Vec (&acc)[R][V]) {
  Vec scales[V];
  QUIRE_EACH for (int j = 0; j < V; ++j)
    scales[j] = load_scales(b.work.args.layer->coded.scale_type, b.scales, column + j * kLanes);
#if QUIRE_LEVEL == 1
  if constexpr (deinterleaved)
    QUIRE_EACH for (int j = 0; j < V; j += 2) deinterleave(scales[j], scales[j + 1]);
#endif
  QUIRE_EACH for (int j = 0; j < V; ++j) QUIRE_EACH for (int r = 0; r < R; ++r)
    acc[r][j] = add(b.grows ? load(sums + r * kTile + j * kLanes) : zero(), mul(acc[r][j], scales[j]));
}

// Where row i of the product is added to.
QUIRE_INLINE float* added_to(const Block& b, float* tile, int64_t i) {
  return tile + (b.work.args.rows[i] - b.work.args.tile_from) * kTile;
}

// Leaves that wait when so many are done.
int64_t waiting(int64_t done) { return __builtin_popcountll(static_cast<uint64_t>(done)); }
// Branches of the tree that a leaf completes.
int64_t branches(int64_t leaf) { return __builtin_ctzll(~static_cast<uint64_t>(leaf)); }

// The end of a block, and perhaps of a leaf: what `acc` has of columns from `column` on goes to `sums`.
template <int R, int V>
QUIRE_INLINE void end_block(const Block& b, int64_t row, float* sums, int64_t column, Vec (&acc)[R][V]) {
  for (int64_t left = b.joins; left > 0; --left) {
    sums -= b.apart;
    QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
      acc[r][j] = add(load(sums + r * kTile + j * kLanes), acc[r][j]);
  }
  if (b.into) {
    QUIRE_EACH for (int r = 0; r < R; ++r) {
      const Vec share = splat(b.work.args.shares[row + r]);
      float* out = added_to(b, b.into, row + r) + column;
      QUIRE_EACH for (int j = 0; j < V; ++j)
        store(out + j * kLanes, add(load(out + j * kLanes), mul(acc[r][j], share)));
    }
    return;
  }
  QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
    store(sums + r * kTile + j * kLanes, acc[r][j]);
}

// ---- register tiles ----------------------------------------------------------------------------
//
// tile<R, P>: R rows times 64 columns over the steps of a block. sums[r][64] are read unless it is
// fresh; then written, or joined. Every four steps P lines of the memory at `next` are fetched.

constexpr int64_t kLines = 16;  // of 64 bytes: the weights of four steps

// How far ahead of itself one pass fetches what it reads once. Tile registers are loaded a KiB at a time: with 2 KiB,
// products of 1 to 16 rows in bf16 took 1.1 times as long, with 4 as long, but those of codes longer. Without them, 4 KiB
// are best, and 6 where numbers are made of a weight first (docs/cpu-kernels.md).
constexpr int64_t kOwnLead = kTiles ? 8192 : 4096, kOwnLeadOfMade = kTiles ? 8192 : 6144;

// Into the second-level cache: a line on its way to the first holds one of few places in its queue all the while, so
// that memory waits for places; the second level has more of them.
QUIRE_INLINE void fetch_line(const char* line) { __builtin_prefetch(line, 0, 2); }

// Step `step` of four: a line after the other, since in bursts they hold up the arithmetic.
template <int P> QUIRE_INLINE void fetch(const char*& next, int step) {
  QUIRE_EACH for (int i = P * step / 4; i < P * (step + 1) / 4; ++i) fetch_line(next + 64 * i);
  if (step == 3) next += 64 * P;
}

// What each pass of V vectors of columns fetches of `all` lines; where these are too few, the first pass does it.
template <int V> struct Share {
  static constexpr int64_t kPasses = kTile / (V * kLanes);
  static constexpr bool all_do(int64_t all) { return all >= kPasses; }
  static constexpr int of(int64_t all) { return static_cast<int>(all_do(all) ? all / kPasses : all); }
  static constexpr bool has(int64_t all, int64_t column) { return column == 0 || all_do(all); }
};

// Where vectors are long, seven and eight rows pass by a weight at once, by half of its columns at a time. By blocks, in
// two passes, these have to be begun and ended (docs/cpu-kernels.md).
constexpr int kAtOnce = QUIRE_LEVEL >= 2 && !kTiles ? 8 : 0;
// Rows for which numbers are made in registers: up to kWholeUnits pass by all columns at a time, up to kMadeOnce by half of
// them. With 6 rows of 8-bit floats, whole columns left no registers for what makes the numbers (docs/cpu-kernels.md).
constexpr int kWholeUnits = QUIRE_LEVEL >= 3 && !kTiles ? 5 : 6;
constexpr int64_t kMadeOnce = QUIRE_LEVEL >= 3 && !kTiles ? 12 : 0;
// Vectors of columns that rows pass by at a time.
constexpr int whole_vectors(int rows) { return rows <= 6 ? 4 : 2; }

#if QUIRE_LEVEL >= 3
// Two k of 64 columns.
template <int R, int V>
QUIRE_INLINE void multiply_step(const bf16* const x, int64_t stride, const __m512i (&w)[V], Vec (&acc)[R][V]) {
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    int32_t pair;
    __builtin_memcpy(&pair, x + r * stride, 4);
    const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
    QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j].v = _mm512_dpbf16_ps(acc[r][j].v, a, (__m512bh)w[j]);
  }
}
template <int R, int V>
QUIRE_INLINE void step_bf16(const bf16* const x, int64_t stride, const bf16* w, Vec (&acc)[R][V]) {
  __m512i b[V];
  QUIRE_EACH for (int j = 0; j < V; ++j) b[j] = _mm512_loadu_si512(w + 32 * j);
  multiply_step<R>(x, stride, b, acc);
}

// Rows alone are bound by memory: they fetch their own weights, 16 steps ahead.
template <int R, int P>
void tile_bf16(const Block& b, int64_t row, float* sums, const char* next) {
  constexpr int V = whole_vectors(R);
  const bf16* x = static_cast<const bf16*>(b.work.x) + row * b.work.stride;
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

// Vectors of columns per register tile, and rows: what the registers hold. One row alone passes by all
// columns at once, so that it reads its weights from front to back.
#if QUIRE_LEVEL >= 2
constexpr int kRows = 6;
constexpr int vectors_of(int) { return 4; }
#elif QUIRE_LEVEL == 1
constexpr int kRows = 6;
constexpr int vectors_of(int rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }
#else
constexpr int kRows = 4;
constexpr int vectors_of(int rows) { return rows == 1 ? 4 : 1; }
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

// ---- numbers of narrow weights, made in registers -----------------------------------------------

#if QUIRE_LEVEL >= 3
template <int R, class S>
QUIRE_INLINE void multiply_unit(const S& source, const char* unit, const bf16* x, int64_t stride, bool, Vec (&acc)[R][4]) {
  __m512i numbers[4];
  make_unit(source, unit, numbers);
  multiply_step<R>(x, stride, numbers, acc);
}
#elif QUIRE_LEVEL == 1
template <class S> QUIRE_INLINE Vec whole_number(Vec numbers, bool grown) {
  return S::kTimes == 1.0f || grown ? numbers : mul(numbers, splat(S::kTimes));
}

template <int R, class S>
QUIRE_INLINE void multiply_unit(const S& source, const char* unit, const float* x, int64_t, bool grown, Vec (&acc)[R][8]) {
  const Vec by[2] = {splat(x[0]), splat(x[1])};
  source.numbers(unit, [&](int k, int j, Vec numbers) __attribute__((always_inline)) {
    acc[0][j] = fma(by[k], whole_number<S>(numbers, grown), acc[0][j]);
  });
}
#endif

#if QUIRE_LEVEL >= 3 || QUIRE_LEVEL == 1
// Of so many bytes of a weight, those that one half of the columns fetches while it passes by as many.
QUIRE_INLINE int64_t half_of(const Block& b, int64_t bytes) { return bytes * b.lines / b.all_lines / 2; }

// Group by group, anew for each pass: that takes less time than reading them from a near cache, unless rows
// are many.
template <int R, class S> void tile_units(S source, const Block& b, int64_t row, float* sums, int64_t pass) {
  using T = typename S::Row;
  constexpr int V = kTile / kLanes;
  const Linear& layer = *b.work.args.layer;
  const T* x = static_cast<const T*>(b.work.x) + row * b.work.stride;
  const int64_t stride = b.work.stride, group = layer.coded.group, size = group_bytes(layer), head = group_head(layer);
  const int64_t bytes = unit_bytes(layer);
  // One pass fetches what it reads itself a little later; each of several its part of the next block.
  const bool alone = b.lines == 0;
  const int64_t ahead = alone ? bytes : 2 * half_of(b, bytes);
  const char* next = b.next + 2 * pass * half_of(b, offset_of(layer, b.k1) - offset_of(layer, b.k0));
  Block part = b;
  Vec acc[R][V];
  QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j] = zero();
  for (int64_t k = b.k0, end; k < b.k1; k = end) {
    const int64_t first = k / group * group;
    end = first + group < b.k1 ? first + group : b.k1;
    const char* at = b.weights + k / group * size;
    const char* unit = at + head + (k - first) / 2 * bytes;
    if (alone)
      for (const char* const codes = next + head; next < codes; next += 64) fetch_line(next);
    const auto multiply_units = [&]() __attribute__((always_inline)) {
      for (int64_t i = k; i < end; i += 2, unit += bytes) {
        for (int64_t at = 0; at < ahead; at += 64) fetch_line(next + at);
        next += ahead;
        multiply_unit<R>(source, unit, x + i, stride, b.work.grown, acc);
      }
    };
#if QUIRE_LEVEL == 1
    source.begin(at);
    multiply_units();
#else
    if (source.begin(at)) {
      multiply_units();
    } else {
      widen_weights(WidenArgs{&layer, b.weights, k, end, b.wide, kBF16});
      const bf16* w = static_cast<const bf16*>(b.wide);
      QUIRE_EACH for (int r = 0; r < R; ++r) S::put_in_order(acc[r]);
      for (int64_t i = k; i < end; i += 2, w += 2 * kTile) step_bf16<R>(x + i, stride, w, acc);
      QUIRE_EACH for (int r = 0; r < R; ++r) S::put_out_of_order(acc[r]);
    }
#endif
    if constexpr (S::kScalesSums) {
      part.scales = at;
      part.grows = k > b.k0;
      scale_sums<R, V, S::kDeinterleaved>(part, sums, 0, acc);
      if (end == b.k1) break;
      QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j) {
        store(sums + r * kTile + j * kLanes, acc[r][j]);
        acc[r][j] = zero();
      }
    }
  }
  QUIRE_EACH for (int r = 0; r < R; ++r) S::put_in_order(acc[r]);
  end_block<R, V>(b, row, sums, 0, acc);
}

#if QUIRE_LEVEL >= 3
// Numbers in memory, of a step, in the order of half h of a source.
template <class S> QUIRE_INLINE void out_of_order(const bf16* w, int h, __m512i (&out)[2]) {
  alignas(64) int32_t from[kTile], to[kTile];
  __builtin_memcpy(from, w, sizeof from);
  for (int i = 0; i < kTile; ++i) to[i] = from[S::column(i)];
  QUIRE_EACH for (int j = 0; j < 2; ++j) out[j] = _mm512_load_si512(to + (2 * h + j) * kLanes);
}

// Half h of the columns of R rows, so that more of them pass by together: numbers are made once for all. Sums stay in the
// order of the source.
template <int R, int h, class S> void tile_half(S source, const Block& b, int64_t row, float* sums, const char* next) {
  const Linear& layer = *b.work.args.layer;
  const bf16* x = static_cast<const bf16*>(b.work.x) + row * b.work.stride;
  const int64_t stride = b.work.stride, group = layer.coded.group, size = group_bytes(layer), head = group_head(layer);
  const int64_t bytes = unit_bytes(layer), ahead = half_of(b, bytes);
  float* const at = sums + h * kTile / 2;
  Block part = b;
  Vec acc[R][2];
  const auto clear = [&]() __attribute__((always_inline)) {
    QUIRE_EACH for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = zero();
  };
  const auto keep = [&]() __attribute__((always_inline)) {
    QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < 2; ++j) store(at + r * kTile + j * kLanes, acc[r][j]);
  };
  clear();
  for (int64_t k = b.k0, end; k < b.k1; k = end) {
    const int64_t first = k / group * group;
    end = first + group < b.k1 ? first + group : b.k1;
    const char* codes = b.weights + k / group * size;
    const char* unit = codes + head + (k - first) / 2 * bytes;
    for (const char* const behind = next + half_of(b, head); next < behind; next += 64) fetch_line(next);
    __m512i numbers[2];
    if (source.begin(codes)) {
      for (int64_t i = k; i < end; i += 2, unit += bytes, next += ahead) {
        fetch_line(next);
        source.half(unit, h, numbers);
        multiply_step<R>(x + i, stride, numbers, acc);
      }
    } else {
      widen_weights(WidenArgs{&layer, b.weights, k, end, b.wide, kBF16});
      const bf16* w = static_cast<const bf16*>(b.wide);
      for (int64_t i = k; i < end; i += 2, w += 2 * kTile) {
        out_of_order<S>(w, h, numbers);
        multiply_step<R>(x + i, stride, numbers, acc);
      }
    }
    if constexpr (S::kScalesSums) {
      part.scales = codes;
      part.grows = k > b.k0;
      scale_sums<R, 2>(part, at, h * kTile / 2, acc);
      if (end == b.k1) break;
      keep();
      clear();
    }
  }
  if constexpr (S::kInOrder) end_block<R, 2>(b, row, at, h * kTile / 2, acc);
  else keep();
}

template <int R, class S> void tile_halves(const S& source, const Block& b, int64_t row, float* sums, int64_t pass) {
  const Linear& layer = *b.work.args.layer;
  const int64_t half = half_of(b, offset_of(layer, b.k1) - offset_of(layer, b.k0));
  tile_half<R, 0>(source, b, row, sums, b.next + 2 * pass * half);
  tile_half<R, 1>(source, b, row, sums, b.next + (2 * pass + 1) * half);
  if constexpr (!S::kInOrder)
    for (int64_t r = 0; r < R; ++r, sums += kTile) {
      Vec y[1][4];
      QUIRE_EACH for (int j = 0; j < 4; ++j) y[0][j] = load(sums + j * kLanes);
      S::put_in_order(y[0]);
      end_block<1, 4>(b, row + r, sums, 0, y);
    }
}
#endif

#if QUIRE_LEVEL == 1
// One half of the columns of R rows: more sums than those would leave registers. They stay in the source's order.
template <int R, int h, class S> void tile_half(S source, const Block& b, int64_t row, float* sums) {
  const Linear& layer = *b.work.args.layer;
  const float* x = static_cast<const float*>(b.work.x) + row * b.work.stride;
  const int64_t stride = b.work.stride, group = layer.coded.group, size = group_bytes(layer), head = group_head(layer);
  const int64_t bytes = unit_bytes(layer), lines = h == 0 ? bytes / 64 : 0;
  const bool grown = b.work.grown;
  const char* next = b.next;
  Block part = b;
  Vec acc[2][R][2];
  const auto each = [&](auto what) __attribute__((always_inline)) {
    QUIRE_EACH for (int q = 0; q < 2; ++q) what(sums + S::pair(h, q) * kLanes, S::pair(h, q) * kLanes, acc[q]);
  };
  const auto clear = [&](float*, int, Vec (&some)[R][2]) __attribute__((always_inline)) {
    QUIRE_EACH for (int r = 0; r < R; ++r) some[r][0] = some[r][1] = zero();
  };
  each(clear);
  for (int64_t k = b.k0, end; k < b.k1; k = end) {
    const int64_t first = k / group * group;
    end = first + group < b.k1 ? first + group : b.k1;
    const char* at = b.weights + k / group * size;
    const char* unit = at + head + (k - first) / 2 * bytes;
    if (h == 0)
      for (const char* const codes = next + head; next < codes; next += 64) fetch_line(next);
    source.begin(at);
    for (int64_t i = k; i < end; i += 2, unit += bytes) {
      for (int64_t line = 0; line < lines; ++line, next += 64) fetch_line(next);
      source.template half<h>(unit, [&](int odd, int j, Vec numbers) __attribute__((always_inline)) {
        const Vec w = whole_number<S>(numbers, grown);
        const int place = S::place(j);
        QUIRE_EACH for (int r = 0; r < R; ++r) {
          Vec& sum = acc[place / 2][r][place % 2];
          sum = fma(splat(x[r * stride + i + odd]), w, sum);
        }
      });
    }
    if constexpr (S::kScalesSums) {
      part.scales = at;
      part.grows = k > b.k0;
      each([&](float* to, int column, Vec (&some)[R][2]) __attribute__((always_inline)) {
        scale_sums<R, 2, S::kDeinterleaved>(part, to, column, some);
        if (end == b.k1) return;
        QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < 2; ++j) store(to + r * kTile + j * kLanes, some[r][j]);
      });
      if (end == b.k1) break;
      each(clear);
    }
  }
  each([&](float* to, int column, Vec (&some)[R][2]) __attribute__((always_inline)) { end_block<R, 2>(b, row, to, column, some); });
}
#endif

template <int R> void narrow_rows(const Block& b, int64_t row, float* sums, int64_t pass) {
  const Linear& layer = *b.work.args.layer;
#if QUIRE_LEVEL >= 3
  const auto multiply = [&](const auto& source) {
    if constexpr (R <= kWholeUnits) tile_units<R>(source, b, row, sums, pass);
    else tile_halves<R>(source, b, row, sums, pass);
  };
  if (layer.dtype == kTable4) return multiply(PowerColumns(layer));
  if (kLooksUpBytes) return multiply(E4M3Table(layer));
  multiply(E4M3Units(layer));
#else
  with_columns(layer, [&](const auto& source) {
    if constexpr (R == 1) return tile_units<R>(source, b, row, sums, pass);
    tile_half<R, 0>(source, b, row, sums);
    tile_half<R, 1>(source, b, row, sums);
  });
#endif
}
#endif

// ---- products of codes: coded_tile.h

// Vectors of columns that pass by at a time.
constexpr int coded_vectors(int rows) { return QUIRE_LEVEL >= 2 ? whole_vectors(rows) : QUIRE_LEVEL == 0 ? 1 : rows == 1 ? 8 : rows == 2 ? 4 : 2; }
// With groups, sums wait beside whole numbers: fewer.
constexpr int group_vectors(int rows) { return QUIRE_LEVEL >= 2 ? (rows <= 2 ? 4 : 2) : QUIRE_LEVEL == 0 ? 1 : rows == 1 ? 8 : rows == 2 ? 2 : 1; }

// Lines that a pass over groups fetches per four steps, at least. Where vectors are long, the first two passes fetch
// all of the next block with their products: what is left to each of six is too little for one line a step.
constexpr int kGroupLines = QUIRE_LEVEL >= 2 ? 8 : 1;

// The end of a leaf, whose sums are `y`, before the row's scale.
template <int R, int V>
QUIRE_INLINE void end_coded(const Block& b, int64_t row, float* at, int64_t column, Vec (&y)[R][V]) {
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    const Vec scale = splat(b.work.coded.scales[row + r]);
    QUIRE_EACH for (int j = 0; j < V; ++j) y[r][j] = mul(y[r][j], scale);
  }
  end_block<R, V>(b, row, at, column, y);
}

// The same of one group, whose sums are `acc`.
template <int R, int V>
QUIRE_INLINE void end_codes8(const Block& b, int64_t row, float* at, int64_t column, IVec (&acc)[R][V]) {
  const Linear& layer = *b.work.args.layer;
  const int64_t tile = (b.weights - static_cast<const char*>(layer.weight)) / (b.work.coded.stride * kTile);
  const int64_t first = tile * kTile + column;
  Vec y[R][V];
  QUIRE_EACH for (int j = 0; j < V; ++j) {
    const Vec scale = load(layer.coded.scales + first + j * kLanes);
    const IVec zeros = layer.coded.zeros ? less(load_whole(layer.coded.zeros + first + j * kLanes), whole(kBelow))
                                         : whole(layer.coded.zero - kBelow);
    QUIRE_EACH for (int r = 0; r < R; ++r) {
      const IVec shift = times(zeros, whole(b.work.coded.sums[row + r]));
      y[r][j] = add(zero(), mul(rounded(less(acc[r][j], shift)), scale));
    }
  }
  end_coded<R, V>(b, row, at, column, y);
}

QUIRE_INLINE int32_t four_codes(const int8_t* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return x;
}

// Where a pass of rows begins to fetch, if each fetches its part of the next block from front to back.
const char* fetched_by(const Block& b, int64_t pass) {
  const Linear& layer = *b.work.args.layer;
  const int64_t bytes = offset_of(layer, b.k1) - offset_of(layer, b.k0);
  return b.next + pass * (bytes / 1024) * b.lines * 64;
}

// One group: whole numbers wait between blocks.
template <int R, int P> void tile_codes8(const Block& b, int64_t row, float* sums, int64_t pass) {
  constexpr int V = coded_vectors(R);
  const int64_t stride = b.work.coded.stride;
  const int8_t* x = b.work.coded.codes + row * stride;
  const char* next = fetched_by(b, pass);
  for (int64_t column = 0; column < kTile; column += V * kLanes) {
    float* at = sums + column;
    const char* w = b.weights + column * 4;
    IVec acc[R][V];
    QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
      acc[r][j] = b.fresh ? no_sum() : load_whole(at + r * 64 + j * kLanes);
    for (int64_t k = b.k0; k < b.k1; k += 16) {
      QUIRE_EACH for (int s = 0; s < 16; s += 4) {
        if (Share<V>::has(P, column)) fetch<Share<V>::of(P)>(next, s / 4);
        WVec weights[V];
        QUIRE_EACH for (int j = 0; j < V; ++j) weights[j] = bytes_at(w + (k + s) * 64 + j * kLanes * 4);
        QUIRE_EACH for (int r = 0; r < R; ++r) {
          const int32_t q = four_codes(x + r * stride + k + s);
          QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j] = dot(acc[r][j], weights[j], q);
        }
      }
    }
    if (!b.ends) {
      QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
        store_whole(at + r * 64 + j * kLanes, acc[r][j]);
      continue;
    }
    end_codes8<R, V>(b, row, at, column, acc);
  }
}

// Codes of a group. kOneRun: halves in groups of kRun, without zeros of their own.
enum { kBytes = 0, kHalves = 1, kTable = 2, kOneRun = 3 };

#ifdef QUIRE_PAIRS
// Pairs of the next codes: kRun of them, or 8.
template <int codes, int R, int V, class F>
QUIRE_INLINE void run_pairs(const char* w, const int8_t* x, int64_t stride, const F& fetch_lines, IVec (&pairs)[R][V]) {
  QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j) pairs[r][j] = no_sum();
  QUIRE_EACH for (int k = 0; k < codes; k += 8) {
    fetch_lines();
    QUIRE_EACH for (int j = 0; j < V; ++j) {
      WVec low, high;
      halves_at(w + k * 32 + j * kLanes * 4, low, high);
      QUIRE_EACH for (int r = 0; r < R; ++r) {
        const int8_t* q = x + r * stride + k;
        pairs[r][j] = pairs4(pairs[r][j], low, four_codes(q));
        as_new(pairs[r][j]);
        pairs[r][j] = pairs4(pairs[r][j], high, four_codes(q + 4));
        as_new(pairs[r][j]);
      }
    }
  }
}
#endif

// `lines` of the memory at `next` are fetched with each step of 256 bytes, after which it is `advance` further on.
// `acc` is what products are added to; of kOneRun, the first of each row's `groups` shifts.
template <int R, int V, int kind, int lines>
QUIRE_INLINE void group_sums(const char* w, const int8_t* x, int64_t stride, int64_t group, const uint8_t* table,
                             [[maybe_unused]] const int32_t* shifts, [[maybe_unused]] int64_t groups, const char*& next, int64_t advance,
                             IVec (&acc)[R][V]) {
  const auto fetch_lines = [&]() __attribute__((always_inline)) {
    QUIRE_EACH for (int i = 0; i < lines; ++i) fetch_line(next + 64 * i);
    next += advance;
  };
  if constexpr (kind == kBytes) {
    for (int64_t k = 0; k < group; k += 4, w += 256) {
      fetch_lines();
      WVec weights[V];
      QUIRE_EACH for (int j = 0; j < V; ++j) weights[j] = bytes_at(w + j * kLanes * 4);
      QUIRE_EACH for (int r = 0; r < R; ++r) {
        const int32_t q = four_codes(x + r * stride + k);
        QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j] = dot(acc[r][j], weights[j], q);
      }
    }
#ifdef QUIRE_PAIRS
  } else if constexpr (kind == kHalves) {
    const auto add_run = [&](auto codes, int64_t k) __attribute__((always_inline)) {
      IVec pairs[R][V];
      run_pairs<decltype(codes)::value>(w + k * 32, x + k, stride, fetch_lines, pairs);
      QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
        acc[r][j] = add_pairs(acc[r][j], pairs[r][j]);
    };
    int64_t k = 0;
    for (; k + kRun <= group; k += kRun) add_run(Number<kRun>(), k);
    for (; k < group; k += 8) add_run(Number<8>(), k);
  } else if constexpr (kind == kOneRun) {
    // Sums are begun when their pairs are done: none waits in memory meanwhile.
    IVec pairs[R][V];
    run_pairs<kRun>(w, x, stride, fetch_lines, pairs);
    QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
      acc[r][j] = add_pairs(whole(shifts[r * groups]), pairs[r][j]);
#endif
  } else {
    for (int64_t k = 0; k < group; k += 8, w += 256) {
      fetch_lines();
      const auto codes_at = [&](int j, WVec& low, WVec& high) __attribute__((always_inline)) {
        if constexpr (kind == kHalves) halves_at(w + j * kLanes * 4, low, high);
        else halves_at(w + j * kLanes * 4, table, low, high);
      };
      // The shorter of rows and columns stays in registers while the other passes by.
      if constexpr (R < V) {
        QUIRE_EACH for (int j = 0; j < V; ++j) {
          WVec low, high;
          codes_at(j, low, high);
          QUIRE_EACH for (int r = 0; r < R; ++r) {
            const int8_t* q = x + r * stride + k;
            acc[r][j] = dot(dot(acc[r][j], low, four_codes(q)), high, four_codes(q + 4));
          }
        }
      } else {
        WVec halves[2][V];
        QUIRE_EACH for (int j = 0; j < V; ++j) codes_at(j, halves[0][j], halves[1][j]);
        QUIRE_EACH for (int half = 0; half < 2; ++half) QUIRE_EACH for (int r = 0; r < R; ++r) {
          const int32_t q = four_codes(x + r * stride + k + 4 * half);
          QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j] = dot(acc[r][j], halves[half][j], q);
        }
      }
    }
  }
}

// Groups: each is added to the float32 sums of its leaf. With more rows fewer columns pass at a time, so
// that whole numbers and sums both stay in registers. One pass of rows fetches what comes next from front to
// back; each of several the lines that its own columns have in the next block, a whole block ahead: from front to
// back, the first columns of the next block would come upon lines that were only just asked for.
// `plain`: -1, or the type of the scales of groups of 32 without zeros and minima: what the compiler knows of them
// saves 3 % of the time with 8 rows, 2 % with 32.
template <int R, int P, int kind, int plain = -1>
void tile_groups(const Block& b, int64_t row, float* sums, int64_t pass) {
  constexpr int V = group_vectors(R), kShare = Share<V>::of(P);
  constexpr int kStepLines = Share<V>::all_do(P) ? kShare / 4 : 0;  // fetched with each step of a group
  constexpr bool kOwnLines = kStepLines > 0 && P < kLines;
  constexpr int64_t kAdvance = kOwnLines ? 256 : 64 * kStepLines;
  constexpr int32_t below = kind == kHalves || kind == kOneRun ? kBelow4 : kBelow;
  const Linear& layer = *b.work.args.layer;
  const Coded& c = layer.coded;
  const CodedRows& rows = b.work.coded;
  constexpr bool is_plain = plain >= 0;
  const int scale_type = is_plain ? plain : c.scale_type;
  const int64_t group = kind == kOneRun ? kRun : is_plain ? 32 : c.group, stride = rows.stride;
  const int64_t head = is_plain ? kTile * static_cast<int64_t>(item_size(plain)) : group_head(layer);
  const int64_t size = is_plain ? head + 32 * kTile / 2 : offset_of(layer, group);
  const int64_t lowest_at = minima_at(layer);
  const char* next = fetched_by(b, pass);
  for (int64_t column = 0; column < kTile; column += V * kLanes) {
    const char* w = b.weights + b.k0 / group * size;
    const char* ahead = b.next;  // as far into the next block as `w` is into this one
    const int8_t* x = rows.codes + row * stride + b.k0;
    const int32_t* shifts = rows.sums + row * rows.groups + b.k0 / group;
    const float* totals = rows.totals + (rows.totals ? row * rows.groups + b.k0 / group : 0);
    float* at = sums + column;
    Vec y[R][V];
    QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
      y[r][j] = b.fresh ? zero() : load(at + r * 64 + j * kLanes);
    for (int64_t k = b.k0; k < b.k1; k += group, w += size, ahead += size, x += group, ++shifts) {
      // The scales are fetched with the first columns.
      if (kOwnLines) {
        if (column == 0)
          for (int64_t line = 0; line < b.extra; ++line) fetch_line(ahead + (pass * b.extra + line) * 64);
        next = ahead + head + column * 4 + pass * kStepLines * 64;
      } else if (P > 0 && Share<V>::has(P, column)) {
        // Where steps fetch none, codes too.
        const int64_t some = kStepLines > 0 ? 0 : (size - head) * kShare / 1024;
        for (int64_t lines = column == 0 ? b.extra + some : some; lines > 0; --lines, next += 64) fetch_line(next);
      }
      IVec acc[R][V];
      if (kind == kOneRun) {  // group_sums begins them
      } else if (!is_plain && c.group_zeros) {
        QUIRE_EACH for (int j = 0; j < V; ++j) {
          const auto* p = reinterpret_cast<const int8_t*>(w + zeros_at(layer) + column + j * kLanes);
          const IVec zeros = less(load_int8(p), whole(below));
          QUIRE_EACH for (int r = 0; r < R; ++r) acc[r][j] = times(zeros, whole(shifts[r * rows.groups]));
        }
      } else {
        QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
          acc[r][j] = whole(shifts[r * rows.groups]);
      }
      group_sums<R, V, kind, kStepLines>(w + head + column * 4, x, stride, group, c.table, shifts, rows.groups, next,
                                         kAdvance, acc);
      QUIRE_EACH for (int j = 0; j < V; ++j) {
        const Vec scale = load_scales(scale_type, w, column + j * kLanes);
        QUIRE_EACH for (int r = 0; r < R; ++r) y[r][j] = add(y[r][j], mul(rounded(acc[r][j]), scale));
      }
      if (!is_plain && c.group_minima) {
        QUIRE_EACH for (int j = 0; j < V; ++j) {
          const Vec least = load_scales(c.scale_type, w + lowest_at, column + j * kLanes);
          QUIRE_EACH for (int r = 0; r < R; ++r)
            y[r][j] = sub(y[r][j], mul(splat(totals[r * rows.groups]), least));
        }
        ++totals;
      }
    }
    if (b.ends) {
      end_coded<R, V>(b, row, at, column, y);
      continue;
    }
    QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
      store(at + r * 64 + j * kLanes, y[r][j]);
  }
}

template <int R, int P> void coded_rows(const Block& b, int64_t row, float* sums, int64_t pass) {
  const Linear& layer = *b.work.args.layer;
  const Coded& c = layer.coded;
  if (!c.group) return tile_codes8<R, P>(b, row, sums, pass);
  constexpr int L = P == 0 || P >= kGroupLines ? P : kGroupLines;
  if (layer.dtype == kCodes8) return tile_groups<R, L, kBytes>(b, row, sums, pass);
  if (c.table) return tile_groups<R, L, kTable>(b, row, sums, pass);
#ifdef QUIRE_PAIRS
  if (c.group == kRun && !c.group_zeros) return tile_groups<R, L, kOneRun>(b, row, sums, pass);
#endif
#if QUIRE_LEVEL >= 3
  if (c.group == 32 && !c.group_zeros && !c.group_minima) {
    if (c.scale_type == kBF16) return tile_groups<R, L, kHalves, kBF16>(b, row, sums, pass);
    if (c.scale_type == kF16) return tile_groups<R, L, kHalves, kF16>(b, row, sums, pass);
  }
#endif
  tile_groups<R, L, kHalves>(b, row, sums, pass);
}

#ifdef QUIRE_AMX
// ---- products on tile registers: tile_registers.h

// Rows of codes that take them, at least: fewer are multiplied faster without, with the same bits. The sums of groups
// have to leave the registers before they are scaled.
constexpr int64_t kLeastRows = 3, kLeastRowsOfGroups = 8;

// How far ahead codes are fetched while numbers are made of them: the best of 1 to 8 KiB, to either level of cache.
constexpr int64_t kMadeLead = 3072;

// Rows of one tile by a narrow weight, whose numbers are made a step before they are multiplied: within a group by a
// source, else by the function for all of them.
template <class S> void multiply_made(const Block& b, const TileProduct& product, S source) {
  static_assert(kTileStep * 2 == kStepBytes, "a step is a line of a row");
  const Linear& layer = *b.work.args.layer;
  const int64_t group = layer.coded.group, size = group_bytes(layer), head = group_head(layer), bytes = unit_bytes(layer);
  b.shape->set(product.count, product.last);
  multiply_one<kNumbers>(product, static_cast<char*>(b.wide), [&](int64_t step, char* to) {
    const int64_t k0 = b.k0 + step * kTileStep, k1 = k0 + kTileStep < b.k1 ? k0 + kTileStep : b.k1;
    const int64_t before = k0 / group, first = before * group;
    const char* at = b.weights + before * size;
    if (k1 > first + group || !source.begin(at))
      return widen_weights(WidenArgs{&layer, b.weights, k0, k1, to, kBF16});
    const char* unit = at + head + (k0 - first) / 2 * bytes;
    for (int64_t k = k0; k < k1; k += 2, unit += bytes, to += kUnit * 2) {
      for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(unit + kMadeLead + line, 0, 3);
      __m512i numbers[4];
      make_unit(source, unit, numbers);
      QUIRE_EACH for (int m = 0; m < 4; ++m) _mm512_storeu_si512(to + 64 * m, numbers[m]);
    }
  });
}
struct NoSource {
  explicit NoSource(const Linear&) {}
  bool begin(const char*) { return false; }
  void half(const char*, int, __m512i (&)[2]) const {}
};
void multiply_made(const Block& b, const TileProduct& product) {
  const Linear& layer = *b.work.args.layer;
  if (are_powers(layer)) return multiply_made(b, product, PowerUnits(layer));
  if (layer.dtype != kE4M3 || layer.coded.wide != kBF16) return multiply_made(b, product, NoSource(layer));
  if (kLooksUpBytes) return multiply_made(b, product, E4M3Table(layer));
  multiply_made(b, product, E4M3Units(layer));
}

// Numbers, or codes of one group.
void tile_rows(const Block& b, int64_t row, int64_t count, float* sums, int64_t pass) {
  const Work& work = b.work;
  const bool coded = is_coded(*work.args.layer);
  const int64_t item = coded ? 1 : 2, bytes = (b.k1 - b.k0) * item, stride = (coded ? work.coded.stride : work.stride) * item;
  const char* x = coded ? reinterpret_cast<const char*>(work.coded.codes) : static_cast<const char*>(work.x);
  const bool fetched = pass * b.lines >= b.all_lines;
  // A leaf's end does more with its sums than to keep them; whole numbers become others.
  const bool more = coded ? b.ends : b.scales || b.joins > 0 || b.into;
  alignas(64) float ended[2 * kTileRegisterRows * kTile];
  // The last rows pass by with some of those before them, whose sums are dropped: setting another shape, and the first
  // one again in the next block, takes longer.
  const int64_t again = b.whole_tiles ? kTileRegisterRows - count : 0;
  const TileProduct product{
      x + (row - again) * stride + b.k0 * item, stride, again + count, b.weights + (b.k0 - b.begins) * kTile * item,
      bytes / kStepBytes, bytes % kStepBytes / 4, b.fresh ? nullptr : sums - again * kTile, more || again ? ended : sums,
      b.next + pass * (bytes / 16) * b.lines * 64, fetched ? 0 : 4 * b.lines};
  if (b.wide) multiply_made(b, product);
  else coded ? multiply_tiles<kSignedRows>(*b.shape, product) : multiply_tiles<kNumbers>(*b.shape, product);
  if (!more) {
    if (again) __builtin_memcpy(sums, ended + again * kTile, static_cast<size_t>(count * kTile) * sizeof(float));
    return;
  }
  for (int64_t r = 0; r < count; ++r) {
    const float* from = ended + (again + r) * kTile;
    float* const at = sums + r * kTile;
    if (coded) {
      IVec acc[1][4];
      QUIRE_EACH for (int j = 0; j < 4; ++j) acc[0][j] = load_whole(from + j * kLanes);
      end_codes8<1, 4>(b, row + r, at, 0, acc);
      continue;
    }
    Vec acc[1][4];
    QUIRE_EACH for (int j = 0; j < 4; ++j) acc[0][j] = load(from + j * kLanes);
    if (b.scales) scale_sums<1, 4>(b, at, 0, acc);
    end_block<1, 4>(b, row + r, at, 0, acc);
  }
}

// How the sums of a group, whole numbers, join those of the groups before it. Codes of four bits have become bytes less
// their zeros, so that scales are all that is left, and minima; those of eight lack what is to be added for all that
// they are above their zeros.
enum GroupEnd { kScaled, kLeast, kShifted, kAll };

// Of 16 columns from `column` on, whose sums so far are `y`. Rows after the last are made of what is there, and dropped.
template <GroupEnd end, int R>
QUIRE_INLINE void add_group(const Linear& layer, const CodedRows& rows, int64_t row, int64_t group, const char* head,
                            int64_t column, const int32_t* whole_sums, Vec (&y)[R]) {
  const Coded& c = layer.coded;
  const Vec scale = load_scales(c.scale_type, head, column);
  const int64_t at = row * rows.groups + group;
  const bool least_too = end == kLeast || (end == kAll && c.group_minima);
  const Vec least = least_too ? load_scales(c.scale_type, head + minima_at(layer), column) : zero();
  IVec zeros = whole(1);
  if (end == kAll && c.group_zeros)
    zeros = less(load_int8(reinterpret_cast<const int8_t*>(head + zeros_at(layer) + column)), whole(kBelow));
  QUIRE_EACH for (int r = 0; r < R; ++r) {
    IVec all = load_whole(whole_sums + r * kLanes);
    if constexpr (end == kShifted) all = plus(all, whole(rows.sums[at + r * rows.groups]));
    if constexpr (end == kAll) all = plus(all, times(zeros, whole(rows.sums[at + r * rows.groups])));
    y[r] = add(y[r], mul(rounded(all), scale));
    if (least_too) y[r] = sub(y[r], mul(splat(rows.totals[at + r * rows.groups]), least));
  }
}

// Sums of 16 columns, so far.
template <int R> QUIRE_INLINE void begin_columns(const Block& b, int64_t count, const float* sums, Vec (&y)[R]) {
  QUIRE_EACH for (int r = 0; r < R; ++r) y[r] = b.fresh || r >= count ? zero() : load(sums + r * kTile);
}
__attribute__((noinline)) void end_column_sums(const Block& b, int64_t row, int64_t count, float* sums, int64_t column) {
  for (int64_t r = 0; r < count; ++r) {
    float* const at = sums + r * kTile + column;
    Vec ended[1][1] = {{load(at)}};
    end_coded<1, 1>(b, row + r, at, column, ended);
  }
}
template <int R>
QUIRE_INLINE void end_columns(const Block& b, int64_t row, int64_t count, float* sums, int64_t column, const Vec (&y)[R]) {
  QUIRE_EACH for (int r = 0; r < R; ++r)
    if (r < count) store(sums + r * kTile + column, y[r]);
  if (b.ends) end_column_sums(b, row, count, sums, column);  // by way of memory, so that `y` can stay in registers
}

// Codes of groups. 16 columns pass by after the others, group by group in pairs: while one pair is multiplied, the one
// before is stored, and the one before that is scaled. A store has to wait until its tile is made; after one instruction on tile
// registers, which is many small ones, a core takes some cycles to come back to others; and what is scaled stays in
// registers over all groups. In this order a group of 32 takes 48 cycles instead of 70 (docs/cpu-kernels.md).
template <GroupEnd end, int R>
void tile_row_groups(const Block& b, int64_t row, int64_t count, float* sums, int64_t pass) {
  constexpr Factors factors = end == kScaled || end == kLeast ? kSigned : kSignedRows;
  const Linear& layer = *b.work.args.layer;
  const CodedRows& rows = b.work.coded;
  const int64_t group = layer.coded.group, size = offset_of(layer, group), first = b.k0 / group;
  const int64_t groups = (b.k1 - b.k0) / group, lines = pass * b.lines >= kLines ? 0 : size / 1024 * b.lines + b.extra;
  const char* const heads = b.weights + first * size;
  const char* const codes = b.bytes ? b.bytes : heads + group_head(layer);
  const int64_t apart = b.bytes ? group * kTile : size, steps = group / kStepBytes, last = group % kStepBytes;
  const char* const x = reinterpret_cast<const char*>(rows.codes) + row * rows.stride + b.k0;
  alignas(64) int32_t whole_sums[2][2][kTileRegisterRows * kLanes];
  if (count < R) __builtin_memset(whole_sums, 0, sizeof whole_sums);
  b.shape->set(count, last / 4);

  const char *next = b.next + pass * groups * lines * 64, *made_x = x, *made_codes = codes;
  int64_t made_column = 0, made_left = groups;
  const auto make = [&](auto turn) __attribute__((always_inline)) {
    const int64_t some = made_left > 1 ? 2 : 1;  // if it is one, it is made twice
    const int64_t share = lines * (made_column + kLanes) / kTile - lines * made_column / kTile;
    for (int64_t line = 0; line < share * some; ++line, next += 64) __builtin_prefetch(next, 0, 2);
    multiply_pair<factors, 2 * decltype(turn)::value>({made_x, rows.stride}, (some - 1) * group,
                                                      {made_codes, 256, kStepWeights}, (some - 1) * apart, steps, last > 0);
    made_left -= 2;
    made_x += 2 * group;
    made_codes += 2 * apart;
    if (made_left > 0) return;
    made_left = groups;
    made_column += kLanes;
    made_x = x;
    made_codes = codes + made_column * 4;
  };

  Vec y[R];
  const char* head = heads;
  int64_t column = 0, at = 0;
  const auto scale = [&](const int32_t (&from)[2][kTileRegisterRows * kLanes]) __attribute__((always_inline)) {
    if (at == 0) begin_columns<R>(b, count, sums + column, y);
    add_group<end, R>(layer, rows, row, first + at, head, column, from[0], y);
    if (at + 1 < groups) add_group<end, R>(layer, rows, row, first + at + 1, head + size, column, from[1], y);
    at += 2;
    head += 2 * size;
    if (at < groups) return;
    end_columns<R>(b, row, count, sums, column, y);
    at = 0;
    head = heads;
    column += kLanes;
  };

  const int64_t pairs = (groups + 1) / 2 * (kTile / kLanes);  // an even number
  make(Number<0>());
  make(Number<1>());
  store_pair<0>(whole_sums[0][0]);
  for (int64_t i = 2; i < pairs; i += 2) {
    make(Number<0>());
    store_pair<2>(whole_sums[1][0]);
    scale(whole_sums[0]);
    make(Number<1>());
    store_pair<0>(whole_sums[0][0]);
    scale(whole_sums[1]);
  }
  store_pair<2>(whole_sums[1][0]);
  scale(whole_sums[0]);
  scale(whole_sums[1]);
}

template <GroupEnd end> void row_groups(const Block& b, int64_t row, int64_t count, float* sums, int64_t pass) {
  count <= 8 ? tile_row_groups<end, 8>(b, row, count, sums, pass) : tile_row_groups<end, 16>(b, row, count, sums, pass);
}

// What is taken from each byte of 16 columns of a group.
QUIRE_INLINE __m512i zeros_of(const Linear& layer, const char* group, int64_t column) {
  const Coded& c = layer.coded;
  if (!c.group_zeros) return _mm512_set1_epi8(static_cast<char>(c.table ? 128 + c.zero : c.zero));
  const __m512i each = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(group + zeros_at(layer) + column)));
  return _mm512_mullo_epi32(_mm512_and_si512(each, _mm512_set1_epi32(255)), _mm512_set1_epi32(0x01010101));
}

// Codes of four bits as bytes with a sign, less their zeros, in the order of codes of eight. They fit: without table,
// codes and zeros are 0 to 15; with one there are no zeros (kernels/coded.py).
void widen_codes(const Linear& layer, const char* tile, int64_t k0, int64_t k1, char* to) {
  const int64_t group = layer.coded.group, head = group_head(layer);
  const uint8_t* table = layer.coded.table;
  for (int64_t k = k0; k < k1; k += group, to += group * kTile) {
    const char* const from = tile + offset_of(layer, k);
    __m512i zeros[4];
    QUIRE_EACH for (int j = 0; j < 4; ++j) zeros[j] = zeros_of(layer, from, j * kLanes);
    for (int64_t i = 0; i < group; i += 8)
      QUIRE_EACH for (int j = 0; j < 4; ++j) {
        const char* codes = from + head + i * 32 + 64 * j;
        char* const out = to + i * kTile + 64 * j;
        WVec low, high;
        if (table) halves_at(codes, table, low, high);
        else halves_at(codes, low, high);
        _mm512_storeu_si512(out, _mm512_sub_epi8(low.v, zeros[j]));
        _mm512_storeu_si512(out + 256, _mm512_sub_epi8(high.v, zeros[j]));
      }
  }
}

// Whether rows of a panel take tile registers. Of bf16 numbers all do, since their bits are others.
bool on_tiles(const Work& work, int64_t rows) {
  const Linear& layer = *work.args.layer;
  return work.direct || (is_coded(layer) && rows >= (layer.coded.group ? kLeastRowsOfGroups : kLeastRows));
}

void rows_on_tiles(const Block& b, int64_t row, int64_t count, float* sums, int64_t pass) {
  const Coded& c = b.work.args.layer->coded;
  if (!is_coded(*b.work.args.layer) || !c.group) return tile_rows(b, row, count, sums, pass);
  if (b.bytes) return c.group_minima ? row_groups<kLeast>(b, row, count, sums, pass) : row_groups<kScaled>(b, row, count, sums, pass);
  c.group_zeros || c.group_minima ? row_groups<kAll>(b, row, count, sums, pass) : row_groups<kShifted>(b, row, count, sums, pass);
}
#else
bool on_tiles(const Work&, int64_t) { return false; }
void rows_on_tiles(const Block&, int64_t, int64_t, float*, int64_t) {}
void widen_codes(const Linear&, const char*, int64_t, int64_t, char*) {}
#endif

template <int R> void rows(const Block& b, int64_t row, float* sums, int64_t pass) {
  if (is_coded(*b.work.args.layer)) {
    const bool fetched = pass * b.lines >= kLines && b.k1 - b.k0 > kShortBlock * 4;
#ifdef QUIRE_DEBUG
    (void)fetched;
#else
    switch (fetched ? 0 : b.lines) {
      case 16: return coded_rows<R, 16>(b, row, sums, pass);
      case 8: return coded_rows<R, 8>(b, row, sums, pass);
      case 4: case 3: return coded_rows<R, 4>(b, row, sums, pass);
      case 2: return coded_rows<R, 2>(b, row, sums, pass);
      case 1: return coded_rows<R, 1>(b, row, sums, pass);
    }
#endif
    return coded_rows<R, 0>(b, row, sums, pass);
  }
#if QUIRE_LEVEL >= 3
  if (b.wide) return narrow_rows<R>(b, row, sums, pass);
#elif QUIRE_LEVEL == 1
  if constexpr (R <= kInRegisters) {
    if (b.wide) return narrow_rows<R>(b, row, sums, pass);
  }
#endif
#if QUIRE_LEVEL >= 3
  if (b.work.direct) {
    const char* next = b.next + pass * ((b.k1 - b.k0) / 8) * b.lines * 64;
    // A short block's passes go on: a longer lead did no harm there, and good with 16 rows.
    const bool fetched = pass * b.lines >= b.all_lines && b.k1 - b.k0 > kShortBlock;
#ifdef QUIRE_DEBUG  // sanitizers see nothing in fetching, but take minutes to compile each tile
    (void)fetched;
#else
    switch (fetched ? 0 : b.lines) {
      case 16: return tile_bf16<R, 16>(b, row, sums, next);
      case 8: return tile_bf16<R, 8>(b, row, sums, next);
      case 4: return tile_bf16<R, 4>(b, row, sums, next);
      case 3: return tile_bf16<R, 3>(b, row, sums, next);
      case 2: return tile_bf16<R, 2>(b, row, sums, next);
      case 1: return tile_bf16<R, 1>(b, row, sums, next);
    }
#endif
    return tile_bf16<R, 0>(b, row, sums, next);
  }
#endif
  const bool fetches = b.lines > 0 && pass * b.lines < b.all_lines;
  const char* next = fetches ? b.next + pass * ((b.k1 - b.k0) / 8) * b.lines * 64 : nullptr;
  switch (b.type) {
    case kBF16: return tile_f32<R, kBF16>(b, row, sums, next);
    case kF16: return tile_f32<R, kF16>(b, row, sums, next);
    default: return tile_f32<R, kF32>(b, row, sums, next);
  }
}

#if QUIRE_LEVEL >= 2 && !defined QUIRE_AMX
// More rows than `rows` takes: kAtOnce, or kMadeOnce.
template <int R> void more_rows(const Block& b, int64_t row, float* sums, [[maybe_unused]] int64_t pass) {
#if QUIRE_LEVEL >= 3
  if (b.wide) return narrow_rows<R>(b, row, sums, pass);
#endif
  if constexpr (R <= kAtOnce) {
#if QUIRE_LEVEL >= 3
    if (!is_coded(*b.work.args.layer)) return tile_bf16<R, kLines>(b, row, sums, b.next);
#endif
    tile_codes8<R, kLines>(b, row, sums, 0);
  }
}
#endif

void some_rows(const Block& b, int64_t row, int64_t count, float* sums, int64_t pass) {
  if (b.shape) return rows_on_tiles(b, row, count, sums, pass);
  switch (count) {
    case 1: return rows<1>(b, row, sums, pass);
    case 2: return rows<2>(b, row, sums, pass);
    case 3: return rows<3>(b, row, sums, pass);
#if QUIRE_LEVEL == 0
    default: return rows<4>(b, row, sums, pass);
#else
    case 4: return rows<4>(b, row, sums, pass);
    case 5: return rows<5>(b, row, sums, pass);
#if QUIRE_LEVEL == 1 || defined QUIRE_AMX
    default: return rows<6>(b, row, sums, pass);
#else
    case 6: return rows<6>(b, row, sums, pass);
    case 7: return more_rows<7>(b, row, sums, pass);
    case 8: return more_rows<8>(b, row, sums, pass);
    case 9: return more_rows<9>(b, row, sums, pass);
    case 10: return more_rows<10>(b, row, sums, pass);
    case 11: return more_rows<11>(b, row, sums, pass);
    default: return more_rows<12>(b, row, sums, pass);
#endif
#endif
  }
}

// ---- after the sums ----------------------------------------------------------------------------

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

// ---- one tile of a panel -----------------------------------------------------------------------

// Lines to fetch per four steps, so that all passes together fetch a block, as evenly as can be (three
// passes in two halves, which was faster): memory asked in bursts holds up the arithmetic.
int64_t lines_per_pass(int64_t passes, int64_t all, int64_t least) {
  constexpr int64_t kChoices[] = {1, 2, 3, 4, 8};
  for (int64_t lines : kChoices)
    if (lines >= least && lines * passes >= all) return lines;
  return all;
}

const char* tile_at(const Linear& layer, int64_t tile) {
  return static_cast<const char*>(layer.weight) + tile * tile_bytes(layer);
}

// How often rows pass by a block, each time others of them. Five and six could at once, but then arithmetic and
// memory wait for each other: on Zen 4 two passes by short blocks, which stay in the first-level cache, are 1.03 to
// 1.4 times as fast with one thread (docs/cpu-kernels.md); with three and four rows they are no faster.
constexpr int64_t kMostOnce = QUIRE_LEVEL >= 3 ? 4 : kRows;
// Whether rows pass by in two tile registers at once: each tile of weights that is read is then multiplied twice, but
// rows are read twice. More rows than these would wait for that, since the second-level cache has to give them.
bool two_tiles(const Linear& layer, int64_t rows) {
  return rows > kTileRegisterRows && rows <= kMostTwo && !layer.coded.group;
}
// Weights that are multiplied as they are, without groups.
bool by_blocks(const Work& work) {
  const Linear& layer = *work.args.layer;
  return is_coded(layer) ? !layer.coded.group : work.direct && !is_narrow(layer);
}
// Whether rows pass by half of the columns at a time, and all of the steps.
bool at_once(const Work& work, int64_t rows) {
  return rows > kRows && rows <= kAtOnce && by_blocks(work) && work.args.layer->dtype != kCodes4;
}
// Whether the numbers of a narrow weight are made in registers.
bool in_registers(const Work& work, int64_t rows) {
  const Linear& layer = *work.args.layer;
  const bool fits = work.direct ? layer.dtype == kE4M3 || are_powers(layer) : widens_to_f32(layer);
  return fits && rows <= (layer.dtype == kTable4 ? kInRegisters4 : kInRegisters) && !on_tiles(work, rows);
}

int64_t passes_of(const Work& work, int64_t rows) {
  const Linear& layer = *work.args.layer;
  if (on_tiles(work, rows)) {
    const int64_t once = two_tiles(layer, rows) ? 2 * kTileRegisterRows : kTileRegisterRows;
    return (rows + once - 1) / once;
  }
  if (at_once(work, rows)) return 1;
  if (rows > kMostOnce && rows <= kRows && by_blocks(work)) return 2;
  const int64_t most = rows > kRows && in_registers(work, rows) && kMadeOnce > 0 ? kMadeOnce : kRows;
  return (rows + most - 1) / most;
}

// Whether rows that pass by together read a block's weights once, from front to back.
bool reads_once(const Work& work, int64_t rows) {
  if (on_tiles(work, rows)) return rows <= kTileRegisterRows;
  const int count = static_cast<int>(rows);
  return passes_of(work, rows) == 1 && (work.direct ? whole_vectors(count) : vectors_of(count)) * kLanes == kTile;
}

// The same for codes.
bool reads_codes_once(const Work& work, int64_t rows) {
  const int count = static_cast<int>(rows);
  if (on_tiles(work, rows)) return rows <= kTileRegisterRows && !work.args.layer->coded.group;
  return passes_of(work, rows) == 1 && (work.args.layer->coded.group ? group_vectors(count) : coded_vectors(count)) * kLanes == kTile;
}

// Steps of a leaf's k that are multiplied at a time, where its weights are read more than once: few rows take no
// longer blocks, many rows the nearest number of blocks.
int64_t cut_length(int64_t rows, int64_t k, int64_t block = kBlock, int64_t short_block = kShortBlock) {
  const int64_t blocks = rows <= kFewRows ? (k + short_block - 1) / short_block : (k + block / 2) / block;
  return blocks <= 1 ? k : ((k + blocks - 1) / blocks + 7) / 8 * 8;
}
// Whole steps of tile registers, which are 64 codes or half as many numbers.
int64_t tiles_length(int64_t k, int64_t block) {
  const int64_t blocks = (k + block / 2) / block;
  return blocks <= 1 ? k : ((k + blocks - 1) / blocks + 63) / 64 * 64;
}
int64_t block_length(const Work& work, int64_t rows, int64_t k) {
  if (reads_once(work, rows) || at_once(work, rows)) return k;
  if (!on_tiles(work, rows)) return cut_length(rows, k);
  return tiles_length(k, two_tiles(*work.args.layer, rows) ? kBlock : kTileBlock);
}

// The type that numbers of narrow weights have in a near cache: where vectors are short, as they are multiplied.
int number_type(const Linear& layer) { return widens_to_f32(layer) ? static_cast<int>(kF32) : weight_type(layer); }

// The same for narrow weights, whose numbers stand in a near cache: one pass takes short blocks too.
int64_t narrow_length(const Work& work, int64_t rows, int64_t k) {
  const int64_t few = on_tiles(work, rows) ? 2 * kTileRegisterRows : kRows;
  if (rows <= few) return k > kNarrowBlock ? kNarrowBlock : k;
  if (rows > kFewRows && number_type(*work.args.layer) == kF32) return k > kNarrowBlock32 ? kNarrowBlock32 : k;
  return block_length(work, rows, k);
}

// The same for codes: of whole groups.
int64_t coded_length(const Work& work, int64_t rows, int64_t k) {
  const Linear& layer = *work.args.layer;
  const int64_t unit = layer.coded.group ? layer.coded.group : 16;
  const int64_t tile_block = layer.coded.group         ? kTileBlockOfGroups
                             : two_tiles(layer, rows) ? kBlock8
                                                      : 2 * kTileBlock;
  const int64_t length = reads_codes_once(work, rows) || at_once(work, rows) ? k
                         : on_tiles(work, rows)   ? tiles_length(k, tile_block)
                         : layer.dtype == kCodes8 ? cut_length(rows, k, kBlock8, kShortBlock8)
                                                  : cut_length(rows, k, kBlock4, kShortBlock4);
  return (length + unit - 1) / unit * unit;
}

// Sums that are whole leave the order of a source.
void end_source(const Block& b, int64_t row, int64_t count, float* sums) {
#if QUIRE_LEVEL == 1
  put_sums_in_order(*b.work.args.layer, sums, count);
  if (!b.in_order) return;
  for (int64_t r = 0; r < count; ++r, sums += kTile) {
    const Vec share = splat(b.work.args.shares[row + r]);
    float* out = added_to(b, b.in_order, row + r);
    for (int64_t i = 0; i < kTile; i += kLanes) store(out + i, add(load(out + i), mul(load(sums + i), share)));
  }
#else
  (void)b, (void)row, (void)count, (void)sums;
#endif
}

// All rows of a panel pass by one block of a leaf. `sums` are the oldest ones.
void one_block(const Block& block, int64_t row0, int64_t row1, int64_t tile, int64_t leaf,
               bool ends_leaf, float* sums) {
  const GemmArgs& args = block.work.args;
  const int64_t passes = passes_of(block.work, row1 - row0);
  float* const mine = sums + (args.rows ? 0 : waiting(leaf) * block.apart);
  // Passes of about equal size: four and four rows rather than six and two.
  for (int64_t row = row0, pass = 0, count; row < row1; row += count, ++pass) {
    const int64_t left = passes - pass, at = (row - row0) * kTile;
    count = !block.whole_tiles ? (row1 - row + left - 1) / left : left > 1 ? kTileRegisterRows : row1 - row;
    if (ends_leaf && args.rows && !block.into && !block.in_order) fetch_leaf(args, leaf, row, count, tile);
    some_rows(block, row, count, mine + at, pass);
    if (!ends_leaf || (!args.rows && leaf + 1 < args.layer->leaves)) continue;
    if (block.by_source) end_source(block, row, count, sums + at);
    if (block.into || block.in_order) continue;
    if (args.rows) add_leaf(args, leaf, row, count, tile, sums + at);
    else finish_rows(args, row, count, tile, sums + at);
  }
}

// What a product reads of a tile besides its weights, at the end of its sums: these few lines, which are apart from
// the weights, would hold it up.
void fetch_ends(const Linear& layer, int64_t tile) {
  const auto all = [&](const void* of) {
    if (!of) return;
    const char* first = static_cast<const char*>(of) + tile * kTile * 4;
    QUIRE_EACH for (int64_t i = 0; i < kTile * 4; i += 64) __builtin_prefetch(first + i);
  };
  all(layer.bias);
  if (!is_coded(layer) || layer.coded.group) return;
  all(layer.coded.scales);
  all(layer.coded.zeros);
}

// `after`: what the thread reads after this tile.
void one_tile(const Work& work, int64_t row0, int64_t row1, int64_t tile, const char* after,
              TileShape& registers, float* sums) {
  const Linear& layer = *work.args.layer;
  fetch_ends(layer, tile);
  const int64_t k = padded_k(layer), leaf_k = k / layer.leaves;
  const char* weights = tile_at(layer, tile);
  const int64_t passes = passes_of(work, row1 - row0);
  const bool narrow = is_narrow(layer), at_once = narrow && in_registers(work, row1 - row0);
  // In one register tile of rows, numbers are made a step before they are multiplied.
  const bool by_steps = narrow && on_tiles(work, row1 - row0) && row1 - row0 <= kTileRegisterRows;
  const int type = narrow ? number_type(layer) : weight_type(layer);
  const int64_t group = layer.coded.group, own_lead = narrow || layer.dtype == kCodes4 ? kOwnLeadOfMade : kOwnLead;
  const bool once = narrow ? passes == 1 && !(at_once && row1 - row0 > kWholeUnits)
                    : is_coded(layer) ? reads_codes_once(work, row1 - row0)
                                      : reads_once(work, row1 - row0);
  int64_t length = at_once || by_steps ? leaf_k
                   : is_coded(layer)   ? coded_length(work, row1 - row0, leaf_k)
                   : narrow            ? narrow_length(work, row1 - row0, leaf_k)
                                       : block_length(work, row1 - row0, leaf_k);
  // One of several groups, whose sums join others, is not cut but where a leaf ends.
  const bool scaled = narrow && !at_once && scales_sums(layer), whole = scaled && group < k;
  if (whole) length = group;
  // A narrow weight has fewer lines, and one that is read once is fetched where it becomes numbers.
  const int64_t all_lines = narrow                ? layer.dtype == kTable4 ? kLines / 4 : kLines / 2
                            : layer.dtype == kF32 ? 2 * kLines
                                                  : kLines;
  const int64_t least = is_coded(layer) && group ? kGroupLines : 1;
  const int64_t lines = narrow && once ? 0 : lines_per_pass(passes, all_lines, least);
  // Numbers in memory at once, of a column: by steps, those of two.
  const int64_t most = by_steps ? 2 * kTileStep : at_once && group < length ? group : length;
  void* const wide = narrow ? scratch(6, static_cast<size_t>((most + 1) * kTile) * 4) : nullptr;
  const int64_t apart = (row1 - row0) * kTile;
  TileShape* const shape = on_tiles(work, row1 - row0) ? &registers : nullptr;
  const bool unpacked = shape && layer.dtype == kCodes4;
  const bool whole_tiles = shape && passes > 1 && (row1 - row0) % passes != 0 && !group;
  char* const bytes = unpacked ? static_cast<char*>(scratch(6, static_cast<size_t>(length * kTile))) : nullptr;
  const int64_t head = layer.coded.group ? (group_head(layer) / 64 + passes - 1) / passes : 0;
  for (int64_t leaf = 0; leaf < layer.leaves; ++leaf) {
    const int64_t begin = leaf * leaf_k, end = begin + leaf_k;
    for (int64_t k0 = begin, k1; k0 < end; k0 = k1) {
      k1 = (whole ? k0 / length * length : k0) + length;
      if (k1 > end) k1 = end;
      const int64_t joins = k1 == end && !work.args.rows ? branches(leaf) : 0;
      // One pass over all columns fetches ahead of itself, among others its share of the next block.
      const char* next = once     ? weights + offset_of(layer, k0) + own_lead
                         : k1 < k ? weights + offset_of(layer, k1)
                                  : after;
      const bool adds = k1 == end && work.args.tile_from >= 0;
      float* into = static_cast<float*>(work.args.out) + leaf * work.args.out_rows * kTile;
      // One row leaves the order of a source in registers.
      const bool by_source = narrow && type != layer.coded.wide && (!at_once || row1 - row0 > 1);
      const bool made = narrow && !at_once && !by_steps, ends_group = scaled && (whole || k1 == end);
      if (made) widen_weights(WidenArgs{&layer, weights, k0, k1, wide, type, work.grown});
      if (unpacked) widen_codes(layer, weights, k0, k1, bytes);
      const Block block{work, made ? static_cast<const char*>(wide) : weights,
                        made ? k0 : 0, k0, k1, whole || k0 == begin, joins, apart, next, lines, all_lines,
                        adds && !by_source ? into : nullptr, k1 == end, head,
                        ends_group ? weights + k0 / group * group_bytes(layer) : nullptr, whole && k0 > begin,
                        at_once || by_steps ? wide : nullptr, type, shape, bytes, whole_tiles,
                        by_source, adds && by_source ? into : nullptr};
      one_block(block, row0, row1, tile, leaf, k1 == end, sums);
    }
  }
}

// ---- panels and threads ------------------------------------------------------------------------

// How a product is cut: items are the tiles of the first panel of rows, then those of the next.
struct Cut {
  int64_t tiles, height, items, grain, chunks;

  Cut(const Linear& layer, int64_t rows) {
    tiles = packed_tiles(layer.n);
    const int64_t panels = (rows + kPanel - 1) / kPanel;
    // Panels of about equal height, each a whole number of register tiles.
    constexpr int64_t kUnit = kTiles ? 2 * kTileRegisterRows : kRows;
    height = ((rows + panels - 1) / panels + kUnit - 1) / kUnit * kUnit;
    items = (rows + height - 1) / height * tiles;
    grain = tiles / (num_threads() * 8);
    grain = grain < 1 ? 1 : grain > kMostTiles ? kMostTiles : grain;
    chunks = (items + grain - 1) / grain;
  }

  // First chunk of a thread's share.
  int64_t share(int64_t thread) const { return share_begin(thread, num_threads(), chunks); }
};

// What is read after an item: the next tile, or, if it is the last of a thread's share, the first one
// of the thread's share of the next product.
const char* after_item(const GemmArgs& a, const Cut& cut, const Cut& next, int64_t item) {
  const bool ends_chunk = item + 1 == cut.items || (item + 1) % cut.grain == 0;
  if (a.next && ends_chunk)
    for (int64_t thread = 0; thread < num_threads(); ++thread)
      if (cut.share(thread + 1) == item / cut.grain + 1)
        return tile_at(*a.next, next.share(thread) * next.grain % next.tiles);
  return tile_at(*a.layer, (item + 1) % cut.tiles);
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

// The rows as codes.
Work quantised(const GemmArgs& a) {
  const Linear& layer = *a.layer;
  const CodedRows rows = room_for_codes(layer, a.m);
  if (!a.quantised)
    parallel_for(a.m, 8192 / rows.stride + 1, [&](int64_t begin, int64_t end) {
      int8_t* const line = unordered_codes(layer);
      for (int64_t row = begin; row < end; ++row)
        quantise_row(layer, a.x_dtype, a.x, row * a.x_stride, rows, row, line);
    });
  return {a, nullptr, 0, false, rows};
}

// Multiplies float32 rows with what the numbers of a source lack, if all of them can be.
bool grow_rows(const Linear& layer, float* x, int64_t count) {
#if QUIRE_LEVEL == 1
  const Growth growth = growth_of(layer);
  uint32_t all = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t size = f32_to_bits(x[i]) & 0x7fffffffu;
    all = size > all ? size : all;
  }
  if (all >= growth.too_large) return false;
  // By way of the pool, which knows of denormal numbers whatever mode its caller is in.
  parallel_for(count, 8192, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) x[i] *= growth.times;
  });
  return true;
#else
  (void)layer, (void)x, (void)count;
  return false;
#endif
}

// The rows as the register tiles read them; in scratch memory of the caller if they are not so yet. `most_rows`:
// of these that one weight is multiplied with.
Work prepared(const GemmArgs& a, int64_t most_rows) {
  const Linear& layer = *a.layer;
  if (is_coded(layer)) return quantised(a);
  const int64_t k = padded_k(layer);
  const bool direct = QUIRE_LEVEL >= 3 && a.x_dtype == kBF16 && weight_type(layer) == kBF16;
  const bool by_source = widens_to_f32(layer) && scales_sums(layer) && most_rows <= kFewRows;
  if (k == layer.k && !by_source && (direct || a.x_dtype == kF32)) return {a, a.x, a.x_stride, direct, {}};
  void* wide = scratch(2, static_cast<size_t>(a.m * k) * (direct ? 2 : 4));
  widen_rows(a, a.x, a.x_stride, direct, wide, k);
  return {a, wide, k, direct, {}, by_source && grow_rows(layer, static_cast<float*>(wide), a.m * k)};
}

// ---- mixtures ----------------------------------------------------------------------------------

// Tiles of columns that are made at a time: an expert's rows are fetched once for all of them. A sum of so few
// rows, whose inner activations a near cache holds, goes tile by tile.
constexpr int64_t kSumTiles = 8, kNarrowRows = 512;
// Rows that are made at a time, times tiles, times leaves: their sums take 8 MiB of the last-level cache.
// Fewer rows would fetch every expert's weights more often.
constexpr int64_t kSumRows = 32768;

// Some tiles of the sums of some rows, over all experts.
struct TileSums {
  const ExpertsArgs& a;
  int64_t tile0, tile1;
  int64_t first, count;  // rows first .. first + count of `out`
  float* leaves;         // [tile1 - tile0][leaves + 1][count][64]; the last of a tile are the weighed biases

  int64_t size() const { return count * kTile; }
  float* of_tile(int64_t tile) const { return leaves + (tile - tile0) * ((*a.layers)->leaves + 1) * size(); }
};

void add_bias(const TileSums& s, const Linear& layer, int64_t tile, int64_t from, int64_t to) {
  const float* bias = layer.bias + tile * kTile;
  float* const shift = s.of_tile(tile) + layer.leaves * s.size();
  const int64_t left = layer.n - tile * kTile;
  for (int64_t i = from; i < to; ++i) {
    const Vec share = splat(s.a.shares[i]);
    float* out = shift + (s.a.rows[i] - s.first) * kTile;
    for (int64_t j = 0; j < kTile && j < left; j += kLanes) {
      const bool whole = left - j >= kLanes;
      const Vec said = mul(whole ? load(bias + j) : load_n(bias + j, left - j), share);
      store(out + j, add(load(out + j), said));
    }
  }
}

// Adds the leaves as a tree, in place, then the biases.
void finish_sum(const TileSums& s, int64_t tile) {
  const Linear& layer = **s.a.layers;
  const int64_t left = layer.n - tile * kTile, size = s.size();
  float* const leaves = s.of_tile(tile);
  for (int64_t step = 1; step < layer.leaves; step *= 2)
    for (int64_t leaf = 0; leaf < layer.leaves; leaf += 2 * step) {
      float* one = leaves + leaf * size;
      for (int64_t i = 0; i < size; i += kLanes)
        store(one + i, add(load(one + i), load(one + step * size + i)));
    }
  const float* shift = leaves + layer.leaves * size;
  for (int64_t row = 0; row < s.count; ++row) {
    float* out = s.a.out + (s.first + row) * layer.n + tile * kTile;
    for (int64_t i = 0; i < kTile && i < left; i += kLanes) {
      Vec v = load(leaves + row * kTile + i);
      if (layer.bias) v = add(v, load(shift + row * kTile + i));
      if (left - i >= kLanes) store(out + i, v);
      else store_n(out + i, v, left - i);
    }
  }
}

// First of the ascending rows[from .. to) that is not below `row`.
int64_t first_at(const int64_t* rows, int64_t from, int64_t to, int64_t row) {
  while (from < to) {
    const int64_t middle = (from + to) / 2;
    if (rows[middle] < row) from = middle + 1;
    else to = middle;
  }
  return from;
}

void add_experts(const TileSums& s, const Work& all, float* sums) {
  const ExpertsArgs& a = s.a;
  TileShape registers;
  for (int64_t e = 0, from = 0, end; e < a.experts; ++e, from = end) {
    end = a.ends[e];
    const Linear& layer = *a.layers[e];
    const int64_t begin = first_at(a.rows, from, end, s.first);
    const int64_t m = first_at(a.rows, begin, end, s.first + s.count) - begin;
    if (m == 0) continue;
    GemmArgs args = all.args;
    args.layer = &layer;
    args.m = m;
    args.rows = a.rows + begin;
    args.shares = a.shares + begin;
    args.out_rows = s.count;
    args.tile_from = s.first;
    const int64_t bytes = all.direct ? 2 : 4;
    CodedRows rows = all.coded;
    rows.codes += begin * rows.stride;
    rows.scales += begin;
    rows.sums += begin * rows.groups;
    if (rows.totals) rows.totals += begin * rows.groups;
    const char* x = is_coded(layer) ? nullptr : static_cast<const char*>(all.x) + begin * all.stride * bytes;
    const Work work{args, x, all.stride, all.direct, rows, all.grown};
    const char* next_expert = tile_at(*a.layers[e + 1 < a.experts ? e + 1 : 0], s.tile0);
    const Cut cut(layer, m);
    for (int64_t row = 0; row < m; row += cut.height)
      for (int64_t tile = s.tile0; tile < s.tile1; ++tile) {
        args.out = s.of_tile(tile);
        const char* after = tile + 1 < s.tile1 ? tile_at(layer, tile + 1) : next_expert;
        one_tile(work, row, row + cut.height < m ? row + cut.height : m, tile, after, registers, sums);
      }
    if (layer.bias)
      for (int64_t tile = s.tile0; tile < s.tile1; ++tile) add_bias(s, layer, tile, begin, begin + m);
  }
}

}  // namespace

void sum_experts(const ExpertsArgs& a) {
  if (a.out_rows == 0 || a.experts == 0) return;
  const Linear& layer = **a.layers;
  GemmArgs args{&layer, a.x, a.x_dtype, a.ends[a.experts - 1], a.x_stride, nullptr, nullptr, kF32, kNone, false};
  int64_t most_rows = 0;
  for (int64_t e = 0, from = 0; e < a.experts; from = a.ends[e++])
    if (a.ends[e] - from > most_rows) most_rows = a.ends[e] - from;
  const Work work = prepared(args, most_rows);
  const int64_t tiles = packed_tiles(layer.n), shared = tiles / num_threads() / 4;
  const int64_t width = a.out_rows <= kNarrowRows || shared < 1 ? 1 : shared < kSumTiles ? shared : kSumTiles;
  const int64_t most = kSumRows / layer.leaves / width, groups = (tiles + width - 1) / width;
  const int64_t chunks = (a.out_rows + most - 1) / most;
  parallel_for(groups * chunks, 1, [&](int64_t from, int64_t to) {
    auto* sums = static_cast<float*>(scratch(3, kPanel * kTile * sizeof(float)));
    for (int64_t i = from; i < to; ++i) {
      const int64_t first = i % chunks * most, tile = i / chunks * width;
      TileSums s{a, tile, tile + width < tiles ? tile + width : tiles, first,
                 first + most < a.out_rows ? most : a.out_rows - first, nullptr};
      const auto size = static_cast<size_t>((s.tile1 - tile) * (layer.leaves + 1) * s.size()) * sizeof(float);
      s.leaves = static_cast<float*>(scratch(4, size));
      __builtin_memset(s.leaves, 0, size);
      add_experts(s, work, sums);
      for (int64_t t = tile; t < s.tile1; ++t) finish_sum(s, t);
    }
  });
}

void gemm(const GemmArgs& a) {
  if (a.m == 0) return;
  const Linear& layer = *a.layer;
  const Work work = prepared(a, a.m);
  const Cut cut(layer, a.m);
  const Cut next = a.next ? Cut(*a.next, a.m) : cut;
  const auto kept = static_cast<size_t>(waiting(layer.leaves - 1) + 1);
  parallel_for(cut.items, cut.grain, [&](int64_t from, int64_t to) {
    auto* sums = static_cast<float*>(scratch(3, kept * kPanel * kTile * sizeof(float)));
    TileShape registers;
    for (int64_t i = from; i < to; ++i) {
      const int64_t row0 = i / cut.tiles * cut.height;
      const int64_t row1 = row0 + cut.height < a.m ? row0 + cut.height : a.m;
      one_tile(work, row0, row1, i % cut.tiles, after_item(a, cut, next, i), registers, sums);
    }
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire
