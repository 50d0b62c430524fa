// What the kernels ask of a GPU beyond portable CUDA C++: all PTX is in this
// file. tests/emulator has the same names for a CPU.
#pragma once

#include <cooperative_groups.h>
#include <cuda_pipeline_primitives.h>

#include <cstdint>
#include <cstring>

namespace gn_override {

// The block's dynamic shared memory.
__device__ __forceinline__ unsigned char* dynamic_shared_memory() {
  extern __shared__ __align__(16) unsigned char memory[];
  return memory;
}

// 2^x, to within 2^-22 of it.
__device__ __forceinline__ float approximate_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / x, to within a unit in the last place; what is less than 2^-126, x or the
// result, counts as 0.
__device__ __forceinline__ float approximate_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// -- copies from global to shared memory that do not pass through registers ---

// Starts copying one vector of 4, 8 or 16 bytes, which is there after
// wait_for_copies().
template <typename Vector, typename T>
__device__ __forceinline__ void copy_async(Vector* shared, const T* global) {
  static_assert(sizeof(Vector) >= 4, "cp.async copies 4, 8 or 16 bytes");
  __pipeline_memcpy_async(shared, global, sizeof(Vector));
}

// When the L2 cache shall drop a line: before others, or in turn. There is no
// kLast: such lines outlive the kernel, and reading them otherwise does not
// change that.
enum class Eviction { kFirst, kNormal };

__device__ __forceinline__ uint64_t cache_policy(Eviction eviction) {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  if (eviction == Eviction::kFirst) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0;" : "=l"(policy));
  }
#endif
  return policy;
}

// As above, with a cache policy, where Device::l2_policies.
template <typename Vector, typename T>
__device__ __forceinline__ void
copy_async(Vector* shared, const T* global, uint64_t policy) {
#if __CUDA_ARCH__ >= 800 && __CUDA_ARCH__ < 1000
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (sizeof(Vector) == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(global), "l"(policy)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %3, %2;"
                 :
                 : "r"(to), "l"(global), "l"(policy), "n"(sizeof(Vector))
                 : "memory");
  }
#else
  copy_async(shared, global);
#endif
}

// Ends a batch of copies of this thread.
__device__ __forceinline__ void end_batch() {
  __pipeline_commit();
}

// Waits until at most kBatches of this thread's latest batches are under way.
template <int kBatches>
__device__ __forceinline__ void wait_for_copies() {
  __pipeline_wait_prior(kBatches);
}

// Starts bringing what lies in [first, last) to the L2 cache, but for ends that
// are not 16 bytes of it. From sm_90 on.
__device__ __forceinline__ void prefetch(const void* first, const void* last) {
#if __CUDA_ARCH__ >= 900
  constexpr size_t kUnit = 16;
  const size_t begin = (__cvta_generic_to_global(first) + kUnit - 1) & -kUnit;
  const size_t end = __cvta_generic_to_global(last) & -kUnit;
  if (begin < end) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 :
                 : "l"(begin), "r"(static_cast<unsigned>(end - begin))
                 : "memory");
  }
#endif
}

// -- clusters ----------------------------------------------------------------

#if __CUDA_ARCH__ >= 900
constexpr bool kHasClusters = true;
#else
constexpr bool kHasClusters = false; // a block is a cluster by itself
#endif

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ unsigned address_in_shared(const void* shared) {
  return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// What an address in this block's shared memory is in another's.
__device__ __forceinline__ unsigned address_in_block(
    const void* shared,
    int block) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(address_in_shared(shared)), "r"(block));
  return address;
}

#endif

// A barrier of a cluster in two halves, which order no memory.
__device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Makes 8 bytes of shared memory a counter of the bytes that are sent to it.
// For one thread, before arrive_at_cluster().
__device__ __forceinline__ void begin_counting(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;"
               :
               : "r"(address_in_shared(barrier))
               : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// How many bytes wait_for_bytes() waits for. For one thread, after
// wait_for_cluster(): the count may already have begun.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(address_in_shared(barrier)), "r"(bytes)
               : "memory");
#endif
}

// Stores value in a block of the cluster, at *slot as that block sees it, where
// it counts as sent to *barrier.
template <typename Value>
__device__ __forceinline__ void
send(const Value& value, Value* slot, uint64_t* barrier, int block) {
  static_assert(sizeof(Value) % 8 == 0);
#if __CUDA_ARCH__ >= 900
  const unsigned to = address_in_block(slot, block);
  const unsigned counted = address_in_block(barrier, block);
  uint64_t words[sizeof(Value) / 8];
  memcpy(words, &value, sizeof(Value));
#pragma unroll
  for (unsigned i = 0; i < sizeof(Value) / 8; ++i) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 "
                 "[%0], %1, [%2];"
                 :
                 : "r"(to + 8 * i), "l"(words[i]), "r"(counted)
                 : "memory");
  }
#endif
}

// Returns when all has arrived; what was sent can be read then.
__device__ __forceinline__ void wait_for_bytes(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  unsigned done = 0;
  while (!done) {
    asm volatile("{\n"
                 ".reg .pred p;\n"
                 "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 "
                 "p, [%1], 0;\n"
                 "selp.u32 %0, 1, 0, p;\n"
                 "}\n"
                 : "=r"(done)
                 : "r"(address_in_shared(barrier))
                 : "memory");
  }
#endif
}

// A barrier of all blocks of a cooperative launch.
__device__ __forceinline__ void wait_for_grid() {
  cooperative_groups::this_grid().sync();
}

// -- overlap of kernels ------------------------------------------------------
//
// From sm_90 on, the blocks of a kernel may take their places while what the
// kernel before it in the stream leaves behind is still being written, whoever
// launched that (programmatic dependent launch).

// Returns when the kernel before has ended and its results are visible: nothing
// may touch global memory earlier. So no kernel says that what it reads is
// constant (const __restrict__, __ldg): compilers move such loads ahead of it.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel of the same call may start, which waits for this
// one to end. Others come when this one has left all multiprocessors: blocks
// that took what is free before that are spread unevenly, which may cost more
// than an early start gains. Two passes gain by it forward; backward they would
// lose if the kernels of dX, dgamma and dbeta came early.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

} // namespace gn_override
