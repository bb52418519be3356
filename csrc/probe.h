// What this machine can do: the roofs that kernels are measured against.
#pragma once
#include "isa.h"

namespace quire {

struct ReadArgs {
  const void* memory;  // aligned to 64 bytes, larger than the caches
  size_t bytes;        // a multiple of 256
};
// Reads memory once, on all threads.
QUIRE_KERNEL(probe_read, (const ReadArgs&))

struct MultiplyArgs {
  int64_t rounds;
  double* operations;  // how many multiplications and additions were done, all threads together
};
// Multiply-adds in registers, on all threads: those of a product of bf16.
QUIRE_KERNEL(probe_multiply, (const MultiplyArgs&))
struct CodesArgs {
  int64_t rounds;
  int bits;     // of a weight's code: 8 or 4
  bool groups;  // of 32, each of whose sums is scaled and added to a float32
  double* operations;
};
// The same for whole numbers: those of a product of codes.
QUIRE_KERNEL(probe_multiply_codes, (const CodesArgs&))

}  // namespace quire
