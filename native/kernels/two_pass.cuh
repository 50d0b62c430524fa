// Group normalisation of [N, HxW, C] tensors that reads X twice.
//
//   forward   statistics -> combine_statistics -> normalize
//   backward  gradient_sums -> combine_sums -> input_gradient
//
// The first pass leaves a result for each segment, that is, what a tile and a
// group have in common. The segment of tile t and group g has slot t + g: going
// up the channels, each new segment has a new tile or a new group, so slots are
// unique, and a group's are consecutive.
//
// The second pass is a map. Like an elementwise kernel it has many short
// blocks, whose loads are under way while others store. While its pixels are on
// their way, a block prepares what it needs of each channel.
//
// The first pass goes through all samples at the same time, each from its first
// pixel to its last. What it has read last may still be in the L2 cache, so the
// second goes the other way.
#pragma once

#include "native/kernels/activation.cuh"
#include "native/kernels/gradients.cuh"
#include "native/kernels/hardware.cuh"
#include "native/kernels/moments.cuh"
#include "native/kernels/slab.cuh"

namespace gn_override {

// A block of the first pass: the splits of a sample take turns at its pixels,
// `rows` at a time.
__device__ __forceinline__ Position position_in_turns(
    const Shape& shape,
    const Tiling& tiling,
    int vector,
    int block) {
  Position at = position_in_memory_order(shape, tiling, vector, block);
  const int rows = tiling.rows.divisor();
  const int64_t turn = rows * tiling.splits.divisor();
  const int left = static_cast<int>(shape.HxW - tiling.turns * turn);
  at.first_pixel = at.split * rows;
  at.pixels = tiling.turns * rows + min(max(left - at.split * rows, 0), rows);
  return at;
}

// From a thread's pixel to its next in the first pass.
__device__ __forceinline__ int64_t
step_of_turns(const Shape& shape, const Tiling& tiling) {
  return static_cast<int64_t>(tiling.rows.divisor()) * tiling.splits.divisor() *
      shape.C;
}

// Samples that the second pass goes through at the same time, at most: more are
// so far apart that reading and writing takes longer, and it takes one by one.
constexpr int kSamplesInTurns = 16;

// A block of the second pass.
__device__ __forceinline__ Position
position_in_map(const Shape& shape, const Tiling& tiling, int vector) {
  const int block = gridDim.x - 1 - blockIdx.x;
  if (shape.N > kSamplesInTurns) {
    return position_in_memory_order(shape, tiling, vector, block);
  }
  const int samples = static_cast<int>(shape.N);
  const int rest = tiling.column_tiles.quotient(block);
  const int split = rest / samples;
  return Position(
      shape,
      tiling,
      vector,
      rest - split * samples,
      split,
      block - rest * tiling.column_tiles.divisor());
}

// The results of the first pass that sample n's group has: of each split those
// of some consecutive slots.
struct SegmentsOfGroup {
  int64_t first;
  int slots; // of a split
  int tiles; // that have a segment of the group
  int count; // of all splits

  __device__ SegmentsOfGroup(
      const Shape& shape,
      const Tiling& tiling,
      int vector,
      int64_t n,
      int group) {
    const int tile_width = tiling.columns.divisor() * vector;
    const int channel = group * shape.D.divisor();
    const int first_tile = channel / tile_width;
    tiles = (channel + shape.D.divisor() - 1) / tile_width - first_tile + 1;
    slots = shape.G + tiling.column_tiles.divisor() - 1;
    first = n * tiling.splits.divisor() * slots + first_tile + group;
    count = tiles * tiling.splits.divisor();
  }

