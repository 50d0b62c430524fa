// Launches of native/kernels/two_pass.cuh for one element type. Each dtype has
// .cu files of its own that instantiate these, so that they compile in
// parallel.
#pragma once

#include "native/kernels/two_pass.cuh"
#include "native/launch/parameter_gradients.cuh"
#include "native/launch/two_pass.h"
#include "native/plan/workspace_cuda.h"

namespace gn_override {

// A warp, or part of one, for each (n, g) while it has no more items than this,
// else a block.
constexpr int64_t kItemsOfWarp = 4 * kWarpSize;

// Calls f(kBlock, lanes of a team, blocks) for teams that have `items` each.
template <typename F>
cudaError_t with_team(int64_t teams, int64_t items, F f) {
  if (items > kItemsOfWarp) {
    return f(std::true_type(), kWarpSize, static_cast<unsigned>(teams));
  }
  const int lanes = static_cast<int>(std::bit_ceil(
      static_cast<uint64_t>(std::min<int64_t>(items, kWarpSize))));
  const int64_t of_block = kMaxThreads / lanes;
  return f(
      std::false_type(),
      lanes,
      static_cast<unsigned>(ceil_div(teams, of_block)));
}

template <typename T, typename TY, bool kFused>
cudaError_t two_pass_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    cudaStream_t stream) {
  using Acc = Accumulator<T>;
  const Shape shape = shape_of(problem);
  const Tiling tiling = tiling_of(problem, plan);
  const unsigned blocks = blocks_of(plan, problem.N);
  const auto threads = static_cast<unsigned>(plan.threads);
  const DType parameter = problem.param_dtype;
  const DType statistic = problem.statistics_dtype();
  auto* const partial = static_cast<Moments<Acc>*>(arguments.workspace);
  const auto* const X = static_cast<const T*>(arguments.X);

  cudaError_t error = with_vector<T, TY, sizeof(T)>(plan, [&](auto vector) {
    return launch_kernel<statistics<T, TY, vector>>(
        {.blocks = blocks,
         .threads = threads,
         .shared_bytes = plan.shared_bytes},
        stream,
        shape,
        tiling,
        X,
        partial);
  });
  if (error != cudaSuccess) {
    return error;
  }
  const int64_t tiles_of_group = std::min<int64_t>(
      plan.column_tiles, (problem.D() - 1) / (plan.columns * plan.vector) + 2);
  error = with_team(
      problem.N * problem.G,
      plan.splits * tiles_of_group,
      [&](auto is_block, int lanes, unsigned team_blocks) {
        return launch_kernel<combine_statistics<TY, is_block>>(
            {.blocks = team_blocks, .threads = kMaxThreads},
            stream,
            shape,
            tiling,
            lanes,
            plan.vector,
            static_cast<Acc>(arguments.eps),
            partial,
            ParameterOut<TY>{arguments.mean, statistic},
            ParameterOut<TY>{arguments.rstd, statistic});
      });
  if (error != cudaSuccess) {
    return error;
  }
  return with_vector<T, TY, sizeof(T)>(plan, [&](auto vector) {
    return launch_kernel<normalize<T, TY, vector, kFused>>(
        {.blocks = blocks, .threads = threads},
        stream,
        shape,
        tiling,
        X,
        static_cast<const Moments<Acc>*>(partial),
        ParameterIn<TY>{arguments.gamma, parameter},
        ParameterIn<TY>{arguments.beta, parameter},
        problem.activation, // kFused alone
        static_cast<TY*>(arguments.Y));
  });
}

template <typename T, typename TY, bool kFused>
cudaError_t two_pass_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    cudaStream_t stream) {
  using Acc = Accumulator<T>;
  const Shape shape = shape_of(problem);
  const Tiling tiling = tiling_of(problem, plan);
  const unsigned blocks = blocks_of(plan, problem.N);
  const auto threads = static_cast<unsigned>(plan.threads);
  const DType parameter = problem.param_dtype;
  const DType statistic = problem.statistics_dtype();
  const ParameterIn<TY> mean{arguments.mean, statistic};
  const ParameterIn<TY> rstd{arguments.rstd, statistic};
  const ParameterIn<TY> gamma{arguments.gamma, parameter};
  const ParameterIn<TY> beta{arguments.beta, parameter}; // kFused alone
  const CUDAWorkspace workspace(problem, plan);
  auto* const sums = static_cast<Pair<Acc>*>(arguments.workspace);
  auto* const coefficients =
      static_cast<Pair<Acc>*>(workspace.groups(arguments.workspace));
  const auto* const dY = static_cast<const TY*>(arguments.dY);
  const auto* const X = static_cast<const T*>(arguments.X);

  cudaError_t error = with_vector<T, TY, sizeof(T)>(plan, [&](auto vector) {
    return launch_kernel<gradient_sums<T, TY, vector, kFused>>(
        {.blocks = blocks,
         .threads = threads,
         .shared_bytes = plan.shared_bytes},
        stream,
        shape,
        tiling,
        dY,
        X,
        mean,
        rstd,
        gamma, // kFused alone
        beta, // kFused alone
        problem.activation, // kFused alone
        sums);
  });
  if (error != cudaSuccess) {
    return error;
  }
  if (problem.want_dX) {
    error = with_team(
        problem.N * problem.G,
        plan.splits * problem.D(),
        [&](auto is_block, int lanes, unsigned team_blocks) {
          return launch_kernel<group_coefficients<TY, is_block>>(
              {.blocks = team_blocks, .threads = kMaxThreads},
              stream,
              shape,
              lanes,
              plan.splits,
              static_cast<const Pair<Acc>*>(sums),
              gamma,
              coefficients);
        });
    if (error != cudaSuccess) {
      return error;
    }
    error = with_vector<T, TY, sizeof(T)>(plan, [&](auto vector) {
      return launch_kernel<input_gradient<T, TY, vector, kFused>>(
          {.blocks = blocks, .threads = threads},
          stream,
          shape,
          tiling,
          dY,
          X,
          mean,
          rstd,
          gamma,
          beta, // kFused alone
          problem.activation, // kFused alone
          static_cast<const Pair<Acc>*>(coefficients),
          static_cast<T*>(arguments.dX));
    });
    if (error != cudaSuccess) {
      return error;
    }
  }
  return launch_parameter_gradients<TY>(problem, plan, sums, arguments, stream);
}

} // namespace gn_override
