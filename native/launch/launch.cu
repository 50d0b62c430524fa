#include "native/launch/launch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "native/launch/two_pass.h"

namespace gn_override {

namespace {

// Calls f with a value of the problem's element type.
template <typename F>
cudaError_t with_dtype(const Problem& problem, F f) {
  switch (problem.dtype) {
    case DType::kFloat:
      return f(float());
    case DType::kDouble:
      return f(double());
    case DType::kHalf:
      return f(__half());
    case DType::kBFloat16:
      return f(__nv_bfloat16());
  }
  return cudaErrorInvalidValue;
}

} // namespace

cudaError_t launch_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    cudaStream_t stream) {
  if (plan.scheme != Scheme::kTwoPass) {
    return cudaErrorInvalidValue;
  }
  return with_dtype(problem, [&](auto element) {
    return two_pass_forward<decltype(element)>(
        problem, plan, arguments, stream);
  });
}

cudaError_t launch_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    cudaStream_t stream) {
  if (plan.scheme != Scheme::kTwoPass) {
    return cudaErrorInvalidValue;
  }
  return with_dtype(problem, [&](auto element) {
    return two_pass_backward<decltype(element)>(
        problem, plan, arguments, stream);
  });
}

} // namespace gn_override
