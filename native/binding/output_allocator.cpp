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
#include <sys/mman.h>
#include <unistd.h>
#endif

// Whether PyTorch's allocator fills what it hands out.
C10_DECLARE_bool(caffe2_cpu_allocator_do_zero_fill);
C10_DECLARE_bool(caffe2_cpu_allocator_do_junk_fill);

namespace gn_override::binding {

namespace {

// The most that glibc comes to hold back by itself.
constexpr size_t kLeastKept = 32 << 20;

// Of the machine's memory.
constexpr int64_t kShareKept = 16;

struct Block {
  c10::DataPtr memory; // of PyTorch's allocator
  size_t bytes;
};
using Blocks = std::list<std::unique_ptr<Block>>;

// Tells the system that it may take the pages, until they are written to.
// Returns whether it knows of that.
bool lend_to_system(const Block& block) {
#if defined(__linux__) && defined(MADV_FREE)
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto address = reinterpret_cast<uintptr_t>(block.memory.get());
  const uintptr_t begin = (address + page - 1) & ~(page - 1);
  const uintptr_t end = (address + block.bytes) & ~(page - 1);
  return madvise(reinterpret_cast<void*>(begin), end - begin, MADV_FREE) == 0;
#else
  (void)block;
  return false;
#endif
}

size_t most_kept() {
#if defined(__linux__)
  static const size_t bytes =
      sysconf(_SC_PHYS_PAGES) / kShareKept * sysconf(_SC_PAGESIZE);
  return bytes;
#else
  return 0;
#endif
}

// Blocks that are free, the latest last. Where another thread is at it, or was
// when this process was forked, nothing is found and nothing is kept.
class Kept {
 public:
  // Null if there is none of so many bytes.
  std::unique_ptr<Block> take(size_t bytes) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) {
      return nullptr;
    }
    for (auto it = blocks_.rbegin(); it != blocks_.rend(); ++it) {
      if ((*it)->bytes == bytes) {
        std::unique_ptr<Block> block = std::move(*it);
        blocks_.erase(std::next(it).base());
        bytes_ -= bytes;
        return block;
      }
    }
    return nullptr;
  }

  void put(std::unique_ptr<Block> block) {
    Blocks dropped; // outlives the lock
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock || block->bytes > most_kept()) {
      return;
    }
    bytes_ += block->bytes;
    blocks_.push_back(std::move(block));
    while (bytes_ > most_kept()) {
      bytes_ -= blocks_.front()->bytes;
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
};

Kept& kept() {
  static Kept& blocks = *new Kept; // outputs may outlive static objects
  return blocks;
}

bool keeps() {
  static const bool allowed = [] {
    const char* value = std::getenv("GN_OVERRIDE_KEEP_MEMORY");
    return value == nullptr || std::string_view(value) != "0";
  }();
  return allowed && is_on() && !c10::memoryProfilingEnabled() &&
      !FLAGS_caffe2_cpu_allocator_do_zero_fill &&
      !FLAGS_caffe2_cpu_allocator_do_junk_fill;
}

void free_block(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  if (keeps() && lend_to_system(*block)) {
    kept().put(std::move(block));
  }
}

class OutputAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::Allocator& torchs = *c10::GetCPUAllocator();
    if (bytes < kLeastKept || !keeps()) {
      return torchs.allocate(bytes);
    }
    std::unique_ptr<Block> block = kept().take(bytes);
    if (!block) {
      block = std::make_unique<Block>(torchs.allocate(bytes), bytes);
    }
    void* const memory = block->memory.get();
    const c10::Device device = block->memory.device();
    return {memory, block.release(), free_block, device};
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
  return static_cast<int64_t>(kept().bytes());
}

void drop_kept_memory() {
  kept().drop();
}

} // namespace gn_override::binding
