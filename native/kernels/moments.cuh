// Means and centred sums of squares of a tile, without cancellation.
//
// Variance is never E[x^2] - m^2: a thread's squares are of deviations from a
// pivot among its first pixels; partial results are (mean, M2) with known
// counts, merged by Chan's formula,
//   delta = m_b - m_a, n = n_a + n_b,
//   m = m_a + delta n_b / n, M2 = M2_a + M2_b + delta^2 n_a n_b / n
// (Chan, Golub, LeVeque 1983), or, where all partials are at hand, by sums of
// deviations from a value near their mean: see merge_moments().
#pragma once

#include "native/kernels/activation.cuh"
#include "native/kernels/reduce.cuh"
#include "native/kernels/tile.cuh"
#include "native/kernels/vector.cuh"
#include "native/plan/shared_memory.h"

namespace gn_override {

// With a step of Newton's method: means of float show the last place.
template <typename Acc>
__device__ __forceinline__ Acc reciprocal_or_zero(Acc count) {
  const Acc result = reciprocal(count);
  return count > 0 ? result + result * (1 - count * result) : 0;
}

// all - of_mean, sum d^2 less (sum d)^2 / n, which is at most as large. Where
// squares overflow, the variance is infinite.
template <typename Acc>
__device__ __forceinline__ Acc centred(Acc all, Acc of_mean) {
  return isinf(all) ? all : all - of_mean;
}

// The moments of kVector channels over the pixels seen so far: sums of
// deviations from a pivot, of their squares, and after finish() the (mean, M2).
// The pivot is the first batch's mean or, for two-byte results, the first
// pixel. It is of the pixels that it stands for: if they are n, it is within
// sqrt(n) deviations of their mean, so little cancels. The sums are compensated
// where results show that it is some deviations off.
template <typename T, typename TY, int kVector>
struct ChannelMoments {
  using Acc = Accumulator<T>;
  Acc pivot[kVector] = {};
  Total<T, Acc> of_d[kVector] = {}; // sum d, where d = x - pivot
  Total<T, Acc> of_square[kVector] = {}; // sum d^2
  int count = 0;
  Acc mean[kVector]; // after finish(), and M2
  Acc M2[kVector];

