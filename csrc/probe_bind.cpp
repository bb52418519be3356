// Bindings of the probes.
#include "bind.h"
#include "probe.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

void run_read(uintptr_t memory, size_t bytes) {
  nb::gil_scoped_release release;
  QUIRE_PICK(probe_read)(ReadArgs{at<void>(memory), bytes});
}

double run_multiply(int64_t rounds) {
  nb::gil_scoped_release release;
  double operations = 0;
  QUIRE_PICK(probe_multiply)(MultiplyArgs{rounds, &operations});
  return operations;
}

double run_multiply_codes(int64_t rounds, int bits, bool groups) {
  nb::gil_scoped_release release;
  double operations = 0;
  QUIRE_PICK(probe_multiply_codes)(CodesArgs{rounds, bits, groups, &operations});
  return operations;
}

}  // namespace

void bind_probe(nb::module_& m) {
  m.def("probe_read", &run_read, "memory"_a, "bytes"_a, "Read memory once on all threads.");
  m.def("probe_multiply", &run_multiply, "rounds"_a,
        "Multiply in registers on all threads; the number of operations done.");
  m.def("probe_multiply_codes", &run_multiply_codes, "rounds"_a, "bits"_a, "groups"_a,
        "The same with rows of codes and weights of so many bits, perhaps in groups of 32.");
}

}  // namespace quire
