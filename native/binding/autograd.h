// What the autograd kernels share.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/alias.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/autograd.h>

#include <array>
#include <optional>

#include "native/binding/classify.h"

namespace gn_override::binding {

struct SymbolicSizes {
  c10::SymInt N;
  c10::SymInt C;
  c10::SymInt HxW = 1;

  explicit SymbolicSizes(const at::Tensor& X)
      : N(X.sym_size(0)), C(X.sym_size(1)) {
    for (int64_t d = 2; d < X.dim(); ++d) {
      HxW *= X.sym_size(d);
    }
  }
};

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

// Whether a call on these operands is differentiated by forward-mode AD or
// functorch, which take no C++ autograd function.
template <typename... Operands>
bool inside_transform(const Operands&... operands) {
  return (is_dual(operands) || ...) || inside_functorch_transform();
}

// Whether autograd records a call on these operands.
template <typename... Operands>
bool wants_gradient(const Operands&... operands) {
  return at::GradMode::is_enabled() && (requires_grad(operands) || ...);
}

// dY in the layout of X, which is ordered channels-last. By a permutation where
// no memory format says so: sequences have none, and vmap tells none.
inline at::Tensor match_layout(const at::Tensor& dY, const at::Tensor& X) {
  const bool is_batched = dY.key_set().has_any(
      c10::DispatchKeySet(
          {c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched}));
  return X.dim() == 3 || is_batched
      ? dY.movedim(1, -1).contiguous().movedim(-1, 1)
      : dY.contiguous(X.suggest_memory_format());
}

// An operand as a backward is to save it: a copy of what is not dense, as stock
// makes one, so that the operand may be changed in place meanwhile; and of a
// channels-last inference tensor, which cannot be saved. A traced one is left.
inline at::Tensor to_record(const at::Tensor& operand) {
  if (operand.is_nested() || operand.layout() != at::kStrided ||
      operand.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) {
    return operand;
  }
  if (is_channels_last(operand)) {
    return operand.is_inference() ? operand.clone() : operand;
  }
  return prefers_channels_last(operand) ? match_layout(operand, operand)
                                        : operand.contiguous();
}

inline std::optional<at::Tensor> to_record(
    const std::optional<at::Tensor>& operand) {
  return defined(operand) ? std::optional(to_record(*operand)) : operand;
}

// The gradients of Y = norm(X, gamma, beta), a function of differentiable
// operators, for double backward: undefined where they are not wanted, or where
// the operand has been frozen since the forward. Runs the function again.
template <typename Norm>
torch::autograd::variable_list differentiable_backward(
    const at::Tensor& dY,
    std::array<at::Tensor, 3> operands, // X, gamma, beta; undefined: none
    std::array<bool, 3> wanted,
    Norm norm) {
  // Aliases: the graph from them to Y is the norm and nothing else, even where
  // one operand was computed from another. Not views: of one sample these have
  // other strides.
  torch::autograd::variable_list inputs;
  for (size_t i = 0; i < 3; ++i) {
    if (operands[i].defined()) {
      operands[i] = at::alias(operands[i]);
    }
    wanted[i] = wanted[i] && operands[i].requires_grad();
    if (wanted[i]) {
      inputs.push_back(operands[i]);
    }
  }
  torch::autograd::variable_list gradients(3);
  if (inputs.empty()) {
    return gradients;
  }
  const at::Tensor Y = norm(operands[0], operands[1], operands[2]);
  const torch::autograd::variable_list computed = torch::autograd::grad(
      {Y}, inputs, {dY}, /*retain_graph=*/true, /*create_graph=*/true);
  for (size_t i = 0, next = 0; i < 3; ++i) {
    if (wanted[i]) {
      gradients[i] = computed[next++];
    }
  }
  return gradients;
}

} // namespace gn_override::binding
