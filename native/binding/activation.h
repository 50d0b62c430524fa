// gn_override::group_norm_act and its backward: activation(group_norm(X)) in
// one kernel, in X's dtype or, from half and bfloat16, in float. Called
// directly, they do not ask the switch. Calls that our kernels do not take run
// as a composite of aten operators.
//
//   Autograd          ActivatedNorm (activation.cpp), or the composite inside
//                     functorch transforms and forward-mode AD
//   AutocastCUDA      autocast.cpp
//   CPU, CUDA         activated_forward, activated_inference and
//                     activated_backward below
//   any other, vmap   the composite (composite.h)
//
// gn_override::group_norm_act_inference is Y alone, of X + added where there is
// an added [N, C]: on CUDA one kernel, which rounds no sum. It has no backward:
// where a gradient is wanted, it is an addition and group_norm_act.
//
// gn_override::group_norm_act_or_none is what Python calls (functional, nn and
// fuse()). It asks the switch: None where that is off or where PyTorch's own
// operators are right for the call, else Y of one of the two operators above.
// It is one call, since the same checks are slower in Python.
#pragma once

#include <torch/library.h>

#include <array>
#include <string_view>
#include <utility>

#include "native/binding/composite.h"
#include "native/binding/override.h"

namespace gn_override::binding {

// The operator, through the dispatcher.
Result call_group_norm_act(
    const at::Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation,
    std::optional<at::ScalarType> out_dtype);

// group_norm_act_inference by an addition and group_norm_act.
at::Tensor composite_inference(
    const at::Tensor& X,
    const OptionalTensor& added,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation);

// A forward call with Y of output_type, for an X of two dimensions or more.
inline Classified classify_activated(
    const at::Tensor& X,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    at::ScalarType output_type,
    int64_t group,
    Activation activation) {
  const auto [N, C, HxW] = sizes_of(X);
  Classified call =
      classify_forward(X, gamma, beta, output_type, N, C, HxW, group);
  call.problem.activation = activation;
  call.problem.wide_statistics = true;
  return call;
}

template <typename Backend>
Result activated_forward(
    const at::Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation,
    std::optional<at::ScalarType> out_dtype) {
  const Activation kind = parse_activation(activation);
  if (X.dim() >= 2) {
    const at::ScalarType type = out_dtype.value_or(X.scalar_type());
    const Classified call =
        classify_activated(X, gamma, beta, type, group, kind);
    const Op op =
        type == X.scalar_type() ? Op::kActForward : Op::kAutocastForward;
    if (std::optional<Result> result =
            run_forward<Backend>(op, call, X, gamma, beta, eps)) {
      return *std::move(result);
    }
  }
  return composite_forward(X, group, gamma, beta, eps, activation, out_dtype);
}

template <typename Backend>
at::Tensor activated_inference(
    const at::Tensor& X,
    const OptionalTensor& added,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation) {
  const Activation kind = parse_activation(activation);
  const bool adds = defined(added);
  if (X.dim() >= 2) {
    Classified call =
        classify_activated(X, gamma, beta, X.scalar_type(), group, kind);
    call.problem.adds = adds;
    if (!adds || (!call.declined && Backend::adds(call.problem, X, *added))) {
      if (const std::optional<Result> result =
              run_forward<Backend, /*kStatistics=*/false>(
                  Op::kActForward, call, X, gamma, beta, eps, added)) {
        return std::get<0>(*result);
      }
    }
  }
  return adds
      ? composite_inference(X, added, group, gamma, beta, eps, activation)
      : std::get<0>(composite_forward(
            X, group, gamma, beta, eps, activation, std::nullopt));
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
    const at::ScalarType type = dY.scalar_type();
    Classified call = classify_backward(
        dY,
        X,
        mean,
        rstd,
        gamma,
        beta,
        param_type_of(type, gamma, beta),
        type,
        N,
        C,
        HxW,
        group,
        output_mask);
    call.problem.activation = kind;
    const Op op =
        type == X.scalar_type() ? Op::kActBackward : Op::kAutocastBackward;
    if (std::optional<Result> result =
            run_backward<Backend>(op, call, dY, X, mean, rstd, gamma, beta)) {
      return *std::move(result);
    }
  }
  return composite_backward(
      dY, X, mean, rstd, gamma, beta, group, activation, output_mask);
}

// The three operators of a device's key.
template <typename Backend>
void implement_activated(torch::Library& library) {
  library.impl("group_norm_act", TORCH_FN(activated_forward<Backend>));
  library.impl(
      "group_norm_act_inference", TORCH_FN(activated_inference<Backend>));
  library.impl(
      "group_norm_act_backward", TORCH_FN(activated_backward<Backend>));
}

} // namespace gn_override::binding
