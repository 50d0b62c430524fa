// Group normalisation of [N, HxW, C] tensors so small that a block has a group
// of a sample, backward of all samples, in its threads' registers.
//
// Such a tensor takes less time to move than a kernel takes to start, so what
// counts is how little stands between a thread's first load and its last
// store: there is one vector width, whose channels are always of one group, no
// copy in shared memory, and no other block to wait for.
#pragma once

#include "native/kernels/activation.cuh"
#include "native/kernels/gradients.cuh"
#include "native/kernels/moments.cuh"
#include "native/plan/shared_memory.h"

namespace gn_override {

// How the threads of a block share a group. Those of a sample are whole warps;
// each keeps one column of the group and, from its row on, every rows-th pixel.
struct GroupTiling {
  int HxW;
  int C;
  int D;
  int rows; // of a sample
  FastDivisor groups; // G
  FastDivisor columns;
  FastDivisor threads; // of a sample
  int lanes_per_channel; // backward, as in Tiling
};

// Where a thread works. kAllSamples: the block has all of them.
template <int kVector, bool kAllSamples>
struct PlaceInGroup {
  int64_t n;
  int group;
  int column;
  int row;
  int channel; // first of the thread's
  int pixels; // of the sample, from the thread's first on
  int first_warp; // of the sample

  __device__ explicit PlaceInGroup(const GroupTiling& tiling) {
    const int block = blockIdx.x;
    const int of_block = kAllSamples ? 0 : tiling.groups.quotient(block);
    const int sample = kAllSamples ? tiling.threads.quotient(threadIdx.x) : 0;
    const int first_thread = sample * tiling.threads.divisor();
    const int thread = static_cast<int>(threadIdx.x) - first_thread;
    n = of_block + sample;
    group = block - of_block * tiling.groups.divisor();
    row = tiling.columns.quotient(thread);
    column = thread - row * tiling.columns.divisor();
    channel = group * tiling.D + column * kVector;
    pixels = row < tiling.rows ? tiling.HxW - row : 0;
    first_warp = first_thread / kWarpSize;
  }

  // Element of the thread's first pixel; of row 0's where it has none, as loads
  // need an address.
  __device__ int64_t offset(const GroupTiling& tiling) const {
    const int first = pixels > 0 ? row : 0;
    return (n * tiling.HxW + first) * tiling.C + channel;
  }
};

// A thread's pixels of one operand; in place of those that do not exist the
// first one, or another thread's: a branch would wait for the one before.
template <typename T, int kPixels>
__device__ __forceinline__ void load_own_pixels(
    const T* address,
    int64_t step,
    int rows,
    int pixels,
    uint4 (&pixel)[kPixels]) {
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    const int64_t from = i * rows < pixels ? i * step : 0;
    pixel[i] = *reinterpret_cast<const uint4*>(address + from);
  }
}

// The sum of a power of two of values, by pairs: few additions wait for each
// other.
template <typename Acc, int kCount>
__device__ __forceinline__ Acc sum_of(const Acc (&value)[kCount]) {
  Acc sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    sums[i] = value[i];
  }
#pragma unroll
  for (int left = kCount / 2; left > 0; left /= 2) {
#pragma unroll
    for (int i = 0; i < left; ++i) {
      sums[i] += sums[i + left];
    }
  }
  return sums[0];
}

// gamma and beta of a group, which has no more channels than the block has
// threads, by way of shared memory: neighbouring columns read neighbouring
// places. All threads load and store, also those without a channel: a branch
// would part the loads that come before it from those after it.
template <typename T, int kVector>
struct GroupParameters {
  using Acc = Accumulator<T>;
  bool has_gamma; // else ones
  bool has_beta; // else zeros
  T of_gamma;
  T of_beta;

  // Starts the loads, and store() waits for them. `elsewhere` can be read.
  __device__ GroupParameters(
      const GroupTiling& tiling,
      int group,
      const T* gamma,
      const T* beta,
      const T* elsewhere)
      : has_gamma(gamma != nullptr), has_beta(beta != nullptr) {
    const int thread = threadIdx.x;
    const int channel = group * tiling.D + min(thread, tiling.D - 1);
    of_gamma = *(has_gamma ? gamma + channel : elsewhere);
    of_beta = *(has_beta ? beta + channel : elsewhere);
  }

  __device__ static Pair<Acc>* places() {
    return reinterpret_cast<Pair<Acc>*>(dynamic_shared_memory());
  }

  // For read() behind a barrier of the block.
  __device__ void store(const GroupTiling& tiling) const {
    const int thread = threadIdx.x;
    const int place =
        thread % kVector * tiling.columns.divisor() + thread / kVector;
    places()[thread < tiling.D ? place : thread] = {
        has_gamma ? widen(of_gamma) : 1, has_beta ? widen(of_beta) : 0};
  }

