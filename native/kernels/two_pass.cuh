// Group normalisation of [N, HxW, C] tensors that reads X twice.
//
//   forward   statistics -> combine_statistics -> normalize
//   backward  gradient_sums -> group_coefficients -> input_gradient
//                           -> parameter_gradients
//
// Conventions:
//   * A block owns a tile: `columns` vectors of kVector channels, side by side,
//     times the pixels of one split of one sample. A thread keeps one column
//     and walks down every rows-th pixel, so that whatever D is, loads are
//     16-byte wide and coalesced along C.
//   * Channels meet their groups only at the end of the walk: a segment is what
//     a tile and a group have in common. The segment of tile t and group g has
//     slot t + g: going up the channels, each new segment has a new tile or a
//     new group, so slots are unique, and a group's are consecutive.
//   * Variance is never E[x^2] - m^2: partial results are (mean, M2) with known
//     counts, merged by Chan's formula,
//       delta = m_b - m_a, n = n_a + n_b,
//       m = m_a + delta n_b / n, M2 = M2_a + M2_b + delta^2 n_a n_b / n
//     (Chan, Golub, LeVeque 1983), or, where all partials are at hand, by
//       m = sum n_i m_i / n, M2 = sum M2_i + n_i (m_i - m)^2.
//   * Blocks take tiles in reverse order in the second pass: the first tiles
//     that it reads are the last that the first pass left in the L2 cache.
#pragma once

#include <cstdint>

#include "native/kernels/reduce.cuh"
#include "native/kernels/vector.cuh"

namespace gn_override {

constexpr int kMaxThreads = 256;
// Pixels that a thread loads before it uses the first.
constexpr int kBatch = 8;
// The same where a pixel is a vector of X and one of dY.
constexpr int kBatchOfPairs = 4;

struct Shape {
  int64_t N;
  int64_t HxW;
  int C;
  int G;
  int D;
};

struct Tiling {
  int64_t pixels_per_split;
  int splits;
  int columns;
  int rows;
  int column_tiles;
  // Lanes that fold a segment together, a power of two up to 32.
  int lanes_per_segment;
};

// Where a block, and within it a thread, works.
struct Position {
  int64_t n;
  int64_t first_pixel; // of the split
  int pixels; // of the split
  int split;
  int tile;
  int column; // of the thread within the tile
  int row;
  int channel; // first of the thread's
  bool active; // the thread has a row and channels

  __device__ Position(
      const Shape& shape,
      const Tiling& tiling,
      int vector,
      unsigned block) {
    tile = block % tiling.column_tiles;
    const unsigned rest = block / tiling.column_tiles;
    split = rest % tiling.splits;
    n = rest / tiling.splits;
    first_pixel = split * tiling.pixels_per_split;
    const int64_t left = shape.HxW - first_pixel;
    pixels = static_cast<int>(
        left < tiling.pixels_per_split ? left : tiling.pixels_per_split);
    row = threadIdx.x / tiling.columns;
    column = threadIdx.x % tiling.columns;
    channel = (tile * tiling.columns + column) * vector;
    active = row < tiling.rows && channel < shape.C;
  }

  __device__ int64_t offset(const Shape& shape) const {
    return (n * shape.HxW + first_pixel + row) * shape.C + channel;
  }
};

// Pixels of a split that row `row` walks.
__device__ __forceinline__ int pixels_of_row(int pixels, int row, int rows) {
  return row < pixels ? (pixels - row + rows - 1) / rows : 0;
}

// Calls f(j, g) for the thread's channels channel + j and their groups, without
// a division per channel.
template <int kVector, typename F>
__device__ __forceinline__ void for_each_group(int channel, int D, F f) {
  int group = channel / D;
  int next = (group + 1) * D;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    if (channel + j == next) {
      ++group;
      next += D;
    }
    f(j, group);
  }
}

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

// -- forward -----------------------------------------------------------------

// The (mean, M2) of kVector channels over the pixels seen so far.
template <typename T, int kVector>
struct ChannelMoments {
  using Acc = Accumulator<T>;
  Acc mean[kVector] = {};
  Acc M2[kVector] = {};
  int count = 0;

