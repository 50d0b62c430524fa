// The resident schemes' launches by element type: float, double, __half,
// __nv_bfloat16 (instantiated in resident_*.cu).
// TY: that of Y, which is T or float (in resident_*wide_*.cu).
// kFused: for problems with an activation (in resident_fused_*.cu).
#pragma once

#include "native/launch/launch.h"

namespace gn_override {

template <typename T, typename TY, bool kFused>
cudaError_t resident_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    cudaStream_t stream);

template <typename T, typename TY, bool kFused>
cudaError_t resident_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    cudaStream_t stream);

} // namespace gn_override
