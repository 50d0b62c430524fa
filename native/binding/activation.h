// gn_override::group_norm_act and its backward: activation(group_norm(X)) in
// one kernel. They run on our kernels whether or not the aten overrides are
// switched on, and for what these do not take as a composite of aten operators.
//
//   Autograd          ActivatedNorm (activation.cpp), or the composite inside
//                     functorch transforms and forward-mode AD
//   AutocastCUDA      casts to float, as for aten's group_norm
//   CPU, CUDA         activated_forward, activated_backward below
//   any other, vmap   the composite
#pragma once

#include <array>
#include <string_view>
#include <utility>

#include "native/binding/override.h"

namespace gn_override::binding {

// "identity", "relu", "silu", "gelu", "gelu_tanh"; else a ValueError that lists
// them.
Activation parse_activation(std::string_view name);

// By aten operators, in the type that sums are kept in. Results are of the
// types that our kernels give them, and NCHW-contiguous. Arguments that group
// norm does not take raise its own errors.
Result composite_forward(
    const at::Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation);
Result composite_backward(
    const at::Tensor& dY,
    const at::Tensor& X,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    int64_t group,
    std::string_view activation,
    std::array<bool, 3> output_mask);

// N, C and HxW of an X with at least two dimensions.
inline std::array<int64_t, 3> sizes_of(const at::Tensor& X) {
  int64_t HxW = 1;
  for (int64_t d = 2; d < X.dim(); ++d) {
    HxW *= X.size(d);
  }
  return {X.size(0), X.size(1), HxW};
}

template <typename Backend>
Result activated_forward(
    const at::Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation) {
  const Activation kind = parse_activation(activation);
  if (X.dim() >= 2) {
    const auto [N, C, HxW] = sizes_of(X);
    Classified call = classify_forward(X, gamma, beta, N, C, HxW, group);
    call.problem.activation = kind;
    call.problem.wide_statistics = true;
    if (std::optional<Result> result =
            run_forward<Backend>(Op::kActForward, call, X, gamma, beta, eps)) {
      return *std::move(result);
    }
  }
  return composite_forward(X, group, gamma, beta, eps, activation);
}

template <typename Backend>
Result activated_backward(
    const at::Tensor& dY,
    const at::Tensor& X,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    int64_t group,
    std::string_view activation,
    std::array<bool, 3> output_mask) {
  const Activation kind = parse_activation(activation);
  if (X.dim() >= 2) {
    const auto [N, C, HxW] = sizes_of(X);
    Classified call = classify_backward(
        dY,
        X,
        mean,
        rstd,
        gamma,
        beta,
        param_type_of(X, gamma, beta),
        N,
        C,
        HxW,
        group,
        output_mask);
    call.problem.activation = kind;
    if (std::optional<Result> result = run_backward<Backend>(
            Op::kActBackward, call, dY, X, mean, rstd, gamma, beta)) {
      return *std::move(result);
    }
  }
  return composite_backward(
      dY, X, mean, rstd, gamma, beta, group, activation, output_mask);
}

} // namespace gn_override::binding
