// Sums over a power of two of neighbouring lanes, a warp or a block, and
// compensated sums. The order of additions is fixed, so results repeat bit for
// bit.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "native/plan/shared_memory.h"

namespace gn_override {

// Every lane of each run of `lanes` (a power of two; of more than 32, each warp
// by itself) gets the sums. All threads of the warp must call. Several sums at
// once take little longer than one.
template <typename Acc, int kSums>
__device__ __forceinline__ void sum_lanes(Acc (&value)[kSums], int lanes) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      const Acc other = __shfl_xor_sync(0xffffffffu, value[i], offset);
      if (offset < lanes) {
        value[i] += other;
      }
    }
  }
}

// The same over `warps` whole warps of the block, from `first` on. of_warp has
// room for what each warp of the block adds up; all threads of the block must
// call.
template <typename Acc, int kSums>
__device__ __forceinline__ void
sum_warps(Acc (&value)[kSums], int first, int warps, Acc (*of_warp)[kSums]) {
  sum_lanes(value, kWarpSize);
  if (threadIdx.x % kWarpSize == 0) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) {
      of_warp[threadIdx.x / kWarpSize][i] = value[i];
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    value[i] = lane < warps ? of_warp[first + lane][i] : 0;
  }
  sum_lanes(value, kWarpSize);
}

// Runs of `lanes` (a power of two) neighbouring threads of the block.
struct Runs {
  int lanes;
  int at_once;
  int own; // of this thread
  int first_of_warp;

  __device__ explicit Runs(int lanes) : lanes(lanes) {
    const int shift = __ffs(lanes) - 1;
    at_once = static_cast<int>(blockDim.x) >> shift;
    own = static_cast<int>(threadIdx.x) >> shift;
    first_of_warp = static_cast<int>(threadIdx.x & ~(kWarpSize - 1u)) >> shift;
  }

  // Deals the items 0, ..., count - 1 to the runs: calls f(item, lane of the
  // run, exists). Warps call as a whole, or not at all, so that f may add up
  // over the lanes: those that have no item of their own get the last one,
  // which does not exist.
  template <typename F>
  __device__ __forceinline__ void deal(int count, F f) const {
    if (own >= at_once) {
      return; // a block of not quite so many threads, of runs of many warps
    }
#pragma unroll 1
    for (int first = 0; first + first_of_warp < count; first += at_once) {
      const int item = first + own;
      f(min(item, count - 1), threadIdx.x & (lanes - 1), item < count);
    }
  }
};

// A sum that carries what its additions rounded off (two-sum: Knuth, The Art of
// Computer Programming 2, 4.2.2), so that its error does not grow with their
// number. Inf and NaN come out as a plain sum would have them.
template <typename Acc>
struct CompensatedSum {
  Acc sum;
  Acc lost;

  // No constructor: arrays of it stand in shared memory.
  static __device__ CompensatedSum zero() {
    return {0, 0};
  }

  __device__ void add(Acc term) {
    const Acc before = sum;
    sum = before + term;
    const Acc added = sum - before;
    lost += (before - (sum - added)) + (term - added);
  }

  // The same bits whichever is added to which.
  __device__ void add(const CompensatedSum& other) {
    lost += other.lost;
    add(other.sum);
  }

  __device__ Acc value() const {
    return isfinite(lost) ? sum + lost : sum;
  }
};

// The same where the result is rounded to two bytes, and needs no such care.
template <typename Acc>
struct PlainSum {
  Acc sum;

  static __device__ PlainSum zero() {
    return {0};
  }

  __device__ void add(Acc term) {
    sum += term;
  }

  __device__ Acc value() const {
    return sum;
  }
};

// Compensated, unless results are rounded to two bytes.
template <typename T, typename Acc>
using Total =
    std::conditional_t<sizeof(T) == 2, PlainSum<Acc>, CompensatedSum<Acc>>;

// sum_lanes() of compensated sums, whose additions are compensated as well.
template <typename Acc>
__device__ __forceinline__ void sum_lanes(
    CompensatedSum<Acc>& value,
    int lanes) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const CompensatedSum<Acc> other{
        __shfl_xor_sync(0xffffffffu, value.sum, offset),
        __shfl_xor_sync(0xffffffffu, value.lost, offset)};
    if (offset < lanes) {
      value.add(other);
    }
  }
}

// Sums each member of `sums`, which are accumulators, over threads, as sum(x)
// does for an array x.
template <typename Acc, typename Sums, typename Sum>
__device__ __forceinline__ void sum_members(Sums& sums, Sum sum) {
  Acc members[sizeof(Sums) / sizeof(Acc)];
  memcpy(members, &sums, sizeof(Sums));
  sum(members);
  memcpy(&sums, members, sizeof(Sums));
}

// The threads that share one sum: `lanes`, a power of two of neighbours in a
// warp, or the whole block.
template <bool kBlock>
struct Team {
  int lanes;

  __device__ explicit Team(int lanes) : lanes(lanes) {}

  __device__ int rank() const {
    return kBlock ? threadIdx.x : threadIdx.x & (lanes - 1);
  }
  __device__ int size() const {
    return kBlock ? blockDim.x : lanes;
  }
  // Which team of the grid this is.
  __device__ int64_t index() const {
    return kBlock
        ? blockIdx.x
        : (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  }

  // Every thread of the team gets the sums. All threads of the block must call,
  // and the block is whole warps.
  template <typename Acc>
  __device__ void sum(CompensatedSum<Acc>& value) const {
    sum_lanes(value, kBlock ? kWarpSize : lanes);
    if constexpr (kBlock) {
      __shared__ CompensatedSum<Acc> of_warp[kWarpSize];
      __syncthreads(); // an earlier sum's readers are done
      if (threadIdx.x % kWarpSize == 0) {
        of_warp[threadIdx.x / kWarpSize] = value;
      }
      __syncthreads();
      value = CompensatedSum<Acc>::zero();
      for (unsigned warp = 0; warp < blockDim.x / kWarpSize; ++warp) {
        value.add(of_warp[warp]);
      }
    }
  }

  template <typename Acc, int kSums>
  __device__ void sum(Acc (&value)[kSums]) const {
    if constexpr (kBlock) {
      __shared__ Acc of_warp[kWarpSize][kSums];
      __syncthreads(); // an earlier sum's readers are done
      sum_warps(value, 0, blockDim.x / kWarpSize, of_warp);
    } else {
      sum_lanes(value, lanes);
    }
  }
};

} // namespace gn_override
