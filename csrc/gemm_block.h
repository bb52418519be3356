// What a pass of rows by a block of weights knows, how it fetches, and how it ends. For gemm.isa.cpp only.
//
// A pass multiplies a few rows with a block: some steps of k of one tile of 64 columns. It finds the rows' sums in
// memory unless the block begins its leaf; then it writes them, or joins them to those of the leaves before.
#pragma once
#include "coded_tile.h"
#include "gemm.h"
#include "tile_registers.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// ---- a block -----------------------------------------------------------------------------------

template <int n> struct Number { static constexpr int value = n; };

struct Work {
  const GemmArgs& args;
  const void* x;  // rows as the kernel reads them: bf16, or float32
  int64_t stride;
  bool direct;  // weights of bf16, by PairRow
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

// ---- fetching ----------------------------------------------------------------------------------

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

// ---- what registers hold -----------------------------------------------------------------------

// Vectors of columns that rows pass by at a time.
constexpr int whole_vectors(int rows) { return rows <= 6 ? 4 : 2; }

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

}  // namespace

}  // namespace QUIRE_ISA
}  // namespace quire
