// Bindings of the whole decoder.
#include <nanobind/stl/vector.h>

#include <mutex>

#include "bind.h"
#include "decoder.h"

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

 private:
  Decoder decoder_;
  std::mutex mutex_;
};

}  // namespace

void bind_decoder(nb::module_& m) {
  nb::class_<DecoderLayer>(m, "DecoderLayer", "Constants of a layer. Owns no memory.");
  m.def("make_decoder_layer", &make_decoder_layer, "before_attention"_a, "before_mlp"_a,
        "q_norm"_a, "k_norm"_a, "qkv"_a, "out"_a, "gate_up"_a, "down"_a, "activation"_a,
        "attention"_a, "keys"_a, "values"_a, "rope"_a, "rotary_dim"_a, "interleaved"_a);
  nb::class_<BoundDecoder>(m, "Decoder", "All layers of a decoder and its final norm.")
      .def(nb::init<std::vector<DecoderLayer>, const Norm&, int64_t, int>(), "layers"_a,
           "final_norm"_a, "size"_a, "dtype"_a)
      .def("run", &BoundDecoder::run, "attention"_a, "slots"_a, "positions"_a, "x"_a, "out"_a,
           "tokens"_a, "wanted"_a, "num_wanted"_a, "last"_a,
           "x is overwritten. Attention and slots: one for all layers, or one each. `wanted`:\n"
           "the tokens whose hidden state is asked for, queries of `last`; num_wanted -1: all.");
}

}  // namespace quire
