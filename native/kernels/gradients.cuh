// Sums that the backward pass needs.
//
// With xhat = (X - mean) * rstd, s = 1 / (D * HxW) and sums over a group's
// channels and pixels,
//   dX = rstd * (gamma dY - s sum(gamma dY) - xhat * s sum(gamma dY xhat))
//   dgamma = sum_{n, pixels} dY xhat,   dbeta = sum_{n, pixels} dY
// so the sums of dY xhat and dY of each (n, channel) serve all three. xhat is
// used rather than X: sum(dY X) - mean sum(dY) cancels.
#pragma once

#include "native/kernels/reduce.cuh"
#include "native/kernels/tile.cuh"
#include "native/kernels/vector.cuh"

namespace gn_override {

// sum dY (X - mean) and sum dY of kVector channels over the pixels seen so far.
template <typename T, int kVector>
struct GradientSums {
  using Acc = Accumulator<T>;
  Acc ds[kVector] = {};
  Acc db[kVector] = {};

  // Sums a batch before it joins the total: fewer additions at the total's
  // magnitude, so less rounding.
  template <int kPixels>
  __device__ void add(
      const Vector<T, kVector> (&dy)[kPixels],
      const Vector<T, kVector> (&x)[kPixels],
      const Acc (&mean)[kVector]) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      Acc batch_ds = 0;
      Acc batch_db = 0;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        const Acc g = widen(dy[i].channel[j]);
        batch_ds += g * (widen(x[i].channel[j]) - mean[j]);
        batch_db += g;
      }
      ds[j] += batch_ds;
      db[j] += batch_db;
    }
  }
};

// dX = rstd gamma dY - rstd^2 c_xhat (X - mean) - rstd c for a thread's
// channels.
template <typename T, int kVector>
struct InputGradient {
  using Acc = Accumulator<T>;
  Acc mean[kVector]; // unused where it is folded into `constant`
  Acc of_dY[kVector];
  Acc of_X[kVector];
  Acc constant[kVector];

  // coefficients_of(group) is (c, c_xhat) = s * (sum gamma dY,
  // sum gamma dY xhat).
  template <typename CoefficientsOf>
  __device__ InputGradient(
      const Shape& shape,
      const Position& at,
      ParameterIn<T> mean_in,
      ParameterIn<T> rstd_in,
      ParameterIn<T> gamma,
      CoefficientsOf coefficients_of) {
    gamma.read(at.channel, 1, of_dY);
    Acc group_mean;
    Acc group_rstd;
    Pair<Acc> coefficient;
    for_each_channel<kVector>(
        shape,
        at.channel,
        [&](int group) {
          const int64_t index = at.n * shape.G + group;
          group_mean = mean_in.at(index, 0);
          group_rstd = rstd_in.at(index, 1);
          coefficient = coefficients_of(group);
        },
        [&](int j) {
          mean[j] = group_mean;
          of_dY[j] *= group_rstd;
          of_X[j] = -group_rstd * group_rstd * coefficient.second;
          constant[j] = -group_rstd * coefficient.first;
          if constexpr (kFoldsMean<T>) {
            constant[j] -= of_X[j] * mean[j];
          }
        });
  }

  __device__ Vector<T, kVector> operator()(
      const Vector<T, kVector>& dy,
      const Vector<T, kVector>& x) const {
    Acc dx[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      const Acc centred =
          kFoldsMean<T> ? widen(x.channel[j]) : widen(x.channel[j]) - mean[j];
      dx[j] =
          of_dY[j] * widen(dy.channel[j]) + (of_X[j] * centred + constant[j]);
    }
    return narrow_all<T, kVector>(dx);
  }
};

// mean and rstd of the groups of a thread's channels.
template <typename T, int kVector>
__device__ __forceinline__ void read_moments(
    const Shape& shape,
    const Position& at,
    ParameterIn<T> mean_in,
    ParameterIn<T> rstd_in,
    Accumulator<T> (&mean)[kVector],
    Accumulator<T> (&rstd)[kVector]) {
  Pair<Accumulator<T>> moment;
  for_each_channel<kVector>(
      shape,
      at.channel,
      [&](int group) {
        const int64_t index = at.n * shape.G + group;
        moment = {mean_in.at(index, 0), rstd_in.at(index, 1)};
      },
      [&](int j) {
        mean[j] = moment.first;
        rstd[j] = moment.second;
      });
}

// Adds up the sums of a block's threads over its rows; row 0 gets the totals.
// `shared` has room for kVector * ceil(rows / 2) * columns pairs. All threads
// of the block must call.
template <typename T, int kVector>
__device__ __forceinline__ void fold_rows(
    const Tiling& tiling,
    const Position& at,
    GradientSums<T, kVector>& sums,
    Pair<Accumulator<T>>* shared) {
  using Acc = Accumulator<T>;
  const int columns = tiling.columns.divisor();
  const int plane = (tiling.rows.divisor() + 1) / 2 * columns;
#pragma unroll 1
  for (int rows = tiling.rows.divisor(); rows > 1;) {
    const int half = (rows + 1) / 2;
    if (at.row >= half && at.row < rows) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        shared[j * plane + threadIdx.x - half * columns] = {
            sums.ds[j], sums.db[j]};
      }
    }
    __syncthreads();
    if (at.row < rows - half) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const Pair<Acc> other = shared[j * plane + threadIdx.x];
        sums.ds[j] += other.first;
        sums.db[j] += other.second;
      }
    }
    __syncthreads(); // before the next rows take their place
    rows = half;
  }
}

// dgamma, dbeta: column sums of the [N * splits, C] array of sums. A block
// takes kParameterChannels channels; each thread a kParameterRows-th of their
// rows, compensated (see reduce.cuh), since the rows may be many.
constexpr int kParameterChannels = 8;
constexpr int kParameterRows = kMaxThreads / kParameterChannels;

template <typename T>
__global__ void __launch_bounds__(kMaxThreads) parameter_gradients(
    int C,
    int64_t rows,
    const Pair<Accumulator<T>>* __restrict__ sums,
    ParameterOut<T> dgamma,
    ParameterOut<T> dbeta) {
  using Acc = Accumulator<T>;
  const int column = threadIdx.x % kParameterChannels;
  const int row = threadIdx.x / kParameterChannels;
  const int channel = blockIdx.x * kParameterChannels + column;

  wait_for_previous_kernel();
  auto ds = CompensatedSum<Acc>::zero();
  auto db = CompensatedSum<Acc>::zero();
  if (channel < C) {
#pragma unroll 4
    for (int64_t r = row; r < rows; r += kParameterRows) {
      const Pair<Acc> sum = sums[r * C + channel];
      ds.add(sum.first);
      db.add(sum.second);
    }
  }
  __shared__ CompensatedSum<Acc> ds_of_row[kParameterRows][kParameterChannels];
  __shared__ CompensatedSum<Acc> db_of_row[kParameterRows][kParameterChannels];
  ds_of_row[row][column] = ds;
  db_of_row[row][column] = db;
  for (int half = kParameterRows / 2; half > 0; half /= 2) {
    __syncthreads();
    if (row < half) {
      ds.add(ds_of_row[row + half][column]);
      db.add(db_of_row[row + half][column]);
      ds_of_row[row][column] = ds;
      db_of_row[row][column] = db;
    }
  }
  if (row == 0 && channel < C) {
    if (dgamma.data != nullptr) {
      dgamma.set(channel, ds.value());
    }
    if (dbeta.data != nullptr) {
      dbeta.set(channel, db.value());
    }
  }
}

} // namespace gn_override
