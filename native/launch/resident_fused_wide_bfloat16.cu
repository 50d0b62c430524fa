#include "native/launch/resident.cuh"

namespace gn_override {

template cudaError_t resident_forward<__nv_bfloat16, float, true>(
    const Problem&,
    const Plan&,
    const ForwardArguments&,
    cudaStream_t);
template cudaError_t resident_backward<__nv_bfloat16, float, true>(
    const Problem&,
    const Plan&,
    const BackwardArguments&,
    cudaStream_t);

} // namespace gn_override