  // Adds kPixels pixels: their own mean and centred sum of squares, merged.
  template <int kPixels>
  __device__ void add(const Vector<T, kVector> (&pixel)[kPixels]) {
    const Acc before = static_cast<Acc>(count);
    count += kPixels;
    const Acc weight = static_cast<Acc>(kPixels) / static_cast<Acc>(count);
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      Acc batch_mean = 0;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        batch_mean += widen(pixel[i].channel[j]);
      }
      batch_mean *= Acc(1) / kPixels;
      Acc batch_M2 = 0;
#pragma unroll
      for (int i = 0; i < kPixels; ++i) {
        const Acc centred = widen(pixel[i].channel[j]) - batch_mean;
        batch_M2 += centred * centred;
      }
      const Acc delta = batch_mean - mean[j];
      mean[j] += delta * weight;
      M2[j] += batch_M2 + delta * delta * (before * weight);
    }
  }
};

// partial[n][split][slot] = (mean, M2) of the segment; column_tiles + G - 1
// slots. Dynamic shared memory: 2 * kVector * columns * rows accumulators.
template <typename T, int kVector>
__global__ void __launch_bounds__(kMaxThreads) statistics(
    Shape shape,
    Tiling tiling,
    const T* __restrict__ X,
    Pair<Accumulator<T>>* __restrict__ partial) {
  using Acc = Accumulator<T>;
  const Position at(shape, tiling, kVector, blockIdx.x);

  ChannelMoments<T, kVector> moments;
  if (at.active) {
    const int64_t step = static_cast<int64_t>(tiling.rows) * shape.C;
    const T* address = X + at.offset(shape);
    int left = pixels_of_row(at.pixels, at.row, tiling.rows);
    for (; left >= kBatch; left -= kBatch) {
      Vector<T, kVector> pixel[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        pixel[i] = load<Reuse::kKeep, T, kVector>(address + i * step);
      }
      address += kBatch * step;
      moments.add(pixel);
    }
    for (; left > 0; --left) {
      const Vector<T, kVector> pixel[1] = {
          load<Reuse::kKeep, T, kVector>(address)};
      address += step;
      moments.add(pixel);
    }
  }

  // Channel column * kVector + j of row r stands at [j][r][column]: no two
  // lanes of a warp meet in a bank when they write.
  extern __shared__ __align__(16) unsigned char shared[];
  Acc* const means = reinterpret_cast<Acc*>(shared);
  const int plane = tiling.rows * tiling.columns;
  Acc* const M2s = means + kVector * plane;
  if (at.row < tiling.rows) {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      means[j * plane + threadIdx.x] = moments.mean[j];
      M2s[j * plane + threadIdx.x] = moments.M2[j];
    }
  }
  __syncthreads();

  const int tile_first = at.tile * tiling.columns * kVector;
  const int tile_end = min(tile_first + tiling.columns * kVector, shape.C);
  const int first_group = tile_first / shape.D;
  const int segments = (tile_end - 1) / shape.D - first_group + 1;
  const int lanes = tiling.lanes_per_segment;
  const int lane = threadIdx.x % lanes;
  const int slots = shape.G + tiling.column_tiles - 1;
  for (int first = 0; first < segments; first += blockDim.x / lanes) {
    const int segment = first + static_cast<int>(threadIdx.x) / lanes;
    // Lanes beyond the last segment fold it again: sums need whole warps.
    const int group = first_group + min(segment, segments - 1);
    const int begin = max(group * shape.D, tile_first) - tile_first;
    const int end = min((group + 1) * shape.D, tile_end) - tile_first;
    const int width = end - begin;
    const int items = width * tiling.rows;
    const auto index = [&](const Walk& walk) {
      const int channel = begin + walk.x;
      return (channel % kVector) * plane + walk.y * tiling.columns +
          channel / kVector;
    };

    Acc sum = 0;
    Walk walk(lane, lanes, width);
    for (int i = lane; i < items; i += lanes, walk.next()) {
      const Acc count = pixels_of_row(at.pixels, walk.y, tiling.rows);
      sum += count * means[index(walk)];
    }
    const Acc mean =
        sum_lanes(sum, lanes) / (static_cast<Acc>(at.pixels) * width);

    Acc M2 = 0;
    walk = Walk(lane, lanes, width);
    for (int i = lane; i < items; i += lanes, walk.next()) {
      const Acc count = pixels_of_row(at.pixels, walk.y, tiling.rows);
      const int at_item = index(walk);
      const Acc delta = means[at_item] - mean;
      M2 += M2s[at_item] + count * delta * delta;
    }
    M2 = sum_lanes(M2, lanes);
    if (lane == 0 && segment < segments) {
      partial[(at.n * tiling.splits + at.split) * slots + at.tile + group] = {
          mean, M2};
    }
  }
}

