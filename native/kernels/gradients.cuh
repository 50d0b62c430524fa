// Sums that the backward pass needs.
//
// With xhat = (X - mean) * rstd, s = 1 / (D * HxW) and sums over a group's
// channels and pixels,
//   dX = rstd * (gamma dY - s sum(gamma dY) - xhat * s sum(gamma dY xhat))
//   dgamma = sum_{n, pixels} dY xhat,   dbeta = sum_{n, pixels} dY
// so the sums of dY xhat and dY of each (n, channel) serve all three. xhat is
// used rather than X: sum(dY X) - mean sum(dY) cancels.
// kFused: dZ takes dY's place: Y = activation(Z), Z = gamma xhat + beta.
#pragma once

#include "native/kernels/hardware.cuh"
#include "native/kernels/reduce.cuh"
#include "native/kernels/tile.cuh"
#include "native/kernels/vector.cuh"

namespace gn_override {

// sum dZ (X - mean) and sum dZ of kVector channels over the pixels seen so far.
template <typename T, typename TY, int kVector>
struct GradientSums {
  using Acc = Accumulator<T>;
  using Sum = Total<TY, Acc>;
  Sum ds[kVector] = {};
  Sum db[kVector] = {};

  // Sums a batch before it joins the total: fewer additions at the total's
  // magnitude, so less rounding. Leaves dZ behind.
  template <int kPixels, typename DZOf>
  __device__ void add(
      const Vector<TY, kVector> (&dy)[kPixels],
      const Vector<T, kVector> (&x)[kPixels],
      const Acc (&mean)[kVector],
      DZOf dZ_of,
      Acc (&dZ)[kPixels][kVector]) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      Acc batch_ds = 0;
      Acc batch_db = 0;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        const Acc dy_j = dy[i][j];
        const Acc x_j = x[i][j];
        const Acc g = dZ_of(j, x_j, x_j - mean[j], dy_j);
        dZ[i][j] = g;
        const Acc weighted = g * (x_j - mean[j]);
        batch_ds = i == 0 ? weighted : batch_ds + weighted;
        batch_db = i == 0 ? g : batch_db + g;
      }
      ds[j].add(batch_ds);
      db[j].add(batch_db);
    }
  }

  // (sum dZ xhat, sum dZ) of each channel.
  __device__ void finish(const Acc (&rstd)[kVector], Pair<Acc> (&sums)[kVector])
      const {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      sums[j] = {ds[j].value() * rstd[j], db[j].value()};
    }
  }
};

// What a group adds to dX: of_X X + constant where the mean is folded into
// that, else of_X (X - mean) + constant.
template <typename Acc>
struct alignas(4 * sizeof(Acc)) GradientOfGroup {
  Acc mean;
  Acc rstd;
  Acc of_X;
  Acc constant;
};
static_assert(sizeof(GradientOfGroup<float>) == kOfGroupSize * sizeof(float));

// moment is (mean, rstd), coefficient (c_xhat, c), see InputGradient.
template <typename T, typename Acc>
__device__ __forceinline__ GradientOfGroup<Acc> gradient_of_group(
    const Pair<Acc>& moment,
    const Pair<Acc>& coefficient) {
  const Acc mean = moment.first;
  const Acc rstd = moment.second;
  const Acc of_X = -rstd * rstd * coefficient.first;
  Acc constant = -rstd * coefficient.second;
  if constexpr (kFoldsMean<T>) {
    constant -= of_X * mean;
  }
  return {mean, rstd, of_X, constant};
}

// And a channel's own term, with scale = rstd gamma.
template <typename Acc>
struct alignas(4 * sizeof(Acc)) BackwardMap {
  Acc scale;
  Acc of_X;
  Acc constant;
  Acc mean;
};

template <typename Acc>
__device__ __forceinline__ BackwardMap<Acc> backward_map(
    Acc gamma,
    const GradientOfGroup<Acc>& group) {
  return {gamma * group.rstd, group.of_X, group.constant, group.mean};
}

