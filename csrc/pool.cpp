// See pool.h. Each thread has a share of a job's chunks and a ticket for it: number of the job above,
// next chunk of the share below. Taking a chunk is a compare-and-swap of a ticket, one's own first.
// What a job is made of changes only while all tickets are shut: a shut one holds a chunk that no
// job has, so nobody can take one, neither of the old job nor of a mixture, whenever he read the
// words. A helper that finds its ticket shut waits for the next job.
#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr int kSpins = 4000;  // about 100 us: longer than the gap between two kernels of a step
constexpr uint64_t kChunkMask = 0xffffffffu;  // of the ticket; all ones: shut

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Floats as IEEE 754 has them, for as long as it lives. A library that was built for speed alone, or
// torch.set_flush_denormal, may have told a thread to take denormal numbers for zero: then it would matter which
// thread computes a chunk.
struct UsualFloats {
#if defined(__x86_64__)
  static constexpr unsigned kOther = 0xe040;  // flush to zero, rounding, denormals are zero
  const unsigned before = _mm_getcsr();
  UsualFloats() {
    if (before & kOther) _mm_setcsr(before & ~kOther);
  }
  ~UsualFloats() {
    if (before & kOther) _mm_setcsr(before);
  }
#endif
};

struct alignas(64) Pool {
  struct alignas(64) Ticket {
    std::atomic<uint64_t> word{0};
  };
  std::vector<Ticket> tickets;  // of the caller, then of each helper
  alignas(64) std::atomic<int64_t> finished{0};
  std::atomic<RangeFn> fn{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int64_t> items{0}, grain{1}, chunks{0};
  alignas(64) std::atomic<int> sleepers{0};
  std::atomic<bool> stop{false};
  std::mutex gate;  // for sleeping
  std::condition_variable bell;
  std::mutex busy;  // held by the caller whose job runs
  uint64_t last_job = 0;  // of the caller
  std::vector<std::thread> helpers;

  explicit Pool(int n) : tickets(static_cast<size_t>(n)) {}

  // First chunk of a thread's share of `count`.
  int64_t share(size_t thread, int64_t count) const {
    return share_begin(static_cast<int64_t>(thread), static_cast<int64_t>(tickets.size()), count);
  }

  // Work on the chunks of one share of job `job` until none is left.
  void work_on(size_t whose, uint64_t job) {
    std::atomic<uint64_t>& ticket = tickets[whose].word;
    uint64_t seen = ticket.load(std::memory_order_acquire);
    int64_t done = 0;
    while ((seen >> 32) == job) {
      const int64_t chunk = static_cast<int64_t>(seen & kChunkMask);
      const RangeFn f = fn.load(std::memory_order_relaxed);
      void* c = context.load(std::memory_order_relaxed);
      const int64_t n = items.load(std::memory_order_relaxed);
      const int64_t g = grain.load(std::memory_order_relaxed);
      if (chunk >= share(whose + 1, chunks.load(std::memory_order_relaxed))) break;
      if (!ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_acq_rel,
                                        std::memory_order_acquire))
        continue;
      const int64_t begin = chunk * g, end = begin + g < n ? begin + g : n;
      f(c, begin, end);
      ++done;
      seen = ticket.load(std::memory_order_acquire);
    }
    if (done) finished.fetch_add(done, std::memory_order_release);
  }

  // One's own share, then what others have left of theirs.
  void work(size_t me, uint64_t job) {
    const size_t all = tickets.size();
    for (size_t i = 0; i < all; ++i) work_on(me + i < all ? me + i : me + i - all, job);
  }

  void help(size_t me) {
    const UsualFloats floats;  // a thread begins as the one that made it was
    const std::atomic<uint64_t>& ticket = tickets[me].word;
    uint64_t done = 0;  // the last job this helper saw
    while (!stop.load(std::memory_order_relaxed)) {
      int spins = 0;
      uint64_t job;
      while ((job = ticket.load(std::memory_order_acquire) >> 32) == done) {
        if (++spins < kSpins) {
          relax();
          continue;
        }
        std::unique_lock<std::mutex> lock(gate);
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        bell.wait(lock, [&] {
          return stop.load() || (ticket.load(std::memory_order_seq_cst) >> 32) != done;
        });
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
        if (stop.load()) return;
      }
      work(me, job);
      done = job;
    }
  }

