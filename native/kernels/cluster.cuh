// Thread block clusters (sm_90 on). Earlier architectures run the same code
// with clusters of one block.
#pragma once

#include <cooperative_groups.h>

namespace gn_override {

// The blocks that work on one item together.
struct Cluster {
  int blocks;

  // Waits for all threads of all blocks, whose writes to shared memory are then
  // visible everywhere.
  __device__ void sync() const {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      return;
    }
#endif
    __syncthreads();
  }

  // No block exits, which would end its shared memory, while another reads
  // from it: say so after the last such read, and wait before the exit.
  __device__ void done_reading() const {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
#endif
  }

  __device__ void wait_for_readers() const {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    }
#endif
  }

  // What `own`, an address in this block's shared memory, is in another's.
  template <typename T>
  __device__ const T* in_block(T* own, int rank) const {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      return cooperative_groups::this_cluster().map_shared_rank(own, rank);
    }
#endif
    return own;
  }
};

} // namespace gn_override
