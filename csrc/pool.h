// The threads that kernels run on: the caller and its helpers, which spin briefly, then sleep.
//
// Work is a range of items cut into chunks. Each thread has a share, chunks side by side, and walks
// through it upwards, so what it fetched ahead is what it needs next; whoever is done takes chunks of
// the others. A kernel's bits must therefore not depend on who computes which chunk, nor on the size
// of chunks. A helper that the system has put aside holds nobody up unless it has a chunk in hand,
// since its share is taken by others. Two callers at once:
// the second one does its work alone. Usable in X.isa.cpp: no code of the standard library.
#pragma once
#include <cstddef>
#include <cstdint>

namespace quire {

// Threads that take part, the caller included.
int num_threads();

// Use `n` threads (the caller and n - 1 helpers). Helper i is bound to cpus[i % num_cpus];
// num_cpus 0 binds nobody.
void set_num_threads(int n, const int* cpus, int num_cpus);

// The first of `count` chunks that is of a thread's share; that of num_threads() is `count`.
static inline int64_t share_begin(int64_t thread, int64_t threads, int64_t count) {
  return count * thread / threads;
}

using RangeFn = void (*)(void* context, int64_t begin, int64_t end);

// Call fn(context, begin, end) for chunks of `grain` items that together cover [0, items).
void run_parallel(int64_t items, int64_t grain, RangeFn fn, void* context);

// The same for a lambda (int64_t begin, int64_t end).
template <class F> static inline void parallel_for(int64_t items, int64_t grain, F&& body) {
  struct Call {
    static void run(void* context, int64_t begin, int64_t end) {
      (*static_cast<F*>(context))(begin, end);
    }
  };
  run_parallel(items, grain, &Call::run, const_cast<void*>(static_cast<const void*>(&body)));
}

// Runs `jobs` jobs of all sizes, one right after the other; returns how many went wrong: an item
// left out, done twice, or done after the end of its job.
int64_t exercise_pool(int64_t jobs);

// Scratch memory of the calling thread, aligned to 64 bytes, kept from call to call. A later call with the
// same `slot` (0 to 7) takes it back, with its contents if it wants no more bytes; else they are undefined.
void* scratch(int slot, size_t bytes);

}  // namespace quire
