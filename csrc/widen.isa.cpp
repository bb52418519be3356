// Codes of narrow weights become numbers. Layout and arithmetic: widen.h.
#include "kv_types.h"
#include "widen.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// Scales, zeros and minima of a group, in the order of the numbers of a unit.
struct Factors {
  alignas(64) float scales[kUnit];
  alignas(64) float zeros[kUnit];
  alignas(64) float minima[kUnit];
  alignas(64) int16_t exponents[kUnit];  // of scales that are powers of two: what bf16 numbers grow by
  bool powers;                           // all are
};

// kLanes codes of a unit as float32, from number i on, divided by kTimes: the scale makes up for it.
template <int C> struct Codes {
  static constexpr float kTimes = 1.0f;
  QUIRE_INLINE Vec load(const char* unit, int64_t i, const float*) { return Memory<C>::load(unit, i); }
};

#if QUIRE_LEVEL >= 1
// As a float16 it is 2**-8 times as large, and that conversion knows denormal numbers. No code is NaN.
template <> struct Codes<kE4M3> {
  static constexpr float kTimes = 256.0f;
  QUIRE_INLINE Vec load(const char* unit, int64_t i, const float*) {
    const auto bytes = load_8(reinterpret_cast<const uint8_t*>(unit) + i);
    constexpr auto kKept = static_cast<short>(0xbf80);
#if QUIRE_LEVEL >= 2
    const __m256i w = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return {_mm512_cvtph_ps(_mm256_and_si256(w, _mm256_set1_epi16(kKept)))};
#else
    const __m128i w = _mm_slli_epi16(_mm_cvtepi8_epi16(bytes), 7);
    return {_mm256_cvtph_ps(_mm_and_si128(w, _mm_set1_epi16(kKept)))};
#endif
  }
};
#endif

template <> struct Codes<kTable4> {
  static constexpr float kTimes = 1.0f;
  QUIRE_INLINE Vec load(const char* unit, int64_t i, const float* values) {
    const char* words = unit + i % 16 * 4;
    const int at = static_cast<int>(i / 16 * 4);
#if QUIRE_LEVEL >= 2
    const __m512i codes = _mm512_srli_epi32(_mm512_loadu_si512(words), at);
    return {_mm512_permutexvar_ps(codes, _mm512_loadu_ps(values))};  // by the lowest four bits
#elif QUIRE_LEVEL == 1
    const __m256i codes = _mm256_srli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)), at);
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values), codes);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_loadu_ps(values + 8), codes);
    return {_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28)))};
#else
    Vec r;
    for (int lane = 0; lane < kLanes; ++lane) {
      uint32_t word;
      __builtin_memcpy(&word, words + 4 * lane, 4);
      r.v[lane] = values[word >> at & 15];
    }
    return r;
#endif
  }
};

// With `shifts` zeros and minima count, which few weights have: all that are none are 0.
template <int C, bool shifts>
QUIRE_INLINE Vec number(const char* unit, int64_t i, const float* values, const Factors& by) {
  const Vec v = Codes<C>::load(unit, i, values), scale = load(by.scales + i);
  if constexpr (shifts) return sub(mul(sub(v, load(by.zeros + i)), scale), load(by.minima + i));
  return mul(v, scale);
}

#if QUIRE_LEVEL >= 3
// The same twice, for neighbours.
template <int C, bool shifts>
QUIRE_INLINE void two_numbers(const char* unit, int64_t i, const float* values, const Factors& by, Vec& low, Vec& high) {
  if constexpr (C == kE4M3) {  // both at once, as far as 16 bits go
    const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit + i));
    const __m512i kept = _mm512_set1_epi16(static_cast<short>(0xbf80));
    const __m512i w = _mm512_and_si512(_mm512_slli_epi16(_mm512_cvtepi8_epi16(bytes), 7), kept);
    low = mul({_mm512_cvtph_ps(_mm512_castsi512_si256(w))}, load(by.scales + i));
    high = mul({_mm512_cvtph_ps(_mm512_extracti64x4_epi64(w, 1))}, load(by.scales + i + kLanes));
  } else {
    low = number<C, shifts>(unit, i, values, by);
    high = number<C, shifts>(unit, i + kLanes, values, by);
  }
}
#endif

// Memory that is read soon: this far behind what is read now.
constexpr int64_t kAhead = 4096;

template <int C, int D, bool shifts>
void widen_units(const char* unit, int64_t units, const float* values, const Factors& by, char* out) {
  constexpr int64_t kBytes = C == kTable4 ? kUnit / 2 : kUnit;
  constexpr int64_t kItem = D == kF32 ? 4 : 2;
  for (int64_t u = 0; u < units; ++u, unit += kBytes, out += kUnit * kItem) {
    for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(unit + kAhead + line, 0, 3);
#if QUIRE_LEVEL >= 3
    if constexpr (D == kBF16) {
      _Pragma("GCC unroll 4") for (int64_t i = 0; i < kUnit; i += 2 * kLanes) {
        Vec low, high;
        two_numbers<C, shifts>(unit, i, values, by, low, high);
        _mm512_storeu_si512(out + 2 * i, (__m512i)_mm512_cvtne2ps_pbh(high.v, low.v));
      }
      continue;
    }
#endif
    for (int64_t i = 0; i < kUnit; i += kLanes)
      Memory<D>::store(out, i, number<C, shifts>(unit, i, values, by));
  }
}

