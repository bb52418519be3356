// Linear layers: packed weights, one matrix product with what surrounds it.
//
// A packed weight [N, K] stands in tiles of 64 output columns, columns and K filled up with zeros:
//   bf16       [N/64][K/2][64][2]   two consecutive k of a column side by side (vdpbf16ps' order)
//   f32, f16   [N/64][K][64]
// The layout is the same on every instruction set.
//
// Arithmetic: each output element is one sequence of multiply-adds over k in ascending order,
// float32, whatever the number of rows, their place, the threads, or the tile. bf16 rows times
// bf16 weights on AVX512_BF16 take vdpbf16ps (two products per step, denormals count as zero), with AMX
// steps of 32 k whose even and odd products are summed apart (tile_registers.h);
// everything else converts both sides to float32 exactly and takes fused multiply-adds (separate
// products and sums on the portable path).
//
// A layer of several leaves has one such sequence for each of L equal parts of k, and their sums are
// added as a binary tree of neighbours: ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). Ranks that hold
// neighbouring leaves each compute a branch of that tree, so its bits do not depend on their number.
// Then bias, activation, residual, and one rounding.
//
// Weights that are codes (kCodes8, kCodes4) are multiplied with rows that are codes too: coded_tile.h.
// Narrow ones (kE4M3, kE5M2, kI8, kTable4) become numbers of type `wide`, in registers or, a block at a time,
// in a near cache, and are multiplied as those: widen.h.
#pragma once
#include "isa.h"
#include "scalar.h"

