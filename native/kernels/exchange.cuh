// How the blocks that share an item tell each other their results. An exchange
// has `slots` for the values of all of them; on all threads of a block, in this
// order:
//   begin()
//   ready(values that the block will get)
//   put(slot, value, lane, lanes), by runs of `lanes` threads: to all of them
//   wait(), after which the slots can be read
#pragma once

#include "native/kernels/hardware.cuh"

namespace gn_override {

// Between the blocks of a cluster (sm_90 on; a cluster of one block anywhere):
// every block stores each of its values in every block's shared memory, and
// waits until all that it is owed has arrived. Nobody reads another's memory,
// so a block may exit as soon as it has what it needs.
template <typename Value>
struct ClusterExchange {
  int cluster; // its blocks
  int first; // block of those that share the item
  int blocks; // that do
  Value* slots; // in the same place of each block
  uint64_t* barrier; // counts the bytes that arrive; likewise

  __device__ void begin() const {
    if (kHasClusters && cluster > 1) {
      if (threadIdx.x == 0) {
        begin_counting(barrier);
      }
      arrive_at_cluster();
    }
  }

  __device__ void ready(int values) const {
    if (kHasClusters && cluster > 1) {
      wait_for_cluster();
      if (threadIdx.x == 0) {
        expect_bytes(barrier, values * static_cast<int>(sizeof(Value)));
      }
    }
  }

  __device__ void put(int slot, const Value& value, int lane, int lanes) const {
    if (kHasClusters && cluster > 1) {
      for (int block = lane; block < blocks; block += lanes) {
        send(value, slots + slot, barrier, first + block);
      }
      return;
    }
    if (lane == 0) {
      slots[slot] = value;
    }
  }

  // To one block of the cluster, by one thread.
  __device__ void give(int block, int slot, const Value& value) const {
    if (kHasClusters && cluster > 1) {
      send(value, slots + slot, barrier, block);
    } else {
      slots[slot] = value;
    }
  }

  __device__ void wait() const {
    if (kHasClusters && cluster > 1) {
      wait_for_bytes(barrier);
      return;
    }
    __syncthreads();
  }
};

// Between all blocks of a cooperative launch, through global memory.
template <typename Value>
struct ChipExchange {
  Value* slots;

  __device__ void begin() const {}
  __device__ void ready(int) const {}

  __device__ void put(int slot, const Value& value, int lane, int) const {
    if (lane == 0) {
      slots[slot] = value;
    }
  }

  __device__ void wait() const {
    wait_for_grid();
  }
};

} // namespace gn_override
