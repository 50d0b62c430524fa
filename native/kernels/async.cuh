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

// Waits until at most `batches` of this thread's latest batches are under way.
// The instruction takes a constant: the next lower one here is right too.
__device__ __forceinline__ void wait_for_copies(int batches) {
  if (batches >= 8) {
    __pipeline_wait_prior(8);
  } else if (batches >= 4) {
    __pipeline_wait_prior(4);
  } else if (batches >= 2) {
    __pipeline_wait_prior(2);
  } else if (batches == 1) {
    __pipeline_wait_prior(1);
  } else {
    __pipeline_wait_prior(0);
  }
}

} // namespace gn_override
