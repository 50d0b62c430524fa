// Launches of native/kernels/two_pass.cuh for one element type. Each dtype has
// a .cu file of its own that instantiates these, so that they compile in
// parallel.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <type_traits>

#include "native/kernels/two_pass.cuh"
#include "native/launch/two_pass.h"

namespace gn_override {

// A warp for each (n, g) while it has no more items than this, else a block.
constexpr int64_t kItemsOfWarp = 4 * kWarpSize;

inline Shape shape_of(const Problem& problem) {
  return {
      problem.N,
      problem.HxW,
      static_cast<int>(problem.C),
      static_cast<int>(problem.G),
      static_cast<int>(problem.D())};
}

inline unsigned threads_of(const Plan& plan) {
  return (plan.columns * plan.rows + kWarpSize - 1) / kWarpSize * kWarpSize;
}

inline unsigned blocks_of(const Problem& problem, const Plan& plan) {
  return static_cast<unsigned>(problem.N * plan.splits * plan.column_tiles);
}

inline Tiling tiling_of(const Problem& problem, const Plan& plan) {
  const int64_t segments = std::min<int64_t>(
      problem.G, (plan.columns * plan.vector - 1) / problem.D() + 2);
  int lanes = 1;
  while (lanes < kWarpSize && 2 * lanes * segments <= threads_of(plan)) {
    lanes *= 2;
  }
  return {
      plan.pixels_per_split,
      plan.splits,
      plan.columns,
      plan.rows,
      plan.column_tiles,
      lanes};
}

template <typename T>
size_t shared_bytes(const Plan& plan) {
  return 2 * sizeof(Accumulator<T>) * plan.vector * plan.columns * plan.rows;
}

// Calls f with the plan's vector width as a compile-time constant.
template <typename T, typename F>
void with_vector(const Plan& plan, F f) {
  constexpr int kWidest = 16 / sizeof(T);
  if (plan.vector == kWidest) {
    return f(std::integral_constant<int, kWidest>());
  }
  if constexpr (kWidest >= 4) {
    if (plan.vector == kWidest / 2) {
      return f(std::integral_constant<int, kWidest / 2>());
    }
  }
  if constexpr (kWidest >= 8) {
    if (plan.vector == kWidest / 4) {
      return f(std::integral_constant<int, kWidest / 4>());
    }
  }
  f(std::integral_constant<int, 1>());
}

// Calls f(kBlock, blocks) for teams of a block or of a warp.
template <typename F>
void with_team(int64_t teams, int64_t items, F f) {
  if (items > kItemsOfWarp) {
    return f(std::true_type(), static_cast<unsigned>(teams));
  }
  constexpr int kWarps = kMaxThreads / kWarpSize;
  f(std::false_type(), static_cast<unsigned>((teams + kWarps - 1) / kWarps));
}

template <typename T>
cudaError_t two_pass_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    cudaStream_t stream) {
  using Acc = Accumulator<T>;
  const Shape shape = shape_of(problem);
  const Tiling tiling = tiling_of(problem, plan);
  const bool is_float = problem.param_dtype == DType::kFloat;
  const int64_t slots = problem.G + plan.column_tiles - 1;
  auto* const partial = static_cast<Pair<Acc>*>(arguments.workspace);
  auto* const moments = partial + problem.N * plan.splits * slots;
  const auto* const X = static_cast<const T*>(arguments.X);

  with_vector<T>(plan, [&](auto vector) {
    statistics<T, vector>
        <<<blocks_of(problem, plan),
           threads_of(plan),
           shared_bytes<T>(plan),
           stream>>>(shape, tiling, X, partial);
  });
  if (const cudaError_t error = cudaGetLastError()) {
    return error;
  }
  const int64_t tiles_of_group =
      std::min<int64_t>(
          plan.column_tiles,
          (problem.D() - 1) / (plan.columns * plan.vector) + 2);
  with_team(
      problem.N * problem.G,
      plan.splits * tiles_of_group,
      [&](auto is_block, unsigned blocks) {
        combine_statistics<T, is_block><<<blocks, kMaxThreads, 0, stream>>>(
            shape,
            tiling,
            plan.vector,
            static_cast<Acc>(arguments.eps),
            partial,
            moments,
            ParameterOut<T>{arguments.mean, is_float},
            ParameterOut<T>{arguments.rstd, is_float});
      });
  if (const cudaError_t error = cudaGetLastError()) {
    return error;
  }
  with_vector<T>(plan, [&](auto vector) {
    normalize<T, vector>
        <<<blocks_of(problem, plan), threads_of(plan), 0, stream>>>(
            shape,
            tiling,
            X,
            moments,
            ParameterIn<T>{arguments.gamma, is_float},
            ParameterIn<T>{arguments.beta, is_float},
            static_cast<T*>(arguments.Y));
  });
  return cudaGetLastError();
}

template <typename T>
cudaError_t two_pass_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    cudaStream_t stream) {
  using Acc = Accumulator<T>;
  const Shape shape = shape_of(problem);
  const Tiling tiling = tiling_of(problem, plan);
  const bool is_float = problem.param_dtype == DType::kFloat;
  const ParameterIn<T> mean{arguments.mean, is_float};
  const ParameterIn<T> rstd{arguments.rstd, is_float};
  const ParameterIn<T> gamma{arguments.gamma, is_float};
  auto* const sums = static_cast<Pair<Acc>*>(arguments.workspace);
  auto* const coefficients = sums + problem.N * plan.splits * problem.C;
  const auto* const dY = static_cast<const T*>(arguments.dY);
  const auto* const X = static_cast<const T*>(arguments.X);

  if (!problem.want_dX && !problem.want_dgamma && !problem.want_dbeta) {
    return cudaSuccess;
  }
  with_vector<T>(plan, [&](auto vector) {
    gradient_sums<T, vector>
        <<<blocks_of(problem, plan),
           threads_of(plan),
           shared_bytes<T>(plan),
           stream>>>(shape, tiling, dY, X, mean, rstd, sums);
  });
  if (const cudaError_t error = cudaGetLastError()) {
    return error;
  }
  if (problem.want_dX) {
    with_team(
        problem.N * problem.G,
        plan.splits * problem.D(),
        [&](auto is_block, unsigned blocks) {
          group_coefficients<T, is_block><<<blocks, kMaxThreads, 0, stream>>>(
              shape, plan.splits, sums, gamma, coefficients);
        });
    if (const cudaError_t error = cudaGetLastError()) {
      return error;
    }
    with_vector<T>(plan, [&](auto vector) {
      input_gradient<T, vector>
          <<<blocks_of(problem, plan), threads_of(plan), 0, stream>>>(
              shape,
              tiling,
              dY,
              X,
              mean,
              rstd,
              gamma,
              coefficients,
              static_cast<T*>(arguments.dX));
    });
    if (const cudaError_t error = cudaGetLastError()) {
      return error;
    }
  }
  if (problem.want_dgamma || problem.want_dbeta) {
    const auto blocks = static_cast<unsigned>(
        (problem.C + kParameterChannels - 1) / kParameterChannels);
    parameter_gradients<T><<<blocks, kMaxThreads, 0, stream>>>(
        shape.C,
        problem.N * plan.splits,
        sums,
        ParameterOut<T>{arguments.dgamma, is_float},
        ParameterOut<T>{arguments.dbeta, is_float});
  }
  return cudaGetLastError();
}

} // namespace gn_override
