// Attention over the paged KV cache. Arithmetic: attention.h.
//
// A tile is a few tokens of one request times the query heads of one KV head: a matrix of rows.
// For each segment the keys are turned span by span, so that 16 keys stand in a vector; then
// scores are a small matrix product, as are the weighted values. One token of decoding is a tile
// of few rows. It takes the same steps, for which turning the keys would take longer than the
// products: where pairs of bf16 are multiplied, few_rows.h does both in registers, few_digits.h
// where whole numbers are (digits.h), and few_tiles.h turns scores instead.
#include "attention.h"

#include <algorithm>
#include <utility>

#include "few_digits.h"
#include "few_tiles.h"
#include "pool.h"
#include "product.h"
#include "softmax.h"
#include "turn.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int64_t kValueSpan = 128;  // values rearranged at a time
constexpr int64_t kAtOnce = 8;       // rows whose scores become weights together
// How far ahead few rows of queries fetch keys and values: bytes, and rows of them at most.
constexpr int64_t kLeadBytes = 64 << 10, kMostLead = 512;

alignas(64) const char kZeros[kMaxDim * 4] = {};

// What is multiplied: the type of queries and turned keys, that of weights and values, how many of them one
// step multiplies, and how many rows of them a row of weights has at most.
struct Floats {
  using Q = float;
  using W = float;
  static constexpr int64_t kStep = 1, kRows = 1;
};
#if QUIRE_LEVEL >= 3
struct InPairs {
  using Q = bf16;
  using W = bf16;
  static constexpr int64_t kStep = 2, kRows = 1;
};
#endif
#ifdef QUIRE_LONG_DOTS
struct Digits {
  using Q = int8_t;
  using W = uint8_t;
  static constexpr int64_t kStep = 4, kRows = 2;
};
#endif

// Whether keys and values are pairs of bf16, or become such.
[[maybe_unused]] bool in_pairs(const AttentionArgs& a) {
  const int kept = a.keys.dtype;
  return (kept == kBF16 || kept == kE4M3 || kept == kE5M2) && a.layer->key_dim % 2 == 0;
}

