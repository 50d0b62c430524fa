// Where a CUDA shape goes. First match wins; the last row is aten.
#include <algorithm>
#include <array>

#include "native/plan/policy.h"

namespace gn_override {

namespace {

constexpr int kThreads = 256;

// Pixels that a thread has in flight at once (the kernels' kBatch). A split
// shorter than this many rows of the tile would leave loads unissued.
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

Plan plan_two_pass(const Problem& problem, const Device& device) {
  Plan plan;
  plan.scheme = Scheme::kTwoPass;
  plan.vector = vector_width(problem);

  const int64_t columns = problem.C / plan.vector;
  plan.column_tiles = static_cast<int>(ceil_div(columns, kThreads));
  plan.columns = static_cast<int>(ceil_div(columns, plan.column_tiles));
  plan.rows = static_cast<int>(
      std::clamp<int64_t>(kThreads / plan.columns, 1, problem.HxW));

  const int64_t wanted = ceil_div(
      kBlocksPerMultiprocessor * device.sm_count,
      problem.N * plan.column_tiles);
  const int64_t most = ceil_div(
      problem.HxW, static_cast<int64_t>(plan.rows) * kPixelsInFlight);
  const int64_t splits = std::clamp<int64_t>(wanted, 1, most);
  plan.pixels_per_split =
      ceil_div(ceil_div(problem.HxW, splits), plan.rows) * plan.rows;
  plan.splits =
      static_cast<int>(ceil_div(problem.HxW, plan.pixels_per_split));

  // Forward: (mean, M2) of each split's segments (see two_pass.cuh), then
  // (mean, rstd) of each group. Backward: (sum dY * xhat, sum dY) of each
  // split's channels, then two coefficients of each group.
  const int64_t accumulator = problem.dtype == DType::kDouble ? 8 : 4;
  const int64_t partials = problem.direction == Direction::kForward
      ? problem.G + plan.column_tiles - 1
      : problem.C;
  plan.workspace_bytes = static_cast<size_t>(
      2 * accumulator * problem.N * (plan.splits * partials + problem.G));
  return plan;
}

Plan plan_aten(const Problem&, const Device&) {
  return Plan{};
}

constexpr std::array kTwoPassConditions{
    Condition{
        "a dense channels-last X of more than one pixel and one channel",
        [](const Problem& problem, const Device&) {
          return problem.channels_last;
        }},
    Condition{
        "at least one sample",
        [](const Problem& problem, const Device&) { return problem.N > 0; }},
    Condition{
        "fewer than 2^31 channels, and blocks",
        [](const Problem& problem, const Device&) {
          // A grid has at most 2^31 - 1 blocks. Samples are split further only
          // where they are fewer than the blocks that fill the chip.
          constexpr int64_t kLimit = int64_t{1} << 30;
          return problem.C < kLimit &&
              problem.N <= kLimit / ceil_div(problem.C, kThreads);
        }},
    Condition{
        "a CUDA device",
        [](const Problem&, const Device& device) {
          return device.sm_count > 0;
        }},
};

const std::array kRules{
    Rule{
        "two_pass",
        kTwoPassConditions,
        plan_two_pass,
        "every channels-last shape: pixels are split over the whole chip, X is "
        "read twice"},
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
