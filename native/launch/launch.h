// Launchers: raw pointers in, cudaError_t out. They allocate nothing: the Plan
// holds the geometry and the workspace's size.
#pragma once

#include <cuda_runtime_api.h>

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

// Whether the stream has all multiprocessors. That of a green context has a
// part of its device's: CUDA refuses plans there that take the whole chip, but
// for a graph that captures them, whose replay would wait for ever.
bool has_whole_chip(cudaStream_t stream);

// Figures of the current device: all of Device but pins and threads.
cudaError_t describe_device(Device& device);

} // namespace gn_override