// moments[n][g] = (mean, rstd) in the accumulator's type; mean and rstd are
// rounded. One team (see Team) for each (n, g).
template <typename T, bool kBlock>
__global__ void __launch_bounds__(kMaxThreads) combine_statistics(
    Shape shape,
    Tiling tiling,
    int vector,
    Accumulator<T> eps,
    const Pair<Accumulator<T>>* __restrict__ partial,
    Pair<Accumulator<T>>* __restrict__ moments,
    ParameterOut<T> mean_out,
    ParameterOut<T> rstd_out) {
  using Acc = Accumulator<T>;
  using Threads = Team<kBlock>;
  const int64_t teams = shape.N * shape.G;
  const int64_t index = Threads::index();
  const bool idle = index >= teams; // stays for the sums
  const int64_t n = idle ? 0 : index / shape.G;
  const int group = idle ? 0 : static_cast<int>(index % shape.G);

  const int tile_width = tiling.columns * vector;
  const int first = group * shape.D;
  const int last = first + shape.D - 1;
  const int first_tile = first / tile_width;
  const int tiles = last / tile_width - first_tile + 1;
  const int slots = shape.G + tiling.column_tiles - 1;
  const Pair<Acc>* const own =
      partial + n * tiling.splits * slots + group + first_tile;

  const auto count = [&](const Walk& walk) {
    const int tile_first = (first_tile + walk.x) * tile_width;
    const int width =
        min(last + 1, tile_first + tile_width) - max(first, tile_first);
    const int64_t left = shape.HxW - walk.y * tiling.pixels_per_split;
    const int64_t pixels =
        left < tiling.pixels_per_split ? left : tiling.pixels_per_split;
    return static_cast<Acc>(pixels) * width;
  };
  const int items = tiles * tiling.splits;
  const Acc total = static_cast<Acc>(shape.HxW) * shape.D;

  Acc sum = 0;
  Walk walk(Threads::rank(), Threads::size(), tiles);
  for (int i = Threads::rank(); i < items; i += Threads::size(), walk.next()) {
    sum += count(walk) * own[static_cast<int64_t>(walk.y) * slots + walk.x].first;
  }
  const Acc mean = Threads::sum(sum) / total;

  Acc M2 = 0;
  walk = Walk(Threads::rank(), Threads::size(), tiles);
  for (int i = Threads::rank(); i < items; i += Threads::size(), walk.next()) {
    const Pair<Acc> part = own[static_cast<int64_t>(walk.y) * slots + walk.x];
    const Acc delta = part.first - mean;
    M2 += part.second + count(walk) * delta * delta;
  }
  const Acc rstd = reciprocal_sqrt(Threads::sum(M2) / total + eps);

  if (!idle && Threads::rank() == 0) {
    moments[index] = {mean, rstd};
    mean_out.set(index, mean);
    rstd_out.set(index, rstd);
  }
}

// Y = (X - mean) * rstd * gamma + beta
template <typename T, int kVector>
__global__ void __launch_bounds__(kMaxThreads) normalize(
    Shape shape,
    Tiling tiling,
    const T* __restrict__ X,
    const Pair<Accumulator<T>>* __restrict__ moments,
    ParameterIn<T> gamma,
    ParameterIn<T> beta,
    T* __restrict__ Y) {
  using Acc = Accumulator<T>;
  const Position at(shape, tiling, kVector, gridDim.x - 1 - blockIdx.x);
  if (!at.active) {
    return;
  }
  Acc mean[kVector];
  Acc scale[kVector];
  Acc shift[kVector];
  for_each_group<kVector>(at.channel, shape.D, [&](int j, int group) {
    const Pair<Acc> moment = moments[at.n * shape.G + group];
    mean[j] = moment.first;
    scale[j] = moment.second * gamma.at(at.channel + j, 1);
    shift[j] = beta.at(at.channel + j, 0);
  });

  const auto apply = [&](const Vector<T, kVector>& x) {
    Acc y[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      y[j] = (widen(x.channel[j]) - mean[j]) * scale[j] + shift[j];
    }
    return narrow_all<T, kVector>(y);
  };

  const int64_t step = static_cast<int64_t>(tiling.rows) * shape.C;
  int64_t offset = at.offset(shape);
  int left = pixels_of_row(at.pixels, at.row, tiling.rows);
  for (; left >= kBatch; left -= kBatch) {
    Vector<T, kVector> pixel[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      pixel[i] = load<Reuse::kStream, T, kVector>(X + offset + i * step);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      store(Y + offset + i * step, apply(pixel[i]));
    }
    offset += kBatch * step;
  }
  for (; left > 0; --left) {
    store(Y + offset, apply(load<Reuse::kStream, T, kVector>(X + offset)));
    offset += step;
  }
}

