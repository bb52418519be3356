// Bindings by part. Addresses arrive as integers; the kernels run without the GIL.
#pragma once
#include <nanobind/nanobind.h>

#include <cstdint>

namespace quire {

void bind_gemm(nanobind::module_& m);
void bind_memory(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_probe(nanobind::module_& m);

template <class T> static inline T* at(uintptr_t address) { return reinterpret_cast<T*>(address); }

}  // namespace quire
