#include "native/launch/registers.cuh"

namespace gn_override {

template cudaError_t registers_forward<__nv_bfloat16, false>(
    const Problem&,
    const Plan&,
    const ForwardArguments&,
    cudaStream_t);
template cudaError_t registers_backward<__nv_bfloat16, false>(
    const Problem&,
    const Plan&,
    const BackwardArguments&,
    cudaStream_t);

} // namespace gn_override