  __device__ int64_t operator[](int i) const {
    const int split = i / tiles;
    return first + static_cast<int64_t>(split) * slots + i - split * tiles;
  }
};

// Slot 0 of a block's segments, those of tile t of group 0.
__device__ __forceinline__ int64_t
first_slot(const Shape& shape, const Tiling& tiling, const Position& at) {
  const int slots = shape.G + tiling.column_tiles.divisor() - 1;
  return (at.n * tiling.splits.divisor() + at.split) * slots + at.tile;
}

// Channels of a block at most, but of one of the forward statistics.
template <typename T>
constexpr int kMapChannels = kTwoPassSlice / sizeof(T);

// Calls f(channel, parameter_place()) for each channel of the block's tile, on
// one of its threads.
template <int kVector, typename F>
__device__ __forceinline__ void for_each_of_tile(
    const Shape& shape,
    const Tiling& tiling,
    const Position& at,
    F f) {
  const int columns = tiling.columns.divisor();
  const int first = at.tile * columns * kVector;
  const int channels = min(columns * kVector, shape.C - first);
#pragma unroll 1
  for (int i = threadIdx.x; i < channels; i += blockDim.x) {
    f(first + i, parameter_place<kVector>(tiling, i));
  }
}

// Whether a thread of the second pass may have more pixels than it loads at
// first.
template <typename T, int kVector>
constexpr bool kWalksOn = sizeof(T) * kVector == kWalkedBytes;

// -- forward -----------------------------------------------------------------

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
  const Position at = position_in_turns(shape, tiling, kVector, blockIdx.x);

  allow_next_kernel();
  wait_for_previous_kernel();
  ChannelMoments<T, TY, kVector> moments;
  if (at.active) {
    const int64_t step = step_of_turns(shape, tiling);
    const T* const address = X + at.offset(shape);
    for_each_run_of_pixels<kBatch<T, kVector>>(
        pixels_of_thread(tiling, at), [&](int first, auto pixels) {
          Vector<T, kVector> pixel[decltype(pixels)::value];
          load_pixels(address + first * step, step, pixel);
          moments.add(pixel);
        });
  }

