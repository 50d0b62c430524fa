// How the blocks that share an item tell each other their results. An exchange
// has `slots` for the values of all of them; on all threads of a block, in this
// order:
//   begin(values that the block will get)
//   ready()
//   put(slot, value, lane, lanes), by runs of `lanes` threads
//   wait(), after which the slots can be read
#pragma once

#include <cooperative_groups.h>

#include <cstdint>
#include <cstring>

namespace gn_override {

// Between the blocks of a cluster (sm_90 on; a cluster of one block anywhere):
// every block stores each of its values in every block's shared memory, and
// waits until all that it is owed has arrived. Nobody reads another's memory,
// so a block may exit as soon as it has what it needs.
template <typename Value>
struct ClusterExchange {
  static_assert(sizeof(Value) % 8 == 0);

  int blocks; // of the cluster
  Value* slots; // in the same place of each block
  uint64_t* barrier; // counts the bytes that arrive; likewise

  __device__ void begin(int values) const {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;"
                     :
                     : "r"(local(barrier))
                     : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                     :
                     : "r"(local(barrier)),
                       "r"(values * static_cast<int>(sizeof(Value)))
                     : "memory");
      }
      asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
    }
#endif
  }

  __device__ void ready() const {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
    }
#endif
  }

  __device__ void put(int slot, const Value& value, int lane, int lanes) const {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      for (int block = lane; block < blocks; block += lanes) {
        const unsigned to = in_block(slots + slot, block);
        const unsigned arrived = in_block(barrier, block);
        uint64_t words[sizeof(Value) / 8];
        memcpy(words, &value, sizeof(Value));
#pragma unroll
        for (unsigned i = 0; i < sizeof(Value) / 8; ++i) {
          asm volatile(
              "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 "
              "[%0], %1, [%2];"
              :
              : "r"(to + 8 * i), "l"(words[i]), "r"(arrived)
              : "memory");
        }
      }
      return;
    }
#endif
    if (lane == 0) {
      slots[slot] = value;
    }
  }

  __device__ void wait() const {
#if __CUDA_ARCH__ >= 900
    if (blocks > 1) {
      unsigned done = 0;
      while (!done) {
        asm volatile("{\n"
                     ".reg .pred p;\n"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 "
                     "p, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, p;\n"
                     "}\n"
                     : "=r"(done)
                     : "r"(local(barrier))
                     : "memory");
      }
      return;
    }
#endif
    __syncthreads();
  }

 private:
  static __device__ unsigned local(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
  }

  // What an address in this block's shared memory is in another's.
  static __device__ unsigned in_block(const void* shared, int block) {
    unsigned address = 0;
#if __CUDA_ARCH__ >= 900
    asm("mapa.shared::cluster.u32 %0, %1, %2;"
        : "=r"(address)
        : "r"(local(shared)), "r"(block));
#endif
    return address;
  }
};

// Between all blocks of a cooperative launch, through global memory.
template <typename Value>
struct ChipExchange {
  Value* slots;

  __device__ void begin(int) const {}
  __device__ void ready() const {}

  __device__ void put(int slot, const Value& value, int lane, int) const {
    if (lane == 0) {
      slots[slot] = value;
    }
  }

  __device__ void wait() const {
    cooperative_groups::this_grid().sync();
  }
};

} // namespace gn_override
