// Shared memory of the CUDA kernels, byte for byte: the planner sizes it, the
// kernels lay it out.
#pragma once

#include <cstdint>

#include "native/plan/problem.h"

#ifdef __CUDACC__
#define GN_OVERRIDE_HOST_DEVICE __host__ __device__
#else
#define GN_OVERRIDE_HOST_DEVICE
#endif

namespace gn_override {

// Neighbouring channels of a vector that are always of one group: the largest
// power of two that divides D, at most the vector (itself a power of two).
GN_OVERRIDE_HOST_DEVICE constexpr int channels_of_one_group(
    int64_t D,
    int vector) {
  const int64_t even = D & -D;
  return even < vector ? static_cast<int>(even) : vector;
}

// Accumulators that the threads of a block fold their results in: (mean, M2) of
// each thread's channels, merged as far as they are of one group, or two sums
// of each channel of half of the rows.
GN_OVERRIDE_HOST_DEVICE constexpr int64_t
fold_size(Direction direction, int64_t D, int vector, int columns, int rows) {
  return direction == Direction::kForward
      ? int64_t{2} * (vector / channels_of_one_group(D, vector)) * columns *
          rows
      : int64_t{2} * vector * columns * ((rows + 1) / 2);
}

// The resident scheme's parts, as offsets in bytes.
struct ResidentLayout {
  // One operand's slab is ceil(pixels_per_split / rows) x threads vectors, what
  // each thread loaded: X's, or dY's and then X's.
  int64_t slab_bytes;
  int64_t fold; // fold_size() accumulators
  int64_t channels; // backward: two accumulators of each channel of the tile
  int64_t own; // four of each group: this block's share of what is summed
  int64_t total; // four of each group: the cluster's
  int64_t bytes;

  GN_OVERRIDE_HOST_DEVICE constexpr ResidentLayout(
      Direction direction,
      int64_t D,
      int64_t pixels_per_split,
      int threads,
      int columns,
      int rows,
      int vector,
      int element_bytes,
      int accumulator_bytes)
      : slab_bytes(
            (pixels_per_split + rows - 1) / rows * threads * vector *
            element_bytes),
        fold(direction == Direction::kForward ? slab_bytes : 2 * slab_bytes),
        channels(
            fold +
            accumulator_bytes * fold_size(direction, D, vector, columns, rows)),
        own(channels +
            (direction == Direction::kForward
                 ? 0
                 : int64_t{2} * accumulator_bytes * vector * columns)),
        total(own + int64_t{4} * accumulator_bytes * (columns * vector / D)),
        bytes(total + int64_t{4} * accumulator_bytes * (columns * vector / D)) {
  }
};

} // namespace gn_override
