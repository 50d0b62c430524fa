// Where the CPU kernels keep their partial results in Plan::workspace_bytes.
// The policy reads the total, native/cpu the offsets.
#pragma once

#include <algorithm>

#include "native/plan/plan.h"
#include "native/plan/rows_cpu.h"

namespace gn_override {

// Sizes and offsets in bytes, unless said otherwise. An accumulator is a double
// for double X and a float for all others.
struct CPUWorkspace {
  // A batch of S samples has
  //   partials   accumulators [S][splits][2][stride]
  //   maps       accumulators [S][arrays_of_map][folded_stride]
  //   sums       double [S][2][stride]
  struct Batch {
    int64_t maps; // offset
    int64_t sums; // offset
    int64_t bytes;
  };
  // The gradients of gamma and beta are summed over runs of consecutive
  // samples, then over the runs: the order is the same for any number of
  // threads, and the sums of the runs stay small for any number of samples, and
  // of channels of a large X: a hundredth of it.
  static constexpr int64_t kMostRuns = 64;
  static constexpr int64_t kShareOfRuns = 100;

  int64_t accumulator; // size of one
  int64_t stride; // elements: C, and room for a vector at any of them
  int64_t folded_stride; // elements: fold * C, likewise
  // Forward: center, scale, shift. Backward: center, dZ_scale, X_scale, shift
  // and, with an activation, beta.
  int64_t arrays_of_map; // a number
  int64_t samples_per_run; // a number; 1 in a forward: it sums none over them
  int64_t runs; // a number; 0 in a forward
  Batch own; // one sample; there are plan.slots of it
  Batch shared; // plan.samples_per_batch samples, after them
  int64_t totals; // offset of double [runs][2][stride]
  int64_t bytes;

  CPUWorkspace(const Problem& problem, const Plan& plan)
      : accumulator(problem.accumulator_bytes()),
        stride(padded(problem.C)),
        folded_stride(padded(problem.C * plan.fold)),
        arrays_of_map(
            problem.direction == Direction::kForward ? 3
                : problem.is_fused()                 ? 5
                                                     : 4),
        samples_per_run(
            problem.direction == Direction::kForward
                ? 1
                : std::max<int64_t>(
                      1,
                      ceil_div(problem.N, most_runs(problem, stride)))),
        runs(
            problem.direction == Direction::kForward
                ? 0
                : ceil_div(problem.N, samples_per_run)),
        own(batch(plan, 1)),
        shared(batch(plan, plan.samples_per_batch)),
        totals(plan.slots * own.bytes + shared.bytes),
        bytes(totals + runs * sums_bytes(stride)) {}

 private:
  static constexpr int64_t sums_bytes(int64_t stride) {
    return 2 * stride * 8;
  }
  static constexpr int64_t most_runs(const Problem& problem, int64_t stride) {
    return problem.bytes() <= kLargeTensor
        ? kMostRuns
        : std::clamp<int64_t>(
              problem.bytes() / kShareOfRuns / sums_bytes(stride),
              1,
              kMostRuns);
  }
  static constexpr int64_t padded(int64_t elements) {
    return (ceil_div(elements, kMostLanes) + 1) * kMostLanes;
  }
  Batch batch(const Plan& plan, int64_t samples) const {
    Batch result;
    result.maps = samples * plan.splits * 2 * stride * accumulator;
    result.sums =
        result.maps + samples * arrays_of_map * folded_stride * accumulator;
    result.bytes = result.sums + samples * sums_bytes(stride);
    return result;
  }
};

} // namespace gn_override