// -- backward ----------------------------------------------------------------
//
// With xhat = (X - mean) * rstd, s = 1 / (D * HxW) and sums over a group's
// channels and pixels,
//   dX = rstd * (gamma dY - s sum(gamma dY) - xhat * s sum(gamma dY xhat))
//   dgamma = sum_{n, pixels} dY xhat,   dbeta = sum_{n, pixels} dY
// so the sums of dY xhat and dY of each (n, channel) serve all three. xhat is
// used rather than X: sum(dY X) - mean sum(dY) cancels.

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

// sums[n][split][c] = (sum dY xhat, sum dY) over the split's pixels. Dynamic
// shared memory: 2 * kVector * columns * rows accumulators.
template <typename T, int kVector>
__global__ void __launch_bounds__(kMaxThreads) gradient_sums(
    Shape shape,
    Tiling tiling,
    const T* __restrict__ dY,
    const T* __restrict__ X,
    ParameterIn<T> mean_in,
    ParameterIn<T> rstd_in,
    Pair<Accumulator<T>>* __restrict__ sums) {
  using Acc = Accumulator<T>;
  const Position at(shape, tiling, kVector, blockIdx.x);
  GradientSums<T, kVector> sums_of_channels;
  Acc(&ds)[kVector] = sums_of_channels.ds;
  Acc(&db)[kVector] = sums_of_channels.db;
  if (at.active) {
    Acc mean[kVector];
    Acc rstd[kVector];
    for_each_group<kVector>(at.channel, shape.D, [&](int j, int group) {
      mean[j] = mean_in.at(at.n * shape.G + group, 0);
      rstd[j] = rstd_in.at(at.n * shape.G + group, 1);
    });
    const int64_t step = static_cast<int64_t>(tiling.rows) * shape.C;
    int64_t offset = at.offset(shape);
    int left = pixels_of_row(at.pixels, at.row, tiling.rows);
    for (; left >= kBatchOfPairs; left -= kBatchOfPairs) {
      Vector<T, kVector> dy[kBatchOfPairs];
      Vector<T, kVector> x[kBatchOfPairs];
#pragma unroll
      for (int i = 0; i < kBatchOfPairs; ++i) {
        dy[i] = load<Reuse::kKeep, T, kVector>(dY + offset + i * step);
        x[i] = load<Reuse::kKeep, T, kVector>(X + offset + i * step);
      }
      sums_of_channels.add(dy, x, mean);
      offset += kBatchOfPairs * step;
    }
    for (; left > 0; --left) {
      const Vector<T, kVector> dy[1] = {
          load<Reuse::kKeep, T, kVector>(dY + offset)};
      const Vector<T, kVector> x[1] = {
          load<Reuse::kKeep, T, kVector>(X + offset)};
      sums_of_channels.add(dy, x, mean);
      offset += step;
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      ds[j] *= rstd[j];
    }
  }

  // Fold the rows, halving their number each time.
  extern __shared__ __align__(16) unsigned char shared[];
  Pair<Acc>* const of_row = reinterpret_cast<Pair<Acc>*>(shared);
  const int plane = tiling.rows * tiling.columns;
  for (int rows = tiling.rows; rows > 1;) {
    const int half = (rows + 1) / 2;
    if (at.row >= half && at.row < rows) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        of_row[j * plane + threadIdx.x] = {ds[j], db[j]};
      }
    }
    __syncthreads();
    if (at.row < rows - half) {
#pragma unroll
      for (int j = 0; j < kVector; ++j) {
        const Pair<Acc> other =
            of_row[j * plane + threadIdx.x + half * tiling.columns];
        ds[j] += other.first;
        db[j] += other.second;
      }
    }
    rows = half;
  }
  if (at.active && at.row == 0) {
    Pair<Acc>* const own =
        sums + (at.n * tiling.splits + at.split) * shape.C + at.channel;
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      own[j] = {ds[j], db[j]};
    }
  }
}