template <class Path> class Attend {
  using Q = typename Path::Q;
  using W = typename Path::W;
  static constexpr int64_t kStep = Path::kStep, kRows = Path::kRows;
  static constexpr bool floats = kStep == 1, digits = kStep == 4;
  // Whether rows are multiplied with pairs of bf16, where keys and values are such.
  static constexpr bool kPaired = QUIRE_LEVEL >= 2 && __is_same(Q, PairRow);

 public:
  Attend(const AttentionArgs& args, const AttentionTile& tile)
      : a(args), t(tile), layer(*args.layer), step(*args.step) {
    group = layer.heads / layer.kv_heads;
    q_rows = rows = t.count * group;
    width = padded_dim(layer.value_dim);
    heads = t.kv_head_end - t.kv_head;
    q_stride = (layer.key_dim + kStep - 1) / kStep * kStep;
#if QUIRE_LEVEL >= 2
    few = rows <= kFewRows && layer.key_dim <= kQueryStride && (digits || (!kTiles && kPaired && in_pairs(a)));
    if (few) q_stride = kQueryStride;
#ifdef QUIRE_AMX
    if (!floats && !digits && rows <= kFewTileRows && in_few_tiles(a.keys.dtype))
      few = true, q_stride = whole_steps(layer.key_dim), q_rows = kFewTileRows;
#endif
#endif
    const int64_t groups = (rows + kTileRows - 1) / kTileRows;
    pulls = groups > 4 ? 0 : groups > 1 ? 1 : 2;
    allocate();
  }

  // `later` (or nullptr) is what this thread will probably do next; `fetched` as in attention.h.
  void run(const AttentionTile* later, int64_t& fetched) {
    load_queries();
    if (!t.parts) start();
    if (!few) fetched = run_units(later, fetched > 0);
    else if constexpr (digits) fetched = this->run_segments(later, fetched > 0);
    else if constexpr (kPaired) fetched = this->run_few(later, fetched);
    if (!t.parts) finish();
  }

  // Whether something of `later` is fetched.
  bool run_units(const AttentionTile* later, bool fetched) {
    const char* lines[2][2 * kSegment];
    Unit unit{t.segment, t.kv_head};
    locate(t, unit, lines[0]);
    for (int turn = 0; unit.segment < t.segment_end; turn ^= 1) {
      const Unit next = after(unit, t);
      select(unit);
      const Range range = seen(t, unit.segment);
      const char** ahead = lines[turn ^ 1];
      Range to_come{0, 0};
      if (next.segment == unit.segment) {
        beside(lines[turn], range, next.kv_head - unit.kv_head, ahead);
        to_come = range;
      } else if (next.segment < t.segment_end) {
        locate(t, next, ahead);
        to_come = seen(t, next.segment);
      } else if (later) {
        locate(*later, {later->segment, later->kv_head}, ahead);
        to_come = seen(*later, later->segment);
      }
      if (a.keys.dtype == kI8) end_factors(range);
      attend_many(unit.segment, range, lines[turn], to_come, ahead, fetched);
      fetched = true;
      if (!t.parts) fold(unit.segment);
      unit = next;
    }
    return later;
  }

  void merge() {
    start();
    for (Unit unit{t.segment, t.kv_head}; unit.segment < t.segment_end; unit = after(unit, t)) {
      select(unit);
      fold(unit.segment);
    }
    finish();
  }

 private:
  // Work is done by units: a segment of one KV head.
  struct Unit {
    int64_t segment, kv_head;
  };

  const AttentionArgs& a;
  const AttentionTile& t;
  const AttentionLayer& layer;
  const AttentionStep& step;
  int64_t group, rows, width, heads, q_stride;
  int64_t q_rows;    // of a head in `q`: where queries are columns (few_tiles.h), there are as many as there can be
  bool few = false;  // rows: few_rows.h, few_digits.h, few_tiles.h
  int pulls;  // lines to fetch per step of a product
  TileShape shape_of_tiles;
  Q *all_q, *keys;
  W *weights, *values;
  float *scores, *own_part, *all_top, *all_sum, *all_acc;
  float *key_factors, *value_factors;  // by position in the segment; of a type that has them
  // Of digits: factors of a row's whole numbers, what is to be taken off its scores; sums of values.
  float *all_query_factors, *weight_factors, *whole;
  int32_t* all_query_shifts;
  int64_t* low_rows;   // where a row's low digits are, behind all rows; 0 if it has none
  int64_t digit_rows;  // with them
  // Of the KV head in work:
  int64_t kv_head;
  Q* q;
  float *top, *sum, *acc, *part, *query_factors;
  int32_t* query_shifts;

  static Unit after(Unit u, const AttentionTile& tile) {
    return u.kv_head + 1 < tile.kv_head_end ? Unit{u.segment, u.kv_head + 1}
                                            : Unit{u.segment + 1, tile.kv_head};
  }

  void select(Unit u) {
    const int64_t i = u.kv_head - t.kv_head;
    kv_head = u.kv_head;
    q = all_q + i * q_rows * q_stride;
    if constexpr (digits) query_factors = all_query_factors + i * rows, query_shifts = all_query_shifts + i * rows;
    top = all_top + i * rows;
    sum = all_sum + i * rows;
    acc = all_acc + i * rows * width;
    part = own_part;
    if (t.parts) part = t.parts + ((u.segment - t.segment) * layer.kv_heads + u.kv_head) * t.part_stride;
  }

  void allocate() {
    char* place = nullptr;
    for (int pass = 0; pass < 2; ++pass) {  // sizes, then places
      char* next = place;
      const auto take = [&](auto*& p, int64_t count) {
        p = reinterpret_cast<__typeof__(&*p)>(next);
        next += (count * static_cast<int64_t>(sizeof *p) + 63) / 64 * 64;
      };
      take(all_q, heads * q_rows * q_stride);
      take(weights, rows * kRows * kSegment);
      take(keys, (layer.key_dim + 31) / 32 * 32 * kSpan);
      take(values, kValueSpan * width);
      take(scores, rows * kSegment);
      take(key_factors, kSegment);
      take(value_factors, kSegment);
      take(own_part, part_floats(rows, layer.value_dim));
      take(all_top, heads * rows);
      take(all_sum, heads * rows);
      take(all_acc, heads * rows * width);
      if constexpr (digits) {
        take(all_query_factors, heads * rows);
        take(all_query_shifts, heads * rows);
        take(weight_factors, rows);
        take(low_rows, rows);
        take(whole, rows * kRows * width);
      }
      if (!place) place = static_cast<char*>(scratch(0, static_cast<size_t>(next - place)));
    }
  }

  // ---- what a row sees -------------------------------------------------------------------------

  struct Range {
    int64_t begin, end;
  };
  // What tokens at [first, last] see, together, relative to a segment's start.
  Range between(int64_t segment, int64_t first, int64_t last) const {
    const int64_t start = segment * kSegment;
    int64_t begin = layer.window ? first - layer.window + 1 - start : 0;
    int64_t end = last + 1 - start;
    if (begin < 0) begin = 0;
    if (end > kSegment) end = kSegment;
    return {begin, end};
  }
  Range seen(const AttentionTile& tile, int64_t segment) const {
    return between(segment, tile.position, tile.position + tile.count - 1);
  }
  Range seen_by(int64_t row, int64_t segment) const {
    const int64_t position = t.position + row / group;
    return between(segment, position, position);
  }

  // Addresses of rows of a unit's keys or values, at positions [from, to) of the segment; zeros where none of the tile's
  // rows sees.
  void locate(const Cache& cache, const AttentionTile& tile, Unit u, int64_t from, int64_t to, const char** out) const {
    const Range range = seen(tile, u.segment);
    const int32_t* table = step.table + tile.request * step.table_stride;
    const int64_t item = static_cast<int64_t>(item_size(cache.dtype));
    const char* data = static_cast<const char*>(cache.data) + u.kv_head * cache.head * item;
    const int64_t end = to < range.end ? to : range.end;
    for (; from < range.begin; ++from) *out++ = kZeros;
    int64_t block = (u.segment * kSegment + from) / step.block_size;
    int64_t offset = (u.segment * kSegment + from) % step.block_size;
    while (from < end) {
      const char* row = data + (table[block] * cache.block + offset * cache.slot) * item;
      const int64_t left = from + step.block_size - offset, stop = left < end ? left : end;
      for (; from < stop; ++from, row += cache.slot * item) *out++ = row;
      offset = 0, ++block;
    }
    for (; from < to; ++from) *out++ = kZeros;
  }
  // Of keys, then values, by position.
  void locate(const AttentionTile& tile, Unit u, const char** out) const {
    const Range range = seen(tile, u.segment);
    const int64_t from = range.begin / kSpan * kSpan, to = (range.end + 15) / 16 * 16;
    locate(a.keys, tile, u, from, to, out + from);
    locate(a.values, tile, u, from, to, out + kSegment + from);
  }

  // Of another KV head, so many further on, from those of one. Zeros stay.
  void beside(const char* const* of, Range range, int64_t heads_on, const char** out) const {
    const int64_t item = static_cast<int64_t>(item_size(a.keys.dtype));
    const int64_t key = heads_on * a.keys.head * item, value = heads_on * a.values.head * item;
    for (int64_t i = range.begin / kSpan * kSpan; i < (range.end + 15) / 16 * 16; ++i) {
      const bool there = i >= range.begin && i < range.end;
      out[i] = of[i] + (there ? key : 0);
      out[kSegment + i] = of[kSegment + i] + (there ? value : 0);
    }
  }

  Lines lines_of(const char* const* lines, Range range, int64_t dim) const {
    const int64_t item = static_cast<int64_t>(item_size(a.keys.dtype));
    return {lines + range.begin, lines + range.end - 1, dim * item + tail_bytes(a.keys.dtype)};
  }

  // Few rows wait for memory: during all of the arithmetic they fetch the keys and values of the next
  // unit. Turning and copying fetch about half of the lines; the products have as many steps as there
  // are lines for each group of rows, times 4.
  Ahead ahead_of(const char* const* lines, Range range) const {
    if (range.begin >= range.end) return {{}, {}, 0, 0};
    return {lines_of(lines, range, layer.key_dim),
            {lines_of(lines + kSegment, range, layer.value_dim)}, 1, pulls};
  }

  // A unit that nobody expected: first its own values, and everything faster.
  void add_values(Ahead& ahead, const char* const* lines, Range range) const {
    if (range.begin >= range.end) return;
    ahead.pulls = 2 * pulls;
    if (ahead.left > 0) ahead.later[ahead.left++] = ahead.now;
    ahead.now = lines_of(lines + kSegment, range, layer.value_dim);
  }

  // ---- queries ---------------------------------------------------------------------------------

  // Of a head's rows, as many numbers from the first query on.
  int64_t query_at(int64_t head, int64_t row) const {
    return (t.token + row / group) * a.q_token + ((t.kv_head + head) * group + row % group) * a.q_head;
  }

  void load_queries() {
    const int64_t dim = layer.key_dim;
#ifdef QUIRE_AMX
    if constexpr (!floats && !digits)
      if (few) {
        for (int64_t head = 0; head < heads; ++head)
          queries_as_columns(rows, dim, [&](int64_t row) { return static_cast<const bf16*>(a.q) + query_at(head, row); },
                             all_q + head * q_rows * q_stride);
        return;
      }
#endif
    for (int64_t i = 0; i < heads * rows; ++i) {
      const int64_t at = query_at(i / rows, i % rows);
      Q* out = all_q + i * q_stride;
      if constexpr (floats) {
        for (int64_t d = 0; d < dim; d += kLanes)
          store_any(kF32, out, d, load_any(a.q_dtype, a.q, at + d, dim - d), dim - d);
      } else {
        const bf16* const from = static_cast<const bf16*>(a.q) + at;
        if constexpr (digits) all_query_factors[i] = query_codes(from, dim, out, all_query_shifts[i]);
        else __builtin_memcpy(out, from, static_cast<size_t>(dim) * 2);
      }
    }
  }

  // ---- one segment -----------------------------------------------------------------------------

  // Behind the last position that was read: 0, so that a weight there is none.
  void end_factors(Range range) {
    for (int64_t k = (range.end + 15) / 16 * 16; k < whole_blocks(range).end; ++k) key_factors[k] = value_factors[k] = 0.0f;
  }

  // Weights come in blocks of so many positions.
  static Range whole_blocks(Range range) {
    constexpr int64_t size = digits ? 64 : 32;
    return {range.begin / size * size, (range.end + size - 1) / size * size};
  }

  // Factors that stand `tail` bytes behind the beginnings of lines. 0 where nothing is seen, as lines there are zeros: what lies
  // there could be NaN, and so could a weight of 0 times that.
  static void read_factors(Range range, const char* const* lines, int64_t tail, float* to) {
    if (range.begin >= range.end) return;
    const int64_t begin = range.begin / kSpan * kSpan, end = (range.end + 15) / 16 * 16;
    for (int64_t k = begin; k < end; ++k) copy_factor(lines[k] + tail, to + k);
  }

  void score(Range range, const char* const* lines, Ahead& ahead) {
    for (int64_t span = range.begin / kSpan * kSpan; span < range.end; span += kSpan) {
      const int64_t count = range.end - span < kSpan ? (range.end - span + 15) / 16 * 16 : kSpan;
      turn_keys(a.keys.dtype, lines + span, count, layer.key_dim, keys, ahead);
      multiply(Product<Q>{q, q_stride, keys, kSpan, (layer.key_dim + kStep - 1) / kStep, scores + span,
                          kSegment, true, &ahead, &shape_of_tiles},
               rows, count);
    }
  }

  // A unit whose keys and values stand at `lines`; those of the next one, at `ahead`, are fetched meanwhile.
  void attend_many(int64_t segment, Range range, const char* const* lines, Range to_come, const char* const* ahead,
                   bool fetched) {
    if (a.keys.dtype == kI8) {
      read_factors(range, lines, layer.key_dim, key_factors);
      read_factors(range, lines + kSegment, a.value_tail, value_factors);
    }
    Ahead fetching = ahead_of(ahead, to_come);
    if (!fetched) add_values(fetching, lines, range);
    score(range, lines, fetching);
    weigh(segment, range);
    sum_values(range, lines + kSegment, fetching);
  }

#if QUIRE_LEVEL >= 2
  // What few rows read of a unit: keys 16 at a time, values where weights begin and by twos.
  struct Seen {
    Range range;
    int64_t key = range.begin / kSpan * kSpan, value = range.begin / 32 * 32;
    int64_t keys = (range.end + 15) / 16 * 16 - key, values = (range.end + 1) / 2 * 2 - value;
  };

  // The rows of memory that few rows read, in their order: keys and values of a unit, then of the next, then of the tile
  // that comes later.
  class RowsToCome {
    static constexpr int64_t kMost = 2 * kSegment;  // of a unit
    const Attend& of;
    const AttentionTile *tile, *later;
    Unit unit;                         // the next one to be added
    int64_t at = 0, end = 0, own = 0;  // what is not read yet begins, what is added ends, what the tile itself has ends
    const char* rows[kMostLead + 4 * kMost];

    bool add() {
      if (unit.segment == tile->segment_end) {
        if (!later) return false;
        tile = later, later = nullptr;
        unit = {tile->segment, tile->kv_head};
      }
      const Seen more{of.seen(*tile, unit.segment)};
      of.locate(of.a.keys, *tile, unit, more.key, more.key + more.keys, rows + end);
      of.locate(of.a.values, *tile, unit, more.value, more.value + more.values, rows + end + more.keys);
      end += more.keys + more.values;
      if (tile == &of.t) own = end;
      unit = after(unit, *tile);
      return true;
    }

   public:
    const int64_t lead;

    // Of the first rows, `fetched` are; now as many as `lead` says.
    RowsToCome(const Attend& attend, const AttentionTile* after_this, int64_t fetched, int64_t row_bytes)
        : of(attend), tile(&attend.t), later(after_this), unit{tile->segment, tile->kv_head},
          lead(std::min(kMostLead, kLeadBytes / row_bytes)) {
      while (end < lead && add()) {}
      for (; fetched < lead && fetched < end; ++fetched) fetch_bytes(rows[fetched], row_bytes);
    }

    // The next `count` rows, behind which stand as many more as `lead` says.
    const char* const* read(int64_t count) {
      if (at + count + lead + kMost > static_cast<int64_t>(sizeof rows / sizeof *rows)) {
        std::copy(rows + at, rows + end, rows);
        end -= at, own -= at, at = 0;
      }
      while (end < at + count + lead && add()) {}
      for (int64_t i = end; i < at + count + lead; ++i) rows[i] = kZeros;  // there are no more
      at += count;
      return rows + at - count;
    }

    // Rows of the later tile that are fetched when all of this one are read.
    int64_t fetched() const { return std::min(lead, end - own); }
  };

  // The same of few rows, without rearranging anything in memory. Each row of memory that is read fetches one that is to
  // come, always as many further on: memory is asked evenly, however long units and tiles are. Returns how many rows of
  // `later` are fetched.
  int64_t run_few(const AttentionTile* later, int64_t fetched) {
    RowsToCome to_come(*this, later, fetched, layer.key_dim * static_cast<int64_t>(item_size(a.keys.dtype)));
    for (Unit unit{t.segment, t.kv_head}; unit.segment < t.segment_end; unit = after(unit, t)) {
      select(unit);
      const Seen of{seen(t, unit.segment)};
      attend_few(unit.segment, of, to_come.read(of.keys + of.values), to_come.lead);
      if (!t.parts) fold(unit.segment);
    }
    return to_come.fetched();
  }

  void attend_few(int64_t segment, const Seen& of, const char* const* lines, int64_t lead) {
#ifdef QUIRE_AMX
    const OnFewTiles by{rows, shape_of_tiles, keys};
#else
    const int64_t by = rows;
#endif
    score_few_rows(by, a.keys.dtype, {q, scores + of.key, kSegment, lines, 0, of.keys, layer.key_dim, lines + lead});
    weigh(segment, of.range);
    lines += of.keys;
    sum_few_rows(by, a.keys.dtype,
                 {weights + of.value, part + 2 * rows, width, lines, 0, of.values, layer.value_dim, lines + lead});
  }

  static void fetch_bytes(const char* line, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) fetch(line + i);
  }
