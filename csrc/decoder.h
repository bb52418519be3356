// All layers of a plain decoder in one call: norm, attention, norm, gated MLP around a residual
// stream. Each step is the kernel that the separate operations call, with the same roundings in
// between, so both ways give the same bits; what is saved is the way back to Python after each.
#pragma once
#include <vector>

#include "attention.h"
#include "gemm.h"

namespace quire {

struct DecoderLayer {
  Norm before_attention, before_mlp;
  Norm q_norm, k_norm;  // of each head, or kNoNorm
  Linear qkv, out, gate_up, down;
  int activation;
  AttentionLayer attention;
  Cache keys, values;
  const float* rope;  // nullptr: no rotary positions
  int64_t rotary_dim;
  bool interleaved;
};

struct Decoder {
  std::vector<DecoderLayer> layers;
  Norm final_norm;
  int64_t size;  // of the residual stream
  int dtype;     // of activations
  ~Decoder();
  // Memory of at least `bytes` for purpose `slot`, kept from step to step.
  void* buffer(int slot, size_t bytes);

 private:
  void* memory_[4] = {};
  size_t size_[4] = {};
};

// What the attention of some layers reads.
struct DecoderTables {
  AttentionStep attention;
  const int64_t* slots;  // [tokens]
};

struct DecoderStep {
  std::vector<DecoderTables> tables;  // one for all layers, or one for each
  const int64_t* positions;           // [tokens]
  void* x;                            // [tokens, size]; overwritten
  void* out;                          // [tokens or num_wanted, size]: after the final norm
  int64_t tokens;
  // Rows of `out`: the tokens that are asked for, ascending, the last ones of each request; with
  // num_wanted < 0 all. The last layer computes keys and values for all, the rest for these.
  const int64_t* wanted;
  int64_t num_wanted;
  AttentionStep last;  // of the last layer, its queries being those tokens
};

void run_decoder(Decoder& decoder, const DecoderStep& step);

}  // namespace quire
