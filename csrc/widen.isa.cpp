// Codes of narrow weights become numbers. Layout and arithmetic: widen.h.
#include "narrow_units.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

// Scales, zeros and minima of a group, in the order of the numbers of a unit.
struct Factors {
  alignas(64) float scales[kUnit];
  alignas(64) float zeros[kUnit];
  alignas(64) float minima[kUnit];
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
// As a source makes them: narrow_units.h.
template <class S> void widen_by(const S& source, const char* unit, int64_t units, int64_t bytes, char* out) {
  for (int64_t u = 0; u < units; ++u, unit += bytes, out += kUnit * 2) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(unit + kAhead + line, 0, 3);
    __m512i numbers[4];
    make_unit(source, unit, numbers);
    _Pragma("GCC unroll 4") for (int m = 0; m < 4; ++m) _mm512_storeu_si512(out + 64 * m, numbers[m]);
  }
}
#elif QUIRE_LEVEL == 2
void widen_e4m3(const char* unit, int64_t units, char* out) {
  for (int64_t u = 0; u < units; ++u, unit += kUnit, out += kUnit * 2) {
    for (int64_t line = 0; line < kUnit; line += 64) __builtin_prefetch(unit + kAhead + line, 0, 3);
    for (int64_t i = 0; i < kUnit; i += 32)
      _mm512_storeu_si512(out + 2 * i, bf16_of_e4m3(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(unit + i))));
  }
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

// Numbers of 64 columns in the order of those of a unit.
void spread(const Coded& c, const float* numbers, float* to) {
  for (int64_t i = 0; i < kTile; i += kLanes) {
    const Vec v = load(numbers + i);
    if (c.wide != kBF16) {
      store(to + i, v);
      store(to + kTile + i, v);
      continue;
    }
#if QUIRE_LEVEL >= 2
    const __m512i first = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    store(to + 2 * i, {_mm512_permutexvar_ps(first, v.v)});
    store(to + 2 * i + kLanes, {_mm512_permutexvar_ps(_mm512_add_epi32(first, _mm512_set1_epi32(8)), v.v)});
#else
    for (int64_t j = 0; j < kLanes; ++j) to[2 * (i + j)] = to[2 * (i + j) + 1] = numbers[i + j];
#endif
  }
}

// `head`: where the group begins. What a layer has not is not set.
void read_factors(const Linear& layer, const char* head, Factors& to) {
  const Coded& c = layer.coded;
  const float times = layer.dtype == kE4M3 ? Codes<kE4M3>::kTimes : 1.0f;
  alignas(64) float numbers[kTile];
  for (int64_t i = 0; i < kTile; i += kLanes)
    store(numbers + i, scales_sums(layer) ? splat(times) : mul(load_scales(c.scale_type, head, i), splat(times)));
  spread(c, numbers, to.scales);
  if (!c.group_zeros && !c.group_minima) return;
  const auto* zeros = reinterpret_cast<const int8_t*>(head + kTile * static_cast<int64_t>(item_size(c.scale_type)));
  for (int64_t i = 0; i < kTile; ++i) numbers[i] = c.group_zeros ? static_cast<float>(zeros[i]) : 0.0f;
  spread(c, numbers, to.zeros);
  for (int64_t i = 0; i < kTile; i += kLanes)
    store(numbers + i, c.group_minima ? load_scales(c.scale_type, head + minima_at(layer), i) : zero());
  spread(c, numbers, to.minima);
}

#if QUIRE_LEVEL == 1
// As float32, as a source makes them, in its order.
template <bool grown, class S>
void widen_columns(const S& source, const char* unit, int64_t units, int64_t bytes, float* out) {
  for (int64_t u = 0; u < units; ++u, unit += bytes, out += kUnit) {
    for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(unit + kAhead + line, 0, 3);
    source.numbers(unit, [&](int k, int j, Vec numbers) __attribute__((always_inline)) {
      store(out + k * kTile + j * kLanes, grown || S::kTimes == 1.0f ? numbers : mul(numbers, splat(S::kTimes)));
    });
  }
}
#endif

// As the chosen function does it.
void widen_usual(const WidenArgs& a) {
  const Linear& layer = *a.layer;
  const int64_t group = layer.coded.group, size = group_bytes(layer), head = group_head(layer);
  const Widen widen = chosen(layer);
  char* out = static_cast<char*>(a.out);
  Factors by;
  for (int64_t k = a.k0, end; k < a.k1; k = end) {
    const int64_t first = k / group * group;
    end = first + group < a.k1 ? first + group : a.k1;
    const char* at = a.tile + k / group * size;
    if (k == a.k0 || !scales_sums(layer)) read_factors(layer, at, by);
    widen(at + head + (k - first) / 2 * unit_bytes(layer), (end - k + 1) / 2, layer.coded.values, by, out);
    out += (end - k) * kTile * static_cast<int64_t>(item_size(layer.coded.wide));
  }
}

#if QUIRE_LEVEL >= 1
// `widen(at, unit, units, out, k, end)` makes the numbers of a group, of `item` bytes each.
template <class F> void by_groups(const WidenArgs& a, int64_t item, const F& widen) {
  const Linear& layer = *a.layer;
  const int64_t group = layer.coded.group, size = group_bytes(layer), head = group_head(layer);
  char* out = static_cast<char*>(a.out);
  for (int64_t k = a.k0, end; k < a.k1; k = end) {
    const int64_t first = k / group * group;
    end = first + group < a.k1 ? first + group : a.k1;
    const char* at = a.tile + k / group * size;
    widen(at, at + head + (k - first) / 2 * unit_bytes(layer), (end - k + 1) / 2, out, k, end);
    out += (end - k) * kTile * item;
  }
}
#endif

}  // namespace

void widen_weights(const WidenArgs& a) {
#if QUIRE_LEVEL >= 1
  const Linear& layer = *a.layer;
#if QUIRE_LEVEL == 1
  if (a.type != layer.coded.wide) {
    return with_columns(layer, [&](auto source) {
      using S = decltype(source);
      by_groups(a, 4, [&](const char* at, const char* unit, int64_t units, char* out, int64_t, int64_t) {
        source.begin(at);
        (a.grown ? widen_columns<true, S> : widen_columns<false, S>)(source, unit, units, unit_bytes(layer), reinterpret_cast<float*>(out));
      });
    });
  }
#endif
#if QUIRE_LEVEL >= 2
  if (layer.dtype == kE4M3 && layer.coded.wide == kBF16) {
#if QUIRE_LEVEL >= 3
    const auto by = [&](const auto& source) {
      by_groups(a, 2, [&](const char*, const char* unit, int64_t units, char* out, int64_t, int64_t) {
        widen_by(source, unit, units, kUnit, out);
      });
    };
    return kLooksUpBytes ? by(E4M3Table(layer)) : by(E4M3Units(layer));
#else
    return by_groups(a, 2, [&](const char*, const char* unit, int64_t units, char* out, int64_t, int64_t) {
      widen_e4m3(unit, units, out);
    });
#endif
  }
#endif
#if QUIRE_LEVEL >= 3
  if (are_powers(layer)) {
    PowerUnits source(layer);
    return by_groups(a, 2, [&](const char* at, const char* unit, int64_t units, char* out, int64_t k, int64_t end) {
      if (source.begin(at)) widen_by(source, unit, units, kUnit / 2, out);
      else widen_usual(WidenArgs{&layer, a.tile, k, end, out, kBF16});
    });
  }
#endif
#endif
  widen_usual(a);
}

}  // namespace QUIRE_ISA
}  // namespace quire
