// torch.autocast on CUDA. Stock's group_norm is computed in float and returns
// float: X is cast, and the cast X saved for backward.
//
//   group_norm      a half X that our kernels take: group_norm_act with a Y in
//                   float, which reads X as it is
//                   after set_autocast("preserve"), any half X: group_norm in
//                   X's dtype
//                   anything else: stock's kernel
//   group_norm_act  likewise, where nothing is said about Y's dtype; never a
//                   cast of a half X
//
// On a CPU autocast leaves group_norm alone, and so do we.
#include <ATen/autocast_mode.h>
#include <ATen/ops/group_norm.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <optional>

#include "native/binding/activation.h"
#include "native/binding/autograd.h"
#include "native/binding/generated/kernels.h"

namespace gn_override::binding {

namespace {

using at::Tensor;

bool are_of(
    at::ScalarType type,
    const std::optional<Tensor>& gamma,
    const std::optional<Tensor>& beta) {
  return (!defined(gamma) || gamma->scalar_type() == type) &&
      (!defined(beta) || beta->scalar_type() == type);
}

// In the type, through autocast's cache; tensors that autocast leaves alone
// stay as they are.
template <typename T>
T cast_to(at::ScalarType type, const T& tensor) {
  return at::autocast::cached_cast(type, tensor, c10::DeviceType::CUDA);
}

struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::DispatchKey::AutocastCUDA};
};

#if GN_OVERRIDE_WITH_CUDA

// Whether a tensor has data, or is a fake one, which has them on the meta
// device. Other classes of tensors know PyTorch's operators, not ours.
bool is_plain_or_fake(const std::optional<Tensor>& tensor) {
  return !defined(tensor) ||
      (!tensor->is_nested() &&
       (!tensor->key_set().has(c10::DispatchKey::Python) ||
        (tensor->has_storage() &&
         tensor->storage().device_type() == c10::DeviceType::Meta)));
}

// Whether the call ends in a kernel, or in its shape under FakeTensorMode. Not
// where someone looks at operators on the way: what is traced shall run without
// this package, and transforms and modes know PyTorch's operators.
bool runs_now(
    const Tensor& X,
    const std::optional<Tensor>& gamma,
    const std::optional<Tensor>& beta) {
  using c10::DispatchKey;
  using c10::impl::tls_is_dispatch_key_included;
  using Modes = c10::impl::TorchDispatchModeTLS;
  const bool is_fake =
      Modes::get_mode(c10::impl::TorchDispatchModeKey::FAKE).has_value();
  return Modes::stack_len() == (is_fake ? 1 : 0) &&
      !inside_transform(X, gamma, beta) &&
      !tls_is_dispatch_key_included(DispatchKey::PreDispatch) &&
      !tls_is_dispatch_key_included(DispatchKey::Tracer) &&
      is_plain_or_fake(X) && is_plain_or_fake(gamma) &&
      is_plain_or_fake(beta) &&
      !X.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
}

#endif // GN_OVERRIDE_WITH_CUDA

Result group_norm_act_autocast(
    const Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation,
    std::optional<at::ScalarType> out_dtype) {
  const WithoutAutocast guard;
  if (is_half(X.scalar_type()) && !out_dtype) {
    const bool preserves = is_on() && autocast_preserves();
    out_dtype = preserves ? X.scalar_type() : at::kFloat;
  }
  if (is_half(X.scalar_type()) && out_dtype == X.scalar_type()) {
    // Weights that the operator would refuse are given X's dtype.
    const at::ScalarType type = X.scalar_type();
    const bool taken =
        are_of(type, gamma, beta) || are_of(at::kFloat, gamma, beta);
    return call_group_norm_act(
        X,
        group,
        taken ? gamma : cast_to(type, gamma),
        taken ? beta : cast_to(type, beta),
        eps,
        activation,
        out_dtype);
  }
  return call_group_norm_act(
      out_dtype ? X : cast_to(at::kFloat, X),
      group,
      cast_to(at::kFloat, gamma),
      cast_to(at::kFloat, beta),
      eps,
      activation,
      out_dtype);
}

TORCH_LIBRARY_IMPL(gn_override, AutocastCUDA, m) {
  m.impl("group_norm_act", TORCH_FN(group_norm_act_autocast));
}

} // namespace

#if GN_OVERRIDE_WITH_CUDA

Tensor group_norm_autocast_cuda(
    const Tensor& input,
    int64_t num_groups,
    const std::optional<Tensor>& weight,
    const std::optional<Tensor>& bias,
    double eps,
    bool cudnn_enabled) {
  if (is_on() && input.is_cuda() && is_half(input.scalar_type())) {
    const WithoutAutocast guard;
    const at::ScalarType type = input.scalar_type();
    const bool now = runs_now(input, weight, bias);
    if (autocast_preserves()) {
      // Our kernels take weights in float; stock's are given X's dtype.
      const bool ours =
          now && takes_forward(input, weight, bias, type, num_groups);
      return at::group_norm(
          input,
          num_groups,
          ours ? weight : cast_to(type, weight),
          ours ? bias : cast_to(type, bias),
          eps,
          cudnn_enabled);
    }
    if (now && prefers_channels_last(input)) {
      const auto gamma = cast_to(at::kFloat, weight);
      const auto beta = cast_to(at::kFloat, bias);
      if (takes_forward(input, gamma, beta, at::kFloat, num_groups)) {
        return std::get<0>(call_group_norm_act(
            input, num_groups, gamma, beta, eps, "identity", at::kFloat));
      }
    }
  }
  using Stock = decltype(at::_ops::group_norm::call);
  return at::autocast::WrapFunction<
      at::autocast::CastPolicy::fp32,
      c10::DeviceType::CUDA,
      Stock,
      Stock,
      &at::_ops::group_norm::call>::type::
      call(input, num_groups, weight, bias, eps, cudnn_enabled);
}

#endif // GN_OVERRIDE_WITH_CUDA

} // namespace gn_override::binding