// dX = rstd gamma dZ - rstd^2 c_xhat (X - mean) - rstd c for a thread's
// channels, with (c_xhat, c) = s * (sum gamma dZ xhat, sum gamma dZ) of their
// group.
template <typename T, typename TY, int kVector>
struct InputGradient {
  using Acc = Accumulator<T>;
  Acc mean[kVector]; // often unused: `constant` has it
  Acc of_dZ[kVector];
  Acc of_X[kVector];
  Acc constant[kVector];

  // gamma is that of the thread's channels, which start at `channel`;
  // of_group(group) is its GradientOfGroup.
  template <typename OfGroup>
  __device__ InputGradient(
      const Shape& shape,
      int channel,
      const Acc (&gamma)[kVector],
      OfGroup of_group) {
    for_each_channel<kVector>(
        shape,
        channel,
        of_group,
        [&](int j, const GradientOfGroup<Acc>& group) {
          set(j, backward_map(gamma[j], group));
        });
  }

  // For channels of one group.
  __device__ InputGradient(
      const Acc (&gamma)[kVector],
      const GradientOfGroup<Acc>& group) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      set(j, backward_map(gamma[j], group));
    }
  }

  // map_of(j) is that of the thread's j-th channel.
  template <typename MapOf>
  __device__ explicit InputGradient(MapOf map_of) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      set(j, map_of(j));
    }
  }

  __device__ void set(int j, const BackwardMap<Acc>& map) {
    mean[j] = map.mean;
    of_dZ[j] = map.scale;
    of_X[j] = map.of_X;
    constant[j] = map.constant;
  }

  template <typename DZOf>
  __device__ Vector<T, kVector> operator()(
      const Vector<TY, kVector>& dy,
      const Vector<T, kVector>& x,
      DZOf dZ_of) const {
    Acc dx[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const Acc value = x[j];
      const Acc operand = kFoldsMean<T> ? value : value - mean[j];
      const Acc g = dZ_of(j, value, value - mean[j], dy[j]);
      dx[j] = of_dZ[j] * g + (of_X[j] * operand + constant[j]);
    }
    return narrow_all<T, kVector>(dx);
  }
};

// mean and rstd of the groups of a thread's channels, which start at `channel`;
// moments_of(group) is both.
template <int kVector, typename Acc, typename MomentsOf>
__device__ __forceinline__ void read_moments(
    const Shape& shape,
    int channel,
    MomentsOf moments_of,
    Acc (&mean)[kVector],
    Acc (&rstd)[kVector]) {
  for_each_channel<kVector>(
      shape, channel, moments_of, [&](int j, const Pair<Acc>& moment) {
        mean[j] = moment.first;
        rstd[j] = moment.second;
      });
}

// Rows that a lane reads at once while it folds a channel.
constexpr int kHeldRows = 4;

// Adds up the sums of a block's threads over its rows and calls
// emit(channel of the tile, (sum dZ xhat, sum dZ)) once for each channel.
// `of_columns` divides by their number; place = row * columns + column of the
// thread, at or beyond rows * columns if it has no sums. `shared` has room for
// fold_size() accumulators; `lanes` as in Tiling::lanes_per_channel. All
// threads of the block must call.
template <typename TY, typename Acc, int kVector, typename Emit>
__device__ __forceinline__ void fold_rows(
    const FastDivisor& of_columns,
    int rows,
    int place,
    int lanes,
    Pair<Acc> (&sums)[kVector],
    Pair<Acc>* shared,
    Emit emit) {
  const int columns = of_columns.divisor();
  // The upper rows join the lower ones first, which halves the room.
  const int half = (rows + 1) / 2;
  const int plane = half * columns;
  const Runs runs(lanes);
  if (place >= plane && place < rows * columns) {
    Pair<Acc>* const slot = shared + place - plane;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      slot[j * plane] = sums[j];
    }
  }
  __syncthreads();
  if (place < plane) {
    Pair<Acc>* const slot = shared + place;
    const bool joined = place < (rows - half) * columns;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      if (joined) {
        const Pair<Acc> upper = slot[j * plane];
        sums[j].first += upper.first;
        sums[j].second += upper.second;
      }
      slot[j * plane] = sums[j];
    }
  }
  __syncthreads();

  runs.deal(columns * kVector, [&](int item, int lane, bool exists) {
    const int j = of_columns.quotient(item);
    const int column = item - j * columns;
    struct {
      Total<TY, Acc> ds = Total<TY, Acc>::zero();
      Total<TY, Acc> db = Total<TY, Acc>::zero();
    } totals;
    const Pair<Acc>* const of_channel = shared + j * plane + column;
#pragma unroll 1
    for (int first = lane; first < half; first += kHeldRows * runs.lanes) {
      Pair<Acc> held[kHeldRows];
#pragma unroll
      for (int i = 0; i < kHeldRows; ++i) {
        const int row = first + i * runs.lanes;
        held[i] = of_channel[min(row, half - 1) * columns];
        if (row >= half) {
          held[i] = {0, 0};
        }
      }
#pragma unroll
      for (int i = 0; i < kHeldRows; ++i) {
        totals.ds.add(held[i].first);
        totals.db.add(held[i].second);
      }
    }
    sum_members<Acc>(totals, [&](auto& sums) { sum_lanes(sums, runs.lanes); });
    if (lane == 0 && exists) {
      emit(
          column * kVector + j,
          Pair<Acc>{totals.ds.value(), totals.db.value()});
    }
  });
}

