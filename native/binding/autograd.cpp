// group_norm for PyTorch 2.11 to 2.13, where stock's makes what it gets
// NCHW-contiguous, and where the derivative of native_group_norm does so too.
//
//   group_norm  channels-last, to be recorded   ChannelsLastNorm below
//               channels-last otherwise         native_group_norm
//               anything else                   at::native::group_norm
//
// The kernel sits at the composite key: that is where eager, inference mode,
// fake tensors and tracing all pass. Sizes and strides may be symbolic here;
// nothing below turns them into integers.
#if GN_OVERRIDE_STOCK_DROPS_LAYOUT

#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/group_norm_native.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/forward_grad.h>

#include <array>
#include <optional>

#include "native/binding/autograd.h"
#include "native/binding/classify.h"
#include "native/binding/generated/kernels.h"
#include "native/binding/question.h"
#include "native/binding/state.h"

namespace gn_override::binding {

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

bool serves(const at::Device& device) {
#if GN_OVERRIDE_WITH_CUDA
  return device.is_cpu() || device.is_cuda();
#else
  return device.is_cpu();
#endif
}

// prefers_channels_last() that takes symbolic shapes too.
bool keeps_layout(const Tensor& X) {
  if (X.is_nested() || X.layout() != at::kStrided) {
    return false;
  }
  if (!X.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return prefers_channels_last(X);
  }
  if (X.dim() == 3) {
    const auto strides = X.sym_strides();
    const auto C = X.sym_size(1);
    return TORCH_GUARD_OR_FALSE(c10::sym_eq(strides[1], 1)) &&
        TORCH_GUARD_OR_FALSE(c10::sym_eq(strides[2], C)) &&
        TORCH_GUARD_OR_FALSE(c10::sym_eq(strides[0], C * X.sym_size(2)));
  }
  const auto format = X.suggest_memory_format();
  return format == at::MemoryFormat::ChannelsLast ||
      format == at::MemoryFormat::ChannelsLast3d;
}

// Of forward-mode AD, torch.func.jvp's among them. Inside another transform no
// tensor tells that it has a tangent further out.
bool inside_dual_level() {
  return torch::autograd::ForwardADLevel::try_get_by_idx(/*idx=*/0) != nullptr;
}

// Whether X is traced for a program that stock's kernels may run, without this
// package or with the switch off: see gn_override/_inductor.py. Its layouts are
// stock's then. Where nobody knows whether they will, only those are that
// stock's kernels do not take.
bool traces_for_elsewhere(const Tensor& X) {
  if (!X.key_set().has(c10::DispatchKey::Python) &&
      !c10::impl::TorchDispatchModeTLS::any_modes_set()) {
    return false;
  }
  static const PythonQuestion for_elsewhere(
      "gn_override::traces_for_elsewhere");
  static const PythonQuestion alone("gn_override::traces_alone");
  return for_elsewhere() || (alone() && !X.is_contiguous(stock_format(X)));
}

struct ChannelsLastNorm : torch::autograd::Function<ChannelsLastNorm> {
  static constexpr bool is_traceable = true; // by compiled autograd
  static constexpr size_t kArguments = 8; // of forward

  static Tensor forward(
      AutogradContext* ctx,
      const Tensor& X,
      const std::optional<Tensor>& gamma,
      const std::optional<Tensor>& beta,
      const c10::SymInt& N,
      const c10::SymInt& C,
      const c10::SymInt& HxW,
      int64_t group,
      double eps) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [Y, mean, rstd] =
        at::native_group_norm_symint(X, gamma, beta, N, C, HxW, group, eps);
    // Not beta: no gradient depends on it, and what is saved must not be
    // changed in place before backward.
    ctx->save_for_backward({X, gamma.value_or(Tensor()), mean, rstd});
    ctx->saved_data["N"] = N;
    ctx->saved_data["C"] = C;
    ctx->saved_data["HxW"] = HxW;
    ctx->saved_data["group"] = group;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["has_beta"] = defined(beta);
    ctx->set_materialize_grads(false);
    return Y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const Tensor& dY = grads[0];
    if (!dY.defined()) {
      return variable_list(kArguments);
    }
    const variable_list saved = ctx->get_saved_variables();
    const Tensor& X = saved[0];
    const Tensor& gamma = saved[1];
    const c10::SymInt N = ctx->saved_data["N"].toSymInt();
    const c10::SymInt C = ctx->saved_data["C"].toSymInt();
    const c10::SymInt HxW = ctx->saved_data["HxW"].toSymInt();
    const int64_t group = ctx->saved_data["group"].toInt();
    // Edges are counted over the operands that are defined.
    const bool has_gamma = gamma.defined();
    const bool has_beta = ctx->saved_data["has_beta"].toBool();
    const std::array<bool, 3> wanted{
        ctx->needs_input_grad(0),
        has_gamma && ctx->needs_input_grad(1),
        has_beta && ctx->needs_input_grad(has_gamma ? 2 : 1)};

