#include "native/launch/resident.cuh"

namespace gn_override {

template cudaError_t resident_forward<__half, __half, false>(
    const Problem&,
    const Plan&,
    const ForwardArguments&,
    cudaStream_t);
template cudaError_t resident_backward<__half, __half, false>(
    const Problem&,
    const Plan&,
    const BackwardArguments&,
    cudaStream_t);

} // namespace gn_override
