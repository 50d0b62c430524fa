// dgamma and dbeta by a kernel of their own: after two passes, and after
// clusters that have not all samples.
#pragma once

#include "native/kernels/gradients.cuh"
#include "native/launch/launch_kernel.cuh"

namespace gn_override {

// dgamma and dbeta, those that are wanted, from sums[n][split][c].
template <typename T>
cudaError_t launch_parameter_gradients(
    const Problem& problem,
    const Plan& plan,
    const Pair<Accumulator<T>>* sums,
    const BackwardArguments& arguments,
    cudaStream_t stream) {
  if (!problem.wants_parameters()) {
    return cudaSuccess;
  }
  const DType parameter = problem.param_dtype;
  return launch_kernel<parameter_gradients<T>>(
      {.blocks = static_cast<unsigned>(ceil_div(problem.C, kParameterChannels)),
       .threads = kMaxThreads},
      stream,
      static_cast<int>(problem.C),
      problem.N * plan.splits,
      sums,
      ParameterOut<T>{arguments.dgamma, parameter},
      ParameterOut<T>{arguments.dbeta, parameter});
}

} // namespace gn_override
