#include "native/binding/activation.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <array>
#include <string>

#include "native/binding/autograd.h"

namespace gn_override::binding {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

} // namespace

Result call_group_norm_act(
    const Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation,
    std::optional<at::ScalarType> out_dtype) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("gn_override::group_norm_act", "")
          .typed<decltype(composite_forward)>();
  return op.call(X, group, gamma, beta, eps, activation, out_dtype);
}

at::Tensor composite_inference(
    const Tensor& X,
    const OptionalTensor& added,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation) {
  Tensor sum = X;
  if (defined(added)) {
    c10::SymDimVector of_pixels(X.dim(), 1);
    TORCH_CHECK_VALUE(
        X.dim() >= 2 && added->dim() == 2 &&
            added->sym_size(0) == X.sym_size(0) &&
            added->sym_size(1) == X.sym_size(1),
        "gn_override: added must be [N, C] of an input [N, C, *]");
    of_pixels[0] = X.sym_size(0);
    of_pixels[1] = X.sym_size(1);
    sum = X + added->reshape_symint(of_pixels);
  }
  return std::get<0>(call_group_norm_act(
      sum, group, gamma, beta, eps, activation, std::nullopt));
}

namespace {

Result call_backward(
    const Tensor& dY,
    const Tensor& X,
    const Tensor& mean,
    const Tensor& rstd,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    int64_t group,
    std::string_view activation,
    std::array<bool, 3> output_mask) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("gn_override::group_norm_act_backward", "")
          .typed<decltype(composite_backward)>();
  return op.call(
      dY, X, mean, rstd, gamma, beta, group, activation, output_mask);
}

// -- autograd ----------------------------------------------------------------

struct ActivatedNorm : torch::autograd::Function<ActivatedNorm> {
  static constexpr bool is_traceable = true; // by compiled autograd
  static constexpr size_t kArguments = 8; // of forward

  // mean and rstd leave by `statistics`: compiled autograd takes no outputs
  // without a gradient.
  static Tensor forward(
      AutogradContext* ctx,
      const Tensor& X,
      const OptionalTensor& gamma,
      const OptionalTensor& beta,
      int64_t group,
      double eps,
      std::string_view activation,
      std::optional<at::ScalarType> out_dtype,
      std::array<Tensor, 2>* statistics) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [Y, mean, rstd] =
        call_group_norm_act(X, group, gamma, beta, eps, activation, out_dtype);
    // What is saved must not be changed in place before backward: beta only
    // where backward needs it, for an activation or, without a gamma, its type.
    const bool needs_beta = !defined(gamma) ||
        parse_activation(activation) != Activation::kIdentity;
    ctx->save_for_backward(
        {X,
         gamma.value_or(Tensor()),
         needs_beta ? beta.value_or(Tensor()) : Tensor(),
         mean,
         rstd});
    ctx->saved_data["has_beta"] = defined(beta);
    ctx->saved_data["group"] = group;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["activation"] = std::string(activation);
    ctx->set_materialize_grads(false);
    *statistics = {mean, rstd};
    return Y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    variable_list gradients(kArguments); // undefined for other arguments
    const Tensor& dY = grads[0];
    if (!dY.defined()) {
      return gradients;
    }
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& X = saved[0];
    const Tensor& gamma = saved[1];
    Tensor beta = saved[2];
    const bool has_beta = ctx->saved_data["has_beta"].toBool();
    const int64_t group = ctx->saved_data["group"].toInt();
    const std::string activation = ctx->saved_data["activation"].toStringRef();
    // Edges are counted over the operands that are defined.
    const std::array<bool, 3> wanted{
        ctx->needs_input_grad(0),
        gamma.defined() && ctx->needs_input_grad(1),
        has_beta && ctx->needs_input_grad(gamma.defined() ? 2 : 1)};
    if (at::GradMode::is_enabled()) {
      const double eps = ctx->saved_data["eps"].toDouble();
      if (wanted[2] && !beta.defined()) { // no gradient depends on its value
        beta = at::zeros_like(gamma).requires_grad_();
      }
      const variable_list computed = differentiable_backward(
          dY,
          {X, gamma, beta},
          wanted,
          [&](const Tensor& x, const Tensor& weight, const Tensor& bias) {
            return std::get<0>(composite_forward_in(
                stock_format(x),
                x,
                group,
                weight,
                bias,
                eps,
                activation,
                dY.scalar_type()));
          });
      std::copy(computed.begin(), computed.end(), gradients.begin());
    } else {
      std::tie(gradients[0], gradients[1], gradients[2]) = call_backward(
          dY, X, saved[3], saved[4], gamma, beta, group, activation, wanted);
    }
    return gradients;
  }
};

