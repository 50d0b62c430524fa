// From the arguments of the native ops to a Problem, or to the reason why the
// call is aten's. A call that is declined reaches aten untouched, so that aten
// answers, or raises its own error.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <optional>

#include "native/plan/problem.h"

namespace gn_override::binding {

struct Classified {
  Problem problem;
  const char* declined = nullptr; // static storage; null: the call is ours
};

inline bool defined(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined();
}

// Of the types whose sums, and parameters at times, are float.
inline bool is_half(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16;
}

at::ScalarType to_scalar_type(DType dtype);

// Of gamma and beta, or `otherwise` where there are none.
at::ScalarType param_type_of(
    at::ScalarType otherwise,
    const std::optional<at::Tensor>& gamma,
    const std::optional<at::Tensor>& beta);

// Dense in [N, HxW, C] order, for 3-D (strides (C*L, 1, C)), 4-D and 5-D
// tensors, and not dense in NCHW order as well.
bool is_channels_last(const at::Tensor& X);

// is_channels_last(X), or X is worth a copy that makes it so: it is not dense,
// and its strides are ordered channels-last (a slice of such a tensor).
bool prefers_channels_last(const at::Tensor& X);

// X itself if its memory is dense and channels-last, else a copy that is.
at::Tensor to_channels_last(const at::Tensor& X);

constexpr bool kStockDropsLayout = GN_OVERRIDE_STOCK_DROPS_LAYOUT;

// In which stock's composite hands X to the native ops: up to 2.13 NCHW on
// CUDA, and contiguous for [N, C, L]. In another they refuse or misread it.
inline at::MemoryFormat stock_format(const at::Tensor& X) {
  return kStockDropsLayout && X.is_cuda() ? at::MemoryFormat::Contiguous
                                          : X.suggest_memory_format();
}

// Strides of a dense channels-last tensor of these (2 to 5) sizes.
c10::SmallVector<int64_t, 5> channels_last_strides(at::IntArrayRef sizes);

// N, C and HxW of an X with at least two dimensions.
std::array<int64_t, 3> sizes_of(const at::Tensor& X);

// Y is of output_type: X's, or float where X is half or bfloat16.
Classified classify_forward(
    const at::Tensor& X,
    const std::optional<at::Tensor>& gamma,
    const std::optional<at::Tensor>& beta,
    at::ScalarType output_type,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group);

// Whether classify_forward() takes the call, without a look at addresses, which
// fake tensors do not have.
bool takes_forward(
    const at::Tensor& X,
    const std::optional<at::Tensor>& gamma,
    const std::optional<at::Tensor>& beta,
    at::ScalarType output_type,
    int64_t group);

// mean and rstd are of param_type or of the type that sums are kept in; dY is
// of output_type.
Classified classify_backward(
    const at::Tensor& dY,
    const at::Tensor& X,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    const std::optional<at::Tensor>& gamma,
    const std::optional<at::Tensor>& beta,
    at::ScalarType param_type,
    at::ScalarType output_type,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    std::array<bool, 3> output_mask);

} // namespace gn_override::binding
