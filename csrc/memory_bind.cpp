// Bindings of what Python's mmap cannot do to pages. Nothing happens where it is not known how.
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

#include "bind.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace quire {
namespace {

// Gives the memory-mapped pages within [address, address + size) back to the page cache.
void drop_pages(uintptr_t address, size_t size) {
#ifdef __linux__
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (address + page - 1) / page * page, end = (address + size) / page * page;
  if (begin < end) madvise(at<void>(begin), end - begin, MADV_DONTNEED);
#else
  (void)address, (void)size;
#endif
}

bool forbid_pages(uintptr_t address, size_t size) {
#ifdef __linux__
  return mprotect(at<void>(address), size, PROT_NONE) == 0;
#else
  (void)address, (void)size;
  return false;
#endif
}

}  // namespace

void bind_memory(nb::module_& m) {
  m.def("drop_pages", &drop_pages, "address"_a, "size"_a,
        "Give pages of a read-only file mapping back; they are read again if needed.");
  m.def("forbid_pages", &forbid_pages, "address"_a, "size"_a,
        "Whoever touches these whole pages crashes at once.");
}

}  // namespace quire
