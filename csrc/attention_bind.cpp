// Bindings of attention, rotary positions and the KV cache.
#include "attention.h"
#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

AttentionLayer make_layer(int64_t heads, int64_t kv_heads, int64_t key_dim, int64_t value_dim,
                          double scale, double softcap, int64_t window, uintptr_t slopes,
                          uintptr_t sinks) {
  return {heads, kv_heads, key_dim, value_dim, static_cast<float>(scale),
          static_cast<float>(softcap), window, at<float>(slopes), at<float>(sinks)};
}

AttentionStep make_step(uintptr_t query_start, uintptr_t seq_lens, uintptr_t table,
                        int64_t table_stride, int64_t requests, int64_t block_size) {
  return {at<int32_t>(query_start), at<int32_t>(seq_lens), at<int32_t>(table), table_stride,
          requests, block_size};
}

Cache make_cache(uintptr_t data, int64_t block, int64_t slot, int64_t head, int dtype,
                 double scale) {
  return {at<void>(data), block, slot, head, dtype, static_cast<float>(scale)};
}

void run_attention(const AttentionLayer& layer, const AttentionStep& step, uintptr_t q,
                   int64_t q_token, int64_t q_head, int q_dtype, const Cache& keys,
                   const Cache& values, int64_t value_tail, uintptr_t out) {
  nb::gil_scoped_release release;
  attention(AttentionArgs{&layer, &step, at<void>(q), q_token, q_head, at<void>(out), q_dtype,
                          keys, values, value_tail});
}

WriteArgs make_write(uintptr_t k, int64_t k_token, int64_t k_head, uintptr_t v, int64_t v_token,
                     int64_t v_head, int64_t tokens, int64_t kv_heads, int64_t key_dim,
                     int64_t value_dim, const Cache& keys, const Cache& values, int64_t block_size,
                     uintptr_t slots, int dtype) {
  return {at<void>(k), at<void>(v), k_token, k_head, v_token, v_head, tokens, kv_heads, key_dim,
          value_dim, keys, values, block_size, at<int64_t>(slots), dtype};
}

void run_rotary(const WriteArgs& write, uintptr_t q, int64_t q_token, int64_t q_head,
                int64_t heads, uintptr_t positions, uintptr_t table, int64_t rotary_dim,
                int64_t offset, bool interleaved) {
  nb::gil_scoped_release release;
  QUIRE_PICK(rotary_write)(RotaryArgs{at<void>(q), q_token, q_head, heads, at<int64_t>(positions),
                                      at<float>(table), rotary_dim, offset, interleaved, write});
}

void run_write(const WriteArgs& write) {
  nb::gil_scoped_release release;
  QUIRE_PICK(write_kv)(write);
}

}  // namespace

void bind_attention(nb::module_& m) {
  nb::class_<AttentionLayer>(m, "AttentionLayer", "Constants of a layer's attention.");
  nb::class_<AttentionStep>(m, "AttentionStep", "What all layers of a step share. Owns no memory.");
  nb::class_<Cache>(m, "Cache", "Keys or values of a layer, by strides. Owns no memory.");
  nb::class_<WriteArgs>(m, "KVWrite", "New keys and values and where they go. Owns no memory.");
  m.attr("MAX_HEAD_DIM") = kMaxDim;
  m.def("make_attention", &make_layer, "heads"_a, "kv_heads"_a, "key_dim"_a, "value_dim"_a,
        "scale"_a, "softcap"_a, "window"_a, "slopes"_a, "sinks"_a);
  m.def("make_attention_step", &make_step, "query_start"_a, "seq_lens"_a, "table"_a,
        "table_stride"_a, "requests"_a, "block_size"_a);
  m.def("make_cache", &make_cache, "data"_a, "block"_a, "slot"_a, "head"_a, "dtype"_a, "scale"_a);
  m.def("attention", &run_attention, "layer"_a, "step"_a, "q"_a, "q_token"_a, "q_head"_a,
        "q_dtype"_a, "keys"_a, "values"_a, "value_tail"_a, "out"_a);
  m.def("make_kv_write", &make_write, "k"_a, "k_token"_a, "k_head"_a, "v"_a, "v_token"_a,
        "v_head"_a, "tokens"_a, "kv_heads"_a, "key_dim"_a, "value_dim"_a, "keys"_a, "values"_a,
        "block_size"_a, "slots"_a, "dtype"_a);
  m.def("rotary_write", &run_rotary, "write"_a, "q"_a, "q_token"_a, "q_head"_a, "heads"_a,
        "positions"_a, "table"_a, "rotary_dim"_a, "offset"_a, "interleaved"_a);
  m.def("write_kv", &run_write, "write"_a);
}

}  // namespace quire
