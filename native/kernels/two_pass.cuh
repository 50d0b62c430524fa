// Group normalisation of [N, HxW, C] tensors that reads X twice.
//
//   forward   statistics -> combine_statistics -> normalize
//   backward  gradient_sums -> group_coefficients -> input_gradient
//                           -> parameter_gradients
//
// The first pass leaves a result for each segment, that is, what a tile and a
// group have in common. The segment of tile t and group g has slot t + g: going
// up the channels, each new segment has a new tile or a new group, so slots are
// unique, and a group's are consecutive.
//
// Blocks take tiles in reverse order in the second pass: the first tiles that
// it reads are the last that the first pass left in the L2 cache.
#pragma once

#include "native/kernels/activation.cuh"
#include "native/kernels/gradients.cuh"
#include "native/kernels/hardware.cuh"
#include "native/kernels/moments.cuh"

namespace gn_override {

// -- forward -----------------------------------------------------------------

// Of a split.
__device__ __forceinline__ int slots_of(
    const Shape& shape,
    const Tiling& tiling) {
  return shape.G + tiling.column_tiles.divisor() - 1;
}

// partial[n][split][slot] is of the segment. Dynamic shared memory: fold_size()
// accumulators. At most a warp folds a segment.
template <typename T, typename TY, int kVector>
__global__ void __launch_bounds__(kMaxThreads, kBlocksPerMultiprocessor<T>)
    statistics(
        Shape shape,
        Tiling tiling,
        const T* X,
        Moments<Accumulator<T>>* partial) {
  using Acc = Accumulator<T>;
  const Position at =
      position_in_memory_order(shape, tiling, kVector, blockIdx.x);

  allow_next_kernel();
  wait_for_previous_kernel();
  ChannelMoments<T, TY, kVector> moments;
  if (at.active) {
    const int64_t step = static_cast<int64_t>(tiling.rows.divisor()) * shape.C;
    const T* const address = X + at.offset(shape);
    for_each_run_of_pixels<kBatch<T, kVector>>(
        pixels_of_thread(tiling, at), [&](int first, auto pixels) {
          Vector<T, kVector> pixel[decltype(pixels)::value];
          load_pixels<Reuse::kKeep>(address + first * step, step, pixel);
          moments.add(pixel);
        });
  }

  unsigned char* const shared = dynamic_shared_memory();
  const int slots = slots_of(shape, tiling);
  Moments<Acc>* const own =
      partial + (at.n * tiling.splits.divisor() + at.split) * slots + at.tile;
  fold_segments(
      shape,
      tiling,
      at,
      moments,
      true,
      reinterpret_cast<Pair<Acc>*>(shared),
      [&](int group, int, const Moments<Acc>& moment, int lane) {
        if (lane == 0) {
          own[group] = moment;
        }
      });
}

// The segments of a sample's first split get the moments of their group, with
// rstd; mean and rstd are rounded. One team (see Team) for each (n, g), which
// alone reads the group's segments, and all of them first.
template <typename T, bool kBlock>
__global__ void __launch_bounds__(kMaxThreads) combine_statistics(
    Shape shape,
    Tiling tiling,
    int lanes,
    int vector,
    Accumulator<T> eps,
    Moments<Accumulator<T>>* partial,
    ParameterOut<T> mean_out,
    ParameterOut<T> rstd_out) {
  using Acc = Accumulator<T>;
  const Team<kBlock> team(lanes);
  const int64_t last_index = shape.N * shape.G - 1;
  const bool idle = team.index() > last_index; // stays for the sums
  // Idle teams read what the last one of their block does, before it writes.
  const int64_t index = idle ? last_index : team.index();
  const int64_t n = index / shape.G;
  const int group = static_cast<int>(index % shape.G);

  const int tile_width = tiling.columns.divisor() * vector;
  const int first = group * shape.D.divisor();
  const int last = first + shape.D.divisor() - 1;
  const int first_tile = first / tile_width;
  const int tiles = last / tile_width - first_tile + 1;
  const int slots = slots_of(shape, tiling);
  Moments<Acc>* const own =
      partial + n * tiling.splits.divisor() * slots + group + first_tile;

  const Acc per_group =
      1 / (static_cast<Acc>(shape.HxW) * static_cast<Acc>(shape.D.divisor()));

  allow_next_kernel();
  wait_for_previous_kernel();
  Moments<Acc> of_group = merge_moments<T, 1, Acc>(
      team.rank(),
      team.size(),
      tiles * tiling.splits.divisor(),
      [&](int i) {
        const int split = i / tiles;
        return own[static_cast<int64_t>(split) * slots + i - split * tiles];
      },
      [&] { return own->mean; },
      true,
      [&](auto& sums) { team.sum(sums); },
      &per_group);
  of_group.second = reciprocal_sqrt(of_group.second * per_group + eps);

  __syncthreads(); // all of the segments have been read
  if (idle) {
    return;
  }
  for (int i = team.rank(); i < tiles; i += team.size()) {
    own[i] = of_group;
  }
  if (team.rank() == 0) {
    mean_out.set(index, of_group.mean);
    rstd_out.set(index, of_group.second);
  }
}

// Y = (X - mean) * rstd * gamma + beta
// kFused: an activation of that.
template <typename T, typename TY, int kVector, bool kFused>
__global__ void __launch_bounds__(kMaxThreads, kBlocksPerMultiprocessor<T>)
    normalize(
        Shape shape,
        Tiling tiling,
        const T* X,
        const Moments<Accumulator<T>>* partial,
        ParameterIn<TY> gamma,
        ParameterIn<TY> beta,
        Activation activation, // kFused alone
        TY* Y) {
  using Acc = Accumulator<T>;
  const Position at = position_in_memory_order(
      shape, tiling, kVector, gridDim.x - 1 - blockIdx.x);
  wait_for_previous_kernel();
  if (!at.active) {
    return;
  }
  Acc weight[kVector];
  Acc bias[kVector];
  gamma.read(at.channel, 1, weight);
  beta.read(at.channel, 0, bias);
  const int slots = slots_of(shape, tiling);
  const Moments<Acc>* const own =
      partial + at.n * tiling.splits.divisor() * slots + at.tile;
  const auto moments_of = [&](int group) { return own[group]; };
  const Normalization<T, TY, kVector, kFused> normalization(
      shape, at.channel, activation, weight, bias, moments_of);
  const int64_t step = static_cast<int64_t>(tiling.rows.divisor()) * shape.C;
  const int64_t offset = at.offset(shape);
  for_each_run_of_pixels<kBatch<T, kVector>>(
      pixels_of_thread(tiling, at), [&](int first, auto pixels) {
        constexpr int kPixels = decltype(pixels)::value;
        const int64_t from = offset + first * step;
        Vector<T, kVector> pixel[kPixels];
        load_pixels<Reuse::kStream>(X + from, step, pixel);
        normalization.write(pixel, X + from, Y + from, step);
      });
}

// -- backward ----------------------------------------------------------------

// Derivatives take registers: with vectors of eight channels, those of half as
// many blocks.
template <typename T, bool kFused>
constexpr int kBackwardBlocksPerMultiprocessor =
    kFused && sizeof(T) == 2 ? 2 : kBlocksPerMultiprocessor<T>;

// What ChannelMaps read of the channels from `channel` on.
template <typename T>
__device__ __forceinline__ auto parameters_at(
    const ParameterIn<T>& gamma,
    const ParameterIn<T>& beta,
    int channel) {
  return [=](auto& weight, auto& bias) {
    gamma.read(channel, 1, weight);
    beta.read(channel, 0, bias);
  };
}

// (mean, rstd) of sample n's groups.
template <typename T>
__device__ __forceinline__ auto moments_at(
    const Shape& shape,
    int64_t n,
    const ParameterIn<T>& mean,
    const ParameterIn<T>& rstd) {
  return [=, first = n * shape.G](int group) -> Pair<Accumulator<T>> {
    return {mean.at(first + group, 0), rstd.at(first + group, 1)};
  };
}

// sums[n][split][c] = (sum dZ xhat, sum dZ) over the split's pixels. Dynamic
// shared memory: fold_size() accumulators.
template <typename T, typename TY, int kVector, bool kFused>
__global__ void __launch_bounds__(
    kMaxThreads,
    (kBackwardBlocksPerMultiprocessor<T, kFused>))
    gradient_sums(
        Shape shape,
        Tiling tiling,
        const TY* dY,
        const T* X,
        ParameterIn<TY> mean_in,
        ParameterIn<TY> rstd_in,
        ParameterIn<TY> gamma, // kFused alone
        ParameterIn<TY> beta, // kFused alone
        Activation activation, // kFused alone
        Pair<Accumulator<T>>* sums) {
  using Acc = Accumulator<T>;
  const Position at =
      position_in_memory_order(shape, tiling, kVector, blockIdx.x);
  allow_next_kernel();
  wait_for_previous_kernel();
  Pair<Acc> of_thread[kVector] = {};
  if (at.active) {
    Acc mean[kVector];
    Acc rstd[kVector];
    const auto moments_of = moments_at(shape, at.n, mean_in, rstd_in);
    read_moments(shape, at.channel, moments_of, mean, rstd);
    const auto differentiation = differentiation_of<kFused, TY>(
        activation,
        ChannelMaps<TY, kVector>(
            mean, rstd, parameters_at(gamma, beta, at.channel)));
    const int64_t step = static_cast<int64_t>(tiling.rows.divisor()) * shape.C;
    const int64_t offset = at.offset(shape);
    GradientSums<T, TY, kVector> gradients;
    for_each_run_of_pixels<kBatchOfPairs<TY, kVector>>(
        pixels_of_thread(tiling, at), [&](int first, auto pixels) {
          const int64_t from = offset + first * step;
          Vector<TY, kVector> dy[decltype(pixels)::value];
          Vector<T, kVector> x[decltype(pixels)::value];
          load_pixels<Reuse::kKeep>(dY + from, step, dy);
          load_pixels<Reuse::kKeep>(X + from, step, x);
          differentiation.with([&](auto dZ_of) {
            Acc dZ[decltype(pixels)::value][kVector]; // not kept
            gradients.add(dy, x, mean, dZ_of, dZ);
          });
        });
    gradients.finish(rstd, of_thread);
  }

  unsigned char* const shared = dynamic_shared_memory();
  const int first_channel = at.tile * tiling.columns.divisor() * kVector;
  Pair<Acc>* const own = sums +
      (at.n * tiling.splits.divisor() + at.split) * shape.C + first_channel;
  fold_rows<TY>(
      tiling.columns,
      tiling.rows.divisor(),
      threadIdx.x,
      tiling.lanes_per_channel,
      of_thread,
      reinterpret_cast<Pair<Acc>*>(shared),
      [&](int channel, Pair<Acc> sum) {
        if (first_channel + channel < shape.C) {
          own[channel] = sum;
        }
      });
}

// Items that a thread of a team loads before it uses the first.
constexpr int kItemsAtOnce = 4;

// Walks the items of a [height, width] array in steps of `step` without a
// division per item.
struct Walk {
  int x;
  int y;
  int step_x;
  int step_y;
  int width;

