// Where a CUDA shape goes. First match wins; the last row is aten.
#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "native/plan/estimates_cuda.h"
#include "native/plan/policy.h"
#include "native/plan/shared_memory.h"
#include "native/plan/workspace_cuda.h"

namespace gn_override {

namespace {

// Of the widest type, kTwoPassSlice is so many channels, so no two-pass grid
// cuts a pixel into more than ceil_div(C, kNarrowestTile) tiles.
constexpr int64_t kNarrowestTile = kTwoPassSlice / 8;

// Pixels that a thread shall walk, at least: a split shorter than this many
// rows of the tile would cost more to fold than to read.
constexpr int kPixelsInFlight = 8;

// Blocks a multiprocessor of the two-pass scheme's first pass, at most, where
// samples are split: blocks of 256 threads run at once, but for those that need
// more registers (kBlocksPerMultiprocessor of tile.cuh for float).
constexpr int64_t kTwoPassBlocks = 4;

// No plan depends on which gradients are wanted (cached_plan() relies on that),
// so a gradient has the same bits whatever else is asked for.

// Widest vector, up to 16 bytes of any operand, that tiles a pixel's C channels
// and that every base address is aligned to.
int vector_width(const Problem& problem) {
  const int64_t element = size_of(problem.dtype);
  int vector = static_cast<int>(kWideVector / size_of(problem.output_dtype()));
  while (problem.C % vector != 0 || problem.alignment % (vector * element)) {
    vector /= 2; // 1 divides: no operand's alignment is less than an element
  }
  return vector;
}

// Workspaces of large tensors shall be at most 2% of X, where a coarser cut of
// the pixels can make them so.
constexpr int64_t kWorkspaceShare = 50;

bool exceeds_workspace_share(const Problem& problem, int64_t workspace_bytes) {
  return problem.bytes() > kLargeTensor &&
      workspace_bytes > problem.bytes() / kWorkspaceShare;
}

// Where a wave's operands are at most so many times the L2 cache, half of the
// cache can be made to hold pixels until they are read again. Larger ones push
// them out.
constexpr int64_t kCachedWave = 3;

// Blocks of plans of several waves ask for what is read so much later that it
// is a sixth of the L2 cache: enough for the time that they exchange and store,
// and little enough to be there when it is read. (Forward, kernels-h200 of
// commit 7a78db0cc821 against that of f5860d40f519: rn1 and rn2 in float32 3%
// faster, pr2 2%.)
constexpr int64_t kAheadShare = 6;
constexpr int kPrefetchCapability = 90;

int64_t bytes_ahead(const Device& device) {
  return device.compute_capability >= kPrefetchCapability
      ? device.l2_bytes / kAheadShare
      : 0;
}

// Of blocks of the whole chip. Fewer threads make a batch smaller, so that
// whole batches fill shared memory better, and leave less to fold.
constexpr int kWholeChipThreads = 384;
// Blocks of kMaxThreads and kMaxResidentThreads leave shared memory unused
// where pixels are by sevens (ResNet's 56 x 56, ...). These are for where more
// of them fit a multiprocessor than of kMaxThreads, if few of those do and the
// elements have two bytes. (Wider ones would take narrower tiles, and longer.)
constexpr std::array kFittingThreads{224, 320};
constexpr int64_t kFewBlocks = 4;

constexpr int64_t kReservedShared = 1024; // of each block, by the driver
constexpr double kNever = std::numeric_limits<double>::infinity();

// A plan with its estimated time.
struct Candidate {
  Plan plan;
  double nanoseconds = kNever;
  int64_t blocks = 0; // of a multiprocessor at once, if the scheme is resident
};

// Tiles of `columns` vectors, split over `splits` blocks of about `threads`
// threads: the part of the geometry that the resident schemes share.
Plan tiled_plan(
    const Problem& problem,
    Scheme scheme,
    int columns,
    int splits,
    int threads) {
  Plan plan;
  plan.scheme = scheme;
  plan.vector = vector_width(problem);
  plan.columns = columns;
  plan.column_tiles = static_cast<int>(
      ceil_div(problem.C, static_cast<int64_t>(columns) * plan.vector));
  plan.pixels_per_split = ceil_div(problem.HxW, splits);
  plan.splits = static_cast<int>(ceil_div(problem.HxW, plan.pixels_per_split));
  plan.rows = static_cast<int>(
      std::clamp<int64_t>(threads / columns, 1, plan.pixels_per_split));
  plan.threads = in_whole_warps(int64_t{1} * plan.rows * columns);
  return plan;
}

// Tiles of whole groups and whole vectors, as vectors: of one to ten bursts,
// or what comes next.
template <typename F>
void for_each_tile_width(const Problem& problem, const Device& device, F f) {
  const int vector = vector_width(problem);
  const int64_t unit = std::lcm<int64_t>(problem.D(), vector);
  int64_t last = 0;
  for (const int64_t bursts : {1, 2, 3, 4, 6, 8, 10}) {
    const int64_t wanted = bursts * kBurst / size_of(problem.dtype);
    const int64_t columns =
        std::min(ceil_div(wanted, unit) * unit, problem.C) / vector;
    if (columns != last && columns <= kMaxResidentThreads &&
        (device.pins.columns == 0 || device.pins.columns == columns)) {
      f(static_cast<int>(columns));
    }
    last = columns;
  }
}

// Blocks of clusters that fit a multiprocessor.
int64_t
blocks_at_once(const Problem& problem, const Device& device, const Plan& plan) {
  const int resident_threads = kMaxResidentThreads *
      resident_blocks(size_of(problem.dtype), /*whole_chip=*/false);
  const int64_t by_memory = (device.shared_memory_per_block + kReservedShared) /
      (plan.shared_bytes + kReservedShared);
  return std::min<int64_t>(by_memory, resident_threads / plan.threads);
}

// -- resident ----------------------------------------------------------------

Candidate resident_candidate(
    const Problem& problem,
    const Device& device,
    int columns,
    int splits,
    int64_t samples, // of a cluster
    int threads) {
  Candidate result;
  Plan& plan = result.plan;
  plan = tiled_plan(problem, Scheme::kResident, columns, splits, threads);
  const int64_t cluster = splits * samples;
  if (plan.threads > kMaxResidentThreads || plan.splits != splits ||
      cluster >= std::ssize(device.clusters) || device.clusters[cluster] == 0 ||
      (cluster > kPortableCluster && !device.whole_chip)) {
    return result;
  }
  plan.cluster = static_cast<int>(cluster);
  plan.pixels_kept = pixels_of_thread(plan);
  plan.shared_bytes = resident_layout(problem, plan, plan.pixels_kept).bytes;
  result.blocks = blocks_at_once(problem, device, plan);
  if (result.blocks < 1) {
    return result;
  }
  plan.workspace_bytes = CUDAWorkspace(problem, plan).bytes();
  if (splits > 1 && exceeds_workspace_share(problem, plan.workspace_bytes)) {
    return result;
  }

  plan.bytes_ahead = resident_waves(problem, device, plan, result.blocks) > 1
      ? bytes_ahead(device)
      : 0;
  result.nanoseconds = estimate_resident(problem, device, plan, result.blocks);
  return result;
}

// Whether pins leave the scheme to the policy, or say this one.
bool allow(const Pins& pins, Scheme scheme) {
  return pins.scheme == Scheme::kAten || pins.scheme == scheme;
}

Candidate best_resident(const Problem& problem, const Device& device) {
  Candidate best;
  const Pins& pins = device.pins;
  if (!allow(pins, Scheme::kResident)) {
    return best;
  }
  const auto consider = [&](const Candidate& candidate) {
    if (candidate.nanoseconds < best.nanoseconds) {
      best = candidate;
    }
  };
  const auto consider_threads = [&](int columns, int splits, int64_t samples) {
    const auto candidate_of = [&](int threads) {
      return resident_candidate(
          problem, device, columns, splits, samples, threads);
    };
    if (pins.threads > 0) {
      consider(candidate_of(pins.threads));
      return;
    }
    const Candidate usual = candidate_of(kMaxThreads);
    consider(usual);
    consider(candidate_of(kMaxResidentThreads));
    if (size_of(problem.output_dtype()) == 2 && usual.blocks < kFewBlocks) {
      for (const int threads : kFittingThreads) {
        const Candidate fitting = candidate_of(threads);
        if (fitting.blocks > usual.blocks) {
          consider(fitting);
        }
      }
    }
  };
  for_each_tile_width(problem, device, [&](int columns) {
    for (int splits = 1; splits < std::ssize(device.clusters); ++splits) {
      if (pins.share > 0 && pins.share != splits) {
        continue;
      }
      consider_threads(columns, splits, 1);
      if (problem.direction == Direction::kBackward && problem.N > 1 &&
          problem.N < std::ssize(device.clusters)) {
        consider_threads(columns, splits, problem.N);
      }
    }
  });
  return best;
}

// -- cooperative -------------------------------------------------------------

// The whole chip takes `samples` samples at a time.
Candidate cooperative_candidate(
    const Problem& problem,
    const Device& device,
    int columns,
    int64_t samples) {
  Candidate result;
  Plan& plan = result.plan;
  int threads = kWholeChipThreads;
  if (problem.is_fused()) {
    threads = kMaxResidentThreads; // they hide more of an activation
  }
  if (device.pins.threads > 0) {
    threads = device.pins.threads;
  }
  const int64_t tiles = ceil_div(
      problem.C, static_cast<int64_t>(columns) * vector_width(problem));
  const int64_t splits = device.sm_count / (samples * tiles);
  if (splits < 1) {
    return result;
  }
  plan = tiled_plan(
      problem,
      Scheme::kCooperative,
      columns,
      static_cast<int>(std::min(splits, problem.HxW)),
      threads);
  plan.samples_per_wave = samples;
  if (plan.threads > kMaxResidentThreads ||
      plan.pixels_per_split > std::numeric_limits<int>::max() / 2) {
    return result;
  }
  // Whole batches, and as many as the copies are ahead: see Ring in slab.cuh.
  const int64_t batch = ring_pixels(problem.direction);
  const int64_t wanted = std::max(
      ceil_div(pixels_of_thread(plan), batch), int64_t{kRingAhead<true>});
  const int64_t of_pixel = plan.vector * problem.element_bytes_read();
  const auto batches_for = [&](int threads) {
    plan.threads = threads;
    const int64_t rest = resident_layout(problem, plan, 0).bytes;
    return std::min(
        wanted,
        (device.shared_memory_per_block - rest) / (batch * threads * of_pixel));
  };
  // Threads without a row help to fold, but their places keep nothing.
  const int fewest = plan.threads;
  int64_t batches = batches_for(std::max(threads, fewest));
  if (batches < wanted) {
    batches = batches_for(fewest);
  }
  if (batches < kRingAhead<true>) {
    return result;
  }
  plan.pixels_kept = batches * batch;
  const int64_t of_wave =
      problem.numel() / problem.N * samples * problem.element_bytes_read();
  if (device.l2_policies && of_wave <= kCachedWave * device.l2_bytes) {
    plan.pixels_cached = std::min(
        pixels_read_again(plan),
        device.l2_bytes / 2 /
            (plan.splits * tiles * samples * plan.threads * of_pixel));
  }
  plan.shared_bytes = resident_layout(problem, plan, plan.pixels_kept).bytes;
  plan.workspace_bytes = CUDAWorkspace(problem, plan).bytes();
  if (exceeds_workspace_share(problem, plan.workspace_bytes)) {
    return result;
  }

  plan.bytes_ahead = samples < problem.N ? bytes_ahead(device) : 0;
  result.nanoseconds = estimate_cooperative(problem, plan);
  return result;
}

Candidate best_cooperative(const Problem& problem, const Device& device) {
  Candidate best;
  if (!device.whole_chip || !allow(device.pins, Scheme::kCooperative)) {
    return best;
  }
  for_each_tile_width(problem, device, [&](int columns) {
    for (int64_t samples = std::min<int64_t>(problem.N, device.sm_count);
         samples > 0;
         --samples) {
      const int64_t waves = ceil_div(problem.N, samples);
      if (ceil_div(problem.N, waves) != samples || // as many waves of fewer
          (device.pins.share > 0 && device.pins.share != samples)) {
        continue;
      }
      const Candidate candidate =
          cooperative_candidate(problem, device, columns, samples);
      if (candidate.nanoseconds < best.nanoseconds) {
        best = candidate;
      }
    }
  });
  return best;
}

double two_pass_nanoseconds(const Problem& problem, const Device& device) {
  return allow(device.pins, Scheme::kTwoPass)
      ? estimate_two_pass(problem, device, vector_width(problem))
      : kNever;
}

// Of the other schemes than registers, the one that is estimated to be the
// fastest has a plan.

std::optional<Plan> plan_resident(
    const Problem& problem,
    const Device& device) {
  const Candidate best = best_resident(problem, device);
  if (best.nanoseconds < two_pass_nanoseconds(problem, device) &&
      best.nanoseconds <= best_cooperative(problem, device).nanoseconds) {
    return best.plan;
  }
  return std::nullopt;
}

// After plan_resident(): where that has none, it is not as fast as this one or
// two passes.
std::optional<Plan> plan_cooperative(
    const Problem& problem,
    const Device& device) {
  const Candidate best = best_cooperative(problem, device);
  if (best.nanoseconds < two_pass_nanoseconds(problem, device)) {
    return best.plan;
  }
  return std::nullopt;
}

// -- two passes --------------------------------------------------------------

std::optional<Plan> plan_two_pass(
    const Problem& problem,
    const Device& device) {
  Plan plan;
  plan.scheme = Scheme::kTwoPass;
  plan.vector = vector_width(problem);

  // The backward pass leaves sums of every channel for every split: narrower
  // tiles make as many blocks of fewer splits, and so a smaller workspace.
  const bool forward = problem.direction == Direction::kForward;
  const int64_t columns = problem.C / plan.vector;
  const int64_t most_columns =
      forward ? kMaxThreads : vectors_of_slice(problem, plan.vector);
  plan.column_tiles = static_cast<int>(ceil_div(columns, most_columns));
  plan.columns = static_cast<int>(ceil_div(columns, plan.column_tiles));
  plan.rows = static_cast<int>(
      std::clamp<int64_t>(kMaxThreads / plan.columns, 1, problem.HxW));

  const int64_t wanted =
      kTwoPassBlocks * device.sm_count / (problem.N * plan.column_tiles);
  int64_t most = ceil_div(problem.HxW, int64_t{plan.rows} * kPixelsInFlight);
  const CUDAWorkspace of_one_split(problem, plan);
  if (exceeds_workspace_share(
          problem, most * of_one_split.of_splits + of_one_split.of_rest)) {
    const int64_t share = problem.bytes() / kWorkspaceShare;
    most = std::max<int64_t>(
        1, (share - of_one_split.of_rest) / of_one_split.of_splits);
  }
  const int64_t splits = device.pins.share > 0
      ? device.pins.share
      : std::clamp<int64_t>(wanted, 1, most);
  plan.pixels_per_split =
      ceil_div(ceil_div(problem.HxW, splits), plan.rows) * plan.rows;
  plan.splits = static_cast<int>(ceil_div(problem.HxW, plan.pixels_per_split));

  plan.threads = in_whole_warps(int64_t{1} * plan.columns * plan.rows);
  plan.shared_bytes =
      problem.accumulator_bytes() *
      fold_size(
          problem.direction, problem.D(), plan.vector, plan.columns, plan.rows);

  plan.workspace_bytes = CUDAWorkspace(problem, plan).bytes();
  return plan;
}

// -- registers ---------------------------------------------------------------

// Threads of a block that hide each other's latency; more take longer to start
// than they save. And of a multiprocessor, where more pixels a thread are
// better than more threads, and than a second wave of blocks.
constexpr int kThreadsOfGroup = 320;
constexpr int64_t kFewThreads = 512;
constexpr int64_t kThreadsAtOnce = 1024;

// A block to each group of a sample or, backward, of all samples: a thread has
// as few pixels as these limits leave it.
std::optional<Plan> plan_registers(
    const Problem& problem,
    const Device& device) {
  const Pins& pins = device.pins;
  if (!allow(pins, Scheme::kRegisters)) {
    return std::nullopt;
  }
  Plan plan;
  plan.scheme = Scheme::kRegisters;
  plan.vector = vector_width(problem);
  plan.columns = static_cast<int>(problem.D() / plan.vector);
  plan.column_tiles = static_cast<int>(problem.G);
  plan.pixels_per_split = problem.HxW;
  const int64_t samples = samples_of_block(problem);
  const int64_t blocks = problem.N / samples * problem.G;
  const int most_threads = pins.threads > 0 ? pins.threads : kThreadsOfGroup;
  // Else each sector is moved for two groups, by many blocks.
  const bool whole_sectors =
      plan.columns * vector_bytes(problem, plan.vector) >= kSector;
  for (plan.pixels_kept = 1;; plan.pixels_kept *= 2) {
    const bool last = plan.pixels_kept == kMostPixelsInRegisters;
    plan.rows = static_cast<int>(ceil_div(problem.HxW, plan.pixels_kept));
    const int64_t threads = samples * kWarpSize *
        ceil_div(int64_t{1} * plan.rows * plan.columns, kWarpSize);
    if (threads <= (last ? kMaxRegisterThreads : most_threads) &&
        blocks * threads <=
            (last && whole_sectors ? kThreadsAtOnce : kFewThreads) *
                device.sm_count) {
      plan.threads = static_cast<int>(threads);
      break;
    }
    if (last) {
      return std::nullopt;
    }
  }
  if (plan.threads < problem.D()) { // see GroupParameters in registers.cuh
    return std::nullopt;
  }
  // gamma and beta, a place of each thread; then, what sums are folded in.
  plan.shared_bytes = 2 * problem.accumulator_bytes() * plan.threads;
  if (problem.direction == Direction::kBackward) {
    plan.shared_bytes += problem.accumulator_bytes() *
        fold_size(problem.direction,
                  problem.D(),
                  plan.vector,
                  plan.columns,
                  static_cast<int>(samples) * plan.rows);
  }
  return plan;
}

// -- the table ---------------------------------------------------------------

constexpr Condition kAddsNothing{
    "nothing to add to X: these kernels read X alone",
    [](const Problem& problem, const Device&) { return !problem.adds; }};
constexpr Condition kFitsGrid{
    "fewer than 2^30 channels, and at most 2^30 tiles of 64 in all samples",
    [](const Problem& problem, const Device&) {
      // A grid has at most 2^31 - 1 blocks. Samples are split further only
      // where they are fewer than the blocks that fill the chip, or, for the
      // second of two passes, into splits of hundreds of elements, of which
      // only a larger memory than any has so many. Slices of fewer channels are
      // 64 bytes at least: so many are of an X of 128 GiB.
      constexpr int64_t kLimit = int64_t{1} << 30;
      return problem.C < kLimit &&
          problem.N <= kLimit / ceil_div(problem.C, kNarrowestTile);
    }};
constexpr Condition kCudaDevice{
    "a CUDA device of compute capability 8.0 or later that there is code for",
    [](const Problem&, const Device& device) {
      return device.compute_capability >= kLeastComputeCapability;
    }};
constexpr Condition kCanKeep{
    "pixels that can be copied to shared memory, 4 bytes at least at a time",
    [](const Problem& problem, const Device&) {
      return vector_width(problem) * size_of(problem.dtype) >= kNarrowestCopy;
    }};

constexpr Condition kWholeChip{
    "a GPU that this process may fill: no other's kernels wait for it",
    [](const Problem&, const Device& device) { return device.whole_chip; }};

constexpr int64_t kMostKeptChannels =
    std::numeric_limits<int>::max() / kMaxResidentThreads;
static_assert(kMostKeptChannels == 4194303, "as the condition says");
constexpr Condition kNarrowPixels{
    "at most 4194303 channels: a thread's step fits an int",
    [](const Problem& problem, const Device&) {
      // A thread's pixels are as many elements apart as an int can count.
      return problem.C <= kMostKeptChannels;
    }};

constexpr Condition kTwoByteType{
    "one type of two bytes for X, Y, weight, bias and, unfused, statistics",
    [](const Problem& problem, const Device&) {
      return size_of(problem.dtype) == 2 && !problem.wide_output &&
          problem.param_dtype == problem.dtype &&
          problem.wide_statistics == problem.is_fused();
    }};
constexpr Condition kWholeVectors{
    "groups of whole vectors of 16 bytes, aligned to them",
    [](const Problem& problem, const Device&) {
      return problem.alignment == kWideVector &&
          problem.D() * size_of(problem.dtype) % kWideVector == 0;
    }};
constexpr int64_t kMostElements =
    int64_t{kMaxRegisterThreads} * kMostPixelsInRegisters * 8;
static_assert(kMostElements == 20480, "as the condition says");
constexpr Condition kSmallGroups{
    "at most 20480 elements of a group, backward of all samples together",
    [](const Problem& problem, const Device&) {
      const int64_t samples = samples_of_block(problem);
      return problem.HxW <= kMostElements && samples <= kMostElements &&
          samples * problem.HxW * problem.D() <= kMostElements;
    }};

constexpr std::array kRegistersConditions{
    kChannelsLast,
    kNotEmpty,
    kFitsGrid,
    kCudaDevice,
    kTwoByteType,
    kWholeVectors,
    kSmallGroups,
};
constexpr std::array kResidentConditions{
    kChannelsLast,
    kNotEmpty,
    kFitsGrid,
    kCudaDevice,
    kCanKeep,
    kNarrowPixels,
};
constexpr std::array kCooperativeConditions{
    kChannelsLast,
    kNotEmpty,
    kFitsGrid,
    kCudaDevice,
    kCanKeep,
    kNarrowPixels,
    kWholeChip,
};
constexpr std::array kTwoPassConditions{
    kChannelsLast,
    kAddsNothing,
    kNotEmpty,
    kFitsGrid,
    kCudaDevice,
};

constexpr std::array kRules{
    Rule{
        Scheme::kRegisters,
        kRegistersConditions,
        plan_registers,
        "a block keeps a small group in registers, and waits once for memory "
        "and for no other block (2x2560x8x8 bf16 on an H200: 1.1 times a copy "
        "forward)"},
    Rule{
        Scheme::kResident,
        kResidentConditions,
        plan_resident,
        "a cluster keeps a sample's tile in shared memory between statistics "
        "and normalisation, so X is read once (128x256x28x28 bf16 on an H200: "
        "1.1 times a copy forward)"},
    Rule{
        Scheme::kCooperative,
        kCooperativeConditions,
        plan_cooperative,
        "tiles too large for a cluster: the whole chip keeps as much of a few "
        "samples as fits, and reads the rest twice (2x256x200x272 bf16 on an "
        "H200: 1.3 times a copy forward, two passes 1.6)"},
    Rule{
        Scheme::kTwoPass,
        kTwoPassConditions,
        plan_two_pass,
        "what neither keeps as fast: pixels are split over the whole chip, X "
        "is read twice"},
    kAtenRule,
};

} // namespace

std::span<const Rule> policy_cuda() {
  return kRules;
}

} // namespace gn_override