  // Sums a batch before it joins the total: fewer additions at the total's
  // magnitude, so less rounding.
  template <int kPixels>
  __device__ void add(const Vector<T, kVector> (&pixel)[kPixels]) {
    if (count == 0) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const Acc first = pixel[0][j];
        Acc sum = 0;
        if constexpr (sizeof(TY) > 2) { // else rounding hides what is gained
#pragma unroll
          for (int i = 1; i < kPixels; ++i) {
            sum += pixel[i][j] - first;
          }
        }
        pivot[j] = first + sum / kPixels;
      }
    }
    count += kPixels;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      Acc sum = pixel[0][j] - pivot[j];
      Acc square = sum * sum;
#pragma unroll
      for (int i = 1; i < kPixels; ++i) {
        const Acc d = pixel[i][j] - pivot[j];
        sum += d;
        square += d * d;
      }
      of_d[j].add(sum);
      of_square[j].add(square);
    }
  }

  // Adds values of the channels to all pixels so far.
  __device__ void move(const Vector<T, kVector>& added) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      pivot[j] += added[j];
    }
  }

  // mean = pivot + sum d / n, M2 = sum d^2 - (sum d)^2 / n
  __device__ void finish() {
    const Acc per_count = reciprocal_or_zero(static_cast<Acc>(count));
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const Acc sum = of_d[j].value();
      const Acc shift = sum * per_count;
      M2[j] = centred(of_square[j].value(), sum * shift);
      mean[j] = pivot[j] + shift;
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
struct alignas(16) Moments {
  Acc mean;
  Acc second; // M2, or rstd of a group
  Acc low;
  Acc count; // elements
};
static_assert(sizeof(Moments<float>) == kMomentsSize * sizeof(float));
static_assert(sizeof(Pair<float>) == kPairSize * sizeof(float));

// Sums over parts, of deviations d_i = m_i - m from a value m: from these,
//   mean = m + sum n_i d_i / n
//   M2 = sum (M2_i + n_i d_i^2) - (sum n_i d_i)^2 / n
// Equal parts give exactly their mean.
template <typename TY, typename Acc>
struct DeviationSums {
  Acc of_mean = 0; // sum n_i d_i
  Total<TY, Acc> of_M2 = Total<TY, Acc>::zero();

  __device__ void add(const Moments<Acc>& part, Acc near_mean) {
    const Acc d = (part.mean - near_mean) + part.low;
    const Acc weighted = part.count * d;
    of_mean += weighted;
    of_M2.add(part.second + weighted * d);
  }
};

// The mean of so many parts is within about a fifth, 1 / sqrt(32), of their
// deviation from the mean of all.
constexpr int kSampledParts = 32;
// A part of so many elements is near enough for float statistics that only a
// backward pass reads, that of two-byte results with an activation.
constexpr int kFewElements = 16;

// The moments of all of read(0), ..., read(parts - 1), of which this thread
// reads each `step`-th from `first` on, the first kHeld at once and once only;
// sum(x) makes the array or compensated sum x what the threads that share it
// add up to, and all of them get the result. near() is the mean of one of the
// parts, for all of these threads the same. per_count, unless it is null: 1 /
// the elements, which the result does not count then.
//
// Deviations are from near(), which is within sqrt(parts) of them if the parts
// are of a size: M2 may lose `parts` units in the last place of an accumulator,
// and the mean a few, which two-byte results do not show. If `refined`, they
// are from the mean of kSampledParts or more, unless these have no pixels.
template <
    typename TY,
    int kHeld,
    typename Acc,
    typename Read,
    typename Near,
    typename Sum>
__device__ __forceinline__ Moments<Acc> merge_moments(
    int first,
    int step,
    int parts,
    Read read,
    Near near,
    bool refined,
    Sum sum,
    const Acc* per_count = nullptr) {
  Moments<Acc> held[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int part = first + i * step;
    held[i] = read(min(part, parts - 1)); // no branch: all reads at once
    if (part >= parts) {
      held[i].second = 0;
      held[i].count = 0;
    }
  }
  // Of the first `count` parts, and of all that are held.
  const auto for_each_of = [&](int count, auto add) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      add(held[i]);
    }
#pragma unroll 1
    for (int i = first + kHeld * step; i < count; i += step) {
      add(read(i));
    }
  };
  Acc near_mean = near();
  if (refined) {
    Acc totals[2] = {0, 0}; // of n_i (m_i - near), n_i
    for_each_of(min(parts, kSampledParts), [&](const Moments<Acc>& part) {
      totals[0] += part.count * (part.mean - near_mean);
      totals[1] += part.count;
    });
    sum(totals);
    near_mean += totals[0] * reciprocal_or_zero(totals[1]);
  }

  struct {
    DeviationSums<TY, Acc> deviations;
    Acc count = 0;
  } totals;
  for_each_of(parts, [&](const Moments<Acc>& part) {
    totals.deviations.add(part, near_mean);
    totals.count += part.count;
  });
  if constexpr (sizeof(TY) == sizeof(Acc)) {
    Acc plain[2] = {totals.deviations.of_mean, totals.count};
    sum(plain);
    totals.deviations.of_mean = plain[0];
    totals.count = plain[1];
    sum(totals.deviations.of_M2);
  } else if (per_count == nullptr) {
    sum_members<Acc>(totals, sum);
  } else {
    sum_members<Acc>(totals.deviations, sum);
  }
  const Acc of_mean = totals.deviations.of_mean;
  const Acc shift = of_mean *
      (per_count == nullptr ? reciprocal_or_zero(totals.count) : *per_count);
  const Acc mean = near_mean + shift;
  return {
      mean,
      centred(totals.deviations.of_M2.value(), of_mean * shift),
      shift - (mean - near_mean),
      totals.count};
}

