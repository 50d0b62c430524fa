// Launches of the resident kernels for one element type. Each dtype has
// .cu files of its own that instantiate these, so that they compile in
// parallel.
#pragma once

#include "native/kernels/resident_backward.cuh"
#include "native/kernels/resident_forward.cuh"
#include "native/launch/launch_kernel.cuh"
#include "native/launch/resident.h"
#include "native/plan/workspace_cuda.h"

namespace gn_override {

// What a kernel of the scheme takes besides tensors.
struct ResidentLaunch {
  LaunchShape shape;
  Tiling tiling;
  ResidentLayout layout;
  Waves waves;
  double per_group; // 1 / (HxW D)
};

inline ResidentLaunch resident_launch(
    const Problem& problem,
    const Plan& plan) {
  const bool whole_chip = plan.scheme == Scheme::kCooperative;
  const int64_t samples = whole_chip ? plan.samples_per_wave : problem.N;
  const int of_cluster = whole_chip ? 1 : plan.cluster;
  const int64_t of_batch = ring_pixels(problem.direction);
  // A pixel of each thread of all blocks, or all pixels of a block.
  const int64_t bytes_of_unit = int64_t{1} * plan.columns * plan.vector *
      problem.element_bytes_read() *
      (whole_chip ? plan.rows * blocks_of(plan, samples)
                  : plan.pixels_per_split);
  const auto units_ahead = static_cast<int>(plan.bytes_ahead / bytes_of_unit);
  // A warp reads what the blocks of a cluster found of a group; those of the
  // chip leave a part each.
  const int most_lanes =
      whole_chip ? kWarpSize : kWarpSize * std::max(1, kWarpSize / plan.splits);
  return {
      {.blocks = blocks_of(plan, samples),
       .threads = static_cast<unsigned>(plan.threads),
       .shared_bytes = plan.shared_bytes,
       .cluster = static_cast<unsigned>(of_cluster),
       .cooperative = whole_chip},
      tiling_of(
          problem,
          plan,
          most_lanes,
          whole_chip ? kHeldParts<true> : kHeldParts<false>),
      resident_layout(problem, plan, plan.pixels_kept),
      {.count = static_cast<int>(ceil_div(problem.N, samples)),
       .samples = FastDivisor(
           whole_chip ? static_cast<int>(samples) : of_cluster / plan.splits),
       .cluster = FastDivisor(of_cluster),
       .places = static_cast<int>(ceil_div(plan.pixels_kept, of_batch)),
       .cached = static_cast<int>(plan.pixels_cached),
       .pixels_ahead = whole_chip ? units_ahead : 0,
       .blocks_ahead = whole_chip ? 0 : units_ahead},
      1 / static_cast<double>(problem.HxW * problem.D())};
}

// Calls f(vector width, whether the whole chip shares items, whether a cluster
// has all samples).
template <typename T, typename TY, typename F>
cudaError_t
with_resident_kernel(const Problem& problem, const Plan& plan, F f) {
  return with_vector<T, TY, kNarrowestCopy>(plan, [&](auto vector) {
    using No = std::false_type;
    using Yes = std::true_type;
    return plan.scheme == Scheme::kCooperative   ? f(vector, Yes(), No())
        : cluster_has_all_samples(problem, plan) ? f(vector, No(), Yes())
                                                 : f(vector, No(), No());
  });
}

template <typename T, typename TY, bool kFused>
cudaError_t resident_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    cudaStream_t stream) {
  using Acc = Accumulator<T>;
  const DType parameter = problem.param_dtype;
  const DType statistic = problem.statistics_dtype();
  const ResidentLaunch launch = resident_launch(problem, plan);
  const CUDAWorkspace workspace(problem, plan);
  return with_resident_kernel<T, TY>(
      problem, plan, [&](auto vector, auto whole_chip, auto) {
        return launch_kernel<
            resident_forward_kernel<T, TY, vector, whole_chip, kFused>>(
            launch.shape,
            stream,
            shape_of(problem),
            launch.tiling,
            launch.layout,
            launch.waves,
            static_cast<Acc>(launch.per_group),
            static_cast<Acc>(arguments.eps),
            static_cast<const T*>(arguments.X),
            static_cast<const T*>(arguments.added), // kFused alone
            ParameterIn<TY>{arguments.gamma, parameter},
            ParameterIn<TY>{arguments.beta, parameter},
            problem.activation, // kFused alone
            static_cast<Moments<Acc>*>(workspace.rest(arguments.workspace)),
            static_cast<TY*>(arguments.Y),
            ParameterOut<TY>{arguments.mean, statistic},
            ParameterOut<TY>{arguments.rstd, statistic});
      });
}

template <typename T, typename TY, bool kFused>
cudaError_t resident_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    cudaStream_t stream) {
  using Acc = Accumulator<T>;
  const DType parameter = problem.param_dtype;
  const DType statistic = problem.statistics_dtype();
  const ResidentLaunch launch = resident_launch(problem, plan);
  const CUDAWorkspace workspace(problem, plan);
  auto* const sums = problem.wants_parameters() && workspace.of_splits > 0
      ? static_cast<Pair<Acc>*>(arguments.workspace)
      : nullptr;
  const cudaError_t error = with_resident_kernel<T, TY>(
      problem, plan, [&](auto vector, auto whole_chip, auto all_samples) {
        return launch_kernel<resident_backward_kernel<
            T,
            TY,
            vector,
            whole_chip,
            all_samples,
            kFused>>(
            launch.shape,
            stream,
            shape_of(problem),
            launch.tiling,
            launch.layout,
            launch.waves,
            static_cast<Acc>(launch.per_group),
            static_cast<const TY*>(arguments.dY),
            static_cast<const T*>(arguments.X),
            ParameterIn<TY>{arguments.mean, statistic},
            ParameterIn<TY>{arguments.rstd, statistic},
            ParameterIn<TY>{arguments.gamma, parameter},
            ParameterIn<TY>{arguments.beta, parameter}, // kFused alone
            problem.activation, // kFused alone
            static_cast<Pair<Acc>*>(workspace.rest(arguments.workspace)),
            sums,
            static_cast<T*>(arguments.dX),
            ParameterOut<TY>{arguments.dgamma, parameter},
            ParameterOut<TY>{arguments.dbeta, parameter});
      });
  if (error != cudaSuccess || sums == nullptr ||
      plan.scheme == Scheme::kCooperative) {
    return error;
  }
  // A cluster has not all samples.
  return launch_kernel<parameter_gradients<TY>>(
      {.blocks = static_cast<unsigned>(ceil_div(problem.C, kParameterChannels)),
       .threads = kMaxThreads},
      stream,
      static_cast<int>(problem.C),
      problem.N * plan.splits,
      static_cast<const Pair<Acc>*>(sums),
      ParameterOut<TY>{arguments.dgamma, parameter},
      ParameterOut<TY>{arguments.dbeta, parameter});
}

} // namespace gn_override
