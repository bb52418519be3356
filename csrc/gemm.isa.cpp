// The matrix product. Layout and arithmetic: gemm.h.
//
// Work is cut into panels of rows times tiles of 64 columns. Within a tile, k is cut into blocks
// whose weights fit the second-level cache; for each block the rows pass by, a few at a time, with
// their sums in registers. Between blocks the sums wait in memory, unrounded, so cuts change no
// bit. No block reaches over the end of a leaf; there its sums join those of the leaves before. While
// one block is computed the next one is fetched: weights stream from memory during the arithmetic and
// not before it.
//
// Here: how work is cut, and which pass takes which rows. The passes: gemm_numbers.h, gemm_narrow.h, gemm_codes.h and
// gemm_tiles.h, over the blocks of gemm_block.h; what follows: gemm_finish.h.
#include "gemm_finish.h"
#include "gemm_narrow.h"
#include "gemm_tiles.h"
#include "pool.h"

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
// On Intel's processors bytes are multiplied faster than the second level gives them: blocks of 32 KiB, for the first, are 1.12
// times as fast with 32 rows of int8 (1.03 with 64; int4 1.02).
constexpr int64_t kBlock8 = QUIRE_LEVEL >= 3 ? 2 * kBlock : QUIRE_LEVEL == 2 ? kBlock / 2 : kBlock;
constexpr int64_t kBlock4 = QUIRE_LEVEL >= 3 ? 4 * kBlock : QUIRE_LEVEL == 2 ? kBlock : kBlock / 2;
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
// The same where numbers are float32 and rows many: 64 KiB, beside which a small second-level cache has room for rows.
constexpr int64_t kNarrowBlock32 = 256;
// Rows for which numbers of narrow weights are made in registers, at most; and of codes of four bits.
constexpr int64_t kInRegisters = QUIRE_LEVEL >= 3 ? 96 : QUIRE_LEVEL == 2 ? 12 : QUIRE_LEVEL == 1 ? 3 : 0;
constexpr int64_t kInRegisters4 = QUIRE_LEVEL >= 2 ? 24 : kInRegisters;

// Tiles that a thread takes at a time, at most: threads then end at about the same time.
constexpr int64_t kMostTiles = 2;
// Where vectors are long, seven and eight rows pass by a weight at once, by half of its columns at a time. By blocks, in
// two passes, these have to be begun and ended (docs/cpu-kernels.md).
constexpr int kAtOnce = QUIRE_LEVEL >= 2 && !kTiles ? 8 : 0;
// Bytes of weights that they pass by between two ends, about. Each of these blocks fetches the next one, and the last one
// of a product the first one of what follows: where it were much longer than that, most of it would not be fetched.
constexpr int64_t kAtOnceBytes = 64 << 10;
// Rows for which numbers are made in registers once, by half of the columns at a time, at most.
constexpr int64_t kMadeOnce = QUIRE_LEVEL >= 2 && !kTiles ? 12 : 0;
// Many rows that pass by codes of groups at once, at most: codes of four bits are taken apart once for all of them, and eight
// rows read them once (docs/cpu-kernels.md).
constexpr int64_t kMostGrouped = QUIRE_LEVEL == 2 ? 12 : kRows;
// Many rows that pass by numbers of bf16 at once, at most. Where these become float32 in registers, it pays to do it for more
// rows, by half of the columns at a time: 32 rows took 0.95 of the time (Xeon without AMX), 64 and more as long.
constexpr int64_t kMostNumbers = QUIRE_LEVEL == 2 ? 12 : kRows;

// What a pass over codes fetches where three lines per four steps would do. Short vectors pass by a quarter of the columns at a
// time: if the first of them fetched all three, 32 rows of int8 would take 1.1 times as long (AVX-VNNI).
constexpr int kThreeLines = QUIRE_LEVEL >= 2 ? 3 : 4;

// ---- which pass takes how many rows ------------------------------------------------------------

