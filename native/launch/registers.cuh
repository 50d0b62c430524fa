// Launches of native/kernels/registers.cuh for one element type. Each dtype has
// .cu files of its own that instantiate these, so that they compile in
// parallel.
#pragma once

#include "native/kernels/registers.cuh"
#include "native/launch/launch_kernel.cuh"
#include "native/launch/registers.h"

namespace gn_override {

// What a kernel of the scheme takes besides tensors.
struct RegistersLaunch {
  LaunchShape shape;
  GroupTiling tiling;
  float per_group; // 1 / (HxW D)
};

inline RegistersLaunch registers_launch(
    const Problem& problem,
    const Plan& plan) {
  return {
      {.blocks = static_cast<unsigned>(
           problem.N / samples_of_block(problem) * problem.G),
       .threads = static_cast<unsigned>(plan.threads),
       .shared_bytes = plan.shared_bytes},
      {.HxW = static_cast<int>(problem.HxW),
       .C = static_cast<int>(problem.C),
       .D = static_cast<int>(problem.D()),
       .rows = plan.rows,
       .groups = FastDivisor(static_cast<int>(problem.G)),
       .columns = FastDivisor(plan.columns),
       .threads = FastDivisor(
           static_cast<int>(plan.threads / samples_of_block(problem))),
       .lanes_per_channel = tiling_of(problem, plan).lanes_per_channel},
      static_cast<float>(1 / static_cast<double>(problem.HxW * problem.D()))};
}

// Calls f with the pixels of a thread as a compile-time constant.
template <int kPixels = kMostPixelsInRegisters, typename F>
cudaError_t with_pixels(const Plan& plan, F f) {
  if constexpr (kPixels == 0) {
    return cudaErrorInvalidValue;
  } else if (plan.pixels_kept == kPixels) {
    return f(std::integral_constant<int, kPixels>());
  } else {
    return with_pixels<kPixels / 2>(plan, f);
  }
}

template <typename T, bool kFused>
cudaError_t registers_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    cudaStream_t stream) {
  const RegistersLaunch launch = registers_launch(problem, plan);
  return with_pixels(plan, [&](auto pixels) {
    return launch_kernel<
        registers_forward_kernel<T, 16 / sizeof(T), pixels, kFused>>(
        launch.shape,
        stream,
        launch.tiling,
        launch.per_group,
        static_cast<float>(arguments.eps),
        static_cast<const T*>(arguments.X),
        static_cast<const T*>(arguments.added), // kFused alone
        static_cast<const T*>(arguments.gamma),
        static_cast<const T*>(arguments.beta),
        problem.activation, // kFused alone
        static_cast<T*>(arguments.Y),
        static_cast<Statistic<T, kFused>*>(arguments.mean),
        static_cast<Statistic<T, kFused>*>(arguments.rstd));
  });
}

template <typename T, bool kFused>
cudaError_t registers_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    cudaStream_t stream) {
  const DType parameter = problem.param_dtype;
  const RegistersLaunch launch = registers_launch(problem, plan);
  return with_pixels(plan, [&](auto pixels) {
    return launch_kernel<
        registers_backward_kernel<T, 16 / sizeof(T), pixels, kFused>>(
        launch.shape,
        stream,
        launch.tiling,
        static_cast<int>(problem.N),
        launch.per_group,
        static_cast<const T*>(arguments.dY),
        static_cast<const T*>(arguments.X),
        static_cast<const Statistic<T, kFused>*>(arguments.mean),
        static_cast<const Statistic<T, kFused>*>(arguments.rstd),
        static_cast<const T*>(arguments.gamma),
        static_cast<const T*>(arguments.beta), // kFused alone
        problem.activation, // kFused alone
        static_cast<T*>(arguments.dX),
        ParameterOut<T>{arguments.dgamma, parameter},
        ParameterOut<T>{arguments.dbeta, parameter});
  });
}

} // namespace gn_override
