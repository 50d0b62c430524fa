// Launches of native/kernels/resident.cuh for one element type. Each dtype has
// a .cu file of its own that instantiates these, so that they compile in
// parallel.
#pragma once

#include "native/kernels/resident.cuh"
#include "native/launch/parameter_gradients.cuh"
#include "native/launch/resident.h"

namespace gn_override {

// cp.async copies no less.
constexpr int kNarrowestCopy = 4;

// What the blocks of a cluster found of a group is read by a warp.
inline Tiling resident_tiling(const Problem& problem, const Plan& plan) {
  return tiling_of(
      problem, plan, kWarpSize * std::max(1, kWarpSize / plan.splits));
}

inline LaunchShape resident_shape(const Problem& problem, const Plan& plan) {
  return {
      .blocks = blocks_of(problem, plan),
      .threads = static_cast<unsigned>(plan.threads),
      .shared_bytes = plan.shared_bytes,
      .cluster = static_cast<unsigned>(plan.splits)};
}

template <typename T>
ResidentLayout resident_layout(const Problem& problem, const Plan& plan) {
  return ResidentLayout(
      problem.direction,
      problem.D(),
      plan.splits,
      plan.pixels_per_split,
      plan.threads,
      plan.columns,
      plan.rows,
      plan.vector,
      sizeof(T),
      sizeof(Accumulator<T>));
}

template <typename T>
cudaError_t resident_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    cudaStream_t stream) {
  const bool is_float = problem.param_dtype == DType::kFloat;
  return with_vector<T, kNarrowestCopy>(plan, [&](auto vector) {
    return launch_kernel<resident_forward_kernel<T, vector>>(
        resident_shape(problem, plan),
        stream,
        shape_of(problem),
        resident_tiling(problem, plan),
        resident_layout<T>(problem, plan),
        static_cast<Accumulator<T>>(arguments.eps),
        static_cast<const T*>(arguments.X),
        ParameterIn<T>{arguments.gamma, is_float},
        ParameterIn<T>{arguments.beta, is_float},
        static_cast<T*>(arguments.Y),
        ParameterOut<T>{arguments.mean, is_float},
        ParameterOut<T>{arguments.rstd, is_float});
  });
}

template <typename T>
cudaError_t resident_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    cudaStream_t stream) {
  const bool is_float = problem.param_dtype == DType::kFloat;
  const bool wants_parameters = problem.want_dgamma || problem.want_dbeta;
  auto* const sums = wants_parameters
      ? static_cast<Pair<Accumulator<T>>*>(arguments.workspace)
      : nullptr;
  const cudaError_t error =
      with_vector<T, kNarrowestCopy>(plan, [&](auto vector) {
        return launch_kernel<resident_backward_kernel<T, vector>>(
            resident_shape(problem, plan),
            stream,
            shape_of(problem),
            resident_tiling(problem, plan),
            resident_layout<T>(problem, plan),
            static_cast<const T*>(arguments.dY),
            static_cast<const T*>(arguments.X),
            ParameterIn<T>{arguments.mean, is_float},
            ParameterIn<T>{arguments.rstd, is_float},
            ParameterIn<T>{arguments.gamma, is_float},
            sums,
            static_cast<T*>(arguments.dX));
      });
  if (error != cudaSuccess) {
    return error;
  }
  return launch_parameter_gradients<T>(
      problem, problem.N * plan.splits, sums, arguments, stream);
}

} // namespace gn_override
