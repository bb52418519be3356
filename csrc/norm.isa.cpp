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
void widen(const Row& r) {
  const NormArgs& a = r.a;
  const int64_t base = r.row * a.x_stride;
  for (int64_t i = 0; i < a.size; i += kLanes) {
    const int64_t n = a.size - i;
    Vec x = load_any(a.x_dtype, a.x, base + i, n);
    if (a.residual) {
      x = rounded(a.x_dtype, add(x, load_any(a.x_dtype, a.residual, base + i, n)));
      if (a.sum) store_any(a.x_dtype, a.sum, r.row * a.size + i, x, n);
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

void scale(const Row& r, float inverse) {
  const NormArgs& a = r.a;
  const Norm& norm = a.norm;
  const Vec factor = splat(inverse);
  for (int64_t i = 0; i < a.size; i += kLanes) {
    const int64_t n = a.size - i;
    Vec y = mul(load(r.wide + i), factor);
    if (norm.kind == kRmsNorm && !norm.wide) y = rounded(a.x_dtype, y);
    if (norm.weight) y = mul(y, load_any(norm.dtype, norm.weight, i, n));
    if (norm.bias) y = add(y, load_any(norm.dtype, norm.bias, i, n));
    store_any(a.x_dtype, a.out, r.row * a.size + i, y, n);
  }
}

void one_row(const Row& r) {
  widen(r);
  if (r.a.norm.kind == kLayerNorm) centre(r.wide, r.a.size);
  const float mean = sum_of_squares(r.wide, r.a.size) / static_cast<float>(r.a.size);
  scale(r, 1.0f / __builtin_sqrtf(mean + r.a.norm.eps));
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