  __device__ static void
  read(int columns, int column, Acc (&weight)[kVector], Acc (&bias)[kVector]) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const Pair<Acc> both = places()[j * columns + column];
      weight[j] = both.first;
      bias[j] = both.second;
    }
  }
};

// Type of mean and rstd.
template <typename T, bool kFused>
using Statistic = std::conditional_t<kFused, Accumulator<T>, T>;

// The moments of a thread's pixels, by deviations from its first value, which
// is one of few. Every warp's first thread has pixels.
template <typename T, int kVector, bool kFused, int kPixels>
__device__ __forceinline__ Moments<Accumulator<T>> moments_of(
    const uint4 (&x)[kPixels],
    const Vector<T, kVector>& added, // kFused alone
    int rows,
    int pixels) {
  using Acc = Accumulator<T>;
  Acc pivot = unpack<T, kVector>(x[0])[0];
  if constexpr (kFused) {
    pivot += added[0];
  }
  Acc deviations[kVector] = {};
  Acc squares[kVector] = {};
  Acc count = 0;
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    if (i * rows < pixels) {
      const Vector<T, kVector> pixel = unpack<T, kVector>(x[i]);
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        Acc d = pixel[j] - pivot;
        if constexpr (kFused) {
          d += added[j];
        }
        deviations[j] += d;
        squares[j] += d * d;
      }
      count += kVector;
    }
  }
  const Acc sum = sum_of(deviations);
  const Acc shift = sum * reciprocal_or_zero(count);
  const Acc mean = pivot + shift;
  // What rounding took from the mean shows in float statistics alone.
  const Acc low =
      sizeof(Statistic<T, kFused>) > 2 ? shift - (mean - pivot) : Acc{0};
  return {mean, centred(sum_of(squares), sum * shift), low, count};
}

// per_group is 1 / (HxW D).
// kFused: with an activation.
template <typename T, int kVector, int kPixels, bool kFused>
__global__ void __launch_bounds__(kMaxRegisterThreads) registers_forward_kernel(
    GroupTiling tiling,
    Accumulator<T> per_group,
    Accumulator<T> eps,
    const T* X,
    const T* added, // kFused alone
    const T* gamma,
    const T* beta,
    Activation activation, // kFused alone
    T* Y,
    Statistic<T, kFused>* mean_out,
    Statistic<T, kFused>* rstd_out) {
  using Acc = Accumulator<T>;
  const PlaceInGroup<kVector, false> at(tiling);
  const int64_t offset = at.offset(tiling);
  const int64_t step = static_cast<int64_t>(tiling.rows) * tiling.C;
  wait_for_previous_kernel();
  uint4 x[kPixels];
  load_own_pixels(X + offset, step, tiling.rows, at.pixels, x);
  const GroupParameters<T, kVector> parameters(
      tiling, at.group, gamma, beta, X + offset);

  uint4 own_added = {}; // kFused alone
  if constexpr (kFused) {
    if (added != nullptr) {
      own_added =
          *reinterpret_cast<const uint4*>(added + at.n * tiling.C + at.channel);
    }
  }

  const Moments<Acc> own = moments_of<T, kVector, kFused>(
      x,
      unpack<T, kVector>(own_added), // kFused alone
      tiling.rows,
      at.pixels);
  parameters.store(tiling);
  // Two-byte results do not show what this gains.
  constexpr bool kRefined =
      sizeof(Statistic<T, kFused>) > 2 && kPixels * kVector < kFewElements;
  const int lane = threadIdx.x % kWarpSize;
  const auto sum = [](auto& sums) { sum_lanes(sums, kWarpSize); };
  __shared__ Moments<Acc> of_warp[kWarpSize];
  const Moments<Acc> merged = merge_moments<T, 1, Acc>(
      lane,
      kWarpSize,
      kWarpSize,
      [&](int) { return own; },
      [&] { return __shfl_sync(0xffffffffu, own.mean, 0); },
      kRefined,
      sum);
  if (lane == 0) {
    of_warp[threadIdx.x / kWarpSize] = merged;
  }
  __syncthreads();
  Acc weight[kVector];
  Acc bias[kVector];
  parameters.read(tiling.columns.divisor(), at.column, weight, bias);
  Moments<Acc> of_group = merge_moments<T, 1, Acc>(
      lane,
      kWarpSize,
      blockDim.x / kWarpSize,
      [&](int warp) { return of_warp[warp]; },
      [&] { return of_warp[0].mean; },
      kRefined,
      sum,
      &per_group);
  of_group.second = reciprocal_sqrt(of_group.second * per_group + eps);

  Normalization<T, T, kVector, kFused> normalization(
      activation, weight, bias, of_group);
  if constexpr (kFused) {
    normalization.move(unpack<T, kVector>(own_added));
  }
  normalization.write(x, X + offset, Y + offset, step, at.pixels, tiling.rows);
  if (threadIdx.x == 0) {
    mean_out[blockIdx.x] = narrow<Statistic<T, kFused>>(of_group.mean);
    rstd_out[blockIdx.x] = narrow<Statistic<T, kFused>>(of_group.second);
  }
}

