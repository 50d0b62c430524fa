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

// Brings the `count` elements of a parameter from `first` on to shared memory.
// The loads start at once, so that they are ahead of whatever the caller starts
// next; store() waits for them.
template <typename T, typename Store>
struct ParameterCopy {
  using Acc = Accumulator<T>;
  ParameterIn<T> parameter;
  Acc otherwise;
  int64_t first;
  int count;
  Store store_at; // (i, value)
  typename ParameterIn<T>::Word own = 0;

  __device__ ParameterCopy(
      ParameterIn<T> parameter,
      Acc otherwise,
      int64_t first,
      int count,
      Store store_at)
      : parameter(parameter),
        otherwise(otherwise),
        first(first),
        count(count),
        store_at(store_at) {
    if (threadIdx.x < count) {
      own = parameter.fetch(first + threadIdx.x);
    }
  }

  __device__ void store() const {
    if (threadIdx.x < count) {
      store_at(threadIdx.x, parameter.value_of(own, otherwise));
    }
    // More elements than threads are rare.
    for (int i = threadIdx.x + blockDim.x; i < count; i += blockDim.x) {
      store_at(i, parameter.at(first + i, otherwise));
    }
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

  // Of the first `valid` pixels from `first` on; what follows repeats the last.
  template <int kPixels>
  __device__ void
  read(int first, int valid, Vector<T, kVector> (&pixel)[kPixels]) const {
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      pixel[i] = *at(first + min(i, valid - 1));
    }
  }
};

// Starts the copies of a thread's `count` pixels in batches of kResidentBatch:
// copy(i) starts those of the i-th.
template <typename Copy>
__device__ __forceinline__ void copy_pixels(int count, Copy copy) {
  for (int first = 0; first < count; first += kResidentBatch) {
#pragma unroll
    for (int i = 0; i < kResidentBatch; ++i) {
      if (first + i < count) {
        copy(first + i);
      }
    }
    end_batch();
  }
}

