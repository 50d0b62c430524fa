#include "native/launch/two_pass.cuh"

namespace gn_override {

template cudaError_t two_pass_forward<float, float, false>(
    const Problem&,
    const Plan&,
    const ForwardArguments&,
    cudaStream_t);
template cudaError_t two_pass_backward<float, float, false>(
    const Problem&,
    const Plan&,
    const BackwardArguments&,
    cudaStream_t);

} // namespace gn_override