#endif

#ifdef QUIRE_LONG_DOTS
  // Few rows of digits, whose heads of keys and values share lines of memory: during the unit of a head, that head's part of the
  // next segment is fetched. If each unit fetched for the next one, the first head would fetch nearly everything, faster
  // than memory delivers it, and the other heads nothing.
  bool run_segments(const AttentionTile* later, bool fetched) {
    const char* lines[3][2 * kSegment];
    const char **now = lines[0], **after = lines[1], **then = lines[2];  // this unit, the next, and the next segment's first
    Range range = seen(t, t.segment);
    locate(t, {t.segment, t.kv_head}, now);
    if (!fetched) fetch_heads(now, range.begin, range.end);
    read_value_factors(range, now);
    for (int64_t segment = t.segment; segment < t.segment_end; ++segment) {
      const Range to_come = locate_next(segment, later, then);
      for (int64_t head = 0; head + 1 < heads; ++head) {
        beside(now, range, 1, after);
        attend_head(segment, head, range, now, after, then);
        std::swap(now, after);
      }
      attend_head(segment, heads - 1, range, now, then, then);
      fetch_heads(then, range.end, to_come.end);
      // Those that were not read beside the products.
      read_value_factors({to_come.begin, std::min(to_come.end, range.begin / 32 * 32)}, then);
      read_value_factors({std::max(to_come.begin, (range.end + 3) / 4 * 4), to_come.end}, then);
      std::swap(now, then);
      range = to_come;
    }
    return later;
  }

  void read_value_factors(Range range, const char* const* lines) {
    read_factors(range, lines + kSegment, a.value_tail, value_factors);
  }

  // Lines of what comes after a segment, for the first head, and what is seen of it.
  Range locate_next(int64_t segment, const AttentionTile* later, const char** lines) const {
    const bool more = segment + 1 < t.segment_end;
    Range range{0, 0};
    if (more || later) {
      const AttentionTile& tile = more ? t : *later;
      const Unit unit = more ? Unit{segment + 1, t.kv_head} : Unit{later->segment, later->kv_head};
      range = seen(tile, unit.segment);
      locate(tile, unit, lines);
    }
    fill_up(lines, range);
    return range;
  }

  // One unit: keys and values at `now`; factors of the values at `next` are read meanwhile, and this head's part of `then` is fetched.
  void attend_head(int64_t segment, int64_t head, Range range, const char* const* now, const char* const* next,
                   const char* const* then) {
    select({segment, t.kv_head + head});
    end_factors(range);
    const bool last = head + 1 == heads;
    const int64_t begin = range.begin / kSpan * kSpan, end = (range.end + 15) / 16 * 16;
    score_few_rows(rows, FewKeys{{{q, scores, kSegment, now, begin, end, layer.key_dim, then},
                                  head * a.keys.head, last}, query_shifts, key_factors});
    weigh(segment, range);
    sum_few_rows(digit_rows, FewValues{{{weights, whole, width, now + kSegment, range.begin / 32 * 32,
                                         (range.end + 3) / 4 * 4, layer.value_dim, then + kSegment},
                                        head * a.values.head, last},
                                       next + kSegment, a.value_tail, value_factors});
    join_values();
    if (!t.parts) fold(segment);
  }

  // All heads at positions k .. end.
  void fetch_heads(const char* const* lines, int64_t k, int64_t end) const {
    for (; k < end; ++k) {
      fetch_bytes(lines[k], (heads - 1) * a.keys.head + layer.key_dim + kFactorBytes);
      fetch_bytes(lines[kSegment + k], (heads - 1) * a.values.head + layer.value_dim + kFactorBytes);
    }
  }
  // Where `locate` had nothing to say: what is there is fetched without asking.
  static void fill_up(const char** lines, Range range) {
    for (int64_t half = 0; half < 2; ++half, lines += kSegment) {
      for (int64_t i = 0; i < range.begin / kSpan * kSpan; ++i) lines[i] = kZeros;
      for (int64_t i = (range.end + 15) / 16 * 16; i < kSegment; ++i) lines[i] = kZeros;
    }
  }
