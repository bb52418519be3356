// See decoder.h.
#include "decoder.h"

#include <cstdlib>
#include <cstring>
#ifdef __linux__
#include <sys/mman.h>
#endif

namespace quire {

Decoder::~Decoder() {
  for (void* m : memory_) std::free(m);
}

void* Decoder::buffer(int slot, size_t bytes) {
  if (size_[slot] < bytes) {
    std::free(memory_[slot]);
    constexpr size_t large = size_t{2} << 20;
    const size_t unit = bytes < large ? 4096 : large;
    size_[slot] = (bytes + unit - 1) / unit * unit;
    memory_[slot] = std::aligned_alloc(unit, size_[slot]);
    if (!memory_[slot]) std::abort();
#ifdef __linux__
    if (unit == large) madvise(memory_[slot], size_[slot], MADV_HUGEPAGE);
#endif
  }
  return memory_[slot];
}

namespace {

enum Slot { kNormed = 0, kGiven = 1, kQkv = 2, kInner = 3 };

struct Run {
  Decoder& decoder;
  const DecoderStep& step;
  size_t item;
  int64_t rows;  // in work: all tokens, in the end those that are wanted

  void* take(int slot, int64_t columns) const {
    return decoder.buffer(slot, static_cast<size_t>(step.tokens * columns) * item);
  }

  // For the product with `next`, if there is one.
  void norm(const Norm& norm, const void* x, void* residual, void* out, const Linear* next) const {
    QUIRE_PICK(normalize)(NormArgs{norm, x, residual, residual, out, decoder.dtype, rows,
                                   decoder.size, decoder.size, next});
  }

  void linear(const Linear& layer, const void* x, void* out, int activation, const Linear* next,
              bool after_norm = false) const {
    GemmArgs args{&layer, x, decoder.dtype, rows, layer.k, nullptr, out,
                  decoder.dtype, activation, false, next};
    args.quantised = after_norm;
    QUIRE_PICK(gemm)(args);
  }

  // Norms the heads of each token in place.
  void norm_heads(const Norm& norm, char* heads, int64_t count, int64_t dim, int64_t width) const {
    if (norm.kind == kNoNorm) return;
    for (int64_t t = 0; t < rows; ++t, heads += width * item)
      QUIRE_PICK(normalize)(
          NormArgs{norm, heads, nullptr, nullptr, heads, decoder.dtype, count, dim, dim});
  }

  // Moves the wanted rows of a matrix to its front.
  void keep_wanted(void* matrix, int64_t width) const {
    const size_t bytes = static_cast<size_t>(width) * item;
    char* const first = static_cast<char*>(matrix);
    for (int64_t i = 0; i < step.num_wanted; ++i)
      std::memmove(first + i * bytes, first + step.wanted[i] * bytes, bytes);
  }

  void attend(size_t index, const void* x, void* out) {
    const DecoderLayer& layer = decoder.layers[index];
    const DecoderTables& tables = step.tables[step.tables.size() == 1 ? 0 : index];
    const AttentionStep* seen_by = &tables.attention;
    const AttentionLayer& a = layer.attention;
    const int64_t width = layer.qkv.n, dim = a.key_dim;
    char* qkv = static_cast<char*>(take(kQkv, width));
    linear(layer.qkv, x, qkv, kNone, &layer.out, true);
    char* k = qkv + a.heads * dim * item;
    char* v = k + a.kv_heads * dim * item;
    norm_heads(layer.q_norm, qkv, a.heads, dim, width);
    norm_heads(layer.k_norm, k, a.kv_heads, dim, width);
    const WriteArgs write{k, v, width, dim, width, a.value_dim, step.tokens, a.kv_heads, dim,
                          a.value_dim, layer.keys, layer.values, tables.attention.block_size,
                          tables.slots, decoder.dtype};
    if (layer.rope)
      QUIRE_PICK(rotary_write)(RotaryArgs{qkv, width, dim, a.heads, step.positions, layer.rope,
                                          layer.rotary_dim, 0, layer.interleaved, write});
    else
      QUIRE_PICK(write_kv)(write);
    if (step.num_wanted >= 0 && index + 1 == decoder.layers.size()) {
      keep_wanted(qkv, width);
      keep_wanted(step.x, decoder.size);
      rows = step.num_wanted;
      seen_by = &step.last;
      if (rows == 0) return;
    }
    void* seen = take(kInner, a.heads * a.value_dim);
    attention(AttentionArgs{&a, seen_by, qkv, width, dim, seen, decoder.dtype, layer.keys,
                            layer.values, a.value_dim});
    linear(layer.out, seen, out, kNone, &layer.gate_up);
  }
};

}  // namespace

void run_decoder(Decoder& decoder, const DecoderStep& step) {
  Run run{decoder, step, item_size(decoder.dtype), step.tokens};
  void* normed = run.take(kNormed, decoder.size);
  void* given = run.take(kGiven, decoder.size);
  for (size_t index = 0; index < decoder.layers.size(); ++index) {
    const DecoderLayer& layer = decoder.layers[index];
    const DecoderLayer* following = index + 1 < decoder.layers.size() ? &layer + 1 : nullptr;
    if (index == 0) QUIRE_PICK(normalize)(NormArgs{layer.before_attention, step.x, nullptr, nullptr,
                                              normed, decoder.dtype, step.tokens, decoder.size,
                                              decoder.size, &layer.qkv});
    else run.norm(layer.before_attention, given, step.x, normed, &layer.qkv);
    run.attend(index, normed, given);
    if (run.rows == 0) return;
    run.norm(layer.before_mlp, given, step.x, normed, &layer.gate_up);
    void* inner = run.take(kInner, layer.gate_up.n / 2);
    run.linear(layer.gate_up, normed, inner, layer.activation, &layer.down, true);
    run.linear(layer.down, inner, given, kNone, following ? &following->qkv : nullptr);
  }
  run.norm(decoder.final_norm, given, step.x, step.out, nullptr);
}

}  // namespace quire
