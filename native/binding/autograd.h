// What the autograd kernels share.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <optional>

namespace gn_override::binding {

inline bool defined(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

inline bool requires_grad(const std::optional<at::Tensor>& tensor) {
  return defined(tensor) && tensor->requires_grad();
}

// Carries a tangent of forward-mode AD, which has one level.
inline bool is_dual(const std::optional<at::Tensor>& tensor) {
  return defined(tensor) && tensor->_fw_grad(/*level=*/0).defined();
}

// The functorch accessor would not tell: it stays set after its first use.
inline bool inside_functorch_transform() {
  using c10::DispatchKey;
  using c10::impl::tls_is_dispatch_key_included;
  return tls_is_dispatch_key_included(
             DispatchKey::FuncTorchDynamicLayerFrontMode) ||
      tls_is_dispatch_key_included(DispatchKey::FuncTorchDynamicLayerBackMode);
}

// The gradients of Y = norm(X, gamma, beta), a function of differentiable
// operators, for double backward: undefined where they are not wanted. Runs the
// function again.
template <typename Norm>
torch::autograd::variable_list differentiable_backward(
    const at::Tensor& dY,
    std::array<at::Tensor, 3> operands, // X, gamma, beta; undefined: none
    std::array<bool, 3> wanted,
    Norm norm) {
  // Aliases: the graph from them to Y is the norm and nothing else, even where
  // one operand was computed from another.
  torch::autograd::variable_list inputs;
  for (size_t i = 0; i < 3; ++i) {
    if (operands[i].defined()) {
      operands[i] = operands[i].view_as(operands[i]);
    }
    if (wanted[i]) {
      inputs.push_back(operands[i]);
    }
  }
  const at::Tensor Y = norm(operands[0], operands[1], operands[2]);
  const torch::autograd::variable_list computed = torch::autograd::grad(
      {Y}, inputs, {dY}, /*retain_graph=*/true, /*create_graph=*/true);
  torch::autograd::variable_list gradients(3);
  for (size_t i = 0, next = 0; i < 3; ++i) {
    if (wanted[i]) {
      gradients[i] = computed[next++];
    }
  }
  return gradients;
}

} // namespace gn_override::binding
