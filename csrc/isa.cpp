// Which instruction sets this machine has.
#include "isa.h"

#include <atomic>

namespace quire {

static const char* const kNames[kNumIsas] = {"portable", "avx2", "avx512", "avx512_bf16"};

const char* isa_name(int isa) { return kNames[isa]; }

static int detect() {
#if QUIRE_X86
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return kPortable;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return kAvx2;
  if (!__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512bf16"))
    return kAvx512;
  return kAvx512Bf16;
#else
  return kPortable;
#endif
}

int best_isa() {
  static const int best = detect();
  return best;
}

static std::atomic<int>& active() {
  static std::atomic<int> isa{best_isa()};
  return isa;
}

int active_isa() { return active().load(std::memory_order_relaxed); }

bool set_isa(int isa) {
  if (isa < 0 || isa > best_isa()) return false;
  active().store(isa, std::memory_order_relaxed);
  return true;
}

}  // namespace quire
