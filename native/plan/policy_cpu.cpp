// Where a CPU shape goes. First match wins; the last row is aten.
#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>

#include "native/plan/policy.h"
#include "native/plan/rows_cpu.h"
#include "native/plan/workspace_cpu.h"

namespace gn_override {

namespace {

// What has been read for the sums should still be in a cache when it is read
// again for the output. Level-2 caches of servers are 1 to 2 MB a core, the
// shared ones 32 MB and more. Barriers cost microseconds on an idle machine
// and a time slice each on a busy one, so there should be few: a thread works
// on samples of its own where that many samples fit the caches, and what all
// threads work on together is as large as the caches allow.
constexpr int64_t kCacheBytesPerThread = 1 << 20;
constexpr int64_t kSharedCacheBytes = 32 << 20;

// How far ahead a thread asks for memory. Where its part of X is in its level-2
// cache, that costs a tenth to a fifth of the time; from farther away it saves
// as much and more.
constexpr int64_t kBytesAhead = 8192;

// Bytes of a chunk at most: several chunks a thread and batch, so that threads
// are loaded evenly.
constexpr int64_t kChunkBytes = 256 << 10;

// Chunks of the whole call at least, where its rows suffice: more than there
// are threads. A constant, since the chunks decide the order of the sums, and
// results must not depend on the number of threads.
constexpr int64_t kLeastChunks = 64;

// Rows of a chunk, at least. With fewer, the chunk's own sums (two arrays of a
// row's length, merged in double) weigh as much as its rows.
constexpr int64_t kLeastRows = 16;

// Rows of a chunk at most, and their square for each element of a group: above,
// rounding of the running mean, one a block of rows, begins to show. It grows
// with the root of a chunk's rows, and averages out over a group's chunks and
// channels.
constexpr int64_t kMostRows = 512;
constexpr int64_t kMostSquaredRows = 16;

// Elements of a chunk, at least. With fewer, as of few channels, a chunk costs
// more than its rows, by its calls and by the merge (1x2x64x64 would be 64
// chunks of 128).
constexpr int64_t kLeastElements = 4096;

// Of a large X, a chunk has so many bytes of each channel at least, so that the
// chunks' sums take at most 1.6% of a sample.
constexpr int64_t kLeastChannelBytes = 512;

// A row of at least this many elements keeps enough independent sums going to
// hide the latency of an addition.
constexpr int64_t kFoldedRow = 128;

// Rows longer than this are not folded to make them whole vectors: what is left
// at their end is a small part.
constexpr int64_t kLongRow = 512;

// Folded rows of a sample, at least, so that what folding costs once a sample
// (the parameters of the map are written `fold` times) is a small part: where
// rows become whole vectors, and where they become longer than that.
constexpr int64_t kLeastWholeRows = 8;
constexpr int64_t kLeastFoldedRows = 64;

// Pixels to a row: whole vectors (the smaller ones divide the widest) and
// enough of them, where the sample has the pixels for it.
int64_t fold_of(const Problem& problem) {
  const int64_t whole = kMostLanes / std::gcd(problem.C, kMostLanes);
  if (problem.C > kLongRow || whole * problem.C > kMaxFoldedRow) {
    return 1;
  }
  const int64_t enough = whole * ceil_div(kFoldedRow, whole * problem.C);
  if (problem.HxW >= enough * kLeastFoldedRows) {
    return enough;
  }
  return std::clamp<int64_t>(problem.HxW / kLeastWholeRows, 1, whole);
}

std::optional<Plan> plan_channels_last(
    const Problem& problem,
    const Device& device) {
  Plan plan;
  plan.scheme = Scheme::kChannelsLastCPU;
  const int64_t fold = fold_of(problem);
  plan.fold = static_cast<int>(fold);

  const int64_t row_bytes = problem.C * size_of(problem.dtype);
  const auto accurate_rows = static_cast<int64_t>(std::sqrt(
      static_cast<double>(kMostSquaredRows * problem.D() * problem.HxW)));
  const int64_t accurate = std::min(kMostRows, accurate_rows) * fold;
  const int64_t least = problem.bytes() > kLargeTensor
      ? kLeastChannelBytes / std::min<int64_t>(size_of(problem.dtype), 4)
      : std::min(
            std::max(kLeastRows, ceil_div(kLeastElements, problem.C)),
            accurate);
  const int64_t most =
      std::max(least, std::min(kChunkBytes / row_bytes, accurate));
  const int64_t wanted =
      ceil_div(problem.HxW, ceil_div(kLeastChunks, problem.N));
  const int64_t rows = std::clamp(wanted, least, most);
  const int64_t splits = ceil_div(problem.HxW, rows);
  const int64_t block = rows < kLeastRows * fold ? fold : kSumRows * fold;
  plan.pixels_per_split =
      ceil_div(ceil_div(problem.HxW, splits), block) * block;
  plan.splits = static_cast<int>(ceil_div(problem.HxW, plan.pixels_per_split));

  const int64_t operands = problem.direction == Direction::kForward ? 1 : 2;
  const int64_t sample_bytes = operands * problem.HxW * row_bytes;
  const int64_t cache_bytes =
      std::max(kCacheBytesPerThread * device.threads, kSharedCacheBytes);
  const CPUWorkspace of_sample(problem, plan); // a batch has one so far
  const int64_t run = of_sample.samples_per_run;
  plan.bytes_ahead =
      problem.bytes() > kCacheBytesPerThread * device.threads ? kBytesAhead : 0;
  plan.slots = problem.N / run >= device.threads &&
          sample_bytes <= cache_bytes / device.threads
      ? device.threads
      : 0;
  // Of the samples that slots leave; of small ones, the workspace is the most.
  const int64_t left =
      plan.slots > 0 ? problem.N % (run * plan.slots) : problem.N;
  plan.samples_per_batch = std::clamp<int64_t>(
      cache_bytes / 2 / (sample_bytes + of_sample.shared.bytes),
      1,
      std::max<int64_t>(left, 1));
  plan.workspace_bytes = CPUWorkspace(problem, plan).bytes;
  return plan;
}

constexpr std::array kConditions{kChannelsLast, kNotEmpty};

constexpr std::array kRules{
    Rule{
        Scheme::kChannelsLastCPU,
        kConditions,
        plan_channels_last,
        "every channels-last shape: a thread takes whole samples where they "
        "fit its cache; else all threads share one, cut into chunks"},
    kAtenRule,
};

} // namespace

std::span<const Rule> policy_cpu() {
  return kRules;
}

} // namespace gn_override
