// Copies from global to shared memory that do not pass through registers.
#pragma once

#include <cuda_pipeline_primitives.h>

#include "native/kernels/vector.cuh"

namespace gn_override {

// Starts copying one vector; it is there after wait_for_copies().
template <typename T, int kVector>
__device__ __forceinline__ void copy_async(
    Vector<T, kVector>* shared,
    const T* global) {
  static_assert(sizeof(*shared) >= 4, "cp.async copies 4, 8 or 16 bytes");
  __pipeline_memcpy_async(shared, global, sizeof(*shared));
}

// What the L2 cache shall do with a line: drop it before others, or after them.
enum class Eviction { kFirst, kLast };

__device__ __forceinline__ uint64_t cache_policy(Eviction eviction) {
  uint64_t policy = 0;
#if __CUDA_ARCH__ >= 800
  if (eviction == Eviction::kFirst) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_last.b64 %0;" : "=l"(policy));
  }
#endif
  return policy;
}

// As above, with a cache policy.
template <typename T, int kVector>
__device__ __forceinline__ void
copy_async(Vector<T, kVector>* shared, const T* global, uint64_t policy) {
#if __CUDA_ARCH__ >= 800
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  if constexpr (sizeof(*shared) == 16) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;"
                 :
                 : "r"(to), "l"(global), "l"(policy)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global.L2::cache_hint [%0], [%1], %3, %2;"
                 :
                 : "r"(to), "l"(global), "l"(policy), "n"(sizeof(*shared))
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

} // namespace gn_override