    variable_list gradients(3);
    if (at::GradMode::is_enabled()) {
      const double eps = ctx->saved_data["eps"].toDouble();
      // No gradient depends on the value of beta.
      Tensor beta;
      if (wanted[2]) {
        beta = at::zeros_symint({C}, (has_gamma ? gamma : X).options());
        beta.requires_grad_();
      }
      gradients = differentiable_backward(
          dY,
          {X, gamma, beta},
          wanted,
          [&](const Tensor& x, const Tensor& weight, const Tensor& bias) {
            return std::get<0>(at::native_group_norm_symint(
                x.contiguous(stock_format(x)),
                weight,
                bias,
                N,
                C,
                HxW,
                group,
                eps));
          });
    } else {
      // The backward kernel copies other layouts itself, but the stock kernel
      // of these versions, should the call end there, misreads them.
      const RawLayoutScope raw_layout;
      std::tie(gradients[0], gradients[1], gradients[2]) =
          at::native_group_norm_backward_symint(
              match_layout(dY, X),
              X,
              saved[2],
              saved[3],
              gamma,
              N,
              C,
              HxW,
              group,
              wanted);
    }
    gradients.resize(kArguments); // undefined ones for the other arguments
    return gradients;
  }
};

} // namespace

Tensor group_norm_composite(
    const Tensor& input,
    int64_t num_groups,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    double eps,
    bool cudnn_enabled) {
  const auto stock = [&](const Tensor& X) {
    return at::native::group_norm(
        X, num_groups, weight, bias, eps, cudnn_enabled);
  };
  if (!is_on() || !serves(input.device()) || !keeps_layout(input) ||
      traces_for_elsewhere(input)) {
    return stock(input);
  }
  // Stock's tangent formula takes no channels-last tensor.
  if (inside_transform(input, weight, bias)) {
    return stock(inside_dual_level() ? input.contiguous() : input);
  }
  const SymbolicSizes sizes(input);
  // What stock refuses, stock refuses.
  const auto fits = [&](const std::optional<Tensor>& parameter) {
    return !defined(parameter) ||
        (parameter->dim() == 1 && parameter->sym_numel() == sizes.C);
  };
  if (num_groups <= 0 || sizes.C % num_groups != 0 || !fits(weight) ||
      !fits(bias)) {
    return stock(input);
  }

  // As stock hands them on: its kernels take no others.
  const auto contiguous = [](const std::optional<Tensor>& parameter) {
    return defined(parameter) ? std::optional(parameter->contiguous())
                              : parameter;
  };
  const std::optional<Tensor> gamma = contiguous(weight);
  const std::optional<Tensor> beta = contiguous(bias);

  const RawLayoutScope raw_layout;
  const auto is_inference = [](const std::optional<Tensor>& parameter) {
    return defined(parameter) && parameter->is_inference();
  };
  // Nothing records what is of inference tensors alone. Stock's copy of X is
  // none, nor what it has for a parameter that is missing.
  const bool may_be_recorded = !input.is_inference() || !is_inference(weight) ||
      !is_inference(bias) || !input.is_contiguous(stock_format(input));
  const bool recorded = wants_gradient(input, weight, bias) &&
      may_be_recorded &&
      !c10::impl::tls_is_dispatch_key_excluded(
                            c10::DispatchKey::AutogradFunctionality);
  return recorded
      ? ChannelsLastNorm::apply(
            to_record(input),
            gamma,
            beta,
            sizes.N,
            sizes.C,
            sizes.HxW,
            num_groups,
            eps)
      : std::get<0>(at::native_group_norm_symint(
            input, gamma, beta, sizes.N, sizes.C, sizes.HxW, num_groups, eps));
}

} // namespace gn_override::binding

#endif // GN_OVERRIDE_STOCK_DROPS_LAYOUT
