// Passes of rows of codes by weights that are codes, without tile registers. For gemm.isa.cpp only. Layout and
// arithmetic: coded_tile.h.
#pragma once
#include "gemm_block.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// Vectors of columns that pass by at a time.
constexpr int coded_vectors(int rows) { return QUIRE_LEVEL >= 2 ? whole_vectors(rows) : QUIRE_LEVEL == 0 ? 1 : rows == 1 ? 8 : rows == 2 ? 4 : 2; }
// With groups, sums wait beside whole numbers, or codes that are taken apart: fewer.
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
          QUIRE_EACH for (int j = 0; j < V; ++j) add_dot<kInPlace8>(acc[r][j], weights[j], q);
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
        QUIRE_EACH for (int j = 0; j < V; ++j) add_dot<kInPlace8>(acc[r][j], weights[j], q);
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
            add_dot<kInPlace4>(acc[r][j], low, four_codes(q));
            add_dot<kInPlace4>(acc[r][j], high, four_codes(q + 4));
          }
        }
      } else {
        WVec halves[2][V];
        QUIRE_EACH for (int j = 0; j < V; ++j) codes_at(j, halves[0][j], halves[1][j]);
        QUIRE_EACH for (int half = 0; half < 2; ++half) QUIRE_EACH for (int r = 0; r < R; ++r) {
          const int32_t q = four_codes(x + r * stride + k + 4 * half);
          QUIRE_EACH for (int j = 0; j < V; ++j) add_dot<kInPlace4>(acc[r][j], halves[half][j], q);
        }
      }
    }
  }
}

// Float32 sums of a leaf that a pass adds to: in registers, or in memory, where registers are for the whole numbers of
// more rows.
template <int R, int V> struct LeafSums {
  static constexpr bool kStay = QUIRE_LEVEL != 2 || R <= 2;
  float* at;
  Vec sums[R][V];

  explicit LeafSums(float* where) : at(where) {}
  inline __attribute__((always_inline)) void begin(bool fresh) {
    if (kStay || fresh)
      QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j) put(r, j, fresh ? zero() : in_memory(r, j));
  }
  // To the next block, or to `sums`.
  inline __attribute__((always_inline)) void leave() {
    if constexpr (kStay)
      QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j) store(at + r * kTile + j * kLanes, sums[r][j]);
  }
  inline __attribute__((always_inline)) void end() {
    if constexpr (!kStay)
      QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j) sums[r][j] = in_memory(r, j);
  }
  inline __attribute__((always_inline)) Vec get(int r, int j) const { return kStay ? sums[r][j] : in_memory(r, j); }
  inline __attribute__((always_inline)) void put(int r, int j, Vec v) {
    if constexpr (kStay) sums[r][j] = v;
    else store(at + r * kTile + j * kLanes, v);
  }
  // Those in memory are read again: compilers would keep copies of them beside the numbers.
  inline __attribute__((always_inline)) void renew() const {
    if constexpr (!kStay) __asm__ volatile("" : : : "memory");
  }

 private:
  inline __attribute__((always_inline)) Vec in_memory(int r, int j) const { return load(at + r * kTile + j * kLanes); }
};

// Groups: each is added to the float32 sums of its leaf. With more rows fewer columns pass at a time, so
// that whole numbers stay in registers. One pass of rows fetches what comes next from front to
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
  const bool fused = kFuses && (is_plain || layer.coded.short_scales);
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
    LeafSums<R, V> y(sums + column);
    y.begin(b.fresh);
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
          QUIRE_EACH for (int r = 0; r < R; ++r) {
            acc[r][j] = times(zeros, whole(shifts[r * rows.groups]));
            if (fused) acc[r][j] = plus(acc[r][j], whole(kBeginBits));
          }
        }
      } else {
        QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j)
          acc[r][j] = whole(shifts[r * rows.groups]);
      }
      group_sums<R, V, kind, kStepLines>(w + head + column * 4, x, stride, group, c.table, shifts, rows.groups, next,
                                         kAdvance, acc);
      QUIRE_EACH for (int j = 0; j < V; ++j) {
        const Vec scale = load_scales(scale_type, w, column + j * kLanes);
        y.renew();
        if (fused) {
          const Vec begin = mul(scale, splat(-kBegin));
          QUIRE_EACH for (int r = 0; r < R; ++r)
            y.put(r, j, add(y.get(r, j), fma(bits_as_floats(acc[r][j]), scale, begin)));
        } else {
          QUIRE_EACH for (int r = 0; r < R; ++r) y.put(r, j, add(y.get(r, j), mul(rounded(acc[r][j]), scale)));
        }
      }
      if (!is_plain && c.group_minima) {
        QUIRE_EACH for (int j = 0; j < V; ++j) {
          const Vec least = load_scales(c.scale_type, w + lowest_at, column + j * kLanes);
          QUIRE_EACH for (int r = 0; r < R; ++r)
            y.put(r, j, sub(y.get(r, j), mul(splat(totals[r * rows.groups]), least)));
        }
        ++totals;
      }
    }
    if (!b.ends) {
      y.leave();
      continue;
    }
    y.end();
    end_coded<R, V>(b, row, y.at, column, y.sums);
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
#ifdef QUIRE_LONG_DOTS
  if (c.group == 32 && !c.group_zeros && !c.group_minima && (c.short_scales || !kFuses)) {
    if (c.scale_type == kBF16) return tile_groups<R, L, kHalves, kBF16>(b, row, sums, pass);
    if (c.scale_type == kF16) return tile_groups<R, L, kHalves, kF16>(b, row, sums, pass);
  }
#endif
  tile_groups<R, L, kHalves>(b, row, sums, pass);
}

}  // namespace

}  // namespace QUIRE_ISA
}  // namespace quire
