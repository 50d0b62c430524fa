// Group normalisation of [N, HxW, C] tensors that reads X (and dY) once.
//
// An item is a tile of whole groups of one sample. A cluster takes one: each of
// its blocks keeps a split of the item's pixels in shared memory, reduces it,
// exchanges sums with the other blocks through distributed shared memory, and
// computes the result from what it kept. A thread's vectors are its own: it
// copies them in and reads them back, so the slab needs no barrier, and several
// blocks on a multiprocessor overlap one's loads with another's stores.
#pragma once

#include "native/kernels/async.cuh"
#include "native/kernels/cluster.cuh"
#include "native/kernels/gradients.cuh"
#include "native/kernels/moments.cuh"
#include "native/plan/shared_memory.h"

namespace gn_override {

constexpr int kMaxResidentThreads = 512;
// Such blocks that shall fit a multiprocessor, as far as registers go.
template <typename T>
constexpr int kResidentBlocks = sizeof(T) == 8 ? 1 : 2;
// Pixels that a thread takes out of shared memory at once.
constexpr int kResidentBatch = 4;
// The same where a pixel is a vector of X and one of dY. Divides the above.
constexpr int kResidentPairs = 2;

// Blocks in cluster order: splits, then tiles, then samples.
__device__ __forceinline__ Position position_in_cluster_order(
    const Shape& shape,
    const Tiling& tiling,
    int vector) {
  const int block = blockIdx.x;
  const int item = tiling.splits.quotient(block);
  const int n = tiling.column_tiles.quotient(item);
  return Position(
      shape,
      tiling,
      vector,
      n,
      block - item * tiling.splits.divisor(),
      item - n * tiling.column_tiles.divisor());
}

// The groups of an item: its tile's, all of them whole.
struct ItemGroups {
  int first;
  int count;

  __device__ ItemGroups(
      const Shape& shape,
      const Tiling& tiling,
      const Position& at,
      int vector) {
    const int channels = tiling.columns.divisor() * vector;
    const int begin = at.tile * channels;
    first = shape.D.quotient(begin);
    count = shape.D.quotient(min(begin + channels, shape.C)) - first;
  }
};

// One operand's share of a thread, in shared memory.
template <typename T, int kVector>
struct Slab {
  Vector<T, kVector>* vectors;

  __device__ Slab(unsigned char* shared)
      : vectors(reinterpret_cast<Vector<T, kVector>*>(shared) + threadIdx.x) {}

  __device__ Vector<T, kVector>* at(int i) const {
    return vectors + i * blockDim.x;
  }

  // Starts the copies of `count` pixels that are `step` elements apart, in
  // batches of kResidentBatch.
  __device__ void copy_from(const T* global, int64_t step, int count) const {
    Vector<T, kVector>* shared = vectors;
    for (int left = count; left > 0;) {
#pragma unroll
      for (int i = 0; i < kResidentBatch; ++i) {
        if (i < left) {
          copy_async(shared, global);
        }
        shared += blockDim.x;
        global += step;
      }
      left -= kResidentBatch;
      end_batch();
    }
  }

  template <int kPixels>
  __device__ void read(int first, Vector<T, kVector> (&pixel)[kPixels]) const {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      pixel[i] = *at(first + i);
    }
  }
};

// Calls f(g, split) for every group of the item and split of its pixels, a
// power of two, those of a group on neighbouring lanes. Whole warps call: some
// lanes repeat the last group.
template <typename F>
__device__ __forceinline__ void
for_each_share(const Tiling& tiling, const ItemGroups& groups, F f) {
  const int splits = tiling.splits.divisor();
  const int shares = groups.count * splits;
  const int whole_warps = (shares + kWarpSize - 1) / kWarpSize * kWarpSize;
  for (int i = threadIdx.x; i < whole_warps; i += blockDim.x) {
    f(min(tiling.splits.quotient(i), groups.count - 1), i & (splits - 1));
  }
}

// Calls f<kPixels>(first) over `count` pixels, kPixels at a time
// and then one by one.
template <int kPixels, typename F>
__device__ __forceinline__ void for_each_batch(int count, F f) {
  int i = 0;
#pragma unroll 1
  for (; i + kPixels <= count; i += kPixels) {
    f.template operator()<kPixels>(i);
  }
#pragma unroll 1
  for (; i < count; ++i) {
    f.template operator()<1>(i);
  }
}

// -- forward -----------------------------------------------------------------