// What makes Y, or Z, of a channel's X: X scale + shift where the mean is
// folded into `shift`, else (X - mean) scale + shift.
template <typename Acc>
struct alignas(2 * sizeof(Acc)) FoldedMap {
  Acc scale;
  Acc shift;
};
template <typename Acc>
struct alignas(4 * sizeof(Acc)) CentredMap {
  Acc scale;
  Acc shift;
  Acc mean;
};
template <typename TY, typename Acc>
using ForwardMap =
    std::conditional_t<kFoldsMean<TY>, FoldedMap<Acc>, CentredMap<Acc>>;

// moment: that of the channel's group, with rstd as its second.
template <typename TY, typename Acc>
__device__ __forceinline__ ForwardMap<TY, Acc>
forward_map(Acc gamma, Acc beta, const Moments<Acc>& moment) {
  const Acc scale = gamma * moment.second;
  if constexpr (kFoldsMean<TY>) {
    return {scale, beta - moment.mean * scale};
  } else {
    return {scale, beta - moment.low * scale, moment.mean};
  }
}

// Y = (X - mean) * rstd * gamma + beta for a thread's channels.
// kFused: an activation of that; kSharing: see invert().
template <typename T, typename TY, int kVector, bool kFused, int kSharing = 1>
struct Normalization {
  using Acc = Accumulator<T>;
  using Map = ForwardMap<TY, Acc>;
  Activation activation; // kFused alone
  Acc mean[kVector]; // unused where it is folded into `shift`
  Acc scale[kVector];
  Acc shift[kVector];

  // gamma and beta are those of the thread's channels, which start at
  // `channel`; moments_of(group) has rstd as its second.
  template <typename MomentsOf>
  __device__ Normalization(
      const Shape& shape,
      int channel,
      Activation activation, // kFused alone
      const Acc (&gamma)[kVector],
      const Acc (&beta)[kVector],
      MomentsOf moments_of) {
    this->activation = activation; // kFused alone
    for_each_channel<kVector>(
        shape, channel, moments_of, [&](int j, const Moments<Acc>& moment) {
          set(j, gamma[j], beta[j], moment);
        });
  }

  // For channels of one group.
  __device__ Normalization(
      Activation activation, // kFused alone
      const Acc (&gamma)[kVector],
      const Acc (&beta)[kVector],
      const Moments<Acc>& moment) {
    this->activation = activation; // kFused alone
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      set(j, gamma[j], beta[j], moment);
    }
  }

  // map_of(j) is that of the thread's j-th channel.
  template <typename MapOf>
  __device__ explicit Normalization(MapOf map_of) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      set(j, map_of(j));
    }
  }

  __device__ void set(int j, Acc gamma, Acc beta, const Moments<Acc>& moment) {
    const Acc unit = kFused ? unit_of<TY>(activation) : 1; // kFused alone
    gamma *= unit; // kFused alone
    beta *= unit; // kFused alone
    set(j, forward_map<TY>(gamma, beta, moment));
  }

  __device__ void set(int j, const Map& map) {
    scale[j] = map.scale;
    shift[j] = map.shift;
    if constexpr (!kFoldsMean<TY>) {
      mean[j] = map.mean;
    }
  }

  // Makes the map take X where it took X + added.
  __device__ void move(const Vector<T, kVector>& added) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if constexpr (kFoldsMean<TY>) {
        shift[j] += added[j] * scale[j];
      } else {
        mean[j] -= added[j];
      }
    }
  }

  // Writes Y of those of a thread's pixels whose i rows < pixels: the first at
  // Y, the others each `step` farther. Pixel: a vector, or its bytes.
  template <typename Pixel, int kPixels>
  __device__ void write(
      const Pixel (&pixel)[kPixels],
      const T* X, // kFused alone
      TY* Y,
      int64_t step,
      int pixels = kPixels,
      int rows = 1) const {
    const auto write_all = [&](auto map) {
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        if (i * rows < pixels) {
          store(Y + i * step, map(unpack<T, kVector>(pixel[i])));
        }
      }
    };
    if constexpr (!kFused) {
      write_all([&](const auto& x) {
        Acc y[kVector];
        normalize(x, y);
        return narrow_all<TY, kVector>(y);
      });
    } else { // once for all pixels, as activations are branches
      with_activation(activation, [&]<Activation kActivation>() {
        bool in_range = true;
        write_all([&](const auto& x) {
          return map<kActivation, kSharing>(x, in_range);
        });
        if constexpr (kSharing > 1 && kIsShortSilu<kActivation, TY>) {
          if (!in_range) { // seldom: what was read above need not be kept
#pragma unroll 1
            for (int i = 0; i * rows < pixels; ++i) {
              Vector<T, kVector> x[1];
              load_pixels(X + i * step, step, x);
              store(Y + i * step, map<kActivation, 1>(x[0], in_range));
            }
          }
        }
      });
    }
  }

 private:
  __device__ void normalize(const Vector<T, kVector>& x, Acc (&z)[kVector])
      const {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const Acc operand = kFoldsMean<TY> ? x[j] : x[j] - mean[j];
      z[j] = operand * scale[j] + shift[j];
    }
  }

  template <Activation kActivation, int kShared>
  __device__ Vector<TY, kVector> map(
      const Vector<T, kVector>& x,
      bool& in_range) const {
    Acc y[kVector];
    normalize(x, y);
    in_range &= activate<kActivation, TY, kShared>(y);
    return narrow_all<TY, kVector>(y);
  }
};