  unsigned char* const shared = dynamic_shared_memory();
  Moments<Acc>* const own = partial + first_slot(shape, tiling, at);
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

// of_groups[n][g]: the moments, with rstd; mean and rstd are rounded. One team
// (see Team) for each (n, g).
template <typename T, bool kBlock>
__global__ void __launch_bounds__(kMaxThreads) combine_statistics(
    Shape shape,
    Tiling tiling,
    int lanes,
    int vector,
    Accumulator<T> eps,
    const Moments<Accumulator<T>>* partial,
    Moments<Accumulator<T>>* of_groups,
    ParameterOut<T> mean_out,
    ParameterOut<T> rstd_out) {
  using Acc = Accumulator<T>;
  const Team<kBlock> team(lanes);
  const int64_t last_index = shape.N * shape.G - 1;
  const bool idle = team.index() > last_index; // stays for the sums
  const int64_t index = idle ? last_index : team.index();
  const int64_t n = index / shape.G;
  const int group = static_cast<int>(index % shape.G);
  const SegmentsOfGroup segments(shape, tiling, vector, n, group);
  const Acc per_group =
      1 / (static_cast<Acc>(shape.HxW) * static_cast<Acc>(shape.D.divisor()));

  allow_next_kernel();
  wait_for_previous_kernel();
  Moments<Acc> of_group = merge_moments<T, 1, Acc>(
      team.rank(),
      team.size(),
      segments.count,
      [&](int i) { return partial[segments[i]]; },
      [&] { return partial[segments.first].mean; },
      true,
      [&](auto& sums) { team.sum(sums); },
      &per_group);
  of_group.second = reciprocal_sqrt(of_group.second * per_group + eps);

  if (!idle && team.rank() == 0) {
    of_groups[index] = of_group;
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
        const Moments<Accumulator<T>>* of_groups,
        ParameterIn<TY> gamma,
        ParameterIn<TY> beta,
        Activation activation, // kFused alone
        TY* Y) {
  using Acc = Accumulator<T>;
  const Position at = position_in_map(shape, tiling, kVector);
  wait_for_previous_kernel();
  constexpr int kPixels = kBatch<T, kVector>;
  const int pixels = pixels_of_thread(tiling, at);
  const int64_t step = static_cast<int64_t>(tiling.rows.divisor()) * shape.C;
  const int64_t from = at.offset(shape);
  Vector<T, kVector> pixel[kPixels];
  load_pixels(X + from, step, pixel, pixels);

  __shared__ ForwardMap<TY, Acc> maps[kMapChannels<T>];
  const Acc unit = kFused ? unit_of<TY>(activation) : 1; // kFused alone
  for_each_of_tile<kVector>(shape, tiling, at, [&](int channel, int place) {
    const auto raw_weight = gamma.fetch(channel); // all loads at once
    const auto raw_bias = beta.fetch(channel);
    const Moments<Acc> moment =
        of_groups[at.n * shape.G + shape.D.quotient(channel)];
    Acc weight = gamma.value_of(raw_weight, 1);
    Acc bias = beta.value_of(raw_bias, 0);
    weight *= unit; // kFused alone
    bias *= unit; // kFused alone
    maps[place] = forward_map<TY>(weight, bias, moment);
  });
  __syncthreads();
  if (pixels == 0) {
    return;
  }
  Normalization<T, TY, kVector, kFused> normalization(
      [&](int j) { return maps[j * tiling.columns.divisor() + at.column]; });
  normalization.activation = activation; // kFused alone
  normalization.write(pixel, X + from, Y + from, step, pixels);
  if constexpr (kWalksOn<T, kVector>) {
    const auto walk_on = [&](int first, auto count) {
      const int64_t at_first = from + first * step;
      Vector<T, kVector> next[decltype(count)::value];
      load_pixels(X + at_first, step, next);
      normalization.write(next, X + at_first, Y + at_first, step);
    };
    for_each_run_of_pixels<kPixels>(pixels, walk_on, kPixels);
  }
}

// -- backward ----------------------------------------------------------------

// Derivatives take registers: with X of two bytes, those of half as many
// blocks.
template <typename T, bool kFused>
constexpr int kBackwardBlocksPerMultiprocessor =
    kFused && sizeof(T) == 2 ? 2 : kBlocksPerMultiprocessor<T>;
// Pixels that a thread of the second pass has at once: more where each takes
// longer.
template <typename TY, int kVector, bool kFused>
constexpr int kMappedPairs =
    kFused && sizeof(TY) == 2 ? kBatch<TY, kVector>
                              : kBatchOfPairs<TY, kVector>;

// The maps X -> Z of a thread's channels, `step` places apart.
template <typename Acc>
struct SharedMaps {
  const Pair<Acc>* own;
  int step;

  __device__ Pair<Acc> operator()(int j) const {
    return own[j * step];
  }
};

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

// of_channels[n][split][c] = (sum dZ xhat, sum dZ) over the split's pixels;
// of_segments[n][split][slot] is the sum of gamma times that over a segment's
// channels. Dynamic shared memory: fold_size() accumulators.
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
        ParameterIn<TY> gamma,
        ParameterIn<TY> beta, // kFused alone
        Activation activation, // kFused alone
        Pair<Accumulator<T>>* of_channels,
        Pair<Accumulator<T>>* of_segments) {
  using Acc = Accumulator<T>;
  const Position at = position_in_turns(shape, tiling, kVector, blockIdx.x);
  const int tile_width = tiling.columns.divisor() * kVector;
  const int first_channel = at.tile * tile_width;
  const int channels = min(tile_width, shape.C - first_channel);
  ParameterCopy<TY> gammas(gamma, 1, channels);
  allow_next_kernel();
  wait_for_previous_kernel();
  gammas.fetch(first_channel);
  constexpr int kForwardMaps = kFused ? kMapChannels<T> : 1; // kFused alone
  __shared__ Pair<Acc> forward_maps[kForwardMaps]; // kFused alone
  if constexpr (kFused) {
    for_each_of_tile<kVector>(shape, tiling, at, [&](int channel, int place) {
      const auto raw_weight = gamma.fetch(channel); // all loads at once
      const auto raw_bias = beta.fetch(channel);
      const int64_t group = at.n * shape.G + shape.D.quotient(channel);
      const auto raw_mean = mean_in.fetch(group);
      const auto raw_rstd = rstd_in.fetch(group);
      forward_maps[place] = channel_map<TY>(
          mean_in.value_of(raw_mean, 0),
          rstd_in.value_of(raw_rstd, 1),
          gamma.value_of(raw_weight, 1),
          beta.value_of(raw_bias, 0));
    });
    __syncthreads();
  }
  Acc mean[kVector];
  Acc rstd[kVector];
  if (at.active) {
    const auto moments_of = moments_at(shape, at.n, mean_in, rstd_in);
    read_moments(shape, at.channel, moments_of, mean, rstd);
  }
  __shared__ Acc weights[kMapChannels<T>];
  gammas.store([&](int c, Acc weight) { weights[c] = weight; });
  Pair<Acc> of_thread[kVector] = {};
  if (at.active) {
    const auto differentiation = differentiation_of<kFused, TY>(
        activation,
        SharedMaps<Acc>{forward_maps + at.column, tiling.columns.divisor()});
    const int64_t step = step_of_turns(shape, tiling);
    const int64_t offset = at.offset(shape);
    GradientSums<T, TY, kVector> gradients;
    for_each_run_of_pixels<kBatchOfPairs<TY, kVector>>(
        pixels_of_thread(tiling, at), [&](int first, auto pixels) {
          const int64_t from = offset + first * step;
          Vector<TY, kVector> dy[decltype(pixels)::value];
          Vector<T, kVector> x[decltype(pixels)::value];
          load_pixels(dY + from, step, dy);
          load_pixels(X + from, step, x);
          differentiation.with([&](auto dZ_of) {
            Acc dZ[decltype(pixels)::value][kVector]; // not kept
            gradients.add(dy, x, mean, dZ_of, dZ);
          });
        });
    gradients.finish(rstd, of_thread);
  }

  __shared__ Pair<Acc> weighted[kMapChannels<T>];
  Pair<Acc>* const own = of_channels +
      (at.n * tiling.splits.divisor() + at.split) * shape.C + first_channel;
  fold_rows<TY>(
      tiling.columns,
      tiling.rows.divisor(),
      threadIdx.x,
      tiling.lanes_per_channel,
      of_thread,
      reinterpret_cast<Pair<Acc>*>(dynamic_shared_memory()),
      [&](int c, Pair<Acc> sum) {
        if (c < channels) {
          own[c] = sum;
          weighted[c] = {weights[c] * sum.first, weights[c] * sum.second};
        }
      });
  __syncthreads();

  const int first_group = shape.D.quotient(first_channel);
  const int last_group = shape.D.quotient(first_channel + channels - 1);
  const Runs runs(tiling.lanes_per_segment);
  runs.deal(last_group - first_group + 1, [&](int i, int lane, bool exists) {
    const int group = first_group + i;
    const int begin = max(group * shape.D.divisor() - first_channel, 0);
    const int end =
        min((group + 1) * shape.D.divisor() - first_channel, channels);
    Acc sum[2] = {0, 0};
    for (int c = begin + lane; c < end; c += runs.lanes) {
      sum[0] += weighted[c].first;
      sum[1] += weighted[c].second;
    }
    sum_lanes(sum, runs.lanes);
    if (lane == 0 && exists) {
      of_segments[first_slot(shape, tiling, at) + group] = {sum[0], sum[1]};
    }
  });
}

// of_groups[n][g], by one team for each (n, g) in the first `team_blocks`
// blocks; dgamma and dbeta, by a block for each kParameterChannels channels. T:
// that of X.
template <typename T, typename TY, bool kBlock>
__global__ void __launch_bounds__(kMaxThreads) combine_sums(
    Shape shape,
    Tiling tiling,
    int lanes,
    int vector,
    unsigned team_blocks,
    const Pair<Accumulator<T>>* of_channels,
    const Pair<Accumulator<T>>* of_segments,
    ParameterIn<TY> mean_in,
    ParameterIn<TY> rstd_in,
    GradientOfGroup<Accumulator<T>>* of_groups,
    ParameterOut<TY> dgamma,
    ParameterOut<TY> dbeta) {
  using Acc = Accumulator<T>;
  allow_next_kernel();
  if (blockIdx.x >= team_blocks) {
    wait_for_previous_kernel();
    __shared__ CompensatedSum<Acc> of_threads[2 * kMaxThreads];
    sum_parameter_gradients<TY>(
        shape.C,
        shape.N * tiling.splits.divisor(),
        kMaxThreads / kParameterChannels,
        (blockIdx.x - team_blocks) * kParameterChannels,
        of_channels,
        of_threads,
        dgamma,
        dbeta);
    return;
  }
  const Team<kBlock> team(lanes);
  const int64_t last_index = shape.N * shape.G - 1;
  const bool idle = team.index() > last_index; // stays for the sums
  const int64_t index = idle ? last_index : team.index();
  const int64_t n = index / shape.G;
  const int group = static_cast<int>(index % shape.G);
  const SegmentsOfGroup segments(shape, tiling, vector, n, group);

  wait_for_previous_kernel();
  Acc sum[2] = {0, 0}; // of gamma dZ xhat, gamma dZ
#pragma unroll 4
  for (int i = team.rank(); i < segments.count; i += team.size()) {
    const Pair<Acc> of_segment = of_segments[segments[i]];
    sum[0] += of_segment.first;
    sum[1] += of_segment.second;
  }
  team.sum(sum);
  if (!idle && team.rank() == 0) {
    const Acc count = static_cast<Acc>(shape.HxW) * shape.D.divisor();
    of_groups[index] = gradient_of_group<T, Acc>(
        {mean_in.at(index, 0), rstd_in.at(index, 1)},
        {sum[0] / count, sum[1] / count});
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
        const GradientOfGroup<Accumulator<T>>* of_groups,
        ParameterIn<TY> gamma,
        ParameterIn<TY> beta, // kFused alone
        Activation activation, // kFused alone
        T* dX) {
  using Acc = Accumulator<T>;
  const Position at = position_in_map(shape, tiling, kVector);
  wait_for_previous_kernel();
  constexpr int kPixels = kMappedPairs<TY, kVector, kFused>;
  const int pixels = pixels_of_thread(tiling, at);
  const int64_t step = static_cast<int64_t>(tiling.rows.divisor()) * shape.C;
  const int64_t from = at.offset(shape);
  Vector<TY, kVector> dy[kPixels];
  Vector<T, kVector> x[kPixels];
  load_pixels(dY + from, step, dy, pixels);
  load_pixels(X + from, step, x, pixels);

  __shared__ BackwardMap<Acc> maps[kMapChannels<T>];
  constexpr int kForwardMaps = kFused ? kMapChannels<T> : 1; // kFused alone
  __shared__ Pair<Acc> forward_maps[kForwardMaps]; // kFused alone
  for_each_of_tile<kVector>(shape, tiling, at, [&](int channel, int place) {
    const auto raw_weight = gamma.fetch(channel); // all loads at once
    const auto raw_bias = beta.fetch(channel); // kFused alone
    const GradientOfGroup<Acc> of_group =
        of_groups[at.n * shape.G + shape.D.quotient(channel)];
    const Acc weight = gamma.value_of(raw_weight, 1);
    maps[place] = backward_map(weight, of_group);
    if constexpr (kFused) {
      const Acc bias = beta.value_of(raw_bias, 0);
      forward_maps[place] =
          channel_map<TY>(of_group.mean, of_group.rstd, weight, bias);
    }
  });
  __syncthreads();
  if (pixels == 0) {
    return;
  }
  const auto place_of = [&](int j) {
    return j * tiling.columns.divisor() + at.column;
  };
  const InputGradient<T, TY, kVector> gradient(
      [&](int j) { return maps[place_of(j)]; });
  const auto differentiation = differentiation_of<kFused, TY>(
      activation,
      SharedMaps<Acc>{forward_maps + at.column, tiling.columns.divisor()});
  const auto write = [&](const auto& dy, const auto& x, T* out, int count) {
    constexpr int kMost = std::extent_v<std::remove_reference_t<decltype(x)>>;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      if (i < count) {
        Vector<T, kVector> dx;
        differentiation.with(
            [&](auto dZ_of) { dx = gradient(dy[i], x[i], dZ_of); });
        store(out + i * step, dx);
      }
    }
  };
  write(dy, x, dX + from, pixels);
  if constexpr (kWalksOn<T, kVector>) {
    const auto walk_on = [&](int first, auto count) {
      constexpr int kCount = decltype(count)::value;
      const int64_t at_first = from + first * step;
      Vector<TY, kVector> next_dy[kCount];
      Vector<T, kVector> next_x[kCount];
      load_pixels(dY + at_first, step, next_dy);
      load_pixels(X + at_first, step, next_x);
      write(next_dy, next_x, dX + at_first, kCount);
    };
    for_each_run_of_pixels<kPixels>(pixels, walk_on, kPixels);
  }
}

} // namespace gn_override