template <typename T, int kVector>
__global__ void __launch_bounds__(kMaxResidentThreads, kResidentBlocks<T>)
    resident_forward_kernel(
        Shape shape,
        Tiling tiling,
        ResidentLayout layout,
        Accumulator<T> eps,
        const T* __restrict__ X,
        ParameterIn<T> gamma,
        ParameterIn<T> beta,
        T* __restrict__ Y,
        ParameterOut<T> mean_out,
        ParameterOut<T> rstd_out) {
  using Acc = Accumulator<T>;
  const int splits = tiling.splits.divisor();
  const Cluster cluster{splits};
  const Position at = position_in_cluster_order(shape, tiling, kVector);
  const ItemGroups groups(shape, tiling, at, kVector);

  extern __shared__ __align__(16) unsigned char shared[];
  const Slab<T, kVector> slab(shared);
  auto* const own = reinterpret_cast<Moments<Acc>*>(shared + layout.own);
  auto* const total = reinterpret_cast<Moments<Acc>*>(shared + layout.total);

  allow_next_kernel();
  const int count = pixels_of_thread(tiling, at);
  const int64_t step = static_cast<int64_t>(tiling.rows.divisor()) * shape.C;
  const int64_t offset = at.offset(shape);
  slab.copy_from(X + offset, step, count);
  if (at.active) {
    gamma.prefetch(at.channel);
    beta.prefetch(at.channel);
  }

  ChannelMoments<T, kVector> moments;
  const int last_batch = (count - 1) / kResidentBatch;
  for_each_batch<kResidentBatch>(count, [&]<int kPixels>(int first) {
    wait_for_copies(last_batch - first / kResidentBatch);
    Vector<T, kVector> pixel[kPixels];
    slab.read(first, pixel);
    moments.add(pixel);
  });
  fold_segments(
      shape,
      tiling,
      at,
      moments,
      reinterpret_cast<Acc*>(shared + layout.fold),
      [&](int group, Moments<Acc> moment) {
        own[group - groups.first] = moment;
      });
  cluster.sync();

  for_each_share(tiling, groups, [&](int g, int split) {
    const int64_t left = shape.HxW - split * tiling.pixels_per_split;
    const Acc items = static_cast<Acc>(min(left, tiling.pixels_per_split)) *
        shape.D.divisor();
    const Acc all_items = static_cast<Acc>(shape.HxW) * shape.D.divisor();
    const Moments<Acc> part = cluster.in_block(own, split)[g];
    const Acc near_mean = sum_lanes(items * part.mean, splits) / all_items;
    DeviationSums<Acc> deviations;
    deviations.add(part, items, 1, near_mean);
    deviations.reduce([&](Acc value) { return sum_lanes(value, splits); });
    Moments<Acc> of_group = deviations.moments(near_mean, all_items, 1);
    of_group.second = reciprocal_sqrt(of_group.second / all_items + eps);
    if (split == 0) {
      total[g] = of_group;
      if (at.split == 0) {
        const int64_t index = at.n * shape.G + groups.first + g;
        mean_out.set(index, of_group.mean);
        rstd_out.set(index, of_group.second);
      }
    }
  });
  cluster.done_reading();
  __syncthreads();

  if (at.active) {
    const Normalization<T, kVector> normalized(
        shape, at, gamma, beta, [&](int group) {
          return total[group - groups.first];
        });
    for_each_batch<kResidentBatch>(count, [&]<int kPixels>(int first) {
      Vector<T, kVector> pixel[kPixels];
      slab.read(first, pixel);
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        store(Y + offset + (first + i) * step, normalized(pixel[i]));
      }
    });
  }
  cluster.wait_for_readers();
}

// -- backward ----------------------------------------------------------------