#endif

  // Where sums of values go: of digits they are whole numbers that become the part's later.
  float* sums_of_values() const { return digits ? whole : part + 2 * rows; }

  // From scores to weights of all rows. Each step is done for several rows before the next: what a row has in one number
  // takes a while to come out of its vectors.
  void weigh(int64_t segment, Range range) {
    const auto [begin, end] = whole_blocks(range);
    digit_rows = rows;
    for (int64_t first = 0; first < rows; first += kAtOnce) {
      const int64_t behind = first + kAtOnce < rows ? first + kAtOnce : rows;
      float factors[kAtOnce];
      for (int64_t row = first; row < behind; ++row) factors[row - first] = bound(segment, row, begin, end);
      if constexpr (digits) {
        this->weigh_in_digits(first, behind, factors, begin, end);
      } else {
        for (int64_t row = first; row < behind; ++row) {
          W* const w = weights + row * kSegment;
          part[rows + row] = row_weights(scores + row * kSegment, w, begin, end, factors[row - first], part[row]);
          if constexpr (floats)
            if (a.keys.dtype == kI8) scale_all(w, value_factors, begin, end);
        }
      }
    }
  }

  // Finds the largest of a row's scores, and what they are yet to be multiplied with. A row that sees nothing has the
  // weights of some other scores: it is not merged.
  float bound(int64_t segment, int64_t row, int64_t begin, int64_t end) {
    const Range mine = seen_by(row, segment);
    float* s = scores + row * kSegment;
    float scale = layer.scale * a.keys.scale;
    if constexpr (digits) {
      if (!few) this->join_scores(row, s, begin, end);
      scale *= query_factors[row];
    } else if (a.keys.dtype == kI8) {  // floats
      scale_all(s, key_factors, begin, end);
    }
    float factor = scale * kLog2e;
    if (layer.softcap > 0.0f || layer.slopes || factor <= 0.0f) {
      shape(segment, row, scale, s, begin, end);
      factor = 1.0f;
    }
    if (mine.begin < mine.end) {
      for (int64_t k = begin; k < mine.begin; ++k) s[k] = kNever;
      for (int64_t k = mine.end; k < end; ++k) s[k] = kNever;
    } else {
      for (int64_t k = begin; k < end; ++k) s[k] = 0.0f;
    }
    part[row] = row_max(s, begin, end) * factor;
    return factor;
  }

