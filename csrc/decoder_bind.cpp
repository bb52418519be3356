// Bindings of the whole decoder.
#include <nanobind/stl/array.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <tuple>

#include "bind.h"
#include "decoder.h"
#include "request_rows.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

// Parts are copied: the objects they came from may go, the memory they point to may not.
DecoderLayer make_decoder_layer(const Norm& before_attention, const Norm& before_mlp,
                                const Norm& q_norm, const Norm& k_norm, const Linear& qkv,
                                const Linear& out, const Linear& gate_up, const Linear& down,
                                int activation, const AttentionLayer& attention, const Cache& keys,
                                const Cache& values, uintptr_t rope, int64_t rotary_dim,
                                bool interleaved) {
  return {before_attention, before_mlp, q_norm, k_norm, qkv,    out,  gate_up,    down,
          activation,       attention,  keys,   values, at<float>(rope), rotary_dim, interleaved};
}

// Of a request: its numbers as PickArgs has them, its seed, how many tokens it has put out; then its penalties:
// addresses of tokens and counts, how many, and the three numbers.
using Pick = std::tuple<std::array<double, 4>, uint64_t, int64_t,
                        std::tuple<uintptr_t, uintptr_t, int64_t, float, float, float>>;

class BoundDecoder {
 public:
  BoundDecoder(std::vector<DecoderLayer> layers, const Norm& final_norm, int64_t size, int dtype) {
    decoder_.layers = std::move(layers);
    decoder_.final_norm = final_norm;
    decoder_.size = size;
    decoder_.dtype = dtype;
  }

  void run(const std::vector<AttentionStep>& attention, const std::vector<uintptr_t>& slots,
           uintptr_t positions, uintptr_t x, uintptr_t out, int64_t tokens, uintptr_t wanted,
           int64_t num_wanted, const AttentionStep& last) {
    nb::gil_scoped_release release;
    DecoderStep step{{}, at<int64_t>(positions), at<void>(x), at<void>(out), tokens,
                     at<int64_t>(wanted), num_wanted, last};
    for (size_t i = 0; i < attention.size(); ++i)
      step.tables.push_back({attention[i], at<int64_t>(slots[i])});
    const std::lock_guard<std::mutex> alone(mutex_);  // the buffers are one step's
    run_decoder(decoder_, step);
  }

  // As quire/kernels/decoder.py's `tokens_after`. Without `logits` they are never in memory.
  std::pair<std::vector<int64_t>, double> tokens_after(const RequestRows& from, const Embedding& embedding,
                                                       const std::vector<int64_t>& rows,
                                                       const std::vector<int64_t>& positions, const Linear& head,
                                                       uintptr_t logits, const std::vector<Pick>& picks) {
    if (!picks.empty() && picks.size() != rows.size()) throw std::invalid_argument("one pick for each request");
    nb::gil_scoped_release release;
    const std::lock_guard<std::mutex> alone(mutex_);
    if (!last_.fill(from, rows, positions))
      throw std::out_of_range("a request has no token or no block at its position");
    const size_t bytes = rows.size() * static_cast<size_t>(decoder_.size) * item_size(decoder_.dtype);
    x_.resize(bytes);
    hidden_.resize(bytes);
    if (!last_.embed(embedding, decoder_.size, decoder_.dtype, x_.data()))
      throw std::out_of_range("a token has no embedding");
    run_decoder(decoder_, {{last_.tables()}, last_.positions(), x_.data(), hidden_.data(), last_.count(), nullptr, -1, {}});
    const auto start = std::chrono::steady_clock::now();
    std::vector<int64_t> ids;
    if (!logits) {
      ids.resize(rows.size());
      likeliest(head, hidden_.data(), decoder_.dtype, last_.count(), decoder_.size, ids.data());
    } else {
      plain_sums(head, hidden_.data(), decoder_.dtype, last_.count(), decoder_.size, at<float>(logits));
      if (!picks.empty()) ids = pick(at<float>(logits), head.n, picks);
    }
    return {std::move(ids), std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()};
  }