// dX unless it is null, and sums[n][split][c] = (sum dY xhat, sum dY) for
// parameter_gradients unless `sums` is null.
template <typename T, int kVector>
__global__ void __launch_bounds__(kMaxResidentThreads, kResidentBlocks<T>)
    resident_backward_kernel(
        Shape shape,
        Tiling tiling,
        ResidentLayout layout,
        const T* __restrict__ dY,
        const T* __restrict__ X,
        ParameterIn<T> mean_in,
        ParameterIn<T> rstd_in,
        ParameterIn<T> gamma,
        Pair<Accumulator<T>>* __restrict__ sums,
        T* __restrict__ dX) {
  using Acc = Accumulator<T>;
  const int splits = tiling.splits.divisor();
  const Cluster cluster{splits};
  const Position at = position_in_cluster_order(shape, tiling, kVector);
  const ItemGroups groups(shape, tiling, at, kVector);

  extern __shared__ __align__(16) unsigned char shared[];
  const Slab<T, kVector> slab_dY(shared);
  const Slab<T, kVector> slab_X(shared + layout.slab_bytes);
  auto* const channels = reinterpret_cast<Pair<Acc>*>(shared + layout.channels);
  auto* const own = reinterpret_cast<Pair<Acc>*>(shared + layout.own);
  auto* const total = reinterpret_cast<Pair<Acc>*>(shared + layout.total);

  allow_next_kernel();
  const int count = pixels_of_thread(tiling, at);
  const int64_t step = static_cast<int64_t>(tiling.rows.divisor()) * shape.C;
  const int64_t offset = at.offset(shape);
  slab_dY.copy_from(dY + offset, step, count);
  slab_X.copy_from(X + offset, step, count);
  if (at.active) {
    gamma.prefetch(at.channel);
  }

  GradientSums<T, kVector> of_thread;
  if (at.active) {
    Acc mean[kVector];
    Acc rstd[kVector];
    read_moments(shape, at, mean_in, rstd_in, mean, rstd);
    const int last_batch = (count - 1) / kResidentBatch;
    for_each_batch<kResidentPairs>(count, [&]<int kPixels>(int first) {
      wait_for_copies(last_batch - first / kResidentBatch);
      Vector<T, kVector> dy[kPixels];
      Vector<T, kVector> x[kPixels];
      slab_dY.read(first, dy);
      slab_X.read(first, x);
      of_thread.add(dy, x, mean);
    });
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      of_thread.ds[j] *= rstd[j];
    }
  }
  fold_rows(
      tiling,
      at,
      of_thread,
      reinterpret_cast<Pair<Acc>*>(shared + layout.fold));
  if (at.active && at.row == 0) {
    Acc weight[kVector];
    gamma.read(at.channel, 1, weight);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      channels[at.column * kVector + j] = {
          weight[j] * of_thread.ds[j], weight[j] * of_thread.db[j]};
    }
    if (sums != nullptr) {
      Pair<Acc>* const out =
          sums + (at.n * splits + at.split) * shape.C + at.channel;
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        out[j] = {of_thread.ds[j], of_thread.db[j]};
      }
    }
  }
  __syncthreads();

  const int lanes = tiling.lanes_per_segment;
  const int lane = threadIdx.x & (lanes - 1);
  const int lanes_shift = __ffs(lanes) - 1;
#pragma unroll 1
  for (int first = 0; first < groups.count;
       first += blockDim.x >> lanes_shift) {
    const int g = first + (static_cast<int>(threadIdx.x) >> lanes_shift);
    Pair<Acc> sum = {0, 0};
    if (g < groups.count) {
      for (int i = lane; i < shape.D.divisor(); i += lanes) {
        const Pair<Acc> channel = channels[g * shape.D.divisor() + i];
        sum.first += channel.first;
        sum.second += channel.second;
      }
    }
    sum.first = sum_lanes(sum.first, lanes);
    sum.second = sum_lanes(sum.second, lanes);
    if (lane == 0 && g < groups.count) {
      own[g] = sum;
    }
  }
  cluster.sync();

  for_each_share(tiling, groups, [&](int g, int split) {
    const Acc items = static_cast<Acc>(shape.HxW) * shape.D.divisor();
    const Pair<Acc> part = cluster.in_block(own, split)[g];
    const Acc of_dY_xhat = sum_lanes(part.first, splits);
    const Acc of_dY = sum_lanes(part.second, splits);
    if (split == 0) {
      total[g] = {of_dY / items, of_dY_xhat / items};
    }
  });
  cluster.done_reading();
  __syncthreads();

  if (at.active && dX != nullptr) {
    const InputGradient<T, kVector> gradient(
        shape, at, mean_in, rstd_in, gamma, [&](int group) {
          return total[group - groups.first];
        });
    for_each_batch<kResidentPairs>(count, [&]<int kPixels>(int first) {
      Vector<T, kVector> dy[kPixels];
      Vector<T, kVector> x[kPixels];
      slab_dY.read(first, dy);
      slab_X.read(first, x);
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        store(dX + offset + (first + i) * step, gradient(dy[i], x[i]));
      }
    });
  }
  cluster.wait_for_readers();
}

} // namespace gn_override
