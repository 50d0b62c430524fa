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
