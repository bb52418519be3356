// RMS and layer norms, row by row; sums in one fixed order: lanes first, then lanes in halves.
#include "coded_tile.h"
#include "math.h"
#include "pool.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

struct Row {
  const NormArgs& a;
  int64_t row;
  float* wide;  // scratch: the row as float32, filled up with zeros to whole vectors
};

// Widens x (+ residual, rounded) into scratch.
template <int D> void widen(const Row& r) {
  const NormArgs& a = r.a;
  const int64_t base = r.row * a.x_stride;
  for (int64_t i = 0; i < a.size; i += kLanes) {
    const int64_t n = a.size - i;
    Vec x = load_any(D, a.x, base + i, n);
    if (a.residual) {
      x = rounded(D, add(x, load_any(D, a.residual, base + i, n)));
      if (a.sum) store_any(D, a.sum, r.row * a.size + i, x, n);
    }
    store(r.wide + i, x);
  }
}

float sum_of_squares(const float* x, int64_t size) {
  Vec even = zero(), odd = zero();
  int64_t i = 0;
  for (; i + 2 * kLanes <= size; i += 2 * kLanes) {
    const Vec p = load(x + i), q = load(x + i + kLanes);
    even = fma(p, p, even);
    odd = fma(q, q, odd);
  }
  for (; i < size; i += kLanes) {
    const Vec p = load(x + i);
    even = fma(p, p, even);
  }
  return sum(add(even, odd));
}

// Subtracts the mean; lanes beyond `size` stay zero.
void centre(float* x, int64_t size) {
  Vec total = zero();
  for (int64_t i = 0; i < size; i += kLanes) total = add(total, load(x + i));
  const Vec mean = splat(sum(total) / static_cast<float>(size));
  for (int64_t i = 0; i < size; i += kLanes) {
    if (size - i < kLanes) return store_n(x + i, sub(load(x + i), mean), size - i);
    store(x + i, sub(load(x + i), mean));
  }
}

// `alike`: weights are of type D too.
template <int D, bool alike> void scale(const Row& r, float inverse) {
  const NormArgs& a = r.a;
  const Norm& norm = a.norm;
  const int of_weights = alike ? D : norm.dtype;
  const bool rounds = norm.kind == kRmsNorm && !norm.wide;
  const Vec factor = splat(inverse);
  for (int64_t i = 0; i < a.size; i += kLanes) {
    const int64_t n = a.size - i;
    Vec y = mul(load(r.wide + i), factor);
    if (rounds) y = rounded(D, y);
    if (norm.weight) y = mul(y, load_any(of_weights, norm.weight, i, n));
    if (norm.bias) y = add(y, load_any(of_weights, norm.bias, i, n));
    store_any(D, a.out, r.row * a.size + i, y, n);
  }
}

template <int D> void one_row(const Row& r) {
  widen<D>(r);
  if (r.a.norm.kind == kLayerNorm) centre(r.wide, r.a.size);
  const float mean = sum_of_squares(r.wide, r.a.size) / static_cast<float>(r.a.size);
  const float inverse = 1.0f / __builtin_sqrtf(mean + r.a.norm.eps);
  (r.a.norm.dtype == D ? scale<D, true> : scale<D, false>)(r, inverse);
}

void one_row(const Row& r) {
  if (r.a.x_dtype == kBF16) one_row<kBF16>(r);
  else if (r.a.x_dtype == kF16) one_row<kF16>(r);
  else one_row<kF32>(r);
}

}  // namespace

void normalize(const NormArgs& a) {
  // About 16 KiB per chunk: less is not worth waking another thread for.
  const int64_t grain = a.size >= 8192 ? 1 : 8192 / a.size + 1;
  const bool quantises = a.next && is_coded(*a.next);
  const CodedRows codes = quantises ? room_for_codes(*a.next, a.rows) : CodedRows{};
  parallel_for(a.rows, grain, [&](int64_t begin, int64_t end) {
    const size_t whole = static_cast<size_t>((a.size + kLanes - 1) / kLanes * kLanes);
    auto* wide = static_cast<float*>(scratch(0, whole * sizeof(float)));
    int8_t* const line = quantises ? unordered_codes(*a.next) : nullptr;
    for (int64_t row = begin; row < end; ++row) {
      one_row(Row{a, row, wide});
      if (quantises) quantise_row(*a.next, a.x_dtype, a.out, row * a.size, codes, row, line);
    }
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire
