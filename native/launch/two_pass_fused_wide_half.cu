#include "native/launch/two_pass.cuh"

namespace gn_override {

template cudaError_t two_pass_forward<__half, float, true>(
    const Problem&,
    const Plan&,
    const ForwardArguments&,
    cudaStream_t);
template cudaError_t two_pass_backward<__half, float, true>(
    const Problem&,
    const Plan&,
    const BackwardArguments&,
    cudaStream_t);

} // namespace gn_override
