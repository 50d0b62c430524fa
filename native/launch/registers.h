// The registers scheme's launches by element type: __half, __nv_bfloat16
// (instantiated in registers_*.cu).
// kFused: for problems with an activation (in registers_fused_*.cu).
#pragma once

#include "native/launch/launch.h"

namespace gn_override {

template <typename T, bool kFused>
cudaError_t registers_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    cudaStream_t stream);

template <typename T, bool kFused>
cudaError_t registers_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    cudaStream_t stream);

} // namespace gn_override
