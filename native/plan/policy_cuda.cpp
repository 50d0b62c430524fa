// Where a CUDA shape goes. First match wins; the last row is aten.
#include <algorithm>
#include <array>
#include <bit>
#include <limits>
#include <numeric>

#include "native/plan/policy.h"
#include "native/plan/shared_memory.h"

namespace gn_override {

namespace {

constexpr int kThreads = 256;
constexpr int kWarp = 32;

// Vectors that a block of the backward pass has side by side, at most: 512
// bytes of a pixel.
constexpr int kBackwardColumns = 32;

// Pixels that a thread shall walk, at least: a split shorter than this many
// rows of the tile would cost more to fold than to read.
constexpr int kPixelsInFlight = 8;

// Blocks a multiprocessor: enough to fill it twice over at the kernels'
// register use (four blocks of 256 threads are resident), so that the last
// wave is a small part of the work.
constexpr int64_t kBlocksPerMultiprocessor = 8;

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Widest vector, up to 16 bytes, that tiles a pixel's C channels and that every
// base address is aligned to.
int vector_width(const Problem& problem) {
  const int64_t element = size_of(problem.dtype);
  int vector = static_cast<int>(16 / element);
  while (problem.C % vector != 0 || problem.alignment % (vector * element)) {
    vector /= 2;
  }
  return vector;
}

int64_t accumulator_bytes(const Problem& problem) {
  return problem.dtype == DType::kDouble ? 8 : 4;
}

// Workspaces of large tensors shall be at most 2% of X, where a coarser cut of
// the pixels can make them so.
constexpr int64_t kLargeTensor = int64_t{64} << 20;
constexpr int64_t kWorkspaceShare = 50;

bool exceeds_workspace_share(const Problem& problem, int64_t workspace_bytes) {
  return problem.bytes() > kLargeTensor &&
      workspace_bytes > problem.bytes() / kWorkspaceShare;
}

// -- resident ----------------------------------------------------------------

// Estimates, in nanoseconds and bytes per nanosecond, that rank the schemes and
// the resident scheme's candidates; they decide nothing else. Fitted to sweeps
// on an H200 (tools/tune.py, benchmarks/results/tune-h200.json).
constexpr double kBytesPerNs = 32; // of a multiprocessor's share of a copy
// What a wave of blocks loses between its loads and its stores, by the blocks
// that share a multiprocessor.
constexpr std::array kPhaseChange{3000.0, 1500.0, 1000.0};
constexpr double kClusterBarrier = 500; // a doubling of the cluster
// Slices of one burst of 64 bytes, and more so those that do not cut memory at
// bursts, cost more than their bytes.
constexpr int64_t kBurst = 64;
constexpr double kOneBurst = 1.07;
constexpr double kUnevenSlice = 1.1; // of two bursts or more
constexpr double kUnevenNarrowSlice = 1.5;
// Two passes: kernels more than the resident scheme has, and the share of a
// copy's speed that they reach.
constexpr double kMoreKernelsForward = 6500;
constexpr double kMoreKernelsBackward = 7000;
constexpr double kTwoPassSpeed = 0.8;

constexpr int kMostThreads = 512;
constexpr int64_t kReservedShared = 1024; // of each block, by the driver

// Clusters that run at once with a block to a multiprocessor.
int64_t running_clusters(const Device& device, int cluster) {
  const auto power =
      static_cast<size_t>(std::countr_zero(static_cast<unsigned>(cluster)));
  return power < device.clusters.size() ? device.clusters[power] : 0;
}

// Blocks that fit a multiprocessor.
int64_t residents(
    const Problem& problem,
    const Device& device,
    int threads,
    int64_t shared_bytes) {
  // By registers: see kResidentBlocks in resident.cuh.
  const int resident_threads =
      problem.dtype == DType::kDouble ? kMostThreads : 2 * kMostThreads;
  const int64_t by_memory = (device.shared_memory_per_block + kReservedShared) /
      (shared_bytes + kReservedShared);
  return std::min<int64_t>(by_memory, resident_threads / threads);
}

// The resident plan for slices of `columns` vectors and clusters of `cluster`
// blocks of about `threads` threads, with its estimated time.
struct Candidate {
  Plan plan;
  double nanoseconds = std::numeric_limits<double>::infinity();
};

Candidate resident_candidate(
    const Problem& problem,
    const Device& device,
    int vector,
    int columns,
    int cluster,
    int threads) {
  Candidate result;
  Plan& plan = result.plan;
  plan.scheme = Scheme::kResident;
  plan.vector = vector;
  plan.columns = columns;
  plan.column_tiles = static_cast<int>(
      ceil_div(problem.C, static_cast<int64_t>(columns) * vector));
  plan.rows = static_cast<int>(std::clamp<int64_t>(
      threads / columns, 1, ceil_div(problem.HxW, cluster)));
  plan.threads = static_cast<int>(
      ceil_div(static_cast<int64_t>(plan.rows) * columns, kWarp) * kWarp);
  plan.splits = cluster;
  plan.pixels_per_split = ceil_div(problem.HxW, cluster);
  if (plan.threads > kMostThreads ||
      (cluster - 1) * plan.pixels_per_split >= problem.HxW) {
    return result;
  }
  const int operands = problem.direction == Direction::kForward ? 1 : 2;
  const int64_t element = size_of(problem.dtype);
  plan.shared_bytes = ResidentLayout(
                          problem.direction,
                          problem.D(),
                          plan.splits,
                          plan.pixels_per_split,
                          plan.threads,
                          columns,
                          plan.rows,
                          vector,
                          static_cast<int>(element),
                          static_cast<int>(accumulator_bytes(problem)))
                          .bytes;
  const int64_t resident =
      residents(problem, device, plan.threads, plan.shared_bytes);
  if (plan.shared_bytes > device.shared_memory_per_block || resident < 1) {
    return result;
  }
  if (problem.direction == Direction::kBackward &&
      (problem.want_dgamma || problem.want_dbeta)) {
    plan.workspace_bytes = static_cast<size_t>(
        2 * accumulator_bytes(problem) * problem.N * cluster * problem.C);
  }

  const int64_t slice_bytes = int64_t{1} * columns * vector * element;
  const double uneven = slice_bytes == kBurst ? kOneBurst
      : slice_bytes % kBurst == 0             ? 1
      : slice_bytes >= 2 * kBurst             ? kUnevenSlice
                                              : kUnevenNarrowSlice;
  const double block_ns = (operands + 1) * slice_bytes * plan.pixels_per_split /
      kBytesPerNs * uneven;
  const int64_t multiprocessors = running_clusters(device, cluster) * cluster;
  if (cluster > 1 && exceeds_workspace_share(problem, plan.workspace_bytes)) {
    return result;
  }

  const int64_t blocks = problem.N * plan.column_tiles * cluster;
  const int64_t waves = ceil_div(blocks, resident * multiprocessors);
  double barrier = 0;
  for (int size = 1; size < cluster; size *= 2) {
    barrier += kClusterBarrier;
  }
  // Nothing overlaps the only wave.
  const double overlapped =
      kPhaseChange[std::min<size_t>(resident, kPhaseChange.size()) - 1];
  result.nanoseconds = ceil_div(blocks, multiprocessors) * block_ns +
      kPhaseChange[0] + (waves - 1) * overlapped + waves * barrier;
  return result;
}

bool allows(int pin, int64_t value) {
  return pin == 0 || pin == value;
}

double two_pass_nanoseconds(const Problem& problem, const Device& device) {
  const bool forward = problem.direction == Direction::kForward;
  // X, X, Y; or dY, X, dY, X, dX
  const int passes = forward ? 3 : 5;
  return (forward ? kMoreKernelsForward : kMoreKernelsBackward) +
      passes * static_cast<double>(problem.bytes()) /
      (kTwoPassSpeed * kBytesPerNs * device.sm_count);
}

// The fastest resident plan by the estimate; Scheme::kAten where none fits or
// two passes are faster.
Plan plan_resident(const Problem& problem, const Device& device) {
  const int vector = vector_width(problem);
  const int64_t element = size_of(problem.dtype);
  if (device.pins.two_pass || vector * element < 4) { // cp.async copies no less
    return Plan{};
  }
  // Slices of whole groups and whole vectors; of one to eight bursts, or what
  // comes next.
  const int64_t unit = std::lcm<int64_t>(problem.D(), vector);
  Candidate best;
  int64_t last_columns = 0;
  for (const int64_t bursts : {1, 2, 4, 8}) {
    const int64_t wanted = bursts * kBurst / element;
    const int64_t channels = std::min(ceil_div(wanted, unit) * unit, problem.C);
    const int64_t columns = channels / vector;
    if (columns == last_columns || columns > kMostThreads ||
        !allows(device.pins.columns, columns)) {
      continue;
    }
    last_columns = columns;
    for (int cluster = 1; running_clusters(device, cluster) > 0; cluster *= 2) {
      for (const int threads : {kThreads, kMostThreads}) {
        if (!allows(device.pins.splits, cluster) ||
            !allows(device.pins.threads, threads)) {
          continue;
        }
        const Candidate candidate = resident_candidate(
            problem,
            device,
            vector,
            static_cast<int>(columns),
            cluster,
            threads);
        if (candidate.nanoseconds < best.nanoseconds) {
          best = candidate;
        }
      }
    }
  }
  const double others = device.pins != Pins{}
      ? std::numeric_limits<double>::infinity()
      : two_pass_nanoseconds(problem, device);
  return best.nanoseconds < others ? best.plan : Plan{};
}

// -- two passes --------------------------------------------------------------

Plan plan_two_pass(const Problem& problem, const Device& device) {
  Plan plan;
  plan.scheme = Scheme::kTwoPass;
  plan.vector = vector_width(problem);

  // The backward pass leaves sums of every channel for every split: narrower
  // tiles make as many blocks of fewer splits, and so a smaller workspace.
  const bool forward = problem.direction == Direction::kForward;
  const int64_t columns = problem.C / plan.vector;
  plan.column_tiles = static_cast<int>(
      ceil_div(columns, forward ? kThreads : kBackwardColumns));
  plan.columns = static_cast<int>(ceil_div(columns, plan.column_tiles));
  plan.rows = static_cast<int>(
      std::clamp<int64_t>(kThreads / plan.columns, 1, problem.HxW));

  const int64_t wanted = ceil_div(
      kBlocksPerMultiprocessor * device.sm_count,
      problem.N * plan.column_tiles);
  int64_t most =
      ceil_div(problem.HxW, static_cast<int64_t>(plan.rows) * kPixelsInFlight);
  const int64_t sums_of_split =
      2 * accumulator_bytes(problem) * problem.N * problem.C;
  if (!forward && exceeds_workspace_share(problem, most * sums_of_split)) {
    most = std::max<int64_t>(
        1, (problem.bytes() / kWorkspaceShare) / sums_of_split - 1);
  }
  const int64_t splits = device.pins.splits > 0
      ? device.pins.splits
      : std::clamp<int64_t>(wanted, 1, most);
  plan.pixels_per_split =
      ceil_div(ceil_div(problem.HxW, splits), plan.rows) * plan.rows;
  plan.splits = static_cast<int>(ceil_div(problem.HxW, plan.pixels_per_split));

  plan.threads = static_cast<int>(
      ceil_div(int64_t{1} * plan.columns * plan.rows, kWarp) * kWarp);
  plan.shared_bytes =
      accumulator_bytes(problem) *
      fold_size(
          problem.direction, problem.D(), plan.vector, plan.columns, plan.rows);

  // Forward: the Moments of each split's segments (see two_pass.cuh), then of
  // each group. Backward: two sums of each split's channels, then two
  // coefficients of each group.
  const int64_t partials =
      forward ? problem.G + plan.column_tiles - 1 : problem.C;
  plan.workspace_bytes = static_cast<size_t>(
      (forward ? 4 : 2) * accumulator_bytes(problem) * problem.N *
      (plan.splits * partials + problem.G));
  return plan;
}

Plan plan_aten(const Problem&, const Device&) {
  return Plan{};
}

constexpr Condition kChannelsLast{
    "a dense channels-last X of more than one pixel and one channel",
    [](const Problem& problem, const Device&) {
      return problem.channels_last;
    }};
constexpr Condition kNotEmpty{
    "at least one sample",
    [](const Problem& problem, const Device&) { return problem.N > 0; }};
constexpr Condition kFitsGrid{
    "fewer than 2^31 channels, and blocks",
    [](const Problem& problem, const Device&) {
      // A grid has at most 2^31 - 1 blocks. Samples are split further only
      // where they are fewer than the blocks that fill the chip.
      constexpr int64_t kLimit = int64_t{1} << 30;
      return problem.C < kLimit &&
          problem.N <= kLimit / ceil_div(problem.C, kThreads);
    }};
constexpr Condition kCudaDevice{
    "a CUDA device",
    [](const Problem&, const Device& device) { return device.sm_count > 0; }};
constexpr Condition kPaysToStay{
    "a slice of whole groups of a sample that fits the shared memory of a "
    "cluster, in a geometry that beats two passes",
    [](const Problem& problem, const Device& device) {
      return problem.channels_last && problem.N > 0 && device.sm_count > 0 &&
          plan_resident(problem, device).scheme == Scheme::kResident;
    }};

constexpr std::array kResidentConditions{
    kChannelsLast,
    kNotEmpty,
    kFitsGrid,
    kCudaDevice,
    kPaysToStay,
};
constexpr std::array kTwoPassConditions{
    kChannelsLast,
    kNotEmpty,
    kFitsGrid,
    kCudaDevice,
};

const std::array kRules{
    Rule{
        "resident",
        kResidentConditions,
        plan_resident,
        "a sample's slice stays in shared memory between statistics and "
        "normalisation, so X is read once"},
    Rule{
        "two_pass",
        kTwoPassConditions,
        plan_two_pass,
        "samples that clusters cannot hold, or not as fast: pixels are split "
        "over the whole chip, X is read twice"},
    Rule{
        "aten",
        {},
        plan_aten,
        "stock kernels: NCHW-contiguous inputs are theirs"},
};

} // namespace

std::span<const Rule> policy_cuda() {
  return kRules;
}

} // namespace gn_override
