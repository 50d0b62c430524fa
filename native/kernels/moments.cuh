// Means and centred sums of squares of a tile, without cancellation.
//
// Variance is never E[x^2] - m^2: partial results are (mean, M2) with known
// counts, merged by Chan's formula,
//   delta = m_b - m_a, n = n_a + n_b,
//   m = m_a + delta n_b / n, M2 = M2_a + M2_b + delta^2 n_a n_b / n
// (Chan, Golub, LeVeque 1983), or, where all partials are at hand, by
//   m = sum n_i m_i / n, M2 = sum M2_i + n_i (m_i - m)^2
// See DeviationSums for how the last is computed.
#pragma once

#include "native/kernels/activation.cuh"
#include "native/kernels/reduce.cuh"
#include "native/kernels/tile.cuh"
#include "native/kernels/vector.cuh"
#include "native/plan/shared_memory.h"

namespace gn_override {

// The (mean, M2) of kVector channels over the pixels seen so far.
template <typename T, int kVector>
struct ChannelMoments {
  using Acc = Accumulator<T>;
  // Where the mean's own rounding would show in the result, `mean` is kept
  // relative to the first pixel until finish().
  Acc pivot[kVector] = {};
  Acc mean[kVector] = {};
  Acc M2[kVector] = {};
  int count = 0;

  // Adds the first `valid` of kPixels pixels: with d = x - mean and n the count
  // after them,
  //   mean += sum d / n,   M2 += sum d^2 - (sum d)^2 / n
  // which is Chan's formula for a batch that is centred on the mean so far. The
  // very first batch is centred on its first pixel.
  template <int kPixels>
  __device__ void add(
      const Vector<T, kVector> (&pixel)[kPixels],
      int valid = kPixels) {
    if (count == 0) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        (kFoldsMean<T> ? mean[j] : pivot[j]) = widen(pixel[0].channel[j]);
      }
    }
    count += valid;
    const Acc per_count = reciprocal(static_cast<Acc>(count));
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      Acc sum = 0;
      Acc square = 0;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        const Acc x = widen(pixel[i].channel[j]);
        const Acc d = (kFoldsMean<T> ? x : x - pivot[j]) - mean[j];
        if (i < valid) {
          sum += d;
          square += d * d;
        }
      }
      const Acc shift = sum * per_count;
      mean[j] += shift;
      M2[j] += square - sum * shift;
    }
  }

  __device__ void finish() {
    if constexpr (!kFoldsMean<T>) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        mean[j] += pivot[j];
      }
    }
  }

  // Makes each `merged` neighbouring channels, a power of two, one: the first
  // kVector / merged entries are left.
  __device__ void merge_neighbours(int merged) {
#pragma unroll
    for (int width = 1; width < kVector; width *= 2) {
      if (width < merged) {
#pragma unroll
        for (int j = 0; j < kVector / (2 * width); ++j) {
          const Acc delta = mean[2 * j + 1] - mean[2 * j];
          const Acc of_one = static_cast<Acc>(count) * width;
          M2[j] = M2[2 * j] + M2[2 * j + 1] + delta * delta * (of_one / 2);
          mean[j] = mean[2 * j] + delta / 2;
        }
      }
    }
  }
};

// The moments of a part of a group, or of a group. The mean is mean + low:
// `low` is what rounding takes from it, which shows where |mean| is far above
// the deviation.
template <typename Acc>
struct alignas(4 * sizeof(Acc)) Moments {
  Acc mean;
  Acc low;
  Acc second; // M2, or rstd of a group
  Acc count; // elements
};

// (mean, M2) of parts, given a mean m that is right up to the rounding of sums:
// with d_i = m_i - m,
//   mean = m + sum n_i d_i / n
//   M2 = sum (M2_i + n_i d_i^2) - (sum n_i d_i)^2 / n
// The sum of deviations corrects m: equal parts give exactly their mean.
template <typename Acc>
struct DeviationSums {
  Acc of_mean = 0; // sum n_i d_i
  CompensatedSum<Acc> of_M2 = CompensatedSum<Acc>::zero();

  __device__ void add(const Moments<Acc>& part, Acc near_mean) {
    const Acc d = (part.mean - near_mean) + part.low;
    const Acc weighted = part.count * d;
    of_mean += weighted;
    of_M2.add(part.second + weighted * d);
  }
};

// The moments of all of read(0), ..., read(parts - 1), of which this thread
// reads each `step`-th from `first` on, the first kHeld at once and once only;
// sum(x) makes the array x the sums over the threads that share them, and all
// of them get the result. No parts have a count of 0.
template <int kHeld, typename Acc, typename Read, typename Sum>
__device__ __forceinline__ Moments<Acc>
merge_moments(int first, int step, int parts, Read read, Sum sum) {
  Moments<Acc> held[kHeld] = {};
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (first + i * step < parts) {
      held[i] = read(first + i * step);
    }
  }
  Acc totals[2] = {0, 0}; // of n_i, n_i m_i
  const auto add = [&](const Moments<Acc>& part) {
    totals[0] += part.count;
    totals[1] += part.count * part.mean;
  };
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    add(held[i]);
  }
