// How the kernels cut [N, HxW, C] tensors.
//
// A tile is `columns` vectors of kVector channels, side by side; a block owns
// the pixels of one split of one sample's tile. A thread keeps one column and
// walks down every rows-th pixel, so that whatever D is, loads are up to 16
// bytes wide and coalesced along C. Channels meet their groups only at the end
// of the walk.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "native/kernels/fast_divisor.cuh"
#include "native/plan/shared_memory.h"

namespace gn_override {

// Pixels that a thread loads before it uses the first: 64 bytes, or as many as
// are worth their registers. Half as many where a pixel is a vector of X and
// one of dY.
template <typename T, int kVector>
constexpr int kBatch = std::min(64 / static_cast<int>(sizeof(T) * kVector), 16);
template <typename T, int kVector>
constexpr int kBatchOfPairs = kBatch<T, kVector> / 2;
// Blocks of kMaxThreads that shall fit a multiprocessor: with the batches
// above, what is in flight covers the latency of memory.
template <typename T>
constexpr int kBlocksPerMultiprocessor = sizeof(T) == 8 ? 2 : 4;

struct Shape {
  int64_t N;
  int64_t HxW;
  int C;
  int G;
  FastDivisor D;
};

struct Tiling {
  int64_t pixels_per_split;
  FastDivisor splits;
  FastDivisor columns;
  FastDivisor rows;
  FastDivisor column_tiles;
  int turns; // in which every split has `rows` pixels (see two_pass.cuh)
  int merge_shift; // log2(channels_of_one_group())
  // Neighbouring threads, a power of two, that fold a segment together; those
  // that fold a channel, at most a warp.
  int lanes_per_segment;
  int lanes_per_channel;
  // Lanes that merge what all blocks found of a group, at most a warp.
  int lanes_per_exchange;

  // A segment's folded parts: one of each of its warps.
  __device__ int parts_per_segment() const {
    return (lanes_per_segment + kWarpSize - 1) / kWarpSize;
  }
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
      int64_t n,
      int split,
      int tile)
      : n(n), split(split), tile(tile) {
    first_pixel = split * tiling.pixels_per_split;
    const int64_t left = shape.HxW - first_pixel;
    pixels = static_cast<int>(
        left < tiling.pixels_per_split ? left : tiling.pixels_per_split);
    const int columns = tiling.columns.divisor();
    const int thread = threadIdx.x;
    row = tiling.columns.quotient(thread);
    column = thread - row * columns;
    channel = (tile * columns + column) * vector;
    active = row < tiling.rows.divisor() && channel < shape.C;
  }

  // Element of the thread's first pixel.
  __device__ int64_t offset(const Shape& shape) const {
    return (n * shape.HxW + first_pixel + row) * shape.C + channel;
  }
};

// Blocks in memory order: tiles, then splits, then samples.
__device__ __forceinline__ Position position_in_memory_order(
    const Shape& shape,
    const Tiling& tiling,
    int vector,
    int block) {
  const int rest = tiling.column_tiles.quotient(block);
  const int n = tiling.splits.quotient(rest);
  return Position(
      shape,
      tiling,
      vector,
      n,
      rest - n * tiling.splits.divisor(),
      block - rest * tiling.column_tiles.divisor());
}

// How many of a split's pixels each row walks: `every`, and one more in the
// first `longer` rows.
struct PixelsOfRow {
  int every;
  int longer;

  __device__ PixelsOfRow(const Tiling& tiling, int pixels)
      : every(tiling.rows.quotient(pixels)),
        longer(pixels - every * tiling.rows.divisor()) {}

  __device__ int of(int row) const {
    return every + (row < longer);
  }
};

// Pixels that the thread walks.
__device__ __forceinline__ int pixels_of_thread(
    const Tiling& tiling,
    const Position& at) {
  return at.active ? PixelsOfRow(tiling, at.pixels).of(at.row) : 0;
}

// A parameter's place in shared memory: neighbouring columns read neighbouring
// places.
template <int kVector>
__device__ __forceinline__ int parameter_place(
    const Tiling& tiling,
    int channel) {
  return channel % kVector * tiling.columns.divisor() + channel / kVector;
}

// A number of pixels that is known when a kernel is compiled.
template <int n>
using Pixels = std::integral_constant<int, n>;

// Calls f(first, Pixels<n>()) for runs of n of the pixels 0, ..., count - 1:
// n is kMost while so many are left, then half of that, and so on.
template <int kMost, typename F>
__device__ __forceinline__ void
for_each_run_of_pixels(int count, F f, int first = 0) {
#pragma unroll 1
  for (; count - first >= kMost; first += kMost) {
    f(first, Pixels<kMost>());
  }
  if constexpr (kMost > 1) {
    for_each_run_of_pixels<kMost / 2>(count, f, first);
  }
}

// Calls f(j, of_group(the group of channel + j)) for each of a thread's
// channels.
template <int kVector, typename OfGroup, typename F>
__device__ __forceinline__ void
for_each_channel(const Shape& shape, int channel, OfGroup of_group, F f) {
  const auto first = of_group(shape.D.quotient(channel));
  const bool same = shape.D.divisor() % kVector == 0;
#pragma unroll
  for (int j = 0; j < kVector; ++j) {
    f(j, same || j == 0 ? first : of_group(shape.D.quotient(channel + j)));
  }
}

} // namespace gn_override
