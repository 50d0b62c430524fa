// Launchers: raw pointers in, cudaError_t out. They allocate nothing and ask
// the driver for nothing: the Plan holds the geometry and the workspace's size.
#pragma once

#include <cuda_runtime_api.h>

#include <array>

#include "native/plan/arguments.h"
#include "native/plan/plan.h"

namespace gn_override {

cudaError_t launch_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    cudaStream_t stream);

cudaError_t launch_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    cudaStream_t stream);

// Device::clusters of the current device.
cudaError_t count_clusters(ClusterCounts& clusters);

} // namespace gn_override
