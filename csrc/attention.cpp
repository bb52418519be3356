// Which thread computes which part of attention. The arithmetic: attention.isa.cpp.
//
// The batch is cut into tiles of about kTileQueries rows. A tile with more work than a thread's
// fair share is cut by segments, whose parts are merged afterwards, in order. Neither cut changes
// a bit.
#include "attention.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace quire {
namespace {

constexpr int64_t kTileQueries = 112;
constexpr int64_t kFewRows = 24;
constexpr int64_t kKeyRows = 12;  // turning a span of keys and values costs about so many rows
constexpr int64_t kShares = 3;    // pieces of work per thread, at least

struct Piece {
  AttentionTile tile;
  int64_t cost;
};

struct Plan {
  std::vector<AttentionTile> tiles;   // whole, for KV head 0
  std::vector<Piece> pieces;
  std::vector<const Piece*> dealt;  // in the order of work
  std::vector<AttentionTile> merges;
  std::vector<float> parts;
  int64_t segments;  // of all tiles
};

int64_t cost_of(const AttentionTile& tile, int64_t group) {
  return (tile.segment_end - tile.segment) * (tile.count * group + kKeyRows);
}

int64_t cut_batch(const AttentionLayer& layer, const AttentionStep& step, Plan& plan) {
  const int64_t group = layer.heads / layer.kv_heads;
  const int64_t at_once = std::max<int64_t>(1, kTileQueries / group);
  int64_t total = 0;
  plan.tiles.clear();
  plan.segments = 0;
  for (int64_t r = 0; r < step.requests; ++r) {
    const int64_t begin = step.query_start[r], end = step.query_start[r + 1];
    for (int64_t token = begin; token < end; token += at_once) {
      const int64_t count = std::min(at_once, end - token);
      const int64_t position = step.seq_lens[r] - end + token;
      const int64_t first = layer.window ? std::max<int64_t>(0, position - layer.window + 1) : 0;
      const AttentionTile tile{r, token, count, position, 0, 0, first / kSegment,
                               (position + count - 1) / kSegment + 1, nullptr, 0};
      plan.tiles.push_back(tile);
      plan.segments += tile.segment_end - tile.segment;
      total += cost_of(tile, group) * layer.kv_heads;
    }
  }
  return total;
}

// Adds a tile's pieces; those that are cut get their place among the parts as an offset, until
// all are known.
void cut_tile(const AttentionLayer& layer, const AttentionTile& tile, int64_t most,
              int64_t& floats, Plan& plan) {
  const int64_t group = layer.heads / layer.kv_heads, rows = tile.count * group;
  const int64_t segments = tile.segment_end - tile.segment;
  // Few rows read keys faster if one thread reads all heads of a token, as long as each has some to read; many rows
  // compute.
  const bool by_head = rows > kFewRows || plan.segments < num_threads();
  const int64_t at_once = by_head ? 1 : layer.kv_heads;
  const int64_t cost = cost_of(tile, group) * at_once;
  const int64_t pieces = std::min(segments, (cost + most - 1) / most);
  const int64_t size = part_floats(rows, layer.value_dim);
  const auto place = [&](AttentionTile part) {
    if (pieces > 1) {
      const int64_t at = floats + (part.segment - tile.segment) * layer.kv_heads * size;
      part.parts = reinterpret_cast<float*>(sizeof(float) * at + 1);
      part.part_stride = size;
    }
    return part;
  };
  for (int64_t head = 0; head < layer.kv_heads; head += at_once) {
    AttentionTile part = tile;
    part.kv_head = head, part.kv_head_end = head + at_once;
    if (pieces > 1) plan.merges.push_back(place(part));
    for (int64_t i = 0; i < pieces; ++i) {
      part.segment = tile.segment + segments * i / pieces;
      part.segment_end = tile.segment + segments * (i + 1) / pieces;
      plan.pieces.push_back({place(part), cost_of(part, group) * at_once});
    }
  }
  if (pieces > 1) floats += segments * layer.kv_heads * size;
}

// Deals the pieces out, the most work first, so that the threads' shares are alike.
void deal(Plan& plan, int64_t threads) {
  std::vector<Piece>& pieces = plan.pieces;
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const Piece& a, const Piece& b) { return a.cost > b.cost; });
  const int64_t count = static_cast<int64_t>(pieces.size());
  plan.dealt.assign(pieces.size(), nullptr);
  for (int64_t thread = 0, i = 0, round = 0; i < count; ++thread) {
    if (thread == threads) thread = 0, ++round;
    const int64_t at = share_begin(thread, threads, count) + round;
    if (at < share_begin(thread + 1, threads, count)) plan.dealt[at] = &pieces[i++];
  }
}

// Whether a piece is the last of some thread's share.
bool ends_share(int64_t piece, int64_t threads, int64_t count) {
  for (int64_t thread = 1; thread <= threads; ++thread)
    if (share_begin(thread, threads, count) == piece + 1) return true;
  return false;
}

}  // namespace

void attention(const AttentionArgs& args) {
  static thread_local Plan plan;
  const AttentionLayer& layer = *args.layer;
  const int64_t total = cut_batch(layer, *args.step, plan);
  const int64_t threads = num_threads();
  const int64_t most = threads > 1 ? total / (threads * kShares) + 1 : total + 1;
  int64_t floats = 0;
  plan.pieces.clear();
  plan.merges.clear();
  for (const AttentionTile& tile : plan.tiles) cut_tile(layer, tile, most, floats, plan);
  if (static_cast<int64_t>(plan.parts.size()) < floats) plan.parts.resize(floats);
  char* const parts = reinterpret_cast<char*>(plan.parts.data());
  const auto settle = [&](AttentionTile& tile) {
    if (tile.parts)
      tile.parts = reinterpret_cast<float*>(parts + reinterpret_cast<uintptr_t>(tile.parts) - 1);
  };
  for (Piece& piece : plan.pieces) settle(piece.tile);
  for (AttentionTile& tile : plan.merges) settle(tile);
  deal(plan, threads);
  const Piece* const* dealt = plan.dealt.data();
  const auto run = QUIRE_PICK(attend);
  const int64_t count = static_cast<int64_t>(plan.dealt.size());
  parallel_for(count, 1, [&](int64_t begin, int64_t end) {
    static thread_local const AttentionTile* expected = nullptr;
    static thread_local int64_t fetched = 0;  // of it
    for (int64_t i = begin; i < end; ++i) {
      const AttentionTile& tile = dealt[i]->tile;
      const AttentionTile* later = ends_share(i, threads, count) ? nullptr : &dealt[i + 1]->tile;
      if (&tile != expected) fetched = 0;
      run(args, tile, later, fetched);
      expected = later;
    }
  });
  const AttentionTile* merges = plan.merges.data();
  const auto merge = QUIRE_PICK(merge_parts);
  parallel_for(static_cast<int64_t>(plan.merges.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) merge(args, merges[i]);
  });
}

}  // namespace quire
