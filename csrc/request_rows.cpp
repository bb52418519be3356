// See request_rows.h.
#include "request_rows.h"

#include <algorithm>
#include <cstring>

namespace quire {

bool LastTokens::fill(const RequestRows& from, const std::vector<int64_t>& rows,
                      const std::vector<int64_t>& positions) {
  const size_t count = rows.size();
  if (positions.size() != count) return false;
  int64_t last = 0;
  for (size_t i = 0; i < count; ++i) {
    if (rows[i] < 0 || rows[i] >= from.rows || positions[i] < 0 || positions[i] >= from.positions) return false;
    last = std::max(last, positions[i]);
  }
  block_size_ = from.block_size;
  width_ = last / block_size_ + 1;
  if (width_ > from.width) return false;
  positions_ = positions;
  tokens_.resize(count);
  slots_.resize(count);
  lengths_.resize(count);
  starts_.resize(count + 1);
  lines_.resize(count * static_cast<size_t>(width_));
  for (size_t i = 0; i < count; ++i) {
    const int64_t position = positions[i], at = position / block_size_;
    const int32_t* const blocks = from.blocks + rows[i] * from.width;
    // A token without a block would overwrite the null block.
    if (blocks[at] == 0) return false;
    tokens_[i] = from.tokens[rows[i] * from.positions + position];
    slots_[i] = blocks[at] * block_size_ + position % block_size_;
    lengths_[i] = static_cast<int32_t>(position + 1);
    starts_[i + 1] = static_cast<int32_t>(i + 1);
    int32_t* const line = lines_.data() + static_cast<int64_t>(i) * width_;
    std::copy(blocks, blocks + width_, line);
    // Blocks before the window may hold another request's tokens by now.
    if (from.window) std::fill(line, line + std::max<int64_t>(0, position - from.window + 1) / block_size_, 0);
  }
  return true;
}

bool LastTokens::embed(const Embedding& embedding, int64_t size, int dtype, void* out) const {
  for (int64_t token : tokens_)
    if (token < 0 || token >= embedding.rows) return false;
  if (embedding.layer) {
    QUIRE_PICK(gather)(GatherArgs{embedding.layer, count(), tokens_.data(), out, dtype});
    return true;
  }
  const size_t bytes = static_cast<size_t>(size) * item_size(dtype);
  for (size_t i = 0; i < tokens_.size(); ++i)
    std::memcpy(static_cast<char*>(out) + i * bytes, embedding.matrix + static_cast<size_t>(tokens_[i]) * bytes, bytes);
  return true;
}

DecoderTables LastTokens::tables() const {
  return {{starts_.data(), lengths_.data(), lines_.data(), width_, count(), block_size_}, slots_.data()};
}

}  // namespace quire
