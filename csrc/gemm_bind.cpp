// Bindings of linear layers, norms and packing.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "bind.h"
#include "gemm.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

Linear make_linear(uintptr_t weight, uintptr_t bias, int dtype, int64_t n, int64_t k, bool gated,
                   int64_t leaves) {
  return Linear{at<void>(weight), at<float>(bias), dtype, n, k, gated, leaves, {}};
}

Linear make_coded(uintptr_t weight, uintptr_t bias, int dtype, int64_t n, int64_t k, bool gated,
                  int64_t leaves, uintptr_t scales, uintptr_t zeros, uintptr_t order, int64_t group,
                  int scale_type, bool group_zeros, int zero, uintptr_t table, int wide,
                  uintptr_t values, bool group_minima, bool short_scales) {
  return Linear{at<void>(weight), at<float>(bias), dtype, n, k, gated, leaves,
                Coded{at<float>(scales), at<int32_t>(zeros), at<int32_t>(order), group, scale_type,
                      group_zeros, zero, at<uint8_t>(table), wide, at<float>(values),
                      group_minima, short_scales}};
}

// Bytes of a layer's packed weight.
int64_t linear_bytes(const Linear& layer) {
  return packed_tiles(layer.n) * tile_bytes(layer);
}

Norm make_norm(int kind, uintptr_t weight, uintptr_t bias, int dtype, double eps, bool wide) {
  Norm norm;
  norm.kind = kind;
  norm.weight = at<void>(weight);
  norm.bias = at<void>(bias);
  norm.dtype = dtype;
  norm.eps = static_cast<float>(eps);
  norm.wide = wide;
  return norm;
}

void run_linear(const Linear& layer, uintptr_t x, int x_dtype, int64_t m, int64_t x_stride,
                uintptr_t residual, uintptr_t out, int out_dtype, int activation, bool split) {
  nb::gil_scoped_release release;
  QUIRE_PICK(gemm)(GemmArgs{&layer, at<void>(x), x_dtype, m, x_stride, at<void>(residual),
                            at<void>(out), out_dtype, activation, split});
}

// Adds shares[i] times the sums of each leaf of row i to row rows[i] of total [leaves, total_rows, n].
void run_add_leaves(const Linear& layer, uintptr_t x, int x_dtype, int64_t m, int64_t x_stride,
                    uintptr_t total, int64_t total_rows, uintptr_t rows, uintptr_t shares) {
  nb::gil_scoped_release release;
  GemmArgs args{&layer, at<void>(x), x_dtype, m, x_stride, nullptr, at<void>(total), kF32, kNone, false};
  args.rows = at<int64_t>(rows);
  args.shares = at<float>(shares);
  args.out_rows = total_rows;
  QUIRE_PICK(gemm)(args);
}

// See ExpertsArgs.
void run_sum_experts(const std::vector<const Linear*>& layers, const std::vector<int64_t>& ends,
                     uintptr_t x, int x_dtype, int64_t x_stride, uintptr_t rows, uintptr_t shares,
                     uintptr_t out, int64_t out_rows) {
  nb::gil_scoped_release release;
  QUIRE_PICK(sum_experts)(ExpertsArgs{layers.data(), ends.data(), static_cast<int64_t>(layers.size()),
                                      at<void>(x), x_dtype, x_stride, at<int64_t>(rows),
                                      at<float>(shares), at<float>(out), out_rows});
}

void run_likeliest(const Linear& layer, uintptr_t x, int x_dtype, int64_t m, int64_t x_stride,
                   uintptr_t ids) {
  nb::gil_scoped_release release;
  likeliest(layer, at<void>(x), x_dtype, m, x_stride, at<int64_t>(ids));
}

void run_norm(const Norm& norm, uintptr_t x, uintptr_t residual, uintptr_t sum, uintptr_t out,
              int dtype, int64_t rows, int64_t size, int64_t x_stride) {
  nb::gil_scoped_release release;
  QUIRE_PICK(normalize)(NormArgs{norm, at<void>(x), at<void>(residual), at<void>(sum),
                                 at<void>(out), dtype, rows, size, x_stride});
}

void run_pack(uintptr_t weight, int source_dtype, uintptr_t packed, int dtype, int64_t rows,
              int64_t k, int64_t first_row, int64_t total_rows, bool gated) {
  nb::gil_scoped_release release;
  QUIRE_PICK(pack)(PackArgs{at<void>(weight), source_dtype, at<void>(packed), dtype, rows, k,
                            first_row, total_rows, gated});
}

void run_gather(const Linear& layer, uintptr_t ids, int64_t count, uintptr_t out,
                int out_dtype) {
  nb::gil_scoped_release release;
  QUIRE_PICK(gather)(GatherArgs{&layer, count, at<int64_t>(ids), at<void>(out), out_dtype});
}

}  // namespace

void bind_gemm(nb::module_& m) {
  nb::class_<Norm>(m, "Norm", "Constants of a norm.");
  nb::class_<Linear>(m, "Linear", "Constants of a linear layer. Owns no memory.");
  m.def("make_linear", &make_linear, "weight"_a, "bias"_a, "dtype"_a, "n"_a, "k"_a, "gated"_a,
        "leaves"_a);
  m.def("make_coded", &make_coded, "weight"_a, "bias"_a, "dtype"_a, "n"_a, "k"_a, "gated"_a, "leaves"_a,
        "scales"_a, "zeros"_a, "order"_a, "group"_a, "scale_type"_a, "group_zeros"_a, "zero"_a, "table"_a,
        "wide"_a, "values"_a, "group_minima"_a, "short_scales"_a);
  m.def("linear_bytes", &linear_bytes, "layer"_a);
  m.def("make_norm", &make_norm, "kind"_a, "weight"_a, "bias"_a, "dtype"_a, "eps"_a, "wide"_a);
  m.def("linear", &run_linear, "layer"_a, "x"_a, "x_dtype"_a, "m"_a, "x_stride"_a, "residual"_a,
        "out"_a, "out_dtype"_a, "activation"_a, "split"_a);
  m.def("add_leaves", &run_add_leaves, "layer"_a, "x"_a, "x_dtype"_a, "m"_a, "x_stride"_a,
        "total"_a, "total_rows"_a, "rows"_a, "shares"_a);
  m.def("sum_experts", &run_sum_experts, "layers"_a, "ends"_a, "x"_a, "x_dtype"_a, "x_stride"_a, "rows"_a,
        "shares"_a, "out"_a, "out_rows"_a);
  m.def("likeliest", &run_likeliest, "layer"_a, "x"_a, "x_dtype"_a, "m"_a, "x_stride"_a, "ids"_a);
  m.def("norm", &run_norm, "norm"_a, "x"_a, "residual"_a, "sum"_a, "out"_a, "dtype"_a, "rows"_a,
        "size"_a, "x_stride"_a);
  m.def("pack", &run_pack, "weight"_a, "source_dtype"_a, "packed"_a, "dtype"_a, "rows"_a, "k"_a,
        "first_row"_a, "total_rows"_a, "gated"_a);
  m.def("packed_bytes", &packed_bytes, "n"_a, "k"_a, "dtype"_a);
  m.def("gather", &run_gather, "layer"_a, "ids"_a, "count"_a, "out"_a, "out_dtype"_a);
}

}  // namespace quire
