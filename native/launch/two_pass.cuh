// Launches of native/kernels/two_pass.cuh for one element type. Each dtype has
// .cu files of its own that instantiate these, so that they compile in
// parallel.
#pragma once

#include "native/kernels/two_pass.cuh"
#include "native/launch/launch_kernel.cuh"
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

// Of all splits, at most.
inline int64_t segments_of_group(const Problem& problem, const Plan& plan) {
  const int tile_width = plan.columns * plan.vector;
  return plan.splits *
      std::min<int64_t>(plan.column_tiles, (problem.D() - 1) / tile_width + 2);
}

// The first pass's plan, as that of the second, whose threads have `pixels`
// pixels at once.
inline Plan map_plan(const Problem& problem, Plan plan, int pixels) {
  const int64_t of_thread = plan.pixels_per_split / plan.rows;
  const int64_t columns = problem.C / plan.vector;
  const int64_t most_columns =
      std::min<int64_t>(kMapThreads, vectors_of_slice(problem, plan.vector));
  plan.column_tiles = static_cast<int>(ceil_div(columns, most_columns));
  plan.columns = static_cast<int>(ceil_div(columns, plan.column_tiles));
  plan.rows = static_cast<int>(std::clamp<int64_t>(
      (kMapThreads + plan.columns / 2) / plan.columns, 1, problem.HxW));
  if (plan.vector * size_of(problem.dtype) == kWalkedBytes) {
    // As in the first pass, so that small inputs have blocks enough.
    pixels =
        static_cast<int>(std::clamp<int64_t>(of_thread, pixels, kWalkedPixels));
  }
  plan.pixels_per_split = int64_t{1} * plan.rows * pixels;
  plan.splits = static_cast<int>(ceil_div(problem.HxW, plan.pixels_per_split));
  plan.threads = in_whole_warps(plan.columns * plan.rows);
  return plan;
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
  const DType parameter = problem.param_dtype;
  const DType statistic = problem.statistics_dtype();
  const ParameterIn<TY> gamma{arguments.gamma, parameter};
  const ParameterIn<TY> beta{arguments.beta, parameter};
  const CUDAWorkspace workspace(problem, plan);
  auto* const partial = static_cast<Moments<Acc>*>(arguments.workspace);
  auto* const of_groups =
      static_cast<Moments<Acc>*>(workspace.rest(arguments.workspace));
  const auto* const X = static_cast<const T*>(arguments.X);

  cudaError_t error = with_vector<T, TY, sizeof(T)>(plan, [&](auto vector) {
    return launch_kernel<statistics<T, TY, vector>>(
        {.blocks = blocks_of(plan, problem.N),
         .threads = static_cast<unsigned>(plan.threads),
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
  error = with_team(
      problem.N * problem.G,
      segments_of_group(problem, plan),
      [&](auto is_block, int lanes, unsigned team_blocks) {
        return launch_kernel<combine_statistics<TY, is_block>>(
            {.blocks = team_blocks, .threads = kMaxThreads},
            stream,
            shape,
            tiling,
            lanes,
            plan.vector,
            static_cast<Acc>(arguments.eps),
            static_cast<const Moments<Acc>*>(partial),
            of_groups,
            ParameterOut<TY>{arguments.mean, statistic},
            ParameterOut<TY>{arguments.rstd, statistic});
      });
  if (error != cudaSuccess) {
    return error;
  }
  return with_vector<T, TY, sizeof(T)>(plan, [&](auto vector) {
    const Plan map = map_plan(problem, plan, kBatch<T, vector>);
    return launch_kernel<normalize<T, TY, vector, kFused>>(
        {.blocks = blocks_of(map, problem.N),
         .threads = static_cast<unsigned>(map.threads)},
        stream,
        shape,
        tiling_of(problem, map),
        X,
        static_cast<const Moments<Acc>*>(of_groups),
        gamma,
        beta,
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
  const DType parameter = problem.param_dtype;
  const DType statistic = problem.statistics_dtype();
  const ParameterIn<TY> mean{arguments.mean, statistic};
  const ParameterIn<TY> rstd{arguments.rstd, statistic};
  const ParameterIn<TY> gamma{arguments.gamma, parameter};
  const ParameterIn<TY> beta{arguments.beta, parameter}; // kFused alone
  const Tiling tiling = tiling_of(problem, plan);
  const CUDAWorkspace workspace(problem, plan);
  auto* const of_channels = static_cast<Pair<Acc>*>(arguments.workspace);
  Pair<Acc>* const of_segments =
      of_channels + problem.N * plan.splits * problem.C;
  auto* const of_groups =
      static_cast<GradientOfGroup<Acc>*>(workspace.rest(arguments.workspace));
  const auto* const dY = static_cast<const TY*>(arguments.dY);
  const auto* const X = static_cast<const T*>(arguments.X);

  cudaError_t error = with_vector<T, TY, sizeof(T)>(plan, [&](auto vector) {
    return launch_kernel<gradient_sums<T, TY, vector, kFused>>(
        {.blocks = blocks_of(plan, problem.N),
         .threads = static_cast<unsigned>(plan.threads),
         .shared_bytes = plan.shared_bytes},
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
        of_channels,
        of_segments);
  });
  if (error != cudaSuccess) {
    return error;
  }
  error = with_team(
      problem.want_dX ? problem.N * problem.G : 0,
      segments_of_group(problem, plan),
      [&](auto is_block, int lanes, unsigned team_blocks) {
        const int64_t of_parameters = problem.wants_parameters()
            ? ceil_div(problem.C, kParameterChannels)
            : 0;
        return launch_kernel<combine_sums<T, TY, is_block>>(
            {.blocks = team_blocks + static_cast<unsigned>(of_parameters),
             .threads = kMaxThreads},
            stream,
            shape,
            tiling,
            lanes,
            plan.vector,
            team_blocks,
            static_cast<const Pair<Acc>*>(of_channels),
            static_cast<const Pair<Acc>*>(of_segments),
            mean,
            rstd,
            of_groups,
            ParameterOut<TY>{arguments.dgamma, parameter},
            ParameterOut<TY>{arguments.dbeta, parameter});
      });
  if (error != cudaSuccess || !problem.want_dX) {
    return error;
  }
  return with_vector<T, TY, sizeof(T)>(plan, [&](auto vector) {
    constexpr int kPixels = kMappedPairs<TY, vector, kFused>;
    const Plan map = map_plan(problem, plan, kPixels);
    return launch_kernel<input_gradient<T, TY, vector, kFused>>(
        {.blocks = blocks_of(map, problem.N),
         .threads = static_cast<unsigned>(map.threads)},
        stream,
        shape,
        tiling_of(problem, map),
        dY,
        X,
        static_cast<const GradientOfGroup<Acc>*>(of_groups),
        gamma,
        beta, // kFused alone
        problem.activation, // kFused alone
        static_cast<T*>(arguments.dX));
  });
}

} // namespace gn_override