// coefficients[n][g] = s * (sum gamma dY, sum gamma dY xhat). One team for each
// (n, g).
template <typename T, bool kBlock>
__global__ void __launch_bounds__(kMaxThreads) group_coefficients(
    Shape shape,
    int splits,
    const Pair<Accumulator<T>>* __restrict__ sums,
    ParameterIn<T> gamma,
    Pair<Accumulator<T>>* __restrict__ coefficients) {
  using Acc = Accumulator<T>;
  using Threads = Team<kBlock>;
  const int64_t index = Threads::index();
  const bool idle = index >= shape.N * shape.G; // stays for the sums
  const int64_t n = idle ? 0 : index / shape.G;
  const int first = idle ? 0 : static_cast<int>(index % shape.G) * shape.D;
  const Pair<Acc>* const own = sums + n * splits * shape.C + first;

  Acc of_dY = 0;
  Acc of_dY_xhat = 0;
  const int64_t items = static_cast<int64_t>(splits) * shape.D;
  Walk walk(Threads::rank(), Threads::size(), shape.D);
  for (int64_t i = Threads::rank(); i < items;
       i += Threads::size(), walk.next()) {
    const Pair<Acc> sum = own[static_cast<int64_t>(walk.y) * shape.C + walk.x];
    const Acc weight = gamma.at(first + walk.x, 1);
    of_dY_xhat += weight * sum.first;
    of_dY += weight * sum.second;
  }
  of_dY = Threads::sum(of_dY);
  of_dY_xhat = Threads::sum(of_dY_xhat);
  if (!idle && Threads::rank() == 0) {
    const Acc count = static_cast<Acc>(shape.HxW) * shape.D;
    coefficients[index] = {of_dY / count, of_dY_xhat / count};
  }
}

// dX = rstd gamma dY - rstd^2 c_xhat (X - mean) - rstd c
template <typename T, int kVector>
__global__ void __launch_bounds__(kMaxThreads) input_gradient(
    Shape shape,
    Tiling tiling,
    const T* __restrict__ dY,
    const T* __restrict__ X,
    ParameterIn<T> mean_in,
    ParameterIn<T> rstd_in,
    ParameterIn<T> gamma,
    const Pair<Accumulator<T>>* __restrict__ coefficients,
    T* __restrict__ dX) {
  using Acc = Accumulator<T>;
  const Position at(shape, tiling, kVector, gridDim.x - 1 - blockIdx.x);
  if (!at.active) {
    return;
  }
  Acc mean[kVector];
  Acc of_dY[kVector];
  Acc of_X[kVector];
  Acc constant[kVector];
  for_each_group<kVector>(at.channel, shape.D, [&](int j, int group) {
    const int64_t ng = at.n * shape.G + group;
    const Acc rstd = rstd_in.at(ng, 1);
    const Pair<Acc> c = coefficients[ng];
    mean[j] = mean_in.at(ng, 0);
    of_dY[j] = rstd * gamma.at(at.channel + j, 1);
    of_X[j] = -rstd * rstd * c.second;
    constant[j] = -rstd * c.first;
  });

  const auto apply = [&](const Vector<T, kVector>& dy,
                         const Vector<T, kVector>& x) {
    Acc dx[kVector];
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      dx[j] = of_dY[j] * widen(dy.channel[j]) +
          (of_X[j] * (widen(x.channel[j]) - mean[j]) + constant[j]);
    }
    return narrow_all<T, kVector>(dx);
  };

  const int64_t step = static_cast<int64_t>(tiling.rows) * shape.C;
  int64_t offset = at.offset(shape);
  int left = pixels_of_row(at.pixels, at.row, tiling.rows);
  for (; left >= kBatchOfPairs; left -= kBatchOfPairs) {
    Vector<T, kVector> dy[kBatchOfPairs];
    Vector<T, kVector> x[kBatchOfPairs];
#pragma unroll
    for (int i = 0; i < kBatchOfPairs; ++i) {
      dy[i] = load<Reuse::kStream, T, kVector>(dY + offset + i * step);
      x[i] = load<Reuse::kStream, T, kVector>(X + offset + i * step);
    }
#pragma unroll
    for (int i = 0; i < kBatchOfPairs; ++i) {
      store(dX + offset + i * step, apply(dy[i], x[i]));
    }
    offset += kBatchOfPairs * step;
  }
  for (; left > 0; --left) {
    store(
        dX + offset,
        apply(
            load<Reuse::kStream, T, kVector>(dY + offset),
            load<Reuse::kStream, T, kVector>(X + offset)));
    offset += step;
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
