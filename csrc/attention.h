// Attention over the paged KV cache; rotary positions; writing into the cache.
//
// Arithmetic of one query row (one token, one query head), whatever else is computed beside it:
//
// - Its keys are cut by absolute position into segments of kSegment. A score is the sum over the
//   head's dimensions in ascending order, float32: vdpbf16ps steps of two if queries are bf16, keys and
//   values too or 8-bit floats, and the machine has it, with AMX steps of 32 (tile_registers.h), from 0 on or of
//   positions of a segment, else fused multiply-adds of widened numbers.
//   Keys and values of one byte: kv_types.h. Of I8, the score is then multiplied with the key's scale.
//   With bf16 queries over I8 and vdpbf16ps, queries are codes of one byte and weights whole numbers of 8 or 16 bits
//   instead, whose sums over codes are exact: digits.h.
// - Within a segment: maximum of the seen scores; weights 2**(score log2 e - maximum), rounded to
//   bf16 on the vdpbf16ps path; their sum, in lanes by position and then one tree. Of I8, a weight is
//   then multiplied with the value's scale, and on the path of whole numbers rounded to one. Weighted values are
//   summed over positions in ascending order. Unseen positions have weight 0 and add zeros.
// - Segments are merged in ascending order by the online-softmax rule (Milakov & Gimelshein
//   2018), starting from the sink if there is one.
//
// So neither the block size, nor neighbours, nor cuts between steps or threads appear in a bit.
// Blocks are read only at positions that some row of the request in this step sees.
#pragma once
#include "isa.h"

namespace quire {

constexpr int64_t kSegment = 256;
constexpr int64_t kSpan = 64;     // keys that are rearranged at a time
constexpr int64_t kMaxDim = 4096;

// Constants of a layer.
struct AttentionLayer {
  int64_t heads, kv_heads, key_dim, value_dim;
  float scale;
  float softcap;        // 0: none
  int64_t window;       // 0: none
  const float* slopes;  // nullptr or [heads]
  const float* sinks;   // nullptr or [heads]
};

// What all layers of a step share.
struct AttentionStep {
  const int32_t* query_start;  // [requests + 1]
  const int32_t* seq_lens;     // [requests]
  const int32_t* table;        // [requests, ...], rows table_stride apart
  int64_t table_stride, requests, block_size;
};

// Strides in elements; dimensions of a head lie side by side, behind them its factor, if the type has
// one.
struct Cache {
  void* data;
  int64_t block, slot, head;
  int dtype;
  float scale;  // of 8-bit floats: what stands there times this is meant
};

struct AttentionArgs {
  const AttentionLayer* layer;
  const AttentionStep* step;
  const void* q;
  int64_t q_token, q_head;
  void* out;  // [T, heads, value_dim] of q's type, contiguous
  int q_dtype;
  Cache keys, values;   // of one type
  int64_t value_tail;   // bytes from a value to its factor: of latents, that of the whole key
};

// Consecutive tokens of one request, a range of KV heads, and a range of segments.
struct AttentionTile {
  int64_t request, token, count, position;  // first token in the batch, and where it stands
  int64_t kv_head, kv_head_end;
  int64_t segment, segment_end;
  float* parts;         // nullptr: the tile has all its segments. Else those of its first segment,
                        // one for each KV head of the layer, then those of the next
  int64_t part_stride;  // floats between two parts
};

void attention(const AttentionArgs& args);

static inline int64_t padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }
// Floats of the part of one segment and KV head: per row its maximum, sum and weighted values.
static inline int64_t part_floats(int64_t rows, int64_t value_dim) {
  return rows * (2 + padded_dim(value_dim));
}

// Computes a tile: into `out`, or into its parts. `later` (or nullptr) is what this thread will
// probably be asked for next: it fetches its first keys and values. `fetched` says how much of this tile
// this thread has fetched, 0 if it expected another, and is told how much of the later one.
QUIRE_KERNEL(attend, (const AttentionArgs&, const AttentionTile&, const AttentionTile* later,
                      int64_t& fetched))
// Merges all parts of a tile into `out`; segment .. segment_end are all its segments.
QUIRE_KERNEL(merge_parts, (const AttentionArgs&, const AttentionTile&))

struct WriteArgs {
  const void *k, *v;  // [tokens, kv_heads, dim], of dtype
  int64_t k_token, k_head, v_token, v_head;
  int64_t tokens, kv_heads, key_dim, value_dim;
  Cache keys, values;
  int64_t block_size;
  const int64_t* slots;  // [tokens]; negative ones are skipped
  int dtype;
};

// q and k are rotated in place; then k and v are stored if write.slots is given.
struct RotaryArgs {
  void* q;  // [tokens, heads, dim]
  int64_t q_token, q_head, heads;
  const int64_t* positions;  // [tokens]
  const float* table;        // [.., rotary_dim]: cosines, then sines, of rotary_dim / 2 angles
  int64_t rotary_dim;
  int64_t offset;    // first rotated dimension of a head
  bool interleaved;  // pairs (2i, 2i + 1) instead of (i, i + rotary_dim / 2)
  WriteArgs write;
};
QUIRE_KERNEL(rotary_write, (const RotaryArgs&))
QUIRE_KERNEL(write_kv, (const WriteArgs&))

}  // namespace quire
