// Which instruction sets this machine has.
#include "isa.h"

#include <atomic>
#if QUIRE_X86
#include <cpuid.h>
#endif
#if QUIRE_X86 && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

static const char* const kNames[kNumIsas] = {"portable",    "avx2",        "avx_vnni", "avx512",
                                             "avx512_vnni", "avx512_bf16", "amx"};

const char* isa_name(int isa) { return kNames[isa]; }

#if QUIRE_X86

// Leaf 7, part 1: EAX bit 4 (Intel's manual, volume 2A, CPUID). Not every compiler knows its name.
static bool has_avx_vnni() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return QUIRE_HAS_AVX_VNNI && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
}

// AMX with bf16 and 8-bit integers: leaf 7, EDX bits 22, 24 and 25. Linux gives a process the memory that saved
// tile registers take when it asks for it (arch_prctl(ARCH_REQ_XCOMP_PERM, 18)), for all its threads.
static bool ask_for_amx() {
#ifdef __linux__
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kAll = 1u << 22 | 1u << 24 | 1u << 25;
  if (!QUIRE_HAS_AMX || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return false;
#endif
}

static bool is_amd() {
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
}
const bool kFetchPast = is_amd();
const bool kFastDenormals = is_amd();

static bool has_vbmi() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512vbmi");
}
const bool kLooksUpBytes = has_vbmi();

// Intel's processors multiply pairs of bf16 (vdpbf16ps) at half the speed at which they multiply float32: 158 to 172 against
// 299 to 324 GFLOP/s on two cores of a Xeon (`quire.kernels.probe`, with each instruction set). Zen 4 and 5 take pairs faster. It is
// told by the maker and not by a measurement, so that a machine takes the same set, and gives the same bytes, at each start.
static bool has_slow_pairs() {
  __builtin_cpu_init();
  return __builtin_cpu_is("intel");
}

bool has_isa(int isa) {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
  const bool bf16 = vnni && __builtin_cpu_supports("avx512bf16");
  static const bool amx = bf16 && ask_for_amx();
  switch (isa) {
    case kPortable: return true;
    case kAvx2: return avx2;
    case kAvxVnni: return avx2 && has_avx_vnni();
    case kAvx512: return avx512;
    case kAvx512Vnni: return vnni;
    case kAvx512Bf16: return bf16;
    case kAmx: return amx;
    default: return false;
  }
}

#else

const bool kFetchPast = false;
const bool kFastDenormals = false;
const bool kLooksUpBytes = false;
static bool has_slow_pairs() { return false; }
bool has_isa(int isa) { return isa == kPortable; }

#endif

int best_isa() {
  static const int best = [] {
    int isa = kNumIsas - 1;
    while (!has_isa(isa)) --isa;
    return isa == kAvx512Bf16 && has_slow_pairs() ? kAvx512Vnni : isa;
  }();
  return best;
}

static std::atomic<int>& active() {
  static std::atomic<int> isa{best_isa()};
  return isa;
}

int active_isa() { return active().load(std::memory_order_relaxed); }

bool set_isa(int isa) {
  if (!has_isa(isa)) return false;
  active().store(isa, std::memory_order_relaxed);
  return true;
}

}  // namespace quire
