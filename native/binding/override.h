// The two native ops over a backend: classify, plan, allocate, run; or aten.
//
//   struct Backend {
//     static constexpr bool kCuda;
//     struct Guard { explicit Guard(const at::Tensor& X); };  // current device
//     static const Device& device(const at::Tensor& X);
//     static at::Tensor empty(sizes, strides, dtype, const at::Tensor& X);
//     static double eps(double eps, at::ScalarType type);  // as stock rounds
//     it static void run(const Problem&, const Plan&, const ForwardArguments&);
//     static void run(const Problem&, const Plan&, const BackwardArguments&);
//     static Result stock_forward(...);   // same arguments as the native op
//     static Result stock_backward(...);
//   };
#pragma once

#include <tuple>
#include <utility>

#include "native/binding/classify.h"
#include "native/binding/plan_cache.h"
#include "native/binding/state.h"
#include "native/plan/arguments.h"
#include "native/plan/plan.h"

namespace gn_override::binding {

using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;

inline at::Tensor contiguous_or_undefined(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined() ? tensor->contiguous()
                                                 : at::Tensor();
}

inline const void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

inline void* mutable_data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

template <typename Backend>
at::Tensor empty_workspace(const Plan& plan, const at::Tensor& X) {
  const auto bytes = static_cast<int64_t>(plan.workspace_bytes);
  return bytes > 0 ? Backend::empty({bytes}, {1}, at::kByte, X) : at::Tensor();
}

template <typename Backend>
Result forward(
    const at::Tensor& X,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    double eps) {
  const auto stock = [&](const at::Tensor& input) {
    return Backend::stock_forward(input, gamma, beta, N, C, HxW, group, eps);
  };
  const auto declined = [&](const char* reason) {
    count_declined(Op::kForward, Backend::kCuda, reason);
    return stock(RawLayoutScope::is_open() ? X.contiguous() : X);
  };
  if (!is_on()) {
    return stock(RawLayoutScope::is_open() ? X.contiguous() : X);
  }
  const Classified call = classify_forward(X, gamma, beta, N, C, HxW, group);
  if (call.declined) {
    return declined(call.declined);
  }
  const typename Backend::Guard guard(X);
  const Plan& plan = cached_plan(call.problem, Backend::device(X));
  if (plan.scheme == Scheme::kAten) {
    return declined("policy");
  }

  const at::Tensor X_ = to_channels_last(X);
  const at::Tensor gamma_ = contiguous_or_undefined(gamma);
  const at::Tensor beta_ = contiguous_or_undefined(beta);
  const at::ScalarType param_type = gamma_.defined() ? gamma_.scalar_type()
      : beta_.defined()                              ? beta_.scalar_type()
                                                     : X.scalar_type();
  at::Tensor Y = Backend::empty(
      X.sizes(), channels_last_strides(X.sizes()), X.scalar_type(), X);
  at::Tensor mean = Backend::empty({N, group}, {group, 1}, param_type, X);
  at::Tensor rstd = Backend::empty({N, group}, {group, 1}, param_type, X);
  const at::Tensor workspace = empty_workspace<Backend>(plan, X);

  ForwardArguments arguments;
  arguments.X = X_.const_data_ptr();
  arguments.gamma = data_or_null(gamma_);
  arguments.beta = data_or_null(beta_);
  arguments.Y = Y.mutable_data_ptr();
  arguments.mean = mean.mutable_data_ptr();
  arguments.rstd = rstd.mutable_data_ptr();
  arguments.eps = Backend::eps(eps, param_type);
  arguments.workspace = mutable_data_or_null(workspace);
  Backend::run(call.problem, plan, arguments);
  count_taken(Op::kForward, Backend::kCuda, plan.rule);
  return {std::move(Y), std::move(mean), std::move(rstd)};
}

template <typename Backend>
Result backward(
    const at::Tensor& dY,
    const at::Tensor& X,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    const OptionalTensor& gamma,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    std::array<bool, 3> output_mask) {
  const auto stock = [&]() {
    const bool raw = RawLayoutScope::is_open();
    return Backend::stock_backward(
        raw ? dY.contiguous() : dY,
        raw ? X.contiguous() : X,
        mean,
        rstd,
        gamma,
        N,
        C,
        HxW,
        group,
        output_mask);
  };
  const auto declined = [&](const char* reason) {
    count_declined(Op::kBackward, Backend::kCuda, reason);
    return stock();
  };
  if (!is_on()) {
    return stock();
  }
  const Classified call = classify_backward(
      dY, X, mean, rstd, gamma, N, C, HxW, group, output_mask);
  if (call.declined) {
    return declined(call.declined);
  }
  const typename Backend::Guard guard(X);
  const Plan& plan = cached_plan(call.problem, Backend::device(X));
  if (plan.scheme == Scheme::kAten) {
    return declined("policy");
  }

  const at::Tensor X_ = to_channels_last(X);
  const at::Tensor dY_ = to_channels_last(dY);
  const at::Tensor mean_ = mean.contiguous();
  const at::Tensor rstd_ = rstd.contiguous();
  const at::Tensor gamma_ = contiguous_or_undefined(gamma);
  at::Tensor dX;
  if (output_mask[0]) {
    dX = Backend::empty(
        X.sizes(), channels_last_strides(X.sizes()), X.scalar_type(), X);
  }
  const auto empty_parameter = [&](bool wanted) {
    return wanted ? Backend::empty({C}, {1}, mean.scalar_type(), X)
                  : at::Tensor();
  };
  at::Tensor dgamma = empty_parameter(output_mask[1]);
  at::Tensor dbeta = empty_parameter(output_mask[2]);
  const at::Tensor workspace = empty_workspace<Backend>(plan, X);

  BackwardArguments arguments;
  arguments.dY = dY_.const_data_ptr();
  arguments.X = X_.const_data_ptr();
  arguments.mean = mean_.const_data_ptr();
  arguments.rstd = rstd_.const_data_ptr();
  arguments.gamma = data_or_null(gamma_);
  arguments.dX = mutable_data_or_null(dX);
  arguments.dgamma = mutable_data_or_null(dgamma);
  arguments.dbeta = mutable_data_or_null(dbeta);
  arguments.workspace = mutable_data_or_null(workspace);
  Backend::run(call.problem, plan, arguments);
  count_taken(Op::kBackward, Backend::kCuda, plan.rule);

  // Parameter gradients have gamma's dtype, or X's where there is no gamma (a
  // half X with a float beta alone), as stock's.
  const at::ScalarType grad_type =
      gamma_.defined() ? gamma_.scalar_type() : X.scalar_type();
  for (at::Tensor* gradient : {&dgamma, &dbeta}) {
    if (gradient->defined() && gradient->scalar_type() != grad_type) {
      *gradient = gradient->to(grad_type);
    }
  }
  return {std::move(dX), std::move(dgamma), std::move(dbeta)};
}

} // namespace gn_override::binding