Result autograd_forward(
    const Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation,
    std::optional<at::ScalarType> out_dtype) {
  if (inside_transform(X, gamma, beta)) {
    return composite_forward(X, group, gamma, beta, eps, activation, out_dtype);
  }
  if (wants_gradient(X, gamma, beta)) {
    // An inference tensor cannot be saved; PyTorch's own norm saves no bias.
    const OptionalTensor beta_to_record = defined(beta) && beta->is_inference()
        ? OptionalTensor(beta->clone())
        : beta;
    std::array<Tensor, 2> statistics;
    Tensor Y = ActivatedNorm::apply(
        to_record(X),
        to_record(gamma),
        beta_to_record,
        group,
        eps,
        activation,
        out_dtype,
        &statistics);
    return {std::move(Y), std::move(statistics[0]), std::move(statistics[1])};
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_group_norm_act(X, group, gamma, beta, eps, activation, out_dtype);
}

Tensor call_inference(
    const Tensor& X,
    const OptionalTensor& added,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("gn_override::group_norm_act_inference", "")
          .typed<decltype(composite_inference)>();
  return op.call(X, added, group, gamma, beta, eps, activation);
}

Tensor autograd_inference(
    const Tensor& X,
    const OptionalTensor& added,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation) {
  if (wants_gradient(X, added, gamma, beta) ||
      inside_transform(X, added, gamma, beta)) {
    return composite_inference(X, added, group, gamma, beta, eps, activation);
  }
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  return call_inference(X, added, group, gamma, beta, eps, activation);
}

// -- a call of Python's ------------------------------------------------------

// added: whatever has been found beside the input, [N, C, 1, ...] where a
// kernel can add it.
OptionalTensor group_norm_act_or_none(
    const Tensor& X,
    const OptionalTensor& added,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation) {
  // PyTorch's own operators take tangents, and refuse other layouts, in their
  // own way.
  const auto may_be_ours = [](const OptionalTensor& operand) {
    return !defined(operand) ||
        (operand->layout() == at::kStrided && !is_dual(operand));
  };
  // A traced one may not tell its strides.
  const auto is_ours = [&] {
    return X.unsafeGetTensorImpl()->has_symbolic_sizes_strides()
        ? !X.is_contiguous()
        : prefers_channels_last(X);
  };
  if (!is_on() || !(X.is_cpu() || X.is_cuda()) || !may_be_ours(X) ||
      !may_be_ours(added) || !may_be_ours(gamma) || !may_be_ours(beta) ||
      X.dim() < 2 || group <= 0 || !is_ours()) {
    return std::nullopt;
  }
  const bool keeps_nothing = !wants_gradient(X, added, gamma, beta) &&
      !at::autocast::is_autocast_enabled(X.device().type());
  if (!defined(added)) {
    return keeps_nothing
        ? call_inference(X, std::nullopt, group, gamma, beta, eps, activation)
        : std::get<0>(call_group_norm_act(
              X, group, gamma, beta, eps, activation, std::nullopt));
  }
  const auto of_channels = [&] {
    return added->dim() == X.dim() && added->sym_size(0) == X.sym_size(0) &&
        added->sym_size(1) == X.sym_size(1) &&
        added->sym_numel() == X.sym_size(0) * X.sym_size(1);
  };
  if (!keeps_nothing || !X.is_cuda() || added->device() != X.device() ||
      added->scalar_type() != X.scalar_type() || !of_channels()) {
    return std::nullopt;
  }
  return call_inference(
      X, added->flatten(1), group, gamma, beta, eps, activation);
}

// -- registration ------------------------------------------------------------

// Fake kernels are in gn_override/_meta.py.
TORCH_LIBRARY_FRAGMENT(gn_override, m) {
  const std::vector<at::Tag> tags{at::Tag::pt2_compliant_tag};
  m.def(
      "group_norm_act(Tensor input, int num_groups, Tensor? weight=None, "
      "Tensor? bias=None, float eps=1e-05, str activation=\"identity\", "
      "ScalarType? out_dtype=None) -> (Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "group_norm_act_backward(Tensor grad_out, Tensor input, Tensor mean, "
      "Tensor rstd, Tensor? weight, Tensor? bias, int num_groups, "
      "str activation, bool[3] output_mask) -> (Tensor, Tensor, Tensor)",
      tags);
  m.def(
      "group_norm_act_inference(Tensor input, Tensor? added, int num_groups, "
      "Tensor? weight=None, Tensor? bias=None, float eps=1e-05, "
      "str activation=\"identity\") -> Tensor",
      tags);
  m.def(
      "group_norm_act_or_none(Tensor input, Tensor? added, int num_groups, "
      "Tensor? weight, Tensor? bias, float eps, str activation) -> Tensor?",
      group_norm_act_or_none,
      tags);
}

TORCH_LIBRARY_IMPL(gn_override, CompositeExplicitAutograd, m) {
  m.impl("group_norm_act", TORCH_FN(composite_forward));
  m.impl("group_norm_act_backward", TORCH_FN(composite_backward));
  m.impl("group_norm_act_inference", TORCH_FN(composite_inference));
}

TORCH_LIBRARY_IMPL(gn_override, FuncTorchBatchedDecomposition, m) {
  m.impl("group_norm_act", TORCH_FN(composite_forward));
  m.impl("group_norm_act_backward", TORCH_FN(composite_backward));
  m.impl("group_norm_act_inference", TORCH_FN(composite_inference));
}

TORCH_LIBRARY_IMPL(gn_override, Autograd, m) {
  m.impl("group_norm_act", TORCH_FN(autograd_forward));
  m.impl("group_norm_act_inference", TORCH_FN(autograd_inference));
  m.impl(
      "group_norm_act_backward",
      torch::autograd::autogradNotImplementedFallback());
}

} // namespace

} // namespace gn_override::binding
