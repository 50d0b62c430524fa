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
// each thread's channels, merged as far as they are of one group, in columns of
// an odd number of places; or two sums of each channel of half of the rows.
GN_OVERRIDE_HOST_DEVICE constexpr int64_t
fold_size(Direction direction, int64_t D, int vector, int columns, int rows) {
  return direction == Direction::kForward
      ? int64_t{2} * (vector / channels_of_one_group(D, vector)) * columns *
          (rows | 1)
      : int64_t{2} * vector * columns * ((rows + 1) / 2);
}

// The resident scheme's parts, as offsets in bytes.
struct ResidentLayout {
  // One operand's slab is ceil(pixels_per_split / rows) x threads vectors, what
  // each thread loaded: X's, or dY's and then X's.
  int64_t slab_bytes;
  int64_t slots; // what every block found of each group: Moments, or two sums
  int64_t total; // of each group: Moments, or two coefficients
  int64_t moments; // backward: mean and rstd of each group
  int64_t parameters; // of each channel of the tile: gamma and beta, or gamma
  int64_t channels; // backward: two sums of each channel of the tile
  int64_t barrier; // of the exchange between blocks, 8 bytes
  int64_t fold; // fold_size() accumulators
  int64_t bytes;

  GN_OVERRIDE_HOST_DEVICE constexpr ResidentLayout(
      Direction direction,
      int64_t D,
      int splits,
      int64_t pixels_per_split,
      int threads,
      int columns,
      int rows,
      int vector,
      int element_bytes,
      int accumulator_bytes) {
    const bool forward = direction == Direction::kForward;
    const int64_t groups = columns * vector / D;
    const int64_t warps = threads / 32;
    // A block's results: in parts of a warp where several fold a group.
    const int64_t parts = groups > warps ? groups : warps;
    const int64_t wide = int64_t{forward ? 4 : 2} * accumulator_bytes;
    const int64_t pair = int64_t{2} * accumulator_bytes;
    slab_bytes =
        (pixels_per_split + rows - 1) / rows * threads * vector * element_bytes;
    slots = forward ? slab_bytes : 2 * slab_bytes;
    total = slots + wide * splits * parts;
    moments = total + wide * groups;
    parameters = moments + (forward ? 0 : pair * groups);
    channels = parameters + pair * columns * vector;
    barrier = channels + (forward ? 0 : pair * columns * vector);
    fold = barrier + 16; // keeps pairs of doubles aligned
    bytes = fold +
        accumulator_bytes * fold_size(direction, D, vector, columns, rows);
  }
};

} // namespace gn_override