#if QUIRE_LEVEL >= 3
// Numbers that bf16 has, of at least a half or 0, times powers of two, by whole numbers alone: the bits
// of `widen_units` in half the steps.
void widen_powers(const char* unit, int64_t units, const float* values, const Factors& by, char* out) {
  alignas(64) uint16_t table[32], low[32], high[32], shifts[2][32];
  for (int i = 0; i < 32; ++i) {
    table[i] = static_cast<uint16_t>(f32_to_bits(values[i % 16]) >> 16);
    low[i] = static_cast<uint16_t>(2 * (i % 16));
    high[i] = static_cast<uint16_t>(low[i] + 1);
    shifts[0][i] = i < 16 ? 0 : 4;
    shifts[1][i] = i < 16 ? 8 : 12;
  }
  const __m512i all = _mm512_load_si512(table), any = _mm512_set1_epi16(0x7fff);
  for (int64_t u = 0; u < units; ++u, unit += kUnit / 2, out += kUnit * 2) {
    __builtin_prefetch(unit + kAhead, 0, 3);
    const __m512i words = _mm512_loadu_si512(unit);
    const __m512i half[2] = {_mm512_permutexvar_epi16(_mm512_load_si512(low), words),
                             _mm512_permutexvar_epi16(_mm512_load_si512(high), words)};
    _Pragma("GCC unroll 4") for (int m = 0; m < 4; ++m) {
      const __m512i codes = _mm512_srlv_epi16(half[m / 2], _mm512_load_si512(shifts[m % 2]));
      const __m512i x = _mm512_permutexvar_epi16(codes, all);  // by the lowest five bits
      const __mmask32 some = _mm512_test_epi16_mask(x, any);
      const __m512i grown = _mm512_mask_add_epi16(x, some, x, _mm512_load_si512(by.exponents + 32 * m));
      _mm512_storeu_si512(out + 64 * m, grown);
    }
  }
}

bool fit_bf16(const float* values) {
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = f32_to_bits(values[i]), size = bits & 0x7fffffffu;
    if (bits & 0xffffu || (size && size < f32_to_bits(0.5f)) || size > f32_to_bits(1024.0f)) return false;
  }
  return true;
}
#endif

using Widen = void (*)(const char*, int64_t, const float*, const Factors&, char*);

template <int C> Widen chosen(const Coded& c) {
  constexpr bool kShifts = C == kI8 || C == kTable4;  // others have none
  if (kShifts && (c.group_zeros || c.group_minima))
    return c.wide == kBF16  ? widen_units<C, kBF16, kShifts>
           : c.wide == kF16 ? widen_units<C, kF16, kShifts>
                            : widen_units<C, kF32, kShifts>;
  return c.wide == kBF16  ? widen_units<C, kBF16, false>
         : c.wide == kF16 ? widen_units<C, kF16, false>
                          : widen_units<C, kF32, false>;
}

Widen chosen(const Linear& layer) {
  switch (layer.dtype) {
    case kE4M3: return chosen<kE4M3>(layer.coded);
    case kE5M2: return chosen<kE5M2>(layer.coded);
    case kI8: return chosen<kI8>(layer.coded);
    default: return chosen<kTable4>(layer.coded);
  }
}

// `head`: where the group begins.
void read_factors(const Linear& layer, const char* head, Factors& to) {
  const Coded& c = layer.coded;
  const float times = layer.dtype == kE4M3 ? Codes<kE4M3>::kTimes : 1.0f;
  const auto* zeros = reinterpret_cast<const int8_t*>(head + kTile * static_cast<int64_t>(item_size(c.scale_type)));
  alignas(64) float scales[kTile], minima[kTile] = {};
  for (int64_t i = 0; i < kTile; i += kLanes) {
    store(scales + i, mul(load_scales(c.scale_type, head, i), splat(times)));
    if (c.group_minima) store(minima + i, load_scales(c.scale_type, head + minima_at(layer), i));
  }
  for (int64_t i = 0; i < kTile; ++i) {
    const int64_t first = c.wide == kBF16 ? 2 * i : i, second = c.wide == kBF16 ? first + 1 : i + kTile;
    to.scales[first] = to.scales[second] = scales[i];
    to.zeros[first] = to.zeros[second] = c.group_zeros ? static_cast<float>(zeros[i]) : 0.0f;
    to.minima[first] = to.minima[second] = minima[i];
  }
  to.powers = c.scale_type == kE8M0;
  if (!to.powers) return;
  const auto* by = reinterpret_cast<const uint8_t*>(head);
  for (int64_t i = 0; i < kTile; ++i) {
    to.powers &= by[i] != 0;
    to.exponents[2 * i] = to.exponents[2 * i + 1] = static_cast<int16_t>((by[i] - 127) * 128);
  }
}

}  // namespace

void widen_weights(const WidenArgs& a) {
  const Linear& layer = *a.layer;
  const int64_t group = layer.coded.group, size = group_bytes(layer), head = group_head(layer);
  const Widen usual = chosen(layer);
#if QUIRE_LEVEL >= 3
  const Coded& c = layer.coded;
  const bool fits = layer.dtype == kTable4 && c.wide == kBF16 && c.scale_type == kE8M0 && !c.group_zeros &&
         !c.group_minima && fit_bf16(c.values);
#endif
  char* out = static_cast<char*>(a.out);
  Factors by;
  for (int64_t k = a.k0, end; k < a.k1; k = end) {
    const int64_t first = k / group * group;
    end = first + group < a.k1 ? first + group : a.k1;
    const char* at = a.tile + k / group * size;
    read_factors(layer, at, by);
    Widen widen = usual;
#if QUIRE_LEVEL >= 3
    if (fits && by.powers) widen = widen_powers;
#endif
    widen(at + head + (k - first) / 2 * unit_bytes(layer), (end - k + 1) / 2, layer.coded.values, by, out);
    out += (end - k) * kTile * static_cast<int64_t>(item_size(layer.coded.wide));
  }
}

}  // namespace QUIRE_ISA
}  // namespace quire
