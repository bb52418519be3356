// What a worker keeps of its requests, and the inputs of a step that computes one token of each: made here, since a
// few numbers of each request take longer in Python than all their arithmetic. The plain twin:
// quire/worker/input_batch.py.
#pragma once
#include <vector>

#include "decoder.h"

namespace quire {

// Memory of the worker, a row for each request that there is room for.
struct RequestRows {
  const int32_t* tokens;  // [rows, positions]
  int64_t rows, positions;
  const int32_t* blocks;  // [rows, width]: ids, 0 for none
  int64_t width, block_size;
  int64_t window;  // positions that a token sees, itself included; 0: all before it
};

// Rows of an embedding: a packed layer's, or those of a matrix in the type of the activations.
struct Embedding {
  const Linear* layer;
  const char* matrix;
  int64_t rows;
};

// The inputs of one token of some requests.
class LastTokens {
 public:
  // Of the tokens at `positions` of `rows`; false if a request has no token or no block there.
  bool fill(const RequestRows& from, const std::vector<int64_t>& rows, const std::vector<int64_t>& positions);
  // Their embeddings; false if a token has none.
  bool embed(const Embedding& embedding, int64_t size, int dtype, void* out) const;
  DecoderTables tables() const;
  const int64_t* positions() const { return positions_.data(); }
  int64_t count() const { return static_cast<int64_t>(tokens_.size()); }

 private:
  std::vector<int64_t> tokens_, positions_, slots_;
  std::vector<int32_t> starts_, lengths_, lines_;  // of the tables, `width_` each
  int64_t width_ = 0, block_size_ = 0;
};

}  // namespace quire