namespace quire {

constexpr int64_t kTile = 64;

static inline int64_t packed_k(int64_t k, int dtype) { return dtype == kBF16 ? (k + 1) / 2 * 2 : k; }
static inline int64_t packed_tiles(int64_t n) { return (n + kTile - 1) / kTile; }
static inline size_t packed_bytes(int64_t n, int64_t k, int dtype) {
  return static_cast<size_t>(packed_tiles(n)) * kTile * packed_k(k, dtype) * item_size(dtype);
}

// What happens to the sums before they are rounded to the output's type. The numbers are known
// to Python (kernels/native_linear.py).
enum Activation { kNone = 0, kSilu = 1, kGelu = 2, kGeluTanh = 3 };

// How the rows are normalised before the product.
enum NormKind { kNoNorm = 0, kRmsNorm = 1, kLayerNorm = 2 };

struct Norm {
  int kind = kNoNorm;
  const void* weight = nullptr;  // of type `dtype`, may be absent
  const void* bias = nullptr;    // the same; layer norm only
  int dtype = kF32;
  float eps = 0.0f;
  bool wide = false;  // not rounded before the weight (Gemma, OLMo 2); layer norms never are
};

struct Linear;

struct NormArgs {
  Norm norm;
  const void* x;         // [rows, size] of x_dtype, rows x_stride elements apart
  const void* residual;  // nullptr or alike: added first; the sum is rounded and kept in `sum`
  void* sum;             // nullptr or [rows, size]
  void* out;             // [rows, size], contiguous
  int x_dtype;
  int64_t rows, size, x_stride;
  // If this is a weight of codes, the codes of each row are made while it is in a near cache, for the product
  // that follows in the same thread: GemmArgs.quantised.
  const Linear* next = nullptr;
};
QUIRE_KERNEL(normalize, (const NormArgs&))

// What a weight of codes is besides them, or a narrow one. With one group: `scales` and `zeros` are [N],
// in the order of the packed columns. With more, each group of a tile begins with its own: coded_tile.h.
struct Coded {
  const float* scales = nullptr;
  const int32_t* zeros = nullptr;  // nullptr: all are `zero`
  const int32_t* order = nullptr;  // nullptr or [k]: column k of the codes is column order[k] of x
  int64_t group = 0;               // 0: one group
  int scale_type = 0;              // of the scales of groups
  bool group_zeros = false;        // int8, after the scales
  int32_t zero = 0;
  const uint8_t* table = nullptr;  // nullptr or [16]: the codes of 4 bits are those of 8 bits there
  int wide = kF32;                 // of a narrow weight: the type that its numbers are rounded to
  const float* values = nullptr;   // of kTable4: [16]
  bool group_minima = false;       // of scale_type, after the zeros: they are taken from the numbers
  bool short_scales = false;       // of groups: see `fuses` in coded_tile.h
};

struct Linear {
  const void* weight;  // packed
  const float* bias;   // nullptr or [N]
  int dtype;           // of the weight
  int64_t n, k;
  bool gated;  // each tile holds 32 gate columns and their 32 up columns: act(gate) * up
  // A power of two; if more than one, k is a multiple of twice as many, so that none begins between
  // the two of a pair.
  int64_t leaves = 1;
  Coded coded;
};

static inline bool is_coded(const Linear& layer) { return layer.dtype >= kCodes8; }
static inline bool is_narrow(const Linear& layer) { return layer.dtype > kF16 && !is_coded(layer); }
// The type of the numbers that are multiplied. Of no meaning for codes.
static inline int weight_type(const Linear& layer) { return is_narrow(layer) ? layer.coded.wide : layer.dtype; }
// Columns of k that are multiplied.
static inline int64_t padded_k(const Linear& layer) {
  if (!is_coded(layer)) return packed_k(layer.k, weight_type(layer));
  const int64_t unit = layer.coded.group ? layer.coded.group : 16;
  return (layer.k + unit - 1) / unit * unit;
}
// Scales, zeros and minima of a group of 64 columns.
static inline int64_t group_head(const Linear& layer) {
  const Coded& c = layer.coded;
  const auto item = static_cast<int64_t>(item_size(c.scale_type));
  return kTile * ((c.group_minima ? 2 * item : item) + (c.group_zeros ? 1 : 0));
}
// Where the minima begin.
static inline int64_t minima_at(const Linear& layer) {
  return group_head(layer) - kTile * static_cast<int64_t>(item_size(layer.coded.scale_type));
}
// Where the zeros begin.
static inline int64_t zeros_at(const Linear& layer) {
  return kTile * static_cast<int64_t>(item_size(layer.coded.scale_type));
}
// From the beginning of a tile to column k of it, which begins a group if there are some.
static inline int64_t offset_of(const Linear& layer, int64_t k) {
  if (layer.dtype <= kF16) return k * kTile * static_cast<int64_t>(item_size(layer.dtype));
  const bool halves = layer.dtype == kCodes4 || layer.dtype == kTable4;
  const int64_t codes = halves ? k * kTile / 2 : k * kTile;
  return layer.coded.group ? k / layer.coded.group * group_head(layer) + codes : codes;
}
// Of a tile.
static inline int64_t tile_bytes(const Linear& layer) {
  if (!is_narrow(layer)) return offset_of(layer, padded_k(layer));
  return offset_of(layer, (layer.k + layer.coded.group - 1) / layer.coded.group * layer.coded.group);
}

struct GemmArgs {
  const Linear* layer;
  const void* x;  // [m, k], rows x_stride elements apart
  int x_dtype;
  int64_t m, x_stride;
  const void* residual;  // nullptr or [m, columns] of out_dtype, contiguous; may be `out` itself
  void* out;             // [m, columns], contiguous; columns = n, n / 2 if gated
  int out_dtype;
  int activation;
  bool split;  // of a gated layer: all gates, then all ups, without activation: [m, n]
  const Linear* next = nullptr;  // what is multiplied next, if known: fetched betimes
  uint64_t* best = nullptr;      // [m] or nullptr: keys, see below; nothing is written to `out` then
  // [m] or nullptr: the leaves stay apart. `out` is float32 [leaves, out_rows, n], and out[leaf][rows[i]]
  // grows by shares[i] times the leaf's sums of row i, without bias; no row is named twice.
  const int64_t* rows = nullptr;
  const float* shares = nullptr;
  int64_t out_rows = 0;
  // With `rows`: `out` holds one tile of columns alone, [leaves, out_rows, 64], of rows from this on.
  int64_t tile_from = -1;
  bool quantised = false;  // of codes: the norm before has made the rows' (NormArgs.next)
};
QUIRE_KERNEL(gemm, (const GemmArgs&))

// The down projections of a mixture: each row of `out` is the sum over its experts of share times product.
// Rows of one expert stand together in `x`, in ascending order of the rows that they add to. Per leaf
// the sums of the experts are added in the order of `layers`, from 0 on; then the leaves as a tree, then
// the weighed biases, which were added in the same order. All in float32, each product and sum rounded.
struct ExpertsArgs {
  const Linear* const* layers;  // of equal n, k, dtype and leaves; all have a bias or none has
  const int64_t* ends;          // [experts]: where the rows of each end
  int64_t experts;
  const void* x;  // [ends[experts - 1], k], rows x_stride elements apart
  int x_dtype;
  int64_t x_stride;
  const int64_t* rows;  // of `out`, for each row of x
  const float* shares;
  float* out;  // [out_rows, n]
  int64_t out_rows;
};
QUIRE_KERNEL(sum_experts, (const ExpertsArgs&))

// The largest number of a row and its column as one key, which is compared and replaced at once: the
// order of the threads does not matter. The key is 0 at first, larger for a larger number, and for
// equal ones (-0 and 0 are) larger for a smaller column.
constexpr uint64_t kNotFinite = ~uint64_t{0};  // above all others: some number is not finite

static inline uint64_t best_key(float y, int64_t column) {
  const uint32_t bits = f32_to_bits(y + 0.0f);
  const uint32_t order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return static_cast<uint64_t>(order) << 32 | (0xffffffffu - static_cast<uint32_t>(column));
}
// -1 if some number is not finite.
static inline int64_t best_column(uint64_t key) {
  return key == kNotFinite ? -1 : static_cast<int64_t>(0xffffffffu - static_cast<uint32_t>(key));
}

// Column of the largest sum of each row, -1 where some sum is not finite.
static inline void likeliest(const Linear& layer, const void* x, int x_dtype, int64_t m, int64_t x_stride,
                             int64_t* ids) {
  auto* best = reinterpret_cast<uint64_t*>(ids);
  for (int64_t row = 0; row < m; ++row) best[row] = 0;
  GemmArgs args{&layer, x, x_dtype, m, x_stride, nullptr, nullptr, kF32, kNone, false};
  args.best = best;
  QUIRE_PICK(gemm)(args);
  for (int64_t row = 0; row < m; ++row) ids[row] = best_column(best[row]);
}

// Sums of a layer as they are, float32 [m, n].
static inline void plain_sums(const Linear& layer, const void* x, int x_dtype, int64_t m, int64_t x_stride,
                              float* out) {
  QUIRE_PICK(gemm)(GemmArgs{&layer, x, x_dtype, m, x_stride, nullptr, out, kF32, kNone, false});
}

struct PackArgs {
  const void* weight;  // [rows, k] of source dtype, contiguous
  int source_dtype;
  void* packed;
  int dtype;  // packed type
  int64_t rows, k;
  int64_t first_row;   // where the rows go in the whole layer
  int64_t total_rows;  // n of the whole layer
  bool gated;          // the layer's rows are all gates, then all ups
};
QUIRE_KERNEL(pack, (const PackArgs&))

struct WidenArgs {
  const Linear* layer;  // narrow
  const char* tile;
  int64_t k0, k1;  // columns, both even, but for k1 at the end of a layer
  void* out;       // [k1 - k0] columns, one more if they are odd
  int type;        // of these: `wide`, in its order, or float32 if widens_to_f32, in that of a source
  bool grown = false;  // of a source's: the rows are multiplied with its kTimes, not the numbers
};
QUIRE_KERNEL(widen_weights, (const WidenArgs&))

struct GatherArgs {
  const Linear* layer;  // without gates
  int64_t count;
  const int64_t* ids;  // [count]; outside [0, n): zeros
  void* out;           // [count, k] of out_dtype
  int out_dtype;
};
// Rows of a packed weight, for an embedding that shares its memory with the head.
QUIRE_KERNEL(gather, (const GatherArgs&))

}  // namespace quire