#ifdef QUIRE_LONG_DOTS
  // Scores become numbers, but for the query's factor.
  void join_scores(int64_t row, float* s, int64_t begin, int64_t end) {
    const __m512i shift = _mm512_set1_epi32(query_shifts[row]);
    for (int64_t k = begin; k < end; k += kLanes)
      store(s + k, mul(whole_sum(load(s + k), shift), load(key_factors + k)));
  }

  void weigh_in_digits(int64_t first, int64_t behind, const float* factors, int64_t begin, int64_t end) {
    Weights of[kAtOnce];
    for (int64_t row = first; row < behind; ++row)
      of[row - first] = factored_weights(scores + row * kSegment, value_factors, begin, end, factors[row - first], part[row]);
    for (int64_t row = first; row < behind; ++row) {
      const Weights& mine = of[row - first];
      part[rows + row] = mine.sum;
      low_rows[row] = mine.flat ? 0 : digit_rows++;
      weight_factors[row] = weight_digits(scores + row * kSegment, begin, end, mine, weights + row * kSegment,
                                          weights + low_rows[row] * kSegment);
    }
  }

  void join_values() {
    for (int64_t row = 0; row < rows; ++row) {
      const Vec factor = splat(weight_factors[row]);
      const float *high = whole + row * width, *low = whole + low_rows[row] * width;
      float* to = part + 2 * rows + row * width;
      for (int64_t d = 0; d < width; d += kLanes)
        store(to + d, mul(low_rows[row] ? whole_sum(load(high + d), load(low + d)) : whole_sum(load(high + d)), factor));
    }
  }
