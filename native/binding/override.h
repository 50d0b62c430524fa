// The native ops over a backend: classify, plan, allocate, run; or aten.
//
//   struct Backend {
//     static constexpr bool kCuda;
//     struct Guard { explicit Guard(const at::Tensor& X); };  // current device
//     static Plan plan(const Problem&, const at::Tensor& X);
//     static at::Tensor empty(sizes, strides, dtype, const at::Tensor& X);
//     // eps as stock rounds it
//     static double eps(double eps, at::ScalarType type);
//     // whether kernels take [N, C] values that are added to X
//     static bool adds(const Problem&, const at::Tensor& X,
//                      const at::Tensor& added);
//     static void run(const Problem&, const Plan&, const ForwardArguments&);
//     static void run(const Problem&, const Plan&, const BackwardArguments&);
//     static Result stock_forward(...);   // same arguments as the native op
//     static Result stock_backward(...);
//   };
#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include "native/binding/classify.h"
#include "native/binding/state.h"
#include "native/plan/arguments.h"
#include "native/plan/names.h"
#include "native/plan/plan.h"

namespace gn_override::binding {

using Result = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;

inline at::Tensor contiguous_or_undefined(const OptionalTensor& tensor) {
  return defined(tensor) ? tensor->contiguous() : at::Tensor();
}

inline const void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

inline void* mutable_data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

inline bool is_allocated(const at::Tensor& tensor) {
  return !tensor.defined() ||
      tensor.unsafeGetTensorImpl()->storage_initialized();
}

inline bool is_allocated(const OptionalTensor& tensor) {
  return !defined(tensor) || is_allocated(*tensor);
}

// Memory may have been given back, as FSDP does with that of parameters. An
// address is null then: kernels would read it, or miss the parameter.
template <typename... Operands>
void check_allocated(const Operands&... operands) {
  TORCH_CHECK(
      (is_allocated(operands) && ...),
      "gn_override: an operand's data is not allocated, its storage has been "
      "resized to nothing");
}

template <typename Backend>
at::Tensor empty_bytes(int64_t bytes, const at::Tensor& X) {
  return bytes > 0 ? Backend::empty({bytes}, {1}, at::kByte, X) : at::Tensor();
}

// Bytes of memory that `bytes` take where something else follows.
constexpr int64_t aligned(int64_t bytes) {
  constexpr int64_t kAlignment = 256;
  return ceil_div(bytes, kAlignment) * kAlignment;
}

// Runs a call that was classified as ours on our kernels; none where it is
// declined, by its arguments or by the policy. Without kStatistics these are no
// results, and take no allocations of their own.
template <typename Backend, bool kStatistics = true>
std::optional<Result> run_forward(
    Op op,
    const Classified& call,
    const at::Tensor& X,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    const OptionalTensor& added = std::nullopt) {
  const Problem& problem = call.problem;
  if (call.declined) {
    count_declined(op, Backend::kCuda, call.declined);
    return std::nullopt;
  }
  const typename Backend::Guard guard(X);
  const Plan plan = Backend::plan(problem, X);
  if (plan.scheme == Scheme::kAten) {
    if (!problem.adds) { // else the sum comes as another call
      count_declined(op, Backend::kCuda, "policy");
    }
    return std::nullopt;
  }

  check_allocated(X, gamma, beta, added);
  const at::Tensor X_ = to_channels_last(X);
  const at::Tensor added_ = contiguous_or_undefined(added);
  const at::Tensor gamma_ = contiguous_or_undefined(gamma);
  const at::Tensor beta_ = contiguous_or_undefined(beta);
  const at::ScalarType statistics_type =
      to_scalar_type(problem.statistics_dtype());
  at::Tensor Y = Backend::empty(
      X.sizes(),
      channels_last_strides(X.sizes()),
      to_scalar_type(problem.output_dtype()),
      X);
  at::Tensor mean;
  at::Tensor rstd;
  at::Tensor workspace;

  ForwardArguments arguments;
  arguments.X = X_.const_data_ptr();
  arguments.added = data_or_null(added_);
  arguments.gamma = data_or_null(gamma_);
  arguments.beta = data_or_null(beta_);
  arguments.Y = Y.mutable_data_ptr();
  arguments.eps = Backend::eps(eps, statistics_type);
  if constexpr (kStatistics) {
    for (at::Tensor* statistic : {&mean, &rstd}) {
      *statistic = Backend::empty(
          {problem.N, problem.G}, {problem.G, 1}, statistics_type, X);
    }
    workspace = empty_bytes<Backend>(plan.workspace_bytes, X);
    arguments.mean = mean.mutable_data_ptr();
    arguments.rstd = rstd.mutable_data_ptr();
    arguments.workspace = mutable_data_or_null(workspace);
  } else {
    const int64_t statistic =
        aligned(problem.N * problem.G * size_of(problem.statistics_dtype()));
    workspace = empty_bytes<Backend>(2 * statistic + plan.workspace_bytes, X);
    auto* const bytes = static_cast<char*>(mutable_data_or_null(workspace));
    arguments.mean = bytes;
    arguments.rstd = bytes + statistic;
    arguments.workspace = bytes + 2 * statistic;
  }
  Backend::run(problem, plan, arguments);
  count_taken(op, Backend::kCuda, name_of(plan.scheme));
  return Result{std::move(Y), std::move(mean), std::move(rstd)};
}

// Likewise. The gradients of gamma and beta are of Problem::param_dtype.
template <typename Backend>
std::optional<Result> run_backward(
    Op op,
    const Classified& call,
    const at::Tensor& dY,
    const at::Tensor& X,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    const OptionalTensor& gamma,
    const OptionalTensor& beta) {
  const Problem& problem = call.problem;
  if (call.declined) {
    count_declined(op, Backend::kCuda, call.declined);
    return std::nullopt;
  }
  const typename Backend::Guard guard(X);
  const Plan plan = Backend::plan(problem, X);
  if (plan.scheme == Scheme::kAten) {
    count_declined(op, Backend::kCuda, "policy");
    return std::nullopt;
  }

  check_allocated(dY, X, mean, rstd, gamma, beta);
  const at::Tensor X_ = to_channels_last(X);
  const at::Tensor dY_ = to_channels_last(dY);
  const at::Tensor mean_ = mean.contiguous();
  const at::Tensor rstd_ = rstd.contiguous();
  const at::Tensor gamma_ = contiguous_or_undefined(gamma);
  const at::Tensor beta_ = contiguous_or_undefined(beta);
  at::Tensor dX;
  if (problem.want_dX) {
    dX = Backend::empty(
        X.sizes(), channels_last_strides(X.sizes()), X.scalar_type(), X);
  }
  const auto empty_parameter = [&](bool wanted) {
    return wanted
        ? Backend::empty(
              {problem.C}, {1}, to_scalar_type(problem.param_dtype), X)
        : at::Tensor();
  };
  at::Tensor dgamma = empty_parameter(problem.want_dgamma);
  at::Tensor dbeta = empty_parameter(problem.want_dbeta);
  const at::Tensor workspace = empty_bytes<Backend>(plan.workspace_bytes, X);

  BackwardArguments arguments;
  arguments.dY = dY_.const_data_ptr();
  arguments.X = X_.const_data_ptr();
  arguments.mean = mean_.const_data_ptr();
  arguments.rstd = rstd_.const_data_ptr();
  arguments.gamma = data_or_null(gamma_);
  arguments.beta = data_or_null(beta_);
  arguments.dX = mutable_data_or_null(dX);
  arguments.dgamma = mutable_data_or_null(dgamma);
  arguments.dbeta = mutable_data_or_null(dbeta);
  arguments.workspace = mutable_data_or_null(workspace);
  Backend::run(problem, plan, arguments);
  count_taken(op, Backend::kCuda, name_of(plan.scheme));
  return Result{std::move(dX), std::move(dgamma), std::move(dbeta)};
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
  if (is_on()) {
    if (std::optional<Result> result = run_forward<Backend>(
            Op::kForward,
            classify_forward(X, gamma, beta, X.scalar_type(), N, C, HxW, group),
            X,
            gamma,
            beta,
            eps)) {
      return *std::move(result);
    }
  }
  return Backend::stock_forward(
      RawLayoutScope::is_open() ? X.contiguous(stock_format(X)) : X,
      gamma,
      beta,
      N,
      C,
      HxW,
      group,
      eps);
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
  if (is_on()) {
    std::optional<Result> result = run_backward<Backend>(
        Op::kBackward,
        classify_backward(
            dY,
            X,
            mean,
            rstd,
            gamma,
            /*beta=*/std::nullopt,
            mean.scalar_type(),
            X.scalar_type(),
            N,
            C,
            HxW,
            group,
            output_mask),
        dY,
        X,
        mean,
        rstd,
        gamma,
        /*beta=*/std::nullopt);
    if (result) {
      // Without a gamma, stock's gradients of parameters have X's dtype, even
      // where a half X has a float beta.
      if (!defined(gamma)) {
        for (at::Tensor* gradient :
             {&std::get<1>(*result), &std::get<2>(*result)}) {
          if (gradient->defined()) {
            *gradient = gradient->to(X.scalar_type());
          }
        }
      }
      return *std::move(result);
    }
  }
  // The backward of a graph that was compiled, and whose forward ran, with the
  // override on: stock up to 2.13 makes no such call, whose layout it misreads.
  const at::MemoryFormat format = stock_format(X);
  const bool is_ours =
      kStockDropsLayout && is_channels_last(X) && !X.is_contiguous(format);
  const bool converts = is_ours || RawLayoutScope::is_open();
  Result result = Backend::stock_backward(
      converts ? dY.contiguous(format) : dY,
      converts ? X.contiguous(format) : X,
      mean,
      rstd,
      gamma,
      N,
      C,
      HxW,
      group,
      output_mask);
  if (is_ours && output_mask[0]) {
    std::get<0>(result) = to_channels_last(std::get<0>(result));
  }
  return result;
}

} // namespace gn_override::binding
