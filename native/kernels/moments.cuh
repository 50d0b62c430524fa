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

  // Adds kPixels pixels: with d = x - mean and n the count after them,
  //   mean += sum d / n,   M2 += sum d^2 - (sum d)^2 / n
  // which is Chan's formula for a batch that is centred on the mean so far. The
  // very first batch is centred on its first pixel.
  template <int kPixels>
  __device__ void add(const Vector<T, kVector> (&pixel)[kPixels]) {
    if (count == 0) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        (kFoldsMean<T> ? mean[j] : pivot[j]) = widen(pixel[0].channel[j]);
      }
    }
    count += kPixels;
    const Acc per_count = reciprocal(static_cast<Acc>(count));
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      Acc sum = 0;
      Acc square = 0;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        const Acc x = widen(pixel[i].channel[j]);
        const Acc d = (kFoldsMean<T> ? x : x - pivot[j]) - mean[j];
        sum += d;
        square += d * d;
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
struct Moments {
  Acc mean;
  Acc low;
  Acc second; // M2 of a part, rstd of a group
};

// (mean, M2) of parts with known counts, given a mean m that is right up to the
// rounding of sums: with d_i = m_i - m,
//   mean = m + sum n_i d_i / n
//   M2 = sum (M2_i + n_i d_i^2) - (sum n_i d_i)^2 / n
// The sum of deviations corrects m: equal parts give exactly their mean.
template <typename Acc>
struct DeviationSums {
  Acc of_mean = 0; // sum n_i d_i
  CompensatedSum<Acc> of_M2 = CompensatedSum<Acc>::zero();

  // A part of `pixels` pixels of `channels` channels. `of_mean` counts pixels
  // alone.
  __device__ void
  add(Moments<Acc> part, Acc pixels, Acc channels, Acc near_mean) {
    const Acc d = (part.mean - near_mean) + part.low;
    const Acc weighted = pixels * d;
    of_mean += weighted;
    of_M2.add(part.second + weighted * channels * d);
  }

  // Adds up those of several threads: sum(x) is the sum of their x.
  template <typename Sum>
  __device__ void reduce(Sum sum) {
    of_mean = sum(of_mean);
    of_M2 = {sum(of_M2.sum), sum(of_M2.lost)};
  }

  // `pixels` of all parts, each of `channels` channels.
  __device__ Moments<Acc> moments(Acc near_mean, Acc pixels, Acc channels)
      const {
    const Acc shift = of_mean / pixels;
    const Acc mean = near_mean + shift;
    return {
        mean,
        shift - (mean - near_mean),
        of_M2.value() - of_mean * channels * shift};
  }
};

// Y = (X - mean) * rstd * gamma + beta for a thread's channels.
template <typename T, int kVector>
struct Normalization {
  using Acc = Accumulator<T>;
  Acc mean[kVector]; // unused where it is folded into `shift`
  Acc scale[kVector];
  Acc shift[kVector];

  // moments_of(group) has rstd as its second.
  template <typename MomentsOf>
  __device__ Normalization(
      const Shape& shape,
      const Position& at,
      ParameterIn<T> gamma,
      ParameterIn<T> beta,
      MomentsOf moments_of) {
    gamma.read(at.channel, 1, scale);
    beta.read(at.channel, 0, shift);
    Moments<Acc> moment;
    for_each_channel<kVector>(
        shape,
        at.channel,
        [&](int group) { moment = moments_of(group); },
        [&](int j) {
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
    return narrow_all<T, kVector>(y);
  }
};

// Folds the moments of a block's threads into those of its tile's segments
// (what the tile and a group have in common) and calls emit(group, Moments)
// once for each. `shared` has room for fold_size() accumulators. All threads of
// the block must call.
template <typename T, int kVector, typename Emit>
__device__ __forceinline__ void fold_segments(
    const Shape& shape,
    const Tiling& tiling,
    const Position& at,
    ChannelMoments<T, kVector> moments,
    Accumulator<T>* shared,
    Emit emit) {
  using Acc = Accumulator<T>;
  const int merged = channels_of_one_group(shape.D.divisor(), kVector);
  moments.finish();
  moments.merge_neighbours(merged);
  // What follows calls `merged` channels one. Channel column * vector + j of
  // row r stands at [j][r][column]: no two lanes of a warp meet in a bank when
  // they write.
  const int vector = kVector / merged; // a power of two
  const int shift = __ffs(vector) - 1;
  const int merge_shift = __ffs(merged) - 1;
  const int D = shape.D.divisor() >> merge_shift;
  const int rows = tiling.rows.divisor();
  const int columns = tiling.columns.divisor();
  const int plane = rows * columns;
  Acc* const means = shared;
  Acc* const M2s = means + vector * plane;
  if (at.row < rows) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (j < vector) {
        means[j * plane + threadIdx.x] = moments.mean[j];
        M2s[j * plane + threadIdx.x] = moments.M2[j];
      }
    }
  }
  __syncthreads();

  const int tile_first = at.tile * columns * vector;
  const int tile_end =
      min(tile_first + columns * vector, shape.C >> merge_shift);
  const int first_group = shape.D.quotient(tile_first << merge_shift);
  const int segments =
      shape.D.quotient((tile_end << merge_shift) - 1) - first_group + 1;
  const PixelsOfRow row_pixels(tiling, at.pixels);
  const int lanes = tiling.lanes_per_segment;
  const int lane = threadIdx.x & (lanes - 1);
  const int lanes_shift = __ffs(lanes) - 1;
  const int segments_at_once = blockDim.x >> lanes_shift;
#pragma unroll 1
  for (int first = 0; first < segments; first += segments_at_once) {
    const int segment = first + (static_cast<int>(threadIdx.x) >> lanes_shift);
    // Lanes beyond the last segment fold it again: sums need whole warps.
    const int group = first_group + min(segment, segments - 1);
    const int begin = max(group * D, tile_first) - tile_first;
    const int end = min((group + 1) * D, tile_end) - tile_first;
    const int width = end - begin;
    const int items = width * rows;
    const auto index = [&](const Walk& walk) {
      const int channel = begin + walk.x;
      return (channel & (vector - 1)) * plane + walk.y * columns +
          (channel >> shift);
    };
    const auto pixels_of = [&](const Walk& walk) {
      return static_cast<Acc>(row_pixels.of(walk.y));
    };
    const Walk start(lane, lanes, width);

    const Acc count = static_cast<Acc>(at.pixels) * width;
    Acc sum = 0;
    Walk walk = start;
#pragma unroll 2
    for (int i = lane; i < items; i += lanes, walk.next()) {
      sum += pixels_of(walk) * means[index(walk)];
    }
    const Acc near_mean = sum_lanes(sum, lanes) / count;

    DeviationSums<Acc> deviations;
    walk = start;
#pragma unroll 2
    for (int i = lane; i < items; i += lanes, walk.next()) {
      const int at_item = index(walk);
      deviations.add(
          {means[at_item], 0, M2s[at_item]},
          pixels_of(walk),
          merged,
          near_mean);
    }
    deviations.reduce([&](Acc value) { return sum_lanes(value, lanes); });
    if (lane == 0 && segment < segments) {
      emit(group, deviations.moments(near_mean, count, merged));
    }
  }
}

} // namespace gn_override
