// Nothing but reading, nothing but multiplying: see probe.h.
#include "coded_tile.h"
#include "pool.h"
#include "probe.h"
#include "tile_registers.h"
#include "vec.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int kRows = 6, kSteps = 4096;
constexpr int64_t kPiece = 1 << 20;  // bytes that a thread takes at a time

// Keeps a value alive without storing it anywhere that another thread writes.
QUIRE_INLINE void keep(const void* p) { __asm__ volatile("" : : "g"(p) : "memory"); }

void read_piece(const char* p, int64_t bytes) {
  Vec sums[4] = {zero(), zero(), zero(), zero()};
  const bool past = kFetchPast;
  for (int64_t i = 0; i < bytes; i += 4 * kLanes * 4) {
    QUIRE_EACH for (int j = 0; j < 4; ++j) {
      const char* next = p + i + 4096 + 4 * kLanes * j;
      if (past) __builtin_prefetch(next, 0, 0);
      else __builtin_prefetch(next, 0, 3);
      sums[j] = add(sums[j], load(reinterpret_cast<const float*>(p + i) + j * kLanes));
    }
  }
  keep(sums);
}

#ifdef QUIRE_AMX
// Four products of 16 rows and 16 columns over a step, whose tiles are read anew as in tile_registers.h.
constexpr int kVectors = 4;
constexpr double kRoundOperations = double{kSteps} * 4 * 16 * 16 * 2 * 32;

template <Factors factors> void multiply_tiles_round() {
  alignas(64) static const char numbers[2 * 1024] = {};
  alignas(64) float sums[2 * kTileRegisterRows * kTile];
  TileShape shape;
  const TileProduct product{numbers, kStepBytes, 2 * kTileRegisterRows, nullptr, 1, 0, nullptr, sums, nullptr, 0};
  shape.set(kTileRegisterRows, 0);
  for (int step = 0; step < kSteps; ++step)
    one_step_of_two<factors, kRowTile, kColumnTile>(product, numbers, numbers, numbers, [] {});
}
void multiply_round() { multiply_tiles_round<kNumbers>(); }
#elif QUIRE_LEVEL >= 3
constexpr int kVectors = 4, kOperations = 64;  // of a dpbf16 instruction
constexpr double kRoundOperations = double{kSteps} * kRows * kVectors * kOperations;

void multiply_round() {
  __m512 acc[kRows][kVectors];
  QUIRE_EACH for (int r = 0; r < kRows; ++r)
    QUIRE_EACH for (int j = 0; j < kVectors; ++j) {
      acc[r][j] = _mm512_setzero_ps();
      __asm__ volatile("" : "+v"(acc[r][j]));  // as if it were unlike the others
    }
  __m512bh a = (__m512bh)_mm512_setzero_si512(), b = a;
  for (int step = 0; step < kSteps; ++step) {
    __asm__ volatile("" : "+v"(a), "+v"(b));  // as if they were new
    QUIRE_EACH for (int r = 0; r < kRows; ++r)
      QUIRE_EACH for (int j = 0; j < kVectors; ++j) acc[r][j] = _mm512_dpbf16_ps(acc[r][j], a, b);
  }
  Vec total = zero();
  QUIRE_EACH for (int r = 0; r < kRows; ++r)
    QUIRE_EACH for (int j = 0; j < kVectors; ++j) total = add(total, {acc[r][j]});
  keep(&total);
}
#else
constexpr int kVectors = QUIRE_LEVEL == 2 ? 4 : QUIRE_LEVEL == 1 ? 2 : 1;
constexpr double kRoundOperations = double{kSteps} * kRows * kVectors * 2 * kLanes;

void multiply_round() {
  Vec acc[kRows][kVectors];
  QUIRE_EACH for (int r = 0; r < kRows; ++r)
    QUIRE_EACH for (int j = 0; j < kVectors; ++j) acc[r][j] = splat(float(kVectors * r + j));
  for (int step = 0; step < kSteps; ++step) {
    float one = 1.0f;
    __asm__ volatile("" : "+m"(one));
    const Vec a = splat(one);
    QUIRE_EACH for (int r = 0; r < kRows; ++r)
      QUIRE_EACH for (int j = 0; j < kVectors; ++j) acc[r][j] = fma(a, a, acc[r][j]);
  }
  Vec total = zero();
  QUIRE_EACH for (int r = 0; r < kRows; ++r)
    QUIRE_EACH for (int j = 0; j < kVectors; ++j) total = add(total, acc[r][j]);
  keep(&total);
}
#endif