 private:
  static std::vector<int64_t> pick(float* logits, int64_t vocab, const std::vector<Pick>& picks) {
    const int64_t rows = static_cast<int64_t>(picks.size());
    std::vector<int64_t> ids(picks.size());
    std::vector<double> numbers;
    std::vector<uint64_t> seeds;
    std::vector<int64_t> outputs;
    std::vector<Penalties> penalties;
    for (const auto& [number, seed, output, seen] : picks) {
      numbers.insert(numbers.end(), number.begin(), number.end());
      seeds.push_back(seed);
      outputs.push_back(output);
      const auto& [tokens, counts, count, repetition, frequency, presence] = seen;
      penalties.push_back({at<int64_t>(tokens), at<float>(counts), count, repetition, frequency, presence});
    }
    pick_next(logits, penalties.data(), {logits, rows, vocab, vocab, numbers.data(), seeds.data(), outputs.data(),
                                         nullptr, ids.data(), nullptr, 0});
    return ids;
  }

  Decoder decoder_;
  std::mutex mutex_;
  LastTokens last_;
  std::vector<char> x_, hidden_;
};

RequestRows make_request_rows(uintptr_t tokens, int64_t rows, int64_t positions, uintptr_t blocks, int64_t width,
                              int64_t block_size, int64_t window) {
  return {at<int32_t>(tokens), rows, positions, at<int32_t>(blocks), width, block_size, window};
}

Embedding embed_by(const Linear& layer) { return {&layer, nullptr, layer.n}; }
Embedding embed_from(uintptr_t matrix, int64_t rows) { return {nullptr, at<char>(matrix), rows}; }

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<DecoderLayer>(m, "DecoderLayer", "Constants of a layer. Owns no memory.");
  m.def("make_decoder_layer", &make_decoder_layer, "before_attention"_a, "before_mlp"_a,
        "q_norm"_a, "k_norm"_a, "qkv"_a, "out"_a, "gate_up"_a, "down"_a, "activation"_a,
        "attention"_a, "keys"_a, "values"_a, "rope"_a, "rotary_dim"_a, "interleaved"_a);
  nb::class_<RequestRows>(m, "RequestRows", "What a worker keeps of its requests. Owns no memory.");
  nb::class_<Embedding>(m, "Embedding", "Rows of an embedding. Owns no memory.");
  m.def("make_request_rows", &make_request_rows, "tokens"_a, "rows"_a, "positions"_a, "blocks"_a,
        "width"_a, "block_size"_a, "window"_a);
  m.def("embed_by", &embed_by, "layer"_a, nb::keep_alive<0, 1>());
  m.def("embed_from", &embed_from, "matrix"_a, "rows"_a);
  nb::class_<BoundDecoder>(m, "Decoder", "All layers of a decoder and its final norm.")
      .def(nb::init<std::vector<DecoderLayer>, const Norm&, int64_t, int>(), "layers"_a,
           "final_norm"_a, "size"_a, "dtype"_a)
      .def("run", &BoundDecoder::run, "attention"_a, "slots"_a, "positions"_a, "x"_a, "out"_a,
           "tokens"_a, "wanted"_a, "num_wanted"_a, "last"_a,
           "x is overwritten. Attention and slots: one for all layers, or one each. `wanted`:\n"
           "the tokens whose hidden state is asked for, queries of `last`; num_wanted -1: all.")
      .def("tokens_after", &BoundDecoder::tokens_after, "requests"_a, "embedding"_a, "rows"_a,
           "positions"_a, "head"_a, "logits"_a, "picks"_a,
           "The next token after one token of each of some requests, -1 where some logit is not finite,\n"
           "-2 where no largest one is after penalties; and the seconds of the head. logits 0: the\n"
           "likeliest tokens; else logits [requests, vocab] are written there, and tokens are picked\n"
           "from them, if there are picks.");
}

}  // namespace quire
