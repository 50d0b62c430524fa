#include "native/launch/two_pass.cuh"

namespace gn_override {

template cudaError_t two_pass_forward<__nv_bfloat16, float, true>(
    const Problem&,
    const Plan&,
    const ForwardArguments&,
    cudaStream_t);
template cudaError_t two_pass_backward<__nv_bfloat16, float, true>(
    const Problem&,
    const Plan&,
    const BackwardArguments&,
    cudaStream_t);

} // namespace gn_override
