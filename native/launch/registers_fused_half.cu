#include "native/launch/registers.cuh"

namespace gn_override {

template cudaError_t registers_forward<__half, true>(
    const Problem&,
    const Plan&,
    const ForwardArguments&,
    cudaStream_t);
template cudaError_t registers_backward<__half, true>(
    const Problem&,
    const Plan&,
    const BackwardArguments&,
    cudaStream_t);

} // namespace gn_override
