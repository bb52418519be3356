// Instruction sets: which there are, which one runs, and how a kernel is declared for all.
//
// A file X.isa.cpp is compiled once per instruction set, with QUIRE_ISA (a namespace name) and
// QUIRE_LEVEL (0 portable, 1 AVX2+FMA+F16C, 2 AVX-512 F/BW/DQ/VL, 3 with BF16). QUIRE_VNNI says that bytes are
// multiplied in one step: levels 1 and 2 have sets with and without, level 3 always has it. AMX is level 3 with
// QUIRE_AMX. Its code stands in `namespace quire::QUIRE_ISA`. Two rules keep the wrong code from running on an old
// machine: such a file instantiates no template and calls no inline function of the standard
// library (the linker would keep one copy of any instruction set), and its own helpers are
// `static` or in that namespace.
#pragma once
#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) || defined(_M_X64)
#define QUIRE_X86 1
#else
#define QUIRE_X86 0
#endif

namespace quire {

enum Isa { kPortable, kAvx2, kAvxVnni, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx, kNumIsas };

// Name as in QUIRE_CPU_ISA.
const char* isa_name(int isa);
// Whether this machine and this build have it.
bool has_isa(int isa);
// The best one that this machine runs: mostly the last one that it has.
int best_isa();
// The one that kernels use now; best_isa() at first.
int active_isa();
// False if this machine or this build does not have it.
bool set_isa(int isa);

// Whether the probe of memory's speed fetches lines past the larger caches (prefetchnta), which go to the first. On
// Intel's processors they came at half the speed (Xeon with AMX); Zen 4 was faster with it.
extern const bool kFetchPast;
// Whether products of denormal numbers take no longer than others, as on AMD's processors. On Intel's of some
// generations each takes more than a hundred cycles.
extern const bool kFastDenormals;
// Whether bytes can be looked up in tables of 128 (AVX512_VBMI).
extern const bool kLooksUpBytes;

// QUIRE_KERNEL(norm, (const NormArgs&)) declares quire::portable::norm, quire::avx2::norm, ...;
// QUIRE_PICK(norm)(args) calls that of the active instruction set.
#if QUIRE_X86
#define QUIRE_KERNEL(name, signature)          \
  namespace portable { void name signature; }  \
  namespace avx2 { void name signature; }      \
  namespace avx_vnni { void name signature; }  \
  namespace avx512 { void name signature; }    \
  namespace avx512_vnni { void name signature; } \
  namespace avx512_bf16 { void name signature; } \
  namespace amx { void name signature; }
#define QUIRE_PICK(name)                                                           \
  (::quire::pick(&::quire::portable::name, &::quire::avx2::name, &::quire::avx_vnni::name, \
                 &::quire::avx512::name, &::quire::avx512_vnni::name, &::quire::avx512_bf16::name, \
                 &::quire::amx::name))
template <class F> static inline F pick(F a, F b, F c, F d, F e, F f, F g) {
  const F all[] = {a, b, c, d, e, f, g};
  return all[active_isa()];
}
#else
#define QUIRE_KERNEL(name, signature) \
  namespace portable { void name signature; }
#define QUIRE_PICK(name) (&::quire::portable::name)
#endif

// Element types. The numbers are known to Python (kernels/packed.py, kernels/native_attention.py).
// Tensors are of the first three. The next three are kept in the KV cache (kv_types.h) and, as the
// fourth, in weights that become numbers before they are multiplied (widen.h). E8M0 is a scale, a power
// of two; the last are weights of codes that are multiplied as such (coded_tile.h).
enum DType {
  kF32 = 0,
  kBF16 = 1,
  kF16 = 2,
  kE4M3 = 3,
  kE5M2 = 4,
  kI8 = 5,
  kTable4 = 6,  // 4 bits, the numbers in a table
  kE8M0 = 7,    // the exponent of a float32; 0 is 0
  kCodes8 = 8,
  kCodes4 = 9,
};
// Of those that have whole bytes.
static inline size_t item_size(int dtype) { return dtype == kF32 ? 4 : dtype <= kF16 ? 2 : 1; }

}  // namespace quire