  __device__ Walk(int first, int step, int width)
      : x(first % width),
        y(first / width),
        step_x(step % width),
        step_y(step / width),
        width(width) {}

  __device__ void next() {
    x += step_x;
    y += step_y;
    if (x >= width) {
      x -= width;
      ++y;
    }
  }
};

// coefficients[n][g] = s * (sum gamma dZ xhat, sum gamma dZ). One team for each
// (n, g).
template <typename T, bool kBlock>
__global__ void __launch_bounds__(kMaxThreads) group_coefficients(
    Shape shape,
    int lanes,
    int splits,
    const Pair<Accumulator<T>>* sums,
    ParameterIn<T> gamma,
    Pair<Accumulator<T>>* coefficients) {
  using Acc = Accumulator<T>;
  const Team<kBlock> team(lanes);
  const int64_t index = team.index();
  const bool idle = index >= shape.N * shape.G; // stays for the sums
  const int64_t n = idle ? 0 : index / shape.G;
  const int first =
      idle ? 0 : static_cast<int>(index % shape.G) * shape.D.divisor();
  const Pair<Acc>* const own = sums + n * splits * shape.C + first;

  wait_for_previous_kernel();
  Acc sum[2] = {0, 0}; // of gamma dZ xhat, gamma dZ
  const int64_t items = static_cast<int64_t>(splits) * shape.D.divisor();
  Walk walk(team.rank(), team.size(), shape.D.divisor());
  for (int64_t i = team.rank(); i < items; i += kItemsAtOnce * team.size()) {
    Pair<Acc> of_channel[kItemsAtOnce];
    Acc weight[kItemsAtOnce];
#pragma unroll
    for (int k = 0; k < kItemsAtOnce; ++k) {
      // No branch before the loads: all at once.
      const bool exists = i + k * team.size() < items;
      const int channel = exists ? walk.x : 0;
      const int64_t row = exists ? walk.y : 0;
      of_channel[k] = own[row * shape.C + channel];
      weight[k] = gamma.at(first + channel, 1);
      if (!exists) {
        of_channel[k] = {0, 0};
        weight[k] = 0;
      }
      walk.next();
    }
#pragma unroll
    for (int k = 0; k < kItemsAtOnce; ++k) {
      sum[0] += weight[k] * of_channel[k].first;
      sum[1] += weight[k] * of_channel[k].second;
    }
  }
  team.sum(sum);
  if (!idle && team.rank() == 0) {
    const Acc count = static_cast<Acc>(shape.HxW) * shape.D.divisor();
    coefficients[index] = {sum[0] / count, sum[1] / count};
  }
}

// dX = rstd gamma dZ - rstd^2 c_xhat (X - mean) - rstd c
template <typename T, typename TY, int kVector, bool kFused>
__global__ void __launch_bounds__(
    kMaxThreads,
    (kBackwardBlocksPerMultiprocessor<T, kFused>))
    input_gradient(
        Shape shape,
        Tiling tiling,
        const TY* dY,
        const T* X,
        ParameterIn<TY> mean_in,
        ParameterIn<TY> rstd_in,
        ParameterIn<TY> gamma,
        ParameterIn<TY> beta, // kFused alone
        Activation activation, // kFused alone
        const Pair<Accumulator<T>>* coefficients,
        T* dX) {
  using Acc = Accumulator<T>;
  const Position at = position_in_memory_order(
      shape, tiling, kVector, gridDim.x - 1 - blockIdx.x);
  wait_for_previous_kernel();
  if (!at.active) {
    return;
  }
  const auto moments_of = moments_at(shape, at.n, mean_in, rstd_in);
  Acc mean[kVector];
  Acc rstd[kVector];
  read_moments(shape, at.channel, moments_of, mean, rstd);
  const auto differentiation = differentiation_of<kFused, TY>(
      activation,
      ChannelMaps<TY, kVector>(
          mean, rstd, parameters_at(gamma, beta, at.channel)));
  Acc weight[kVector];
  gamma.read(at.channel, 1, weight);
  const InputGradient<T, TY, kVector> gradient(
      shape, at.channel, weight, moments_of, [&](int group) {
        return coefficients[at.n * shape.G + group];
      });
  const int64_t step = static_cast<int64_t>(tiling.rows.divisor()) * shape.C;
  const int64_t offset = at.offset(shape);
  for_each_run_of_pixels<kBatchOfPairs<TY, kVector>>(
      pixels_of_thread(tiling, at), [&](int first, auto pixels) {
        constexpr int kPixels = decltype(pixels)::value;
        const int64_t from = offset + first * step;
        Vector<TY, kVector> dy[kPixels];
        Vector<T, kVector> x[kPixels];
        load_pixels<Reuse::kStream>(dY + from, step, dy);
        load_pixels<Reuse::kStream>(X + from, step, x);
        T* out = dX + from;
#pragma unroll
        for (int i = 0; i < kPixels; ++i) {
          Vector<T, kVector> dx;
          differentiation.with(
              [&](auto dZ_of) { dx = gradient(dy[i], x[i], dZ_of); });
          store(out, dx);
          out += step;
        }
      });
}

} // namespace gn_override
