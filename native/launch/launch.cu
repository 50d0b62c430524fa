#include "native/launch/launch.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "native/launch/launch_kernel.cuh"
#include "native/launch/registers.h"
#include "native/launch/resident.h"
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

// And with one of Y's type, and whether it is fused with an activation.
template <typename F>
cudaError_t with_kernels(const Problem& problem, F f) {
  return with_dtype(problem, [&](auto element) {
    const auto with_output = [&](auto output) {
      return problem.is_fused() ? f(element, output, std::true_type())
                                : f(element, output, std::false_type());
    };
    if (!problem.wide_output) {
      return with_output(element);
    }
    if constexpr (sizeof(element) == 2) {
      return with_output(float());
    }
    return cudaErrorInvalidValue;
  });
}

// Takes a multiprocessor's shared memory and nothing else.
__global__ void occupy() {}

// Device::clusters of more than one block. A driver that refuses what the
// larger ones need has fewer of them.
void count_clusters(int shared_bytes, ClusterCounts& clusters) {
  cudaFuncSetAttribute(
      occupy, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  cudaFuncSetAttribute(
      occupy, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  for (unsigned size = 2; size < clusters.size(); ++size) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = size;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(size);
    config.blockDim = dim3(kWarpSize);
    config.dynamicSmemBytes = shared_bytes;
    config.attrs = &attribute;
    config.numAttrs = 1;
    if (cudaOccupancyMaxActiveClusters(&clusters[size], occupy, &config) !=
        cudaSuccess) {
      clusters[size] = 0; // not supported
    }
  }
  cudaGetLastError(); // is not for whoever asks next
}

// cuStreamGetGreenCtx(), which returns a CUresult and sets a CUgreenCtx, or
// null: older drivers have no green contexts.
using GetGreenContext = int (*)(cudaStream_t stream, void** context);

GetGreenContext find_get_green_context() {
  constexpr const char* kName = "cuStreamGetGreenCtx";
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  constexpr int kFirstVersion = 12040;
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      kName, &function, kFirstVersion, cudaEnableDefault, &result);
#else
  const cudaError_t error =
      cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess) {
    cudaGetLastError(); // is not for whoever asks next
    return nullptr;
  }
  return result == cudaDriverEntryPointSuccess
      ? reinterpret_cast<GetGreenContext>(function)
      : nullptr;
}

} // namespace

bool has_whole_chip(cudaStream_t stream) {
  static const GetGreenContext get = find_get_green_context();
  void* context = nullptr;
  return get == nullptr || get(stream, &context) != 0 || context == nullptr;
}

cudaError_t describe_device(Device& device) {
  int index = 0;
  int major_capability = 0;
  int minor_capability = 0;
  int shared_bytes = 0;
  int l2_bytes = 0;
  int cooperative = 0;
  cudaError_t error = cudaGetDevice(&index);
  const auto get = [&](int& value, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&value, attribute, index);
    }
  };
  get(device.sm_count, cudaDevAttrMultiProcessorCount);
  get(major_capability, cudaDevAttrComputeCapabilityMajor);
  get(minor_capability, cudaDevAttrComputeCapabilityMinor);
  get(shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  get(l2_bytes, cudaDevAttrL2CacheSize);
  get(cooperative, cudaDevAttrCooperativeLaunch);
  cudaFuncAttributes code;
  if (error == cudaSuccess) {
    error = cudaFuncGetAttributes(&code, occupy);
  }
  if (error == cudaSuccess) {
    // Kernels that the GPU has compiled of older PTX are those of an older GPU.
    device.compute_capability =
        std::min(10 * major_capability + minor_capability, code.ptxVersion);
    device.shared_memory_per_block = shared_bytes;
    device.l2_bytes = l2_bytes;
    device.whole_chip = cooperative != 0;
    device.l2_policies = major_capability < 10;
    device.clusters = {};
    device.clusters[1] = device.sm_count;
    if (device.compute_capability >= kClusterCode) {
      count_clusters(shared_bytes, device.clusters);
    }
  }
  return error;
}

cudaError_t launch_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    cudaStream_t stream) {
  return with_kernels(problem, [&](auto element, auto output, auto fused) {
    using T = decltype(element);
    using TY = decltype(output);
    switch (plan.scheme) {
      case Scheme::kRegisters:
        if constexpr (sizeof(TY) == 2) {
          return registers_forward<T, fused>(problem, plan, arguments, stream);
        } else {
          return cudaErrorInvalidValue;
        }
      case Scheme::kResident:
      case Scheme::kCooperative:
        return resident_forward<T, TY, fused>(problem, plan, arguments, stream);
      case Scheme::kTwoPass:
        return two_pass_forward<T, TY, fused>(problem, plan, arguments, stream);
      case Scheme::kAten:
      case Scheme::kChannelsLastCPU:
        break;
    }
    return cudaErrorInvalidValue;
  });
}

cudaError_t launch_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    cudaStream_t stream) {
  if (!problem.want_dX && !problem.wants_parameters()) {
    return cudaSuccess;
  }
  return with_kernels(problem, [&](auto element, auto output, auto fused) {
    using T = decltype(element);
    using TY = decltype(output);
    switch (plan.scheme) {
      case Scheme::kRegisters:
        if constexpr (sizeof(TY) == 2) {
          return registers_backward<T, fused>(problem, plan, arguments, stream);
        } else {
          return cudaErrorInvalidValue;
        }
      case Scheme::kResident:
      case Scheme::kCooperative:
        return resident_backward<T, TY, fused>(
            problem, plan, arguments, stream);
      case Scheme::kTwoPass:
        return two_pass_backward<T, TY, fused>(
            problem, plan, arguments, stream);
      case Scheme::kAten:
      case Scheme::kChannelsLastCPU:
        break;
    }
    return cudaErrorInvalidValue;
  });
}

} // namespace gn_override
