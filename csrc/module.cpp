// The Python module: instruction set, threads, and the parts' own bindings.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bind.h"
#include "isa.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;

static int isa_by_name(const std::string& name) {
  for (int isa = 0; isa < quire::kNumIsas; ++isa)
    if (name == quire::isa_name(isa)) return isa;
  return -1;
}

NB_MODULE(_native, m) {
  // Views that Python keeps for good may be alive when the interpreter ends; that is no leak.
  nb::set_leak_warnings(false);
  m.doc() = "Compiled kernels. Tensors are passed as addresses; see quire/kernels/native.py.";
  m.def("isas", [] {
    const int best = quire::best_isa();
    std::vector<std::string> names{quire::isa_name(best)};
    for (int isa = quire::kNumIsas - 1; isa >= 0; --isa)
      if (isa != best && quire::has_isa(isa)) names.push_back(quire::isa_name(isa));
    return names;
  }, "Instruction sets that this machine runs, best first.");
  m.def("isa", [] { return std::string(quire::isa_name(quire::active_isa())); },
        "The instruction set in use.");
  m.def("set_isa", [](const std::string& name) { return quire::set_isa(isa_by_name(name)); },
        "name"_a, "Use an instruction set; False if it cannot be had here.");
  m.def("num_threads", &quire::num_threads, "Threads that kernels use.");
  m.def("set_num_threads", [](int n, const std::vector<int>& cpus) {
    nb::gil_scoped_release release;
    quire::set_num_threads(n < 1 ? 1 : n, cpus.data(), static_cast<int>(cpus.size()));
  }, "n"_a, "cpus"_a, "Use n threads; helper i is bound to cpus[i % len(cpus)].");
  m.def("exercise_pool", [](int jobs) {
    nb::gil_scoped_release release;
    return quire::exercise_pool(jobs);
  }, "jobs"_a, "Run many small jobs; how many of them did not do each item exactly once.");
  quire::bind_gemm(m);
  quire::bind_memory(m);
  quire::bind_attention(m);
  quire::bind_decoder(m);
  quire::bind_sampling(m);
  quire::bind_probe(m);
}