// Calls f(first, valid) over `count` pixels, kPixels at a time.
template <int kPixels, typename F>
__device__ __forceinline__ void for_each_batch(int count, F f) {
#pragma unroll 1
  for (int first = 0; first < count; first += kPixels) {
    f(first, min(kPixels, count - first));
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
  const Position at = position_in_cluster_order(shape, tiling, kVector);
  const ItemGroups groups(shape, tiling, at, kVector);
  const int parts_of_block = tiling.parts_per_segment();
  const int parts = splits * parts_of_block; // of a group

  extern __shared__ __align__(16) unsigned char shared[];
  const Slab<T, kVector> slab(shared);
  auto* const total = reinterpret_cast<Moments<Acc>*>(shared + layout.total);
  auto* const parameters =
      reinterpret_cast<Pair<Acc>*>(shared + layout.parameters);
  const Exchange<Moments<Acc>> exchange{
      splits,
      reinterpret_cast<Moments<Acc>*>(shared + layout.slots),
      reinterpret_cast<uint64_t*>(shared + layout.barrier)};

  allow_next_kernel();
  exchange.begin(groups.count * parts);
  const int width = tiling.columns.divisor() * kVector;
  const int first_channel = at.tile * width;
  const int channels = min(width, shape.C - first_channel);
  const ParameterCopy gammas(
      gamma, Acc(1), first_channel, channels, [&](int c, Acc value) {
        parameters[c].first = value;
      });
  const ParameterCopy betas(
      beta, Acc(0), first_channel, channels, [&](int c, Acc value) {
        parameters[c].second = value;
      });
  const int count = pixels_of_thread(tiling, at);
  const int64_t step = static_cast<int64_t>(tiling.rows.divisor()) * shape.C;
  const int64_t offset = at.offset(shape);
  copy_pixels(
      count, [&](int i) { copy_async(slab.at(i), X + offset + i * step); });
  gammas.store();
  betas.store();

  ChannelMoments<T, kVector> moments;
  const int last_batch = (count - 1) / kResidentBatch;
  for_each_batch<kResidentBatch>(count, [&](int first, int valid) {
    wait_for_copies(last_batch - first / kResidentBatch);
    Vector<T, kVector> pixel[kResidentBatch];
    slab.read(first, valid, pixel);
    moments.add(pixel, valid);
  });
  exchange.ready();
  fold_segments(
      shape,
      tiling,
      at,
      moments,
      reinterpret_cast<Pair<Acc>*>(shared + layout.fold),
      [&](int group, int part, const Moments<Acc>& moment, int lane) {
        exchange.put(
            (group - groups.first) * parts + at.split * parts_of_block + part,
            moment,
            lane,
            min(tiling.lanes_per_segment, kWarpSize));
      });
  exchange.wait();

  const int lanes = min(parts, kWarpSize);
  for_each_run(groups.count, lanes, [&](int g, int lane, bool exists) {
    Moments<Acc> of_group = merge_moments<Acc>(
        lane,
        lanes,
        parts,
        [&](int i) { return exchange.slots[g * parts + i]; },
        [&](auto& sums) { sum_lanes(sums, lanes); });
    of_group.second = reciprocal_sqrt(of_group.second / of_group.count + eps);
    if (lane == 0 && exists) {
      total[g] = of_group;
      if (at.split == 0) {
        const int64_t index = at.n * shape.G + groups.first + g;
        mean_out.set(index, of_group.mean);
        rstd_out.set(index, of_group.second);
      }
    }
  });
  __syncthreads();
  if (!at.active) {
    return;
  }

  const Normalization<T, kVector> normalized(
      shape,
      at.channel,
      [&](Acc(&weight)[kVector], Acc(&bias)[kVector]) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          const Pair<Acc> both = parameters[at.column * kVector + j];
          weight[j] = both.first;
          bias[j] = both.second;
        }
      },
      [&](int group) { return total[group - groups.first]; });
  for_each_batch<kResidentBatch>(count, [&](int first, int valid) {
    Vector<T, kVector> pixel[kResidentBatch];
    slab.read(first, valid, pixel);
#pragma unroll
    for (int i = 0; i < kResidentBatch; ++i) {
      if (i < valid) {
        store(Y + offset + (first + i) * step, normalized(pixel[i]));
      }
    }
  });
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
  const Position at = position_in_cluster_order(shape, tiling, kVector);
  const ItemGroups groups(shape, tiling, at, kVector);
  const int parts_of_block = tiling.parts_per_segment();
  const int parts = splits * parts_of_block; // of a group

  extern __shared__ __align__(16) unsigned char shared[];
  const Slab<T, kVector> slab_dY(shared);
  const Slab<T, kVector> slab_X(shared + layout.slab_bytes);
  auto* const total = reinterpret_cast<Pair<Acc>*>(shared + layout.total);
  auto* const moments = reinterpret_cast<Pair<Acc>*>(shared + layout.moments);
  auto* const weights = reinterpret_cast<Acc*>(shared + layout.parameters);
  auto* const channels = reinterpret_cast<Pair<Acc>*>(shared + layout.channels);
  const Exchange<Pair<Acc>> exchange{
      splits,
      reinterpret_cast<Pair<Acc>*>(shared + layout.slots),
      reinterpret_cast<uint64_t*>(shared + layout.barrier)};

  allow_next_kernel();
  exchange.begin(groups.count * parts);
  const int width = tiling.columns.divisor() * kVector;
  const int first_channel = at.tile * width;
  const ParameterCopy gammas(
      gamma,
      Acc(1),
      first_channel,
      min(width, shape.C - first_channel),
      [&](int c, Acc value) { weights[c] = value; });
  const int64_t first_group = at.n * shape.G + groups.first;
  const ParameterCopy means(
      mean_in, Acc(0), first_group, groups.count, [&](int g, Acc value) {
        moments[g].first = value;
      });
  const ParameterCopy rstds(
      rstd_in, Acc(1), first_group, groups.count, [&](int g, Acc value) {
        moments[g].second = value;
      });
  const int count = pixels_of_thread(tiling, at);
  const int64_t step = static_cast<int64_t>(tiling.rows.divisor()) * shape.C;
  const int64_t offset = at.offset(shape);
  copy_pixels(count, [&](int i) {
    copy_async(slab_dY.at(i), dY + offset + i * step);
    copy_async(slab_X.at(i), X + offset + i * step);
  });
  gammas.store();
  means.store();
  rstds.store();
  __syncthreads();
  const auto moments_of = [&](int group) {
    return moments[group - groups.first];
  };

  GradientSums<T, kVector> of_thread;
  if (at.active) {
    Acc mean[kVector];
    Acc rstd[kVector];
    read_moments(shape, at.channel, moments_of, mean, rstd);
    const int last_batch = (count - 1) / kResidentBatch;
    for_each_batch<kResidentPairs>(count, [&](int first, int valid) {
      wait_for_copies(last_batch - first / kResidentBatch);
      Vector<T, kVector> dy[kResidentPairs];
      Vector<T, kVector> x[kResidentPairs];
      slab_dY.read(first, valid, dy);
      slab_X.read(first, valid, x);
      of_thread.add(dy, x, mean, valid);
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
      reinterpret_cast<Pair<Acc>*>(shared + layout.fold),
      [&](int c, Pair<Acc> sum) {
        const int channel = first_channel + c;
        if (channel < shape.C) {
          channels[c] = {weights[c] * sum.first, weights[c] * sum.second};
          if (sums != nullptr) {
            sums[(at.n * splits + at.split) * shape.C + channel] = sum;
          }
        }
      });
  exchange.ready();
  __syncthreads();

  const int D = shape.D.divisor();
  const int of_group = tiling.lanes_per_segment;
  for_each_run(groups.count, of_group, [&](int g, int lane, bool exists) {
    Acc sum[2] = {0, 0};
    for (int i = lane; i < D; i += of_group) {
      const Pair<Acc> channel = channels[g * D + i];
      sum[0] += channel.first;
      sum[1] += channel.second;
    }
    sum_lanes(sum, of_group);
    if (exists) {
      exchange.put(
          g * parts + at.split * parts_of_block + lane / kWarpSize,
          {sum[0], sum[1]},
          lane % kWarpSize,
          min(of_group, kWarpSize));
    }
  });
  exchange.wait();

  const Acc items = static_cast<Acc>(shape.HxW) * D;
  const int lanes = min(parts, kWarpSize);
  for_each_run(groups.count, lanes, [&](int g, int lane, bool exists) {
    Acc sum[2] = {0, 0}; // of gamma dY xhat, gamma dY
    for (int i = lane; i < parts; i += lanes) {
      const Pair<Acc> part = exchange.slots[g * parts + i];
      sum[0] += part.first;
      sum[1] += part.second;
    }
    sum_lanes(sum, lanes);
    if (lane == 0 && exists) {
      total[g] = {sum[1] / items, sum[0] / items};
    }
  });
  __syncthreads();
  if (!at.active || dX == nullptr) {
    return;
  }

  const InputGradient<T, kVector> gradient(
      shape,
      at.channel,
      [&](Acc(&weight)[kVector]) {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          weight[j] = weights[at.column * kVector + j];
        }
      },
      moments_of,
      [&](int group) { return total[group - groups.first]; });
  for_each_batch<kResidentPairs>(count, [&](int first, int valid) {
    Vector<T, kVector> dy[kResidentPairs];
    Vector<T, kVector> x[kResidentPairs];
    slab_dY.read(first, valid, dy);
    slab_X.read(first, valid, x);
#pragma unroll
    for (int i = 0; i < kResidentPairs; ++i) {
      if (i < valid) {
        store(dX + offset + (first + i) * step, gradient(dy[i], x[i]));
      }
    }
  });
}

} // namespace gn_override
