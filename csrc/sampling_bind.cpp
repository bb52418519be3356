// Bindings of sampling and log-probabilities.
#include "bind.h"
#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

void run_pick(uintptr_t logits, int64_t rows, int64_t vocab, int64_t stride, uintptr_t numbers,
              uintptr_t seeds, uintptr_t positions, uintptr_t masks, uintptr_t tokens,
              uintptr_t witnesses, int64_t num_witnesses) {
  nb::gil_scoped_release release;
  pick_tokens(PickArgs{at<float>(logits), rows, vocab, stride, at<double>(numbers),
                       at<uint64_t>(seeds), at<int64_t>(positions),
                       at<const uint32_t* const>(masks), at<int64_t>(tokens),
                       at<int32_t>(witnesses), num_witnesses});
}

void run_top(uintptr_t logprobs, int64_t rows, int64_t vocab, uintptr_t chosen, uintptr_t counts,
             int64_t most, uintptr_t ids, uintptr_t values, uintptr_t ranks) {
  nb::gil_scoped_release release;
  top_logprobs(TopArgs{at<float>(logprobs), rows, vocab, at<int64_t>(chosen),
                       at<int64_t>(counts), most, at<int64_t>(ids), at<float>(values),
                       at<int64_t>(ranks)});
}

void run_keep(uintptr_t logits, int64_t vocab, int64_t stride, uintptr_t which, int64_t rows,
              uintptr_t masks, uintptr_t best) {
  nb::gil_scoped_release release;
  keep_allowed(MaskArgs{at<float>(logits), vocab, stride, at<int64_t>(which), rows,
                        at<uint32_t>(masks), at<float>(best)});
}

void run_finite(uintptr_t x, int64_t rows, int64_t n, int64_t stride, uintptr_t answers) {
  nb::gil_scoped_release release;
  finite_rows(at<float>(x), rows, n, stride, at<bool>(answers));
}

void run_log_softmax(uintptr_t x, int64_t rows, int64_t n, int64_t stride, uintptr_t out) {
  nb::gil_scoped_release release;
  log_softmax(at<float>(x), rows, n, stride, at<float>(out));
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("pick_tokens", &run_pick, "logits"_a, "rows"_a, "vocab"_a, "stride"_a, "numbers"_a,
        "seeds"_a, "positions"_a, "masks"_a, "tokens"_a, "witnesses"_a, "num_witnesses"_a);
  m.def("top_logprobs", &run_top, "logprobs"_a, "rows"_a, "vocab"_a, "chosen"_a, "counts"_a,
        "most"_a, "ids"_a, "values"_a, "ranks"_a);
  m.def("keep_allowed", &run_keep, "logits"_a, "vocab"_a, "stride"_a, "which"_a, "rows"_a,
        "masks"_a, "best"_a);
  m.def("finite_rows", &run_finite, "x"_a, "rows"_a, "n"_a, "stride"_a, "answers"_a);
  m.def("log_softmax", &run_log_softmax, "x"_a, "rows"_a, "n"_a, "stride"_a, "out"_a);
}

}  // namespace quire