#pragma unroll 1
  for (int i = first + kHeld * step; i < parts; i += step) {
    add(read(i));
  }
  sum(totals);
  const Acc count = totals[0];
  const Acc per_count = count > 0 ? reciprocal(count) : 0;
  const Acc near_mean = totals[1] * per_count;

  DeviationSums<Acc> deviations;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    deviations.add(held[i], near_mean);
  }
#pragma unroll 1
  for (int i = first + kHeld * step; i < parts; i += step) {
    deviations.add(read(i), near_mean);
  }
  Acc sums[3] = {
      deviations.of_mean, deviations.of_M2.sum, deviations.of_M2.lost};
  sum(sums);
  const Acc shift = sums[0] * per_count;
  const Acc mean = near_mean + shift;
  const CompensatedSum<Acc> of_M2{sums[1], sums[2]};
  return {
      mean, shift - (mean - near_mean), of_M2.value() - sums[0] * shift, count};
}

// Y = activation((X - mean) * rstd * gamma + beta) for a thread's channels.
template <typename T, int kVector, bool kFused>
struct Normalization {
  using Acc = Accumulator<T>;
  Activation activation; // unused unless kFused
  Acc mean[kVector]; // unused where it is folded into `shift`
  Acc scale[kVector];
  Acc shift[kVector];

  // read(gamma, beta) fills in those of the thread's channels, which start at
  // `channel`; moments_of(group) has rstd as its second.
  template <typename Read, typename MomentsOf>
  __device__ Normalization(
      const Shape& shape,
      int channel,
      Activation activation,
      Read read,
      MomentsOf moments_of)
      : activation(activation) {
    read(scale, shift);
    for_each_channel<kVector>(
        shape, channel, moments_of, [&](int j, const Moments<Acc>& moment) {
          mean[j] = moment.mean;
          scale[j] *= moment.second;
          shift[j] -= (kFoldsMean<T> ? moment.mean : moment.low) * scale[j];
        });
  }

  __device__ Vector<T, kVector> operator()(const Vector<T, kVector>& x) const {
    Acc y[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const Acc centred =
          kFoldsMean<T> ? widen(x.channel[j]) : widen(x.channel[j]) - mean[j];
      y[j] = centred * scale[j] + shift[j];
    }
    if constexpr (kFused) {
      with_activation(activation, [&]<Activation kActivation>() {
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
          y[j] = activate<kActivation, T>(y[j]);
        }
      });
    }
    return narrow_all<T, kVector>(y);
  }
};

// Items that a lane holds while it folds a segment.
constexpr int kHeldItems = 4;

// Folds the moments of a block's threads into those of its tile's segments
// (what the tile and a group have in common): calls emit(group, part, Moments,
// lane) for each of a segment's parts, which are those of its warps, or one, on
// each of the lanes that folded it.
// `shared` has room for fold_size() accumulators. All threads of the block must
// call.
template <typename T, int kVector, typename Emit>
__device__ __forceinline__ void fold_segments(
    const Shape& shape,
    const Tiling& tiling,
    const Position& at,
    ChannelMoments<T, kVector> moments,
    Pair<Accumulator<T>>* shared,
    Emit emit) {
  using Acc = Accumulator<T>;
  const int merged = channels_of_one_group(shape.D.divisor(), kVector);
  moments.finish();
  moments.merge_neighbours(merged);
  // What follows calls `merged` channels one. Channels stand side by side, an
  // odd number of places long, so that few lanes meet in a bank.
  const int merge_shift = __ffs(merged) - 1;
  const int vector = kVector >> merge_shift;
  const int rows = tiling.rows.divisor();
  const int pitch = rows | 1;
  if (at.row < rows) {
    Pair<Acc>* slot = shared + at.column * vector * pitch + at.row;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (j < vector) {
        *slot = {moments.mean[j], moments.M2[j]};
        slot += pitch;
      }
    }
  }
  __syncthreads();

  const int D = shape.D.divisor() >> merge_shift;
  const int tile_width = tiling.columns.divisor() * vector;
  const int tile_first = at.tile * tile_width;
  const int tile_end = min(tile_first + tile_width, shape.C >> merge_shift);
  const int first_group = shape.D.quotient(tile_first << merge_shift);
  const int segments =
      shape.D.quotient((tile_end << merge_shift) - 1) - first_group + 1;
  const PixelsOfRow row_pixels(tiling, at.pixels);
  const int lanes = tiling.lanes_per_segment;
  for_each_run(segments, lanes, [&](int segment, int lane, bool exists) {
    const int group = first_group + segment;
    const int begin = max(group * D, tile_first) - tile_first;
    const int end = min((group + 1) * D, tile_end) - tile_first;
    const Moments<Acc> moment = merge_moments<kHeldItems, Acc>(
        lane,
        lanes,
        (end - begin) * rows,
        [&](int i) -> Moments<Acc> {
          const int channel = tiling.rows.quotient(i);
          const int row = i - channel * rows;
          const Pair<Acc> one = shared[(begin + channel) * pitch + row];
          return {
              one.first,
              0,
              one.second,
              static_cast<Acc>(row_pixels.of(row) << merge_shift)};
        },
        [&](auto& sums) { sum_lanes(sums, lanes); });
    if (exists) {
      emit(group, lane / kWarpSize, moment, lane % kWarpSize);
    }
  });
}

} // namespace gn_override
