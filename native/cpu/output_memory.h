// How an output is written, by its size and by what its memory is: pages of the
// system that are still to come, or memory that was written before.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace gn_override::cpu {

// Outputs from these sizes on are written past the caches, on two cores with 32
// MB of shared cache. Y would not stay in the cache: 26 MB of float took 0 to
// 40% less time, by the load on the memory; 10 and 13 MB, with the read of Y
// that follows, 30% more. Beside dX there are X and dY: with 10 and 13 MB of
// each, the backward took 20% less time, and forward, backward and a read of dX
// together 6% less; with 6 MB, a little more.
constexpr int64_t kLeastStreamedY = 24 << 20;
constexpr int64_t kLeastStreamedDX = 8 << 20;

// Outputs from this size on are worth asking the system; it takes a microsecond
// or two.
constexpr int64_t kLeastAsked = 4 << 20;

// Whether the pages in an output's middle are still to come. A large output is
// often memory that the process has just got: from 32 MB on, where glibc maps
// each anew, unless it is one that was kept, and below whenever the heap was
// trimmed.
inline bool is_new(void* output, int64_t bytes) {
#if defined(__linux__)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto middle = reinterpret_cast<uintptr_t>(output) + bytes / 2;
  unsigned char resident = 0;
  const int failed =
      mincore(reinterpret_cast<void*>(middle & ~(page - 1)), page, &resident);
  return failed == 0 && (resident & 1) == 0;
#else
  (void)output;
  (void)bytes;
  return false;
#endif
}

// The first writes to new pages can cost more than the whole kernel: for 102 MB
// 42 ms of processor time in pages of 4 KB, and 6 ms in huge ones.
inline void advise_huge_pages(void* output, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 2 << 20;
  const auto address = reinterpret_cast<uintptr_t>(output);
  const uintptr_t begin = (address + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (address + bytes) & ~(kHugePage - 1);
  // Only advice: where the kernel does not take it, nothing changes.
  (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)output;
  (void)bytes;
#endif
}

// To be called before an output is written. Returns whether to write it past
// the caches; not where it is new: the system zeroes pages in the caches, and
// must then bring them to the memory first (34 MB of float took 15% less time
// without, and 25% less in pages of 4 KB).
inline bool
prepare_output(void* output, int64_t bytes, int64_t least_streamed) {
  if (bytes >= kLeastAsked && is_new(output, bytes)) {
    advise_huge_pages(output, bytes);
    return false;
  }
  return bytes >= least_streamed;
}

} // namespace gn_override::cpu