template <int R> void rows(const Block& b, int64_t row, float* sums, int64_t pass) {
  if (is_coded(*b.work.args.layer)) {
    const bool fetched = pass * b.lines >= kLines && b.k1 - b.k0 > kShortBlock * 4;
#ifdef QUIRE_DEBUG
    (void)fetched;
#else
    switch (fetched ? 0 : b.lines) {
      case 16: return coded_rows<R, 16>(b, row, sums, pass);
      case 8: return coded_rows<R, 8>(b, row, sums, pass);
      case 4: return coded_rows<R, 4>(b, row, sums, pass);
      case 3: return coded_rows<R, kThreeLines>(b, row, sums, pass);
      case 2: return coded_rows<R, 2>(b, row, sums, pass);
      case 1: return coded_rows<R, 1>(b, row, sums, pass);
    }
#endif
    return coded_rows<R, 0>(b, row, sums, pass);
  }
#if QUIRE_LEVEL >= 2
  if (b.wide) return narrow_rows<R>(b, row, sums, pass);
#elif QUIRE_LEVEL == 1
  if constexpr (R <= kInRegisters) {
    if (b.wide) return narrow_rows<R>(b, row, sums, pass);
  }
#endif
#if QUIRE_LEVEL >= 2
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
#if QUIRE_LEVEL != 2  // all of these are multiplied above
    case kBF16: return tile_f32<R, kBF16>(b, row, sums, next);
#endif
    case kF16: return tile_f32<R, kF16>(b, row, sums, next);
    default: return tile_f32<R, kF32>(b, row, sums, next);
  }
}

#if QUIRE_LEVEL >= 2 && !defined QUIRE_AMX
// More rows than kRows: kAtOnce, kMadeOnce, kMostGrouped, or kMostNumbers.
template <int R> void more_rows(const Block& b, int64_t row, float* sums, [[maybe_unused]] int64_t pass) {
  if (b.wide) return narrow_rows<R>(b, row, sums, pass);
  const bool coded = is_coded(*b.work.args.layer);
  [[maybe_unused]] const bool grouped = coded && b.work.args.layer->coded.group;
  if constexpr (kMostGrouped > kAtOnce) {
    if (grouped) return rows<R>(b, row, sums, pass);
  }
  if constexpr (kMostNumbers > kAtOnce) {
    if (!coded) return rows<R>(b, row, sums, pass);
  }
  if constexpr (R <= kAtOnce) {
    if (!coded) return tile_bf16<R, kLines>(b, row, sums, b.next);
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
constexpr int64_t kMostOnce = QUIRE_LEVEL >= 2 ? 4 : kRows;
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
  int64_t most = kRows;
  if (rows > kRows && is_coded(layer) && layer.coded.group) most = kMostGrouped;
  if (rows > kRows && work.direct) most = in_registers(work, rows) ? kMadeOnce : kMostNumbers;
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
// Of `step_bytes` a step.
int64_t at_once_length(int64_t k, int64_t step_bytes) {
  const int64_t block = kAtOnceBytes / step_bytes, blocks = (k + block / 2) / block;
  return blocks <= 1 ? k : ((k + blocks - 1) / blocks + 15) / 16 * 16;
}
int64_t block_length(const Work& work, int64_t rows, int64_t k) {
  if (reads_once(work, rows)) return k;
  if (at_once(work, rows)) return at_once_length(k, 2 * kTile);
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
  const int64_t length = reads_codes_once(work, rows) ? k
                         : at_once(work, rows)    ? at_once_length(k, kTile)
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

// Rows as float32, or in pairs, which are filled up to an even length.
void widen_rows(const GemmArgs& a, const void* x, int64_t stride, bool in_pairs, void* out,
                int64_t width) {
  const int64_t k = a.layer->k;
  parallel_for(a.m, 8192 / k + 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (in_pairs) {
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
  const bool direct = QUIRE_LEVEL >= 2 && weight_type(layer) == kBF16 && (!kRowsInPairs || a.x_dtype == kBF16);
  const bool in_pairs = direct && kRowsInPairs;
  const bool by_source = widens_to_f32(layer) && scales_sums(layer) && most_rows <= kFewRows;
  if (k == layer.k && !by_source && (in_pairs || a.x_dtype == kF32)) return {a, a.x, a.x_stride, direct, {}};
  void* wide = scratch(2, static_cast<size_t>(a.m * k) * (in_pairs ? 2 : 4));
  widen_rows(a, a.x, a.x_stride, in_pairs, wide, k);
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
    const int64_t bytes = all.direct && kRowsInPairs ? 2 : 4;
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
