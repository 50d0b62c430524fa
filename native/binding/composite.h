// activation(group_norm(X)) by aten operators: what the operators of
// activation.h are on devices without kernels of ours, under vmap, and where
// our kernels do not take a call.
#pragma once

#include <array>
#include <string_view>

#include "native/binding/override.h"

namespace gn_override::binding {

// "identity", "relu", "silu", "gelu", "gelu_tanh"; else a ValueError that lists
// them.
Activation parse_activation(std::string_view name);

// Both compute in the type that sums are kept in. Results are of the types that
// our kernels give them, and NCHW-contiguous. Arguments that group norm does
// not take raise its own errors.
Result composite_forward(
    const at::Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation,
    std::optional<at::ScalarType> out_dtype);
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

// composite_forward on an X that is first brought into that format. Its
// operators are differentiable, twice too.
Result composite_forward_in(
    at::MemoryFormat format,
    const at::Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation,
    std::optional<at::ScalarType> out_dtype);

} // namespace gn_override::binding