// dX unless it is null, and dgamma and dbeta, those that are wanted. per_group:
// as forward.
template <typename T, int kVector, int kPixels, bool kFused>
__global__ void __launch_bounds__(kMaxRegisterThreads)
    registers_backward_kernel(
        GroupTiling tiling,
        int samples,
        Accumulator<T> per_group,
        const T* dY,
        const T* X,
        const Statistic<T, kFused>* mean_in,
        const Statistic<T, kFused>* rstd_in,
        const T* gamma,
        const T* beta, // kFused alone
        Activation activation, // kFused alone
        T* dX,
        ParameterOut<T> dgamma,
        ParameterOut<T> dbeta) {
  using Acc = Accumulator<T>;
  const PlaceInGroup<kVector, true> at(tiling);
  const int64_t offset = at.offset(tiling);
  const int64_t step = static_cast<int64_t>(tiling.rows) * tiling.C;
  wait_for_previous_kernel();
  uint4 dy[kPixels];
  uint4 x[kPixels];
  load_own_pixels(dY + offset, step, tiling.rows, at.pixels, dy);
  load_own_pixels(X + offset, step, tiling.rows, at.pixels, x);
  const int64_t index = at.n * tiling.groups.divisor() + at.group;
  const Statistic<T, kFused> own_mean = mean_in[index];
  const Statistic<T, kFused> own_rstd = rstd_in[index];
  const GroupParameters<T, kVector> parameters(
      tiling, at.group, gamma, beta, X + offset);
  Acc weight[kVector];
  Acc bias[kVector];
  const auto read_parameters = [&] {
    parameters.store(tiling);
    __syncthreads();
    parameters.read(tiling.columns.divisor(), at.column, weight, bias);
  };
  if constexpr (kFused) {
    read_parameters();
  }
  const Pair<Acc> moment{widen(own_mean), widen(own_rstd)};
  Acc mean[kVector];
  Acc rstd[kVector];
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    mean[j] = moment.first;
    rstd[j] = moment.second;
  }
  const auto differentiation =
      differentiation_of<kFused, T>(activation, [&](int j) {
        return channel_map<T>(moment.first, moment.second, weight[j], bias[j]);
      });

  GradientSums<T, T, kVector> gradients;
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    if (i * tiling.rows < at.pixels) {
      const Vector<T, kVector> of_dY[1] = {unpack<T, kVector>(dy[i])};
      const Vector<T, kVector> of_X[1] = {unpack<T, kVector>(x[i])};
      differentiation.with([&](auto dZ_of) {
        Acc dZ[1][kVector];
        gradients.add(of_dY, of_X, mean, dZ_of, dZ);
        if constexpr (kFused) { // dZ takes dY's place
          const Vector<T, kVector> rounded = narrow_all<T, kVector>(dZ[0]);
          memcpy(&dy[i], &rounded, sizeof(rounded));
        }
      });
    }
  }
  Pair<Acc> of_thread[kVector];
  gradients.finish(rstd, of_thread);
  if constexpr (!kFused) { // dY and X have come
    read_parameters();
  }
  Acc sum[2] = {0, 0}; // of the group, by gamma
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    sum[0] += weight[j] * of_thread[j].first;
    sum[1] += weight[j] * of_thread[j].second;
  }
  __shared__ Acc of_warp[kWarpSize][2];
  sum_warps(sum, at.first_warp, tiling.threads.divisor() / kWarpSize, of_warp);

  if (dX != nullptr) {
    const InputGradient<T, T, kVector> gradient(
        weight,
        gradient_of_group<T, Acc>(
            moment, {sum[0] * per_group, sum[1] * per_group}));
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      if (i * tiling.rows < at.pixels) {
        store(
            dX + offset + i * step,
            gradient(
                unpack<T, kVector>(dy[i]),
                unpack<T, kVector>(x[i]),
                NoDifferentiation()));
      }
    }
  }
  if (dgamma.data != nullptr || dbeta.data != nullptr) {
    const int columns = tiling.columns.divisor();
    const int rows = samples * tiling.rows;
    const int row = static_cast<int>(at.n) * tiling.rows + at.row;
    fold_rows<T>(
        tiling.columns,
        rows,
        at.pixels > 0 ? row * columns + at.column : rows * columns,
        tiling.lanes_per_channel,
        of_thread,
        parameters.places() + blockDim.x,
        [&](int c, const Pair<Acc>& both) {
          set_parameter_gradients(
              at.group * tiling.D + c, both.first, both.second, dgamma, dbeta);
        });
  }
}

} // namespace gn_override