// Folds the moments of a block's threads into those of its tile's segments
// (what the tile and a group have in common): calls emit(group, part, Moments,
// lane) for each of a segment's parts, which are those of its warps, or one, on
// each of the lanes that folded it.
// `shared` has room for fold_size() accumulators; `refined` as above. All
// threads of the block must call.
template <typename T, typename TY, int kVector, typename Emit>
__device__ __forceinline__ void fold_segments(
    const Shape& shape,
    const Tiling& tiling,
    const Position& at,
    ChannelMoments<T, TY, kVector> moments,
    bool refined,
    Pair<Accumulator<T>>* shared,
    Emit emit) {
  using Acc = Accumulator<T>;
  const int merge_shift = tiling.merge_shift;
  moments.finish();
  moments.merge_neighbours(1 << merge_shift);
  // What follows calls neighbours that are always of one group one channel.
  // Channels stand side by side, an odd number of places long, so that few
  // lanes meet in a bank.
  const int vector = kVector >> merge_shift;
  const int rows = tiling.rows.divisor();
  const int pitch = rows | 1;
  const int D = shape.D.divisor() >> merge_shift;
  const int tile_width = tiling.columns.divisor() * vector;
  const int tile_first = at.tile * tile_width;
  const int tile_end = min(tile_first + tile_width, shape.C >> merge_shift);
  const int first_group = shape.D.quotient(tile_first << merge_shift);
  const int segments =
      shape.D.quotient((tile_end << merge_shift) - 1) - first_group + 1;
  // What a row has of a channel.
  const PixelsOfRow row_pixels(tiling, at.pixels);
  const auto every = static_cast<Acc>(row_pixels.every << merge_shift);
  const auto one_more = static_cast<Acc>((row_pixels.every + 1) << merge_shift);
  const Runs runs(tiling.lanes_per_segment);

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

  runs.deal(segments, [&](int segment, int lane, bool exists) {
    const int group = first_group + segment;
    const int begin = max(group * D, tile_first) - tile_first;
    const int end = min((group + 1) * D, tile_end) - tile_first;
    const Moments<Acc> moment = merge_moments<TY, 1, Acc>(
        lane,
        runs.lanes,
        (end - begin) * rows,
        [&](int i) -> Moments<Acc> {
          const int channel = tiling.rows.quotient(i);
          const int row = i - channel * rows;
          const Pair<Acc> one = shared[(begin + channel) * pitch + row];
          const Acc count = row < row_pixels.longer ? one_more : every;
          return {one.first, one.second, 0, count};
        },
        [&] { return shared[begin * pitch].first; },
        refined,
        [&](auto& sums) { sum_lanes(sums, runs.lanes); });
    if (exists) {
      emit(group, lane / kWarpSize, moment, lane % kWarpSize);
    }
  });
}

} // namespace gn_override
