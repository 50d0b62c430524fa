// Nanoseconds and bytes per nanosecond, fitted on an H200 to the times of all
// plans of 117 shapes, and again of 110 when blocks had begun to prefetch;
// those of two passes, and kSharedNarrow, to 121 shapes when the first had
// begun to add up segments.
// tools/tune.py measures these, and says how much longer the plans that are
// chosen take than the best ones.
#include "native/plan/estimates_cuda.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>

#include "native/plan/shared_memory.h"

namespace gn_override {

namespace {

// By direction: forward, backward.
using ByDirection = std::array<double, 2>;

// A tile of s bytes a pixel takes longer than its bytes: by what it touches of
// bursts and of sectors that it shares with the next tile, if there is one, and
// by a part of each burst; but not where it is all of a pixel in narrow
// vectors.
constexpr double kSharedBurst = 0.382;
constexpr double kSharedSector = 1.63;
constexpr ByDirection kEveryTile{0.259, 0.239};
// And vectors of less than 16 bytes, or of 2, take more instructions.
constexpr double kNarrowVectors = 1.754;
constexpr double kNarrowestVectors = 2;
// Some of which blocks hide from each other that share a multiprocessor, if
// others follow them.
constexpr double kSharedNarrow = 0.75;
// Some of which the whole chip hides, if they have 8.
constexpr ByDirection kHalfVectorsOfChip{kNarrowVectors, 1.25};
// More so where the whole chip has several tiles of them.
constexpr double kNarrowTiles = 1.0606;

// The resident scheme: a call, and what a multiprocessor moves, or its share of
// what the chip can.
constexpr ByDirection kResidentCall{3150, 4600};
constexpr double kMultiprocessorBytesPerNs = 54.1;
constexpr ByDirection kShareBytesPerNs{46.3, 48.8};
// That is what infinitely many threads would move: what so many of them would
// is lost. Each thread of the blocks that start first takes time as well.
constexpr double kLostThreads = 96.3;
constexpr double kThread = 3.6;
// What each wave of blocks but the first loses between its loads and its
// stores, by the blocks that share a multiprocessor.
constexpr std::array kPhaseChange{2990.0, 1470.0, 1090.0, 841.0};
// And each wave: for every channel that it folds, and every doubling of the
// cluster.
constexpr ByDirection kFoldedChannel{10.7, 5.11};
constexpr double kClusterBarrier = 280;
// And backward a second launch, where a cluster has not all samples.
constexpr double kParameterGradients = 1790;

// An activation, each time that it is evaluated, by the elements of a
// multiprocessor. Clusters evaluate it once: by direction, since there are
// enough blocks to hide most of it, if they are of enough threads.
constexpr double kActivation = 0.03;
constexpr ByDirection kResidentActivation{0.01, 0.022};
constexpr double kLostActivationThreads = 400;

// The cooperative scheme: a call, a wave, and what a block reads of a group in
// an exchange.
constexpr ByDirection kCooperativeCall{3580, 5240};
constexpr ByDirection kCooperativeWave{4060, 4470};
constexpr double kExchangedPart = 0.8;
constexpr ByDirection kCooperativeBytesPerNs{35.5, 32.5};
// What the L2 cache holds is read again in less time, by this share.
constexpr double kCachedGain = 0.6;

constexpr ByDirection kTwoPassCall{11000, 12500};
constexpr ByDirection kTwoPassBytesPerNs{30.5, 33};
// Times longer: by vectors of less than 16 bytes, or of 2.
constexpr ByDirection kNarrowTwoPass{1.07, 1.03};
constexpr double kNarrowestTwoPass = 1.4;
// An activation, which both passes evaluate backward: the second waits for it.
constexpr ByDirection kTwoPassActivation{0.03, 0.09};
// For each channel of a sample.
constexpr ByDirection kTwoPassChannel{0.008, 0.025};

double of(const ByDirection& estimate, const Problem& problem) {
  return estimate[problem.direction == Direction::kForward ? 0 : 1];
}

// How many times longer a plan's vectors take than wide ones where tiles are
// kept.
double narrowness(const Problem& problem, const Plan& plan) {
  if (!is_narrow(problem, plan.vector)) {
    return 1;
  }
  if (plan.scheme == Scheme::kCooperative &&
      vector_bytes(problem, plan.vector) == kWideVector / 2) {
    return of(kHalfVectorsOfChip, problem);
  }
  return vector_bytes(problem, plan.vector) == 2 ? kNarrowestVectors
                                                 : kNarrowVectors;
}

// What `pixels` pixels of a tile of a tensor take, as bytes.
double tile_bytes(
    const Problem& problem,
    const Plan& plan,
    int64_t pixels,
    int64_t element) {
  const int64_t width = int64_t{1} * plan.columns * plan.vector * element;
  const int64_t pixel = problem.C * element;
  const auto shared = [&](int64_t unit) {
    return static_cast<double>(unit - std::gcd(std::gcd(width, pixel), unit));
  };
  double lost = 0;
  if (plan.column_tiles > 1) {
    lost += kSharedBurst * shared(kBurst) + kSharedSector * shared(kSector);
  }
  if (plan.column_tiles > 1 || !is_narrow(problem, plan.vector)) {
    lost += of(kEveryTile, problem) * kBurst;
  }
  return static_cast<double>(pixels) * narrowness(problem, plan) *
      (static_cast<double>(width) + lost);
}

// A block's pixels of X, and backward of dY.
double bytes_read(const Problem& problem, const Plan& plan) {
  const int64_t X = size_of(problem.dtype);
  const int64_t dY = problem.element_bytes_read() - X;
  const double of_X = tile_bytes(problem, plan, plan.pixels_per_split, X);
  return dY == 0 ? of_X
                 : of_X + tile_bytes(problem, plan, plan.pixels_per_split, dY);
}

// Those of Y, or of dX.
double bytes_written(const Problem& problem, const Plan& plan) {
  return tile_bytes(
      problem, plan, plan.pixels_per_split, problem.element_bytes_written());
}

double elements_of_block(const Plan& plan) {
  return static_cast<double>(plan.pixels_per_split) * plan.columns *
      plan.vector;
}

// Blocks of the resident scheme, and multiprocessors that its clusters reach.
int64_t resident_blocks_of(const Problem& problem, const Plan& plan) {
  return problem.N * plan.column_tiles * plan.splits;
}

int64_t multiprocessors_of(const Device& device, const Plan& plan) {
  return int64_t{1} * device.clusters[plan.cluster] * plan.cluster;
}

} // namespace

int64_t resident_waves(
    const Problem& problem,
    const Device& device,
    const Plan& plan,
    int64_t blocks_at_once) {
  return ceil_div(
      resident_blocks_of(problem, plan),
      blocks_at_once * multiprocessors_of(device, plan));
}

double estimate_resident(
    const Problem& problem,
    const Device& device,
    const Plan& plan,
    int64_t blocks_at_once) {
  const int64_t blocks = resident_blocks_of(problem, plan);
  const int64_t of_multiprocessor =
      ceil_div(blocks, multiprocessors_of(device, plan));
  const int64_t waves = resident_waves(problem, device, plan, blocks_at_once);
  const auto first_threads = static_cast<double>(
      std::min(blocks_at_once, of_multiprocessor) * plan.threads);
  const bool hides =
      blocks_at_once > 1 && waves > 1 && is_narrow(problem, plan.vector);
  const double block_bytes = (hides ? kSharedNarrow : 1) *
      (bytes_read(problem, plan) + bytes_written(problem, plan));
  const double moved = (1 + kLostThreads / first_threads) *
      std::max(of_multiprocessor * block_bytes / kMultiprocessorBytesPerNs,
               blocks * block_bytes /
                   (of(kShareBytesPerNs, problem) * device.sm_count));
  const double phase_change =
      kPhaseChange[std::min<size_t>(blocks_at_once, kPhaseChange.size()) - 1];
  const double of_wave =
      of(kFoldedChannel, problem) * plan.columns * plan.vector +
      kClusterBarrier * std::bit_width(static_cast<unsigned>(plan.cluster - 1));
  double result = of(kResidentCall, problem) +
      (plan.workspace_bytes > 0 ? kParameterGradients : 0) +
      kThread * first_threads + moved + (waves - 1) * phase_change +
      waves * of_wave;
  if (problem.is_fused()) {
    result += (1 + kLostActivationThreads / first_threads) *
        of(kResidentActivation, problem) * of_multiprocessor *
        elements_of_block(plan);
  }
  return result;
}

double estimate_cooperative(const Problem& problem, const Plan& plan) {
  const int64_t waves = ceil_div(problem.N, plan.samples_per_wave);
  const double all = bytes_read(problem, plan);
  const auto of_thread = static_cast<double>(pixels_of_thread(plan));
  const auto pixels_again = static_cast<double>(pixels_read_again(plan));
  const double again =
      all * (pixels_again - kCachedGain * plan.pixels_cached) / of_thread;
  const double uneven =
      plan.column_tiles > 1 && narrowness(problem, plan) > 1 ? kNarrowTiles : 1;
  const double of_wave = of(kCooperativeWave, problem) +
      kExchangedPart * plan.splits * plan.columns * plan.vector /
          static_cast<double>(problem.D()) +
      (all + again + bytes_written(problem, plan)) /
          of(kCooperativeBytesPerNs, problem);
  double result = of(kCooperativeCall, problem) + waves * uneven * of_wave;
  if (problem.is_fused()) {
    // Backward, what is read again is differentiated again.
    const double evaluations = problem.direction == Direction::kForward
        ? 1
        : 1 + pixels_again / of_thread;
    result += waves * evaluations * kActivation * elements_of_block(plan);
  }
  return result;
}

double
estimate_two_pass(const Problem& problem, const Device& device, int vector) {
  // X, X, Y; or dY, X, dY, X, dX
  const int64_t bytes = problem.numel() *
      (2 * problem.element_bytes_read() + problem.element_bytes_written());
  const double rate = of(kTwoPassBytesPerNs, problem) * device.sm_count;
  const double longer = vector_bytes(problem, vector) == 2
      ? kNarrowestTwoPass
      : (is_narrow(problem, vector) ? of(kNarrowTwoPass, problem) : 1);
  double result = of(kTwoPassCall, problem) +
      longer * static_cast<double>(bytes) / rate +
      of(kTwoPassChannel, problem) * static_cast<double>(problem.N * problem.C);
  if (problem.is_fused()) {
    result += of(kTwoPassActivation, problem) *
        static_cast<double>(problem.numel()) / device.sm_count;
  }
  return result;
}

} // namespace gn_override