// Stores dgamma and dbeta of a channel, each where it is wanted.
template <typename T>
__device__ __forceinline__ void set_parameter_gradients(
    int channel,
    Accumulator<T> ds,
    Accumulator<T> db,
    const ParameterOut<T>& dgamma,
    const ParameterOut<T>& dbeta) {
  if (dgamma.data != nullptr) {
    dgamma.set(channel, ds);
  }
  if (dbeta.data != nullptr) {
    dbeta.set(channel, db);
  }
}

// Channels of dgamma and dbeta that a block takes at once.
constexpr int kParameterChannels = 8;

// dgamma and dbeta of kParameterChannels channels, from `first` on: column sums
// of the [rows, C] array `sums`. Each thread takes an `at_once`-th of the rows,
// compensated (see reduce.cuh), since they may be many. `shared` has room for
// two sums of each of the at_once * kParameterChannels threads of the block,
// all of which must call.
template <typename T>
__device__ __forceinline__ void sum_parameter_gradients(
    int C,
    int64_t rows,
    int at_once,
    int first,
    const Pair<Accumulator<T>>* sums,
    CompensatedSum<Accumulator<T>>* shared,
    ParameterOut<T> dgamma,
    ParameterOut<T> dbeta) {
  using Acc = Accumulator<T>;
  const int row = threadIdx.x / kParameterChannels;
  const int channel = first + threadIdx.x % kParameterChannels;

  auto ds = CompensatedSum<Acc>::zero();
  auto db = CompensatedSum<Acc>::zero();
  if (channel < C) {
#pragma unroll 4
    for (int64_t r = row; r < rows; r += at_once) {
      const Pair<Acc> sum = sums[r * C + channel];
      ds.add(sum.first);
      db.add(sum.second);
    }
  }
  CompensatedSum<Acc>* const own_ds = shared + threadIdx.x;
  CompensatedSum<Acc>* const own_db = own_ds + at_once * kParameterChannels;
  *own_ds = ds;
  *own_db = db;
  for (int left = at_once; left > 1;) {
    const int half = (left + 1) / 2;
    __syncthreads();
    if (row + half < left) {
      ds.add(own_ds[half * kParameterChannels]);
      db.add(own_db[half * kParameterChannels]);
      *own_ds = ds;
      *own_db = db;
    }
    left = half;
  }
  if (row == 0 && channel < C) {
    set_parameter_gradients(channel, ds.value(), db.value(), dgamma, dbeta);
  }
}

// dgamma and dbeta, as a kernel: a block for each kParameterChannels channels.
template <typename T>
__global__ void __launch_bounds__(kMaxThreads) parameter_gradients(
    int C,
    int64_t rows,
    const Pair<Accumulator<T>>* sums,
    ParameterOut<T> dgamma,
    ParameterOut<T> dbeta) {
  wait_for_previous_kernel();
  __shared__ CompensatedSum<Accumulator<T>> of_threads[2 * kMaxThreads];
  sum_parameter_gradients<T>(
      C,
      rows,
      kMaxThreads / kParameterChannels,
      blockIdx.x * kParameterChannels,
      sums,
      of_threads,
      dgamma,
      dbeta);
}

} // namespace gn_override
