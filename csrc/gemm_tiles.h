// Passes of rows on tile registers (tile_registers.h): numbers, narrow weights and codes. For gemm.isa.cpp only. Without
// AMX nothing takes them.
#pragma once
#include "gemm_codes.h"
#include "narrow_units.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// bf16 numbers of a column in a step of tile registers.
constexpr int64_t kTileStep = 32;

#ifdef QUIRE_AMX
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

}  // namespace

}  // namespace QUIRE_ISA
}  // namespace quire
