#include "cuda.h"

#include <setjmp.h>
#include <ucontext.h>

#include <deque>
#include <exception>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "emulator.h"

namespace emulator {

namespace {

constexpr unsigned kWarpSize = 32;
constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kGuardBytes = 256; // after shared memory
constexpr size_t kMostSharedBytes = 227 * 1024;
constexpr unsigned char kPoison = 0xff; // NaN in every type

using Bytes = std::vector<unsigned char>;

// A copy that is still to be made.
struct Copy {
  void* to;
  Bytes bytes;
};

struct Block;

struct Fiber {
  Block* block;
  uint3 thread;
  std::unique_ptr<unsigned char[]> stack;
  ucontext_t start;
  jmp_buf state;
  bool started = false;
  bool ended = false;
  std::vector<Copy> batch; // that is not ended
  std::deque<std::vector<Copy>> batches;
  int shuffles = 0;
  int phase = 0; // of the cluster's barrier, when it arrived there
};

// A barrier of `count` fibers.
struct Meeting {
  int count = 0;
  std::vector<Fiber*> waiting;
};

struct Warp {
  Meeting meeting;
  int size = 0;
  uint64_t words[2][kWarpSize]; // of alternate shuffles
};

// What wait_for_bytes() waits on.
struct Mailbox {
  bool expects = false; // its bytes have been told
  int64_t missing = 0; // bytes
  std::vector<Copy> sent;
  std::vector<Fiber*> waiting;
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  int threads = 0;
  int arrived = 0;
  int phase = 0;
  std::vector<Fiber*> waiting;
};

struct Block {
  Cluster* cluster;
  uint3 index = {};
  Bytes shared;
  Meeting meeting;
  std::vector<Warp> warps;
  std::unique_ptr<Mailbox> mailbox;
};

std::mt19937_64 generator;
Code current_code = Code::k90;
const std::function<void()>* kernel;
std::vector<std::unique_ptr<Fiber>> fibers;
std::vector<Fiber*> ready;
Meeting grid;
// What is in the stream before the kernel that runs, and the threads that wait
// for it.
std::vector<std::function<void()>> stream;
std::vector<Fiber*> held;
// Threads of a block, or of one warp of it, that run when so many draws find no
// others; a block of null: all take turns.
struct Slow {
  const Block* block = nullptr;
  const Warp* warp = nullptr; // null: all of them
  bool has(const Fiber& fiber) const;
};
Slow slow;
constexpr int kDraws = 16;
Fiber* current;
jmp_buf scheduler;
std::string failure; // of a fiber

[[noreturn]] void resume_scheduler() {
  _longjmp(scheduler, 1);
}

// Ends the launch; what is on the fibers' stacks is not unwound.
[[noreturn]] void fail(const char* why) {
  failure = why;
  resume_scheduler();
}

void yield() {
  if (_setjmp(current->state) == 0) {
    resume_scheduler();
  }
}

void release(std::vector<Fiber*>& waiting) {
  ready.insert(ready.end(), waiting.begin(), waiting.end());
  waiting.clear();
}

void release_if_complete(Meeting& meeting) {
  if (static_cast<int>(meeting.waiting.size()) == meeting.count) {
    release(meeting.waiting);
  }
}

void meet(Meeting& meeting) {
  meeting.waiting.push_back(current);
  release_if_complete(meeting);
  yield();
}

void leave(Meeting& meeting) {
  --meeting.count;
  release_if_complete(meeting);
}

Warp& warp_of(const Fiber& fiber) {
  return fiber.block->warps[fiber.thread.x / kWarpSize];
}

Warp& own_warp() {
  return warp_of(*current);
}

bool Slow::has(const Fiber& fiber) const {
  return fiber.block == block && (warp == nullptr || &warp_of(fiber) == warp);
}

void make(std::vector<Copy>& copies) {
  for (const Copy& copy : copies) {
    memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
  }
  copies.clear();
}

void run_thread() {
  (*kernel)();
  if (!own_warp().meeting.waiting.empty()) {
    fail("a thread ends while others of its warp shuffle");
  }
  current->ended = true;
  leave(own_warp().meeting);
  leave(current->block->meeting);
  leave(grid);
  resume_scheduler();
}

void start_thread(Block& block, unsigned x) {
  auto fiber = std::make_unique<Fiber>();
  fiber->block = &block;
  fiber->thread = {x, 0, 0};
  fiber->stack = std::make_unique_for_overwrite<unsigned char[]>(kStackBytes);
  getcontext(&fiber->start);
  fiber->start.uc_stack.ss_sp = fiber->stack.get();
  fiber->start.uc_stack.ss_size = kStackBytes;
  makecontext(&fiber->start, run_thread, 0);
  ready.push_back(fiber.get());
  fibers.push_back(std::move(fiber));
}

// Runs what is in the stream before the kernel that runs, which goes on then.
void run_previous() {
  const auto* const own_kernel = kernel;
  const dim3 own_grid = gridDim;
  const dim3 own_block = blockDim;
  auto own_fibers = std::exchange(fibers, {});
  auto own_meeting = std::exchange(grid, {});
  auto waiting = std::exchange(held, {});
  const Slow own_slow = slow;
  finish();
  slow = own_slow;
  kernel = own_kernel;
  gridDim = own_grid;
  blockDim = own_block;
  fibers = std::move(own_fibers);
  grid = std::move(own_meeting);
  release(waiting);
}

void run_threads() {
  failure.clear();
  while (!ready.empty() || !held.empty()) {
    if (ready.empty()) {
      run_previous();
    }
    const auto draw = [] {
      std::swap(ready[generator() % ready.size()], ready.back());
      return slow.has(*ready.back());
    };
    for (int draws = 1; draw() && draws < kDraws;) {
      ++draws;
    }
    current = ready.back();
    ready.pop_back();
    threadIdx = current->thread;
    blockIdx = current->block->index;
    if (_setjmp(scheduler) == 0) {
      if (current->started) {
        _longjmp(current->state, 1);
      }
      current->started = true;
      setcontext(&current->start);
    }
    if (!failure.empty()) {
      throw std::runtime_error(failure);
    }
  }
  for (const auto& fiber : fibers) {
    if (!fiber->ended) {
      throw std::runtime_error("a thread waits for what never comes");
    }
  }
}

// Runs clusters at once.
void run_clusters(
    const std::vector<unsigned>& clusters,
    unsigned blocks_of_cluster,
    size_t shared_bytes) {
  fibers.clear();
  ready.clear();
  std::vector<std::unique_ptr<Cluster>> running;
  const unsigned threads = blockDim.x;
  for (const unsigned index : clusters) {
    auto cluster = std::make_unique<Cluster>();
    cluster->threads = static_cast<int>(blocks_of_cluster * threads);
    for (unsigned i = 0; i < blocks_of_cluster; ++i) {
      auto block = std::make_unique<Block>();
      block->cluster = cluster.get();
      block->index = {index * blocks_of_cluster + i, 0, 0};
      block->shared.assign(shared_bytes + kGuardBytes, kPoison);
      block->meeting.count = static_cast<int>(threads);
      block->warps.resize((threads + kWarpSize - 1) / kWarpSize);
      for (unsigned x = 0; x < threads; ++x) {
        ++block->warps[x / kWarpSize].size;
        ++block->warps[x / kWarpSize].meeting.count;
        start_thread(*block, x);
      }
      cluster->blocks.push_back(std::move(block));
    }
    running.push_back(std::move(cluster));
  }
  // Of several blocks or warps, one is slow in half of the launches.
  slow = {};
  if (fibers.size() > kWarpSize && generator() % 2) {
    const Fiber& one = *fibers[generator() % fibers.size()];
    const bool is_block = fibers.size() > threads && generator() % 2;
    slow = {one.block, is_block ? nullptr : &warp_of(one)};
  }
  grid.count = static_cast<int>(fibers.size());
  grid.waiting.clear();
  run_threads();
  for (const auto& cluster : running) {
    for (const auto& block : cluster->blocks) {
      const Bytes& shared = block->shared;
      if (!std::all_of(shared.end() - kGuardBytes, shared.end(), [](auto byte) {
            return byte == kPoison;
          })) {
        throw std::runtime_error("a store beyond the block's shared memory");
      }
    }
  }
}

// Likewise, in a thread of the CPU of their own.
void run_clusters_apart(
    const std::vector<unsigned>& clusters,
    unsigned blocks_of_cluster,
    size_t shared_bytes) {
  std::exception_ptr error;
  std::thread([&] {
    try {
      run_clusters(clusters, blocks_of_cluster, shared_bytes);
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) {
    std::rethrow_exception(error);
  }
}

} // namespace

void seed(uint64_t value) {
  generator.seed(value);
  stream.clear(); // of a call that failed
  held.clear();
}

void later(std::function<void()> work) {
  stream.push_back(std::move(work));
}

void finish() {
  while (!stream.empty()) {
    const std::function<void()> last = std::move(stream.back());
    stream.pop_back();
    last(); // which runs those before it
  }
}

void use(Code code) {
  current_code = code;
}

cudaError_t launch(
    const cudaLaunchConfig_t& config,
    const std::function<void()>& of_thread) {
  unsigned of_cluster = 1;
  bool cooperative = false;
  bool programmatic = false;
  for (unsigned i = 0; i < config.numAttrs; ++i) {
    const cudaLaunchAttribute& attribute = config.attrs[i];
    if (attribute.id == cudaLaunchAttributeClusterDimension) {
      of_cluster = attribute.val.clusterDim.x;
    } else if (attribute.id == cudaLaunchAttributeCooperative) {
      cooperative = attribute.val.cooperative != 0;
    } else if (
        attribute.id == cudaLaunchAttributeProgrammaticStreamSerialization) {
      programmatic = attribute.val.programmaticStreamSerializationAllowed != 0;
    }
  }
  if (current_code == Code::k80 && (of_cluster > 1 || programmatic)) {
    throw std::runtime_error("the kernel's code does not know such a launch");
  }
  if (current_code == Code::kSmallClusters && of_cluster > 8) {
    return cudaErrorInvalidClusterSize;
  }
  if (config.gridDim.x == 0 || config.gridDim.x % of_cluster != 0 ||
      config.blockDim.x == 0 || config.blockDim.x > 1024 ||
      config.dynamicSmemBytes > kMostSharedBytes) {
    return cudaErrorInvalidConfiguration;
  }
  later([=,
         blocks = config.gridDim,
         threads = config.blockDim,
         shared_bytes = config.dynamicSmemBytes] {
    if (!programmatic) {
      finish(); // what is before it
    }
    kernel = &of_thread;
    gridDim = blocks;
    blockDim = threads;
    std::vector<unsigned> clusters(blocks.x / of_cluster);
    for (unsigned i = 0; i < clusters.size(); ++i) {
      clusters[i] = i;
    }
    std::shuffle(clusters.begin(), clusters.end(), generator);
    if (cooperative) {
      run_clusters_apart(clusters, of_cluster, shared_bytes);
    } else {
      for (const unsigned cluster : clusters) {
        run_clusters_apart({cluster}, of_cluster, shared_bytes);
      }
    }
  });
  return cudaSuccess;
}

unsigned char* dynamic_shared_memory() {
  return current->block->shared.data();
}

void copy_later(void* to, const void* from, size_t bytes) {
  const auto* const first = static_cast<const unsigned char*>(from);
  if (reinterpret_cast<uintptr_t>(to) % bytes != 0 ||
      reinterpret_cast<uintptr_t>(from) % bytes != 0) {
    fail("a copy to shared memory is not aligned");
  }
  current->batch.push_back({to, Bytes(first, first + bytes)});
}

static std::vector<Range> prefetched_ranges;

void prefetch(const void* first, const void* last) {
  prefetched_ranges.push_back(
      {static_cast<const unsigned char*>(first),
       static_cast<const unsigned char*>(last)});
}

const std::vector<Range>& prefetched() {
  return prefetched_ranges;
}

void clear_prefetched() {
  prefetched_ranges.clear();
}

void end_batch() {
  current->batches.push_back(std::move(current->batch));
  current->batch.clear();
}

void wait_for_copies(int batches) {
  while (static_cast<int>(current->batches.size()) > batches) {
    make(current->batches.front());
    current->batches.pop_front();
  }
}

void wait_for_block() {
  meet(current->block->meeting);
}

void wait_for_grid() {
  meet(grid);
}

void wait_for_previous_kernel() {
  if (!stream.empty()) {
    held.push_back(current);
    yield();
  }
}

uint64_t shuffle(uint64_t word, int from) {
  Warp& warp = own_warp();
  if (warp.meeting.count != warp.size) {
    fail("a shuffle in a warp of which threads have ended");
  }
  const unsigned lane = current->thread.x % kWarpSize;
  auto& words = warp.words[current->shuffles++ % 2];
  words[lane] = word;
  meet(warp.meeting);
  return words[from];
}

void arrive_at_cluster() {
  Cluster& cluster = *current->block->cluster;
  current->phase = cluster.phase;
  if (++cluster.arrived == cluster.threads) {
    cluster.arrived = 0;
    ++cluster.phase;
    release(cluster.waiting);
  }
}

void wait_for_cluster() {
  Cluster& cluster = *current->block->cluster;
  if (cluster.phase == current->phase) {
    cluster.waiting.push_back(current);
    yield();
  }
}

void begin_counting(uint64_t* barrier) {
  auto& mailbox = current->block->mailbox;
  if (mailbox != nullptr) {
    fail("a second barrier of a block");
  }
  mailbox = std::make_unique<Mailbox>();
  *barrier = reinterpret_cast<uint64_t>(mailbox.get());
}

static void deliver_all(Mailbox& mailbox) {
  if (mailbox.expects && mailbox.missing < 0) {
    fail("more stores than a barrier expects");
  }
  if (mailbox.expects && mailbox.missing == 0) {
    make(mailbox.sent);
    release(mailbox.waiting);
  }
}

void expect_bytes(uint64_t*, int bytes) {
  Mailbox& mailbox = *current->block->mailbox;
  if (mailbox.expects) {
    fail("a barrier that is told twice what to expect");
  }
  mailbox.expects = true;
  mailbox.missing += bytes;
  deliver_all(mailbox);
}

void send(
    const void* value,
    size_t bytes,
    void* slot,
    uint64_t* barrier,
    int block) {
  Block& own = *current->block;
  Block& other = *own.cluster->blocks.at(block);
  if (other.meeting.count == 0) {
    fail("a store to a block that has ended");
  }
  const auto there = [&](void* here) {
    return other.shared.data() +
        (static_cast<unsigned char*>(here) - own.shared.data());
  };
  Mailbox* const mailbox = other.mailbox.get();
  if (mailbox == nullptr ||
      *reinterpret_cast<uint64_t*>(there(barrier)) !=
          reinterpret_cast<uint64_t>(mailbox)) {
    fail("a store that counts at no barrier");
  }
  const auto* const first = static_cast<const unsigned char*>(value);
  mailbox->sent.push_back({there(slot), Bytes(first, first + bytes)});
  mailbox->missing -= static_cast<int64_t>(bytes);
  deliver_all(*mailbox);
}

void wait_for_bytes(uint64_t*) {
  Mailbox& mailbox = *current->block->mailbox;
  if (!mailbox.expects || mailbox.missing > 0) {
    mailbox.waiting.push_back(current);
    yield();
  }
}

} // namespace emulator

// -- the runtime library ---------------------------------------------------

extern "C" {

static constexpr int kMultiprocessors = 6;

cudaError_t cudaGetDevice(int* device) {
  *device = static_cast<int>(emulator::current_code);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      return cudaSuccess;
    case cudaDevAttrL2CacheSize:
      *value = 1 << 20;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = emulator::kMostSharedBytes;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      return cudaSuccess;
    case cudaDevAttrCooperativeLaunch:
      *value = 1;
      return cudaSuccess;
    default:
      return cudaErrorInvalidValue;
  }
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->ptxVersion =
      emulator::current_code == emulator::Code::k80 ? 80 : 90;
  return cudaSuccess;
}

cudaError_t
cudaFuncSetAttribute(const void*, cudaFuncAttribute attribute, int) {
  return attribute == cudaFuncAttributeNonPortableClusterSizeAllowed &&
          emulator::current_code == emulator::Code::kSmallClusters
      ? cudaErrorNotSupported
      : cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveClusters(
    int* clusters,
    const void*,
    const cudaLaunchConfig_t* config) {
  const unsigned size = config->attrs[0].val.clusterDim.x;
  if (size > 8 && emulator::current_code == emulator::Code::kSmallClusters) {
    return cudaErrorInvalidClusterSize;
  }
  *clusters = std::max(1, kMultiprocessors / static_cast<int>(size));
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(
    const char*,
    void**,
    unsigned,
    unsigned long long,
    cudaDriverEntryPointQueryResult*) {
  return cudaErrorNotSupported; // there is no driver
}

cudaError_t cudaGetLastError() {
  return cudaSuccess;
}

} // extern "C"
