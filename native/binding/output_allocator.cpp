#include "native/binding/output_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Flags.h>

#include <cstdlib>
#include <list>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "native/binding/state.h"

#if defined(__linux__)
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

// Whether PyTorch's allocator fills what it hands out.
C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);

namespace gn_override::binding {

namespace {

// The most that glibc comes to hold back by itself.
constexpr size_t kLeastKept = 32 << 20;

// -- the system --------------------------------------------------------------

#if defined(__linux__) && defined(MADV_FREE)

// A sixteenth of the machine's memory.
size_t most_kept() {
  static const size_t bytes =
      sysconf(_SC_PHYS_PAGES) / 16 * sysconf(_SC_PAGESIZE);
  return bytes;
}

// Tells the system that it may take the pages, until they are written to.
bool lend_to_system(void* memory, size_t bytes) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t begin = (address + page - 1) & ~(page - 1);
  const uintptr_t end = (address + bytes) & ~(page - 1);
  return madvise(reinterpret_cast<void*>(begin), end - begin, MADV_FREE) == 0;
}

// Whether addresses run short before pages do, so that what is kept may be
// missed although the system could have its pages.
bool counts_addresses() {
  static const bool never_overcommits = [] {
    char mode = '0';
    const int file = open("/proc/sys/vm/overcommit_memory", O_RDONLY);
    const bool known = file >= 0 && read(file, &mode, 1) == 1;
    if (file >= 0) {
      close(file);
    }
    return known && mode == '2';
  }();
  if (never_overcommits) {
    return true;
  }
  for (const auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
    rlimit limit;
    if (getrlimit(resource, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) {
      return true;
    }
  }
  return false;
}

void at_fork(void (*before)(), void (*after)()) {
  pthread_atfork(before, after, after);
}

#else

size_t most_kept() {
  return 0;
}
bool lend_to_system(void*, size_t) {
  return false;
}
bool counts_addresses() {
  return true;
}
void at_fork(void (*)(), void (*)()) {}

#endif

bool keeps() {
  static const bool allowed = [] {
    const char* value = std::getenv("GN_OVERRIDE_KEEP_MEMORY");
    return value == nullptr || std::string_view(value) != "0";
  }();
  return allowed && is_on() && !c10::memoryProfilingEnabled() &&
      !FLAGS_caffe2_cpu_allocator_do_zero_fill &&
      !FLAGS_caffe2_cpu_allocator_do_junk_fill && !counts_addresses();
}

// -- blocks ------------------------------------------------------------------

struct Block {
  c10::DataPtr memory; // of PyTorch's allocator
  size_t bytes;
  int64_t forks; // of this process, before it was allocated
};

// One that is in use is alone in a list, the context of its output: to keep it
// takes no allocation, which might fail.
using Blocks = std::list<Block>;

// Blocks that are free, the latest last. Those that are dropped are freed
// outside the lock.
class Kept {
 public:
  Kept() {
    at_fork(
        [] {
          kept().mutex_.lock();
          kept().blocks_.clear();
          kept().bytes_ = 0;
          ++kept().forks_;
        },
        [] { kept().mutex_.unlock(); });
  }

  static Kept& kept() {
    static Kept& blocks = *new Kept; // outputs may outlive static objects
    return blocks;
  }

  // One of so many bytes, or none; and how often this process has forked.
  std::pair<Blocks, int64_t> take(size_t bytes) {
    Blocks taken;
    const std::lock_guard lock(mutex_);
    for (auto it = blocks_.rbegin(); it != blocks_.rend(); ++it) {
      if (it->bytes == bytes) {
        taken.splice(taken.end(), blocks_, std::next(it).base());
        bytes_ -= bytes;
        break;
      }
    }
    return {std::move(taken), forks_};
  }

  // Takes over the block of a list, if it may be kept.
  void put(Blocks& block) {
    Blocks dropped;
    const std::lock_guard lock(mutex_);
    // After a switch to off comes a drop().
    if (!is_on() || block.front().forks != forks_) {
      return;
    }
    bytes_ += block.front().bytes;
    blocks_.splice(blocks_.end(), block);
    while (bytes_ > most_kept()) {
      bytes_ -= blocks_.front().bytes;
      dropped.splice(dropped.end(), blocks_, blocks_.begin());
    }
  }

  void drop() {
    Blocks dropped;
    const std::lock_guard lock(mutex_);
    dropped.swap(blocks_);
    bytes_ = 0;
  }

  size_t bytes() {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  std::mutex mutex_;
  Blocks blocks_;
  size_t bytes_ = 0;
  int64_t forks_ = 0;
};

void free_block(void* context) {
  const std::unique_ptr<Blocks> block(static_cast<Blocks*>(context));
  const size_t bytes = block->front().bytes;
  if (bytes <= most_kept() && keeps() &&
      lend_to_system(block->front().memory.get(), bytes)) {
    Kept::kept().put(*block);
  }
}

class OutputAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::Allocator& torchs = *c10::GetCPUAllocator();
    if (bytes < kLeastKept || !keeps()) {
      return torchs.allocate(bytes);
    }
    auto [blocks, forks] = Kept::kept().take(bytes);
    if (blocks.empty()) {
      blocks.push_back({torchs.allocate(bytes), bytes, forks});
    }
    void* const memory = blocks.front().memory.get();
    const c10::Device device = blocks.front().memory.device();
    return {memory, new Blocks(std::move(blocks)), free_block, device};
  }

  // As PyTorch's allocator's are: nothing hangs on one but its memory.
  bool is_simple_data_ptr(const c10::DataPtr& memory) const override {
    return memory.get_deleter() == free_block ||
        c10::Allocator::is_simple_data_ptr(memory);
  }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

} // namespace

c10::Allocator* output_allocator() {
  static OutputAllocator& allocator = *new OutputAllocator;
  return &allocator;
}

int64_t kept_bytes() {
  return static_cast<int64_t>(Kept::kept().bytes());
}

void drop_kept_memory() {
  Kept::kept().drop();
}

} // namespace gn_override::binding
