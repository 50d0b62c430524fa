// Where the CUDA kernels keep their partial results in Plan::workspace_bytes.
// The policy reads the total, the launchers the offset.
#pragma once

#include "native/plan/shared_memory.h"

namespace gn_override {

// Partial results: first what each split found of what it has, then what is of
// whole groups.
//   two passes   [N][splits][segments] (see two_pass.cuh), backward
//                [N][splits][C]; then, backward, [N][G], of all splits
//   resident     backward [N][splits][C], unless a cluster has all samples
//   cooperative  backward [N][splits][C]; then [N][G][splits], which the blocks
//                exchange
struct CUDAWorkspace {
  int64_t of_splits = 0; // bytes
  int64_t of_groups = 0; // bytes

  constexpr CUDAWorkspace(const Problem& problem, const Plan& plan) {
    const bool forward = problem.direction == Direction::kForward;
    int64_t of_split = 0;
    int64_t of_group = 0;
    switch (plan.scheme) {
      case Scheme::kTwoPass:
        of_split = forward ? problem.G + plan.column_tiles - 1 : problem.C;
        of_group = forward ? 0 : 1;
        break;
      case Scheme::kResident:
        of_split =
            forward || cluster_has_all_samples(problem, plan) ? 0 : problem.C;
        break;
      case Scheme::kCooperative:
        of_split = forward ? 0 : problem.C;
        of_group = plan.splits;
        break;
      default:
        break;
    }
    const int64_t of_samples = problem.N * partial_bytes(problem);
    of_splits = of_samples * plan.splits * of_split;
    of_groups = of_samples * problem.G * of_group;
  }

  constexpr int64_t bytes() const {
    return of_splits + of_groups;
  }

  // Within the workspace.
  void* groups(void* workspace) const {
    return static_cast<char*>(workspace) + of_splits;
  }
};

} // namespace gn_override