#endif

  // Multiplies x[begin .. end), whole vectors.
  static void scale_all(float* x, const float* by, int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; k += kLanes) store(x + k, mul(load(x + k), load(by + k)));
  }

  // Scores times log2 e with all that a model adds.
  void shape(int64_t segment, int64_t row, float scale, float* s, int64_t begin, int64_t end) {
    const int64_t head = kv_head * group + row % group;
    const float slope = layer.slopes ? layer.slopes[head] * kLog2e : 0.0f;
    const int64_t position = t.position + row / group;
    float ascending[kLanes];
    for (int i = 0; i < kLanes; ++i) ascending[i] = static_cast<float>(i);
    for (int64_t k = begin; k < end; k += kLanes) {
      Vec x = mul(load(s + k), splat(scale));
      if (layer.softcap > 0.0f) {
        const Vec cap = splat(layer.softcap);
        x = mul(cap, tanh_of(div(x, cap)));
      }
      x = mul(x, splat(kLog2e));
      const float distance = static_cast<float>(segment * kSegment + k - position);
      if (layer.slopes) x = fma(add(splat(distance), load(ascending)), splat(slope), x);
      store(s + k, x);
    }
  }

  void sum_values(Range range, const char* const* lines, Ahead& ahead) {
    float* out = sums_of_values();
    const int64_t first = range.begin / 32 * 32;  // where weights begin
    for (int64_t span = first; span < range.end; span += kValueSpan) {
      const int64_t left = range.end - span, whole_steps = (left + kStep - 1) / kStep * kStep;
      const int64_t count = left < kValueSpan ? whole_steps : kValueSpan;
      copy_values(a.keys.dtype, lines + span, count, layer.value_dim, width, values, ahead);
      multiply(Product<W>{weights + span, kSegment, values, width, count / kStep, out, width,
                          span == first, &ahead, &shape_of_tiles},
               digit_rows, width);
    }
    if constexpr (digits) this->join_values();
  }

  // ---- merging ---------------------------------------------------------------------------------

  void start() {
    for (int64_t i = 0; i < heads * rows; ++i) {
      const int64_t head = t.kv_head * group + i / rows * group + i % rows % group;
      all_top[i] = layer.sinks ? layer.sinks[head] * kLog2e : kNever;
      all_sum[i] = layer.sinks ? 1.0f : 0.0f;
      for (int64_t d = 0; d < width; d += kLanes) store(all_acc + i * width + d, zero());
    }
  }

  void fold(int64_t segment) {
    for (int64_t first = 0; first < rows; first += kLanes) {
      const int64_t count = rows - first < kLanes ? rows - first : kLanes;
      const Vec old = load_n(top + first, count), fresh = load_n(part + first, count), highest = max(old, fresh);
      float tops[kLanes], keeps[kLanes], takes[kLanes];
      store(tops, highest);
      store(keeps, exp2<6>(sub(old, highest)));
      store(takes, exp2<6>(sub(fresh, highest)));
      for (int64_t i = 0; i < count; ++i)
        if (const Range mine = seen_by(first + i, segment); mine.begin < mine.end) fold_row(first + i, tops[i], keeps[i], takes[i]);
    }
  }

  void fold_row(int64_t row, float highest, float keep, float take) {
    top[row] = highest;
    sum[row] = sum[row] * keep + part[rows + row] * take;
    const float* from = part + 2 * rows + row * width;
    float* to = acc + row * width;
    for (int64_t i = 0; i < width; i += kLanes)
      store(to + i, fma(load(to + i), splat(keep), mul(load(from + i), splat(take))));
  }

  void finish() {
    for (int64_t i = 0; i < heads * rows; ++i) {
      const int64_t row = i % rows, head = (t.kv_head + i / rows) * group + row % group;
      const int64_t at = ((t.token + row / group) * layer.heads + head) * layer.value_dim;
      const float* sums = all_acc + i * width;
      const Vec total = splat(all_sum[i]), scale = splat(a.values.scale);
      // Adding 0 turns -0 into 0: which zero a sum of nothing has is the only thing left open.
      for (int64_t d = 0; d < layer.value_dim; d += kLanes)
        store_any(a.q_dtype, a.out, at + d, add(mul(div(load(sums + d), total), scale), zero()),
                  layer.value_dim - d);
    }
  }
};

// Does `work` with what attends to a cache of this type.
template <class Work> void attend_with(const AttentionArgs& args, const AttentionTile& tile, const Work& work) {
#ifdef QUIRE_LONG_DOTS
  if (args.q_dtype == kBF16 && args.keys.dtype == kI8) return work(Attend<Digits>(args, tile));
#endif
#if QUIRE_LEVEL >= 3
  if (args.q_dtype == kBF16 && in_pairs(args)) return work(Attend<InPairs>(args, tile));
#endif
  work(Attend<Floats>(args, tile));
}

}  // namespace

void attend(const AttentionArgs& args, const AttentionTile& tile, const AttentionTile* later,
            int64_t& fetched) {
  attend_with(args, tile, [&](auto&& it) { it.run(later, fetched); });
}

void merge_parts(const AttentionArgs& args, const AttentionTile& tile) {
  attend_with(args, tile, [](auto&& it) { it.merge(); });
}

}  // namespace QUIRE_ISA
}  // namespace quire
