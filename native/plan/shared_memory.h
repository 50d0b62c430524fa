// What the planner and the CUDA kernels must agree on: limits of the blocks,
// and shared memory, byte for byte, which the one sizes and the others lay out.
#pragma once

#include <algorithm>
#include <cstdint>

#include "native/plan/plan.h"

namespace gn_override {

constexpr int kWarpSize = 32;

// Threads of as many warps as `threads` need.
constexpr int in_whole_warps(int64_t threads) {
  return static_cast<int>(ceil_div(threads, kWarpSize) * kWarpSize);
}

// Threads of a block at most: of the two-pass scheme, of the resident schemes,
// and of the registers scheme.
constexpr int kMaxThreads = 256;
constexpr int kMaxResidentThreads = 512;
constexpr int kMaxRegisterThreads = 640;

// Bytes of a pixel that a block of two passes has, at most, but for forward
// statistics: what it finds or prepares of a channel is for some rows.
constexpr int kTwoPassSlice = 512;

// The same as vectors.
constexpr int64_t vectors_of_slice(const Problem& problem, int vector) {
  return kTwoPassSlice / (vector * size_of(problem.dtype));
}

// Threads of a block of the two-pass scheme's second pass, about: half as many
// again where a tile has columns for one row and a half.
constexpr int kMapThreads = 128;

// Where vectors have so few bytes, a thread of that pass walks on beyond the
// pixels that it loads at first, to so many at most: what a block prepares
// takes as long as some of them.
constexpr int kWalkedBytes = 2;
constexpr int kWalkedPixels = 48;

// Blocks of kMaxResidentThreads that shall fit a multiprocessor, as far as
// registers go.
constexpr int resident_blocks(int64_t element_bytes, bool whole_chip) {
  return whole_chip || element_bytes == 8 ? 1 : 2;
}

// Samples of a block of the registers scheme, each in warps of its own.
constexpr int64_t samples_of_block(const Problem& problem) {
  return problem.direction == Direction::kForward ? 1 : problem.N;
}

// Pixels that a thread of the registers scheme keeps at most, a power of two.
constexpr int kMostPixelsInRegisters = 4;

// Bytes that cp.async, which fills the resident schemes' slabs, copies at
// least.
constexpr int kNarrowestCopy = 4;

// Neighbouring channels of a vector that are always of one group: the largest
// power of two that divides D, at most the vector (itself a power of two).
constexpr int channels_of_one_group(int64_t D, int vector) {
  const int64_t even = D & -D;
  return even < vector ? static_cast<int>(even) : vector;
}

// Accumulators of a partial result of the statistics, Moments; and of a Pair of
// sums, as which the backward pass has its own.
constexpr int kMomentsSize = 4;
constexpr int kPairSize = 2;

// And of what the two-pass scheme's second pass reads of a group: Moments, or
// GradientOfGroup.
constexpr int kOfGroupSize = 4;

// Bytes of a partial result.
constexpr int64_t partial_bytes(const Problem& problem) {
  return problem.accumulator_bytes() *
      (problem.direction == Direction::kForward ? kMomentsSize : kPairSize);
}

// Accumulators that the threads of a block fold their results in: (mean, M2) of
// each thread's channels, merged as far as they are of one group, in columns of
// an odd number of places; or two sums of each channel of half of the rows.
constexpr int64_t
fold_size(Direction direction, int64_t D, int vector, int columns, int rows) {
  return direction == Direction::kForward
      ? int64_t{2} * (vector / channels_of_one_group(D, vector)) * columns *
          (rows | 1)
      : int64_t{2} * vector * columns * ((rows + 1) / 2);
}

// The resident schemes' ring (see slab.cuh): pixels of a batch, which a thread
// has in registers at once (backward they are of X and dY), and how many
// batches the copies are ahead.
template <Direction kDirection>
constexpr int kRingPixels = kDirection == Direction::kForward ? 4 : 2;
template <bool kWholeChip>
constexpr int kRingAhead = kWholeChip ? 4 : 8;

constexpr int64_t ring_pixels(Direction direction) {
  return direction == Direction::kForward ? kRingPixels<Direction::kForward>
                                          : kRingPixels<Direction::kBackward>;
}

// Whether a cluster has all that dgamma and dbeta of its channels need.
constexpr bool cluster_has_all_samples(
    const Problem& problem,
    const Plan& plan) {
  return plan.scheme == Scheme::kResident &&
      problem.direction == Direction::kBackward &&
      plan.cluster == problem.N * plan.splits;
}

// The resident schemes' parts, as offsets in bytes.
struct ResidentLayout {
  // An operand's slab is `pixels` x threads vectors, what each thread keeps:
  // backward, dY's comes before X's.
  int64_t slab_X;
  int64_t added; // a vector of each thread, where Problem::adds
  // What every block of a cluster found of each group: Moments, or two sums.
  // Then, where a cluster has all samples, what each found of the channels
  // whose dgamma and dbeta this block adds up.
  int64_t slots;
  int64_t total; // of each group: Moments, or two coefficients
  int64_t moments; // backward: mean and rstd of each group
  int64_t parameters; // gamma and beta of each channel of the tile
  int64_t maps; // backward with an activation: X -> Z of each of them
  int64_t channels; // backward: two sums of each channel of the tile
  int64_t barrier; // of the exchange between blocks, 8 bytes
  int64_t fold; // fold_size() accumulators
  int64_t bytes;
};

// `pixels` are those that a thread keeps.
constexpr ResidentLayout
resident_layout(const Problem& problem, const Plan& plan, int64_t pixels) {
  const bool forward = problem.direction == Direction::kForward;
  const int64_t accumulator = problem.accumulator_bytes();
  const int64_t channels = int64_t{1} * plan.columns * plan.vector;
  const int64_t groups = channels / problem.D();
  // A block's results: in parts of a warp where several fold a group.
  const int64_t parts = std::max<int64_t>(groups, plan.threads / kWarpSize);
  const int64_t blocks = plan.scheme == Scheme::kResident ? plan.splits : 0;
  const int64_t partial = partial_bytes(problem);
  const int64_t pair = kPairSize * accumulator;

  ResidentLayout layout = {};
  const int64_t kept = pixels * plan.threads * plan.vector;
  layout.slots = kept * problem.element_bytes_read();
  layout.slab_X = layout.slots - kept * size_of(problem.dtype);
  layout.added = layout.slots;
  if (problem.adds) {
    layout.slots += plan.threads * plan.vector * size_of(problem.dtype);
  }
  const int64_t found = cluster_has_all_samples(problem, plan)
      ? channels + plan.cluster // rounded up to a share of each block
      : 0;
  layout.total = layout.slots + partial * (blocks * parts + found);
  layout.moments = layout.total + partial * groups;
  layout.parameters = layout.moments + (forward ? 0 : pair * groups);
  layout.maps = layout.parameters + pair * channels;
  layout.channels = layout.maps +
      (!forward && problem.is_fused() ? pair * (channels + plan.columns) : 0);
  layout.barrier = layout.channels + (forward ? 0 : pair * channels);
  layout.fold = layout.barrier + 16; // keeps pairs of doubles aligned
  layout.bytes = layout.fold +
      accumulator *
          fold_size(
              problem.direction,
              problem.D(),
              plan.vector,
              plan.columns,
              plan.rows);
  return layout;
}

// Pixels that a thread walks, at most.
constexpr int64_t pixels_of_thread(const Plan& plan) {
  return ceil_div(plan.pixels_per_split, plan.rows);
}

// Those of them that it reads again, where it keeps the others.
constexpr int64_t pixels_read_again(const Plan& plan) {
  return std::max<int64_t>(0, pixels_of_thread(plan) - plan.pixels_kept);
}

} // namespace gn_override