  void run(int64_t n, int64_t g, RangeFn f, void* c) {
    const uint64_t job = last_job = (last_job + 1) & kChunkMask;
    const int64_t count = (n + g - 1) / g;
    // Orders the words after every successful taking, and so after what a taker read before it.
    for (Ticket& t : tickets) t.word.fetch_or(kChunkMask, std::memory_order_acq_rel);
    finished.store(0, std::memory_order_relaxed);
    fn.store(f, std::memory_order_relaxed);
    context.store(c, std::memory_order_relaxed);
    items.store(n, std::memory_order_relaxed);
    grain.store(g, std::memory_order_relaxed);
    chunks.store(count, std::memory_order_relaxed);
    for (size_t t = 0; t < tickets.size(); ++t)
      tickets[t].word.store(job << 32 | static_cast<uint64_t>(share(t, count)),
                            std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst) > 0) {
      std::lock_guard<std::mutex> lock(gate);
      bell.notify_all();
    }
    work(0, job);
    int spins = 0;
    while (finished.load(std::memory_order_acquire) != count) {
      relax();
      if (++spins > kSpins) std::this_thread::yield();
    }
  }

  void start(int n, const int* cpus, int num_cpus) {
    for (int i = 1; i < n; ++i) {
      helpers.emplace_back([this, i] { help(static_cast<size_t>(i)); });
#ifdef __linux__
      pthread_setname_np(helpers.back().native_handle(), "quire-kernel");
      if (num_cpus > 0) {
        cpu_set_t set;
        CPU_ZERO(&set);
        CPU_SET(cpus[i % num_cpus], &set);
        pthread_setaffinity_np(helpers.back().native_handle(), sizeof set, &set);
      }
#else
      (void)cpus, (void)num_cpus;
#endif
    }
  }

  void finish() {
    {
      std::lock_guard<std::mutex> lock(gate);
      stop.store(true);
      bell.notify_all();
    }
    for (auto& helper : helpers) helper.join();
    helpers.clear();
  }
};

// Never destroyed: helpers may still sleep in it when the process ends.
std::atomic<Pool*> pool{nullptr};
std::atomic<int> threads{1};

#ifdef __linux__
// A forked child has no helpers; the parent's pool must not be waited for.
void forget_in_child() {
  pool.store(nullptr);
  threads.store(1);
}
#endif

struct Scratch {
  void* memory[8] = {};
  size_t size[8] = {};
  ~Scratch() {
    for (void* m : memory) std::free(m);
  }
};

}  // namespace

int num_threads() { return threads.load(std::memory_order_relaxed); }

void set_num_threads(int n, const int* cpus, int num_cpus) {
#ifdef __linux__
  static const int registered = pthread_atfork(nullptr, nullptr, forget_in_child);
  (void)registered;
#endif
  Pool* old = pool.exchange(nullptr);
  if (old) {
    {
      std::lock_guard<std::mutex> wait(old->busy);
    }
    old->finish();  // the struct itself stays: a caller may have just read the pointer
  }
  threads.store(n);
  if (n < 2) return;
  auto* fresh = new Pool(n);
  fresh->start(n, cpus, num_cpus);
  pool.store(fresh);
}

void run_parallel(int64_t items, int64_t grain, RangeFn fn, void* context) {
  if (items <= 0) return;
  if (grain < 1) grain = 1;
  const UsualFloats floats;
  Pool* p = items > grain ? pool.load(std::memory_order_acquire) : nullptr;
  if (!p || !p->busy.try_lock()) {
    for (int64_t begin = 0; begin < items; begin += grain)
      fn(context, begin, begin + grain < items ? begin + grain : items);
    return;
  }
  p->run(items, grain, fn, context);
  p->busy.unlock();
}

int64_t exercise_pool(int64_t jobs) {
  constexpr int64_t kItems = 64;
  std::atomic<int> times[kItems];
  int64_t wrong = 0;
  for (int64_t job = 0; job < jobs; ++job) {
    for (auto& t : times) t.store(0, std::memory_order_relaxed);
    const int64_t items = 1 + job * 7 % kItems, grain = 1 + job % 3;
    parallel_for(items, grain, [&times](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) times[i].fetch_add(1, std::memory_order_relaxed);
    });
    bool right = true;
    for (int64_t i = 0; i < kItems; ++i)
      right &= times[i].load(std::memory_order_relaxed) == (i < items ? 1 : 0);
    wrong += !right;
  }
  return wrong;
}

void* scratch(int slot, size_t bytes) {
  thread_local Scratch mine;
  if (mine.size[slot] < bytes) {
    std::free(mine.memory[slot]);
    const size_t size = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    mine.memory[slot] = std::aligned_alloc(64, size);
    mine.size[slot] = mine.memory[slot] ? size : 0;
    if (!mine.memory[slot]) std::abort();
  }
  return mine.memory[slot];
}

}  // namespace quire
