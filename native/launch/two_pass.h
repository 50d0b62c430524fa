// The two-pass scheme's launches by element type: float, double, __half,
// __nv_bfloat16 (instantiated in two_pass_*.cu).
#pragma once

#include "native/launch/launch.h"

namespace gn_override {

template <typename T>
cudaError_t two_pass_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    cudaStream_t stream);

template <typename T>
cudaError_t two_pass_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    cudaStream_t stream);

} // namespace gn_override