#ifdef QUIRE_AMX
// With groups, of 32 codes, tiles are multiplied, stored and scaled in the order of gemm.isa.cpp.
QUIRE_INLINE void scale_pair(const int32_t (&from)[2][kTileRegisterRows * kLanes], const float* scales, Vec (&sums)[kTileRegisterRows]) {
  QUIRE_EACH for (int i = 0; i < 2; ++i) {
    const Vec scale = load(scales);
    QUIRE_EACH for (int r = 0; r < kTileRegisterRows; ++r)
      sums[r] = add(sums[r], mul(rounded(load_whole(from[i] + r * kLanes)), scale));
  }
}
template <int bits, bool groups> void multiply_codes_round() {
  if (!groups) return multiply_tiles_round<kSignedRows>();
  alignas(64) static const char numbers[1024] = {};
  alignas(64) int32_t whole_sums[2][2][kTileRegisterRows * kLanes] = {};
  alignas(64) float scales[kLanes] = {};
  Vec sums[kTileRegisterRows];
  QUIRE_EACH for (int r = 0; r < kTileRegisterRows; ++r) sums[r] = zero();
  const SomeRows rows{numbers, kStepBytes};
  const SomeColumns columns{numbers, kStepBytes, 0};
  TileShape shape;
  shape.set(kTileRegisterRows, 8);
  for (int step = 0; step < kSteps; ++step) {
    multiply_pair<kSigned, 0>(rows, 0, columns, 0, 0, true);
    store_pair<2>(whole_sums[1][0]);
    scale_pair(whole_sums[0], scales, sums);
    multiply_pair<kSigned, 2>(rows, 0, columns, 0, 0, true);
    store_pair<0>(whole_sums[0][0]);
    scale_pair(whole_sums[1], scales, sums);
  }
  keep(sums);
}
constexpr double code_operations(int, bool groups) { return double{kSteps} * 4 * 16 * 16 * 2 * (groups ? 32 : 64); }
#else
// Rows and vectors of codes: with AVX2, products need registers besides their sums. With groups, the sums of all
// groups wait beside those of one.
constexpr int code_rows(int bits, bool groups) { return groups || QUIRE_LEVEL != 1 ? kRows : bits == 8 ? 4 : 5; }
constexpr int code_vectors(bool groups) { return !groups ? kVectors : QUIRE_LEVEL >= 2 ? 2 : 1; }
constexpr int kGroupSteps = 8;  // of four codes
#ifdef QUIRE_PAIRS
constexpr bool kWholeSums = false;
#else
constexpr bool kWholeSums = true;
#endif

// Products of `steps` steps more. Where a level has no instruction for whole sums, it multiplies codes of four bits
// faster. Each product has numbers of its own: of equal ones a compiler makes one.
template <int bits, int R, int V>
QUIRE_INLINE void multiply_codes_steps(int steps, char (&codes)[V][4 * kLanes], int32_t (&x)[R], IVec (&acc)[R][V]) {
  for (int step = 0; step < steps; ++step) {
    __asm__ volatile("" : "+m"(x), "+m"(codes));  // as if they were new
    WVec w[V];
    [[maybe_unused]] WVec high;
    QUIRE_EACH for (int j = 0; j < V; ++j) {
      if constexpr (bits == 8 || kWholeSums) w[j] = bytes_at(codes[j]);
      else halves_at(codes[j], w[j], high);
    }
    QUIRE_EACH for (int r = 0; r < R; ++r)
      QUIRE_EACH for (int j = 0; j < V; ++j) {
#ifdef QUIRE_PAIRS
        acc[r][j] = bits == 8 ? dot(acc[r][j], w[j], x[r]) : pairs4(acc[r][j], w[j], x[r]);
#else
        acc[r][j] = dot(acc[r][j], w[j], x[r]);
#endif
        as_new(acc[r][j]);
      }
  }
}

template <int bits, bool groups> void multiply_codes_round() {
  constexpr int R = code_rows(bits, groups), V = code_vectors(groups);
  Vec sums[R][V];
  QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j) sums[r][j] = zero();
  float scales[V * kLanes] = {};
  alignas(64) char codes[V][4 * kLanes] = {};
  int32_t x[R] = {};
  for (int step = 0; step < kSteps; step += groups ? kGroupSteps : kSteps) {
    IVec acc[R][V];
    QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j) acc[r][j] = no_sum();
    multiply_codes_steps<bits>(groups ? kGroupSteps : kSteps, codes, x, acc);
    if (!groups) continue;
    __asm__ volatile("" : "+m"(scales));
    QUIRE_EACH for (int j = 0; j < V; ++j) {
      const Vec scale = load(scales + j * kLanes);
      QUIRE_EACH for (int r = 0; r < R; ++r) {
#ifdef QUIRE_PAIRS
        if (bits == 4) acc[r][j] = add_pairs(no_sum(), acc[r][j]);
#endif
        sums[r][j] = add(sums[r][j], mul(rounded(acc[r][j]), scale));
      }
    }
  }
  Vec total = zero();
  QUIRE_EACH for (int r = 0; r < R; ++r) QUIRE_EACH for (int j = 0; j < V; ++j) total = add(total, sums[r][j]);
  keep(&total);
}
constexpr double code_operations(int bits, bool groups) {
  return double{kSteps} * code_rows(bits, groups) * code_vectors(groups) * 8 * kLanes;
}
#endif

}  // namespace

void probe_read(const ReadArgs& a) {
  const int64_t bytes = static_cast<int64_t>(a.bytes);
  parallel_for((bytes + kPiece - 1) / kPiece, 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t left = bytes - piece * kPiece;
      read_piece(static_cast<const char*>(a.memory) + piece * kPiece, left < kPiece ? left : kPiece);
    }
  });
}

void probe_multiply(const MultiplyArgs& a) {
  parallel_for(a.rounds, 1, [&](int64_t begin, int64_t end) {
    for (int64_t round = begin; round < end; ++round) multiply_round();
  });
  *a.operations = static_cast<double>(a.rounds) * kRoundOperations;
}

void probe_multiply_codes(const CodesArgs& a) {
  parallel_for(a.rounds, 1, [&](int64_t begin, int64_t end) {
    for (int64_t round = begin; round < end; ++round) {
      if (a.groups) a.bits == 8 ? multiply_codes_round<8, true>() : multiply_codes_round<4, true>();
      else a.bits == 8 ? multiply_codes_round<8, false>() : multiply_codes_round<4, false>();
    }
  });
  *a.operations = static_cast<double>(a.rounds) * code_operations(a.bits, a.groups);
}

}  // namespace QUIRE_ISA
}  // namespace quire
