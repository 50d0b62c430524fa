// Where the CUDA kernels keep their partial results in Plan::workspace_bytes.
// The policy reads the total, the launchers the offset.
#pragma once

#include "native/plan/shared_memory.h"

namespace gn_override {

// That of what the two-pass scheme has of groups, which is read at once.
constexpr int64_t kOfGroupAlignment = 32;

// First partial results, what each split found of what it has; then the rest.
//   two passes   backward [N][splits][C]; [N][splits][segments] (see
//                two_pass.cuh); then [N][G], of all splits
//   resident     backward [N][splits][C], unless a cluster has all samples
//   cooperative  backward [N][splits][C]; then [N][G][splits], which the blocks
//                exchange
struct CUDAWorkspace {
  int64_t of_splits = 0; // bytes
  int64_t of_rest = 0; // bytes

  constexpr CUDAWorkspace(const Problem& problem, const Plan& plan) {
    const bool forward = problem.direction == Direction::kForward;
    int64_t of_split = 0;
    int64_t rest = 0; // of a sample
    switch (plan.scheme) {
      case Scheme::kTwoPass:
        of_split =
            (forward ? 0 : problem.C) + problem.G + plan.column_tiles - 1;
        rest = problem.G * kOfGroupSize * problem.accumulator_bytes();
        break;
      case Scheme::kResident:
        of_split =
            forward || cluster_has_all_samples(problem, plan) ? 0 : problem.C;
        break;
      case Scheme::kCooperative:
        of_split = forward ? 0 : problem.C;
        rest = problem.G * plan.splits * partial_bytes(problem);
        break;
      default:
        break;
    }
    const int64_t partials = problem.N * plan.splits * of_split;
    of_splits = kOfGroupAlignment *
        ceil_div(partials * partial_bytes(problem), kOfGroupAlignment);
    of_rest = problem.N * rest;
  }

  constexpr int64_t bytes() const {
    return of_splits + of_rest;
  }

  // Within the workspace.
  void* rest(void* workspace) const {
    return static_cast<char*>(workspace) + of_splits;
  }
};

} // namespace gn_override
