// Rotary positions, and writing keys and values into the paged cache.
#include "attention.h"
#include "kv_store.h"
#include "pool.h"

namespace quire {
namespace QUIRE_ISA {

namespace {

constexpr int64_t kTokens = 8;  // per chunk of work

// (a, b) -> (a cos - b sin, b cos + a sin), each product and sum rounded on its own, as in the
// plain twin.
QUIRE_INLINE void turn_pair(Vec& a, Vec& b, Vec cosine, Vec sine) {
  const Vec first = sub(mul(a, cosine), mul(b, sine));
  b = add(mul(b, cosine), mul(a, sine));
  a = first;
}

void rotate_halves(int dtype, void* x, int64_t at, const float* table, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i;
    Vec a = load_any(dtype, x, at + i, n), b = load_any(dtype, x, at + half + i, n);
    turn_pair(a, b, load_any(kF32, table, i, n), load_any(kF32, table, half + i, n));
    store_any(dtype, x, at + i, a, n);
    store_any(dtype, x, at + half + i, b, n);
  }
}

void rotate_pairs(int dtype, void* x, int64_t at, const float* table, int64_t half) {
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i < kLanes ? half - i : kLanes;
    float wide[2 * kLanes], even[kLanes], odd[kLanes];
    store(wide, load_any(dtype, x, at + 2 * i, 2 * n));
    if (2 * n > kLanes) store(wide + kLanes, load_any(dtype, x, at + 2 * i + kLanes, 2 * n - kLanes));
    for (int64_t j = 0; j < kLanes; ++j) {
      even[j] = j < n ? wide[2 * j] : 0.0f;
      odd[j] = j < n ? wide[2 * j + 1] : 0.0f;
    }
    Vec a = load(even), b = load(odd);
    turn_pair(a, b, load_any(kF32, table, i, n), load_any(kF32, table, half + i, n));
    store(even, a);
    store(odd, b);
    for (int64_t j = 0; j < kLanes; ++j) wide[2 * j] = even[j], wide[2 * j + 1] = odd[j];
    store_any(dtype, x, at + 2 * i, load(wide), 2 * n);
    if (2 * n > kLanes) store_any(dtype, x, at + 2 * i + kLanes, load(wide + kLanes), 2 * n - kLanes);
  }
}

void rotate_heads(const RotaryArgs& r, void* x, int64_t at, int64_t heads, int64_t head_stride,
                  const float* table) {
  const auto rotate = r.interleaved ? rotate_pairs : rotate_halves;
  for (int64_t h = 0; h < heads; ++h)
    rotate(r.write.dtype, x, at + h * head_stride + r.offset, table, r.rotary_dim / 2);
}

void store_heads(const WriteArgs& w, const Cache& cache, const void* from, int64_t at,
                 int64_t head_stride, int64_t dim, int64_t slot) {
  if (dim == 0) return;  // values that are part of the keys: there is no memory for them
  const int64_t to = slot / w.block_size * cache.block + slot % w.block_size * cache.slot;
  const int64_t item = static_cast<int64_t>(item_size(cache.dtype));
  for (int64_t h = 0; h < w.kv_heads; ++h)
    store_kept(w.dtype, from, at + h * head_stride, dim, cache.dtype, cache.scale,
               static_cast<char*>(cache.data) + (to + h * cache.head) * item);
}

void store_token(const WriteArgs& w, int64_t token) {
  const int64_t slot = w.slots[token];
  if (slot < 0) return;
  store_heads(w, w.keys, w.k, token * w.k_token, w.k_head, w.key_dim, slot);
  store_heads(w, w.values, w.v, token * w.v_token, w.v_head, w.value_dim, slot);
}

}  // namespace

void rotary_write(const RotaryArgs& r) {
  parallel_for(r.write.tokens, kTokens, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const float* table = r.table + r.positions[token] * r.rotary_dim;
      rotate_heads(r, r.q, token * r.q_token, r.heads, r.q_head, table);
      rotate_heads(r, const_cast<void*>(r.write.k), token * r.write.k_token, r.write.kv_heads,
                   r.write.k_head, table);
      if (r.write.slots) store_token(r.write, token);
    }
  });
}

void write_kv(const WriteArgs& w) {
  parallel_for(w.tokens, kTokens, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) store_token(w, token);
  });
}

}  // namespace QUIRE_ISA
}  // namespace quire
