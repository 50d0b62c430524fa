// aten's CUDA key.
#include <ATen/cuda/EmptyTensor.h>
#include <ATen/ops/native_group_norm_backward_cuda_dispatch.h>
#include <ATen/ops/native_group_norm_cuda_dispatch.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAMacros.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <array>
#include <mutex>
#include <optional>

#include "native/binding/activation.h"
#include "native/binding/devices.h"
#include "native/binding/generated/kernels.h"
#include "native/binding/plan_cache.h"
#include "native/binding/question.h"
#include "native/launch/launch.h"

namespace gn_override::binding {

namespace {

struct DescribedOnce {
  std::once_flag once;
  Device device;
};

// Whether a kernel's attributes cannot be had because there is no code for the
// device, nor any that the driver can compile for it.
bool means_no_code(cudaError_t error) {
  switch (error) {
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorInvalidPtx:
    case cudaErrorUnsupportedPtxVersion:
    case cudaErrorJitCompilerNotFound:
    case cudaErrorJitCompilationDisabled:
      return true;
    default:
      return false;
  }
}

// Figures of a device, read once a process; none where there is no code for it.
// Those of a part of it, which a green context is, are the first such part's.
Device& cuda_device(int index) {
  static std::array<DescribedOnce, C10_COMPILE_TIME_MAX_GPUS> wholes;
  static std::array<DescribedOnce, C10_COMPILE_TIME_MAX_GPUS> parts;
  const auto device_index = static_cast<c10::DeviceIndex>(index);
  const bool whole =
      has_whole_chip(c10::cuda::getCurrentCUDAStream(device_index));
  DescribedOnce& described = (whole ? wholes : parts)[index];
  std::call_once(
      described.once, [&device = described.device, device_index, whole] {
        const c10::cuda::CUDAGuard guard(device_index);
        const cudaError_t error = describe_device(device);
        if (means_no_code(error)) {
          cudaGetLastError(); // is not for whoever asks next
          device = {}; // which the policy has no kernels for
        } else {
          C10_CUDA_CHECK(error);
        }
        device.whole_chip = device.whole_chip && whole;
      });
  return described.device;
}

// Device::whole_chip as far as other processes go: gn_override/_whole_chip.py.
bool may_take_whole_chip() {
  static const PythonQuestion ask("gn_override::may_take_whole_chip");
  return ask();
}

} // namespace

void pin_plans(const Pins& pins) {
  for (int index = 0; index < c10::cuda::device_count(); ++index) {
    cuda_device(index).pins = pins;
  }
}

std::optional<Device> current_cuda_device() {
  if (c10::cuda::device_count() == 0) {
    return std::nullopt;
  }
  Device device = cuda_device(c10::cuda::current_device());
  device.whole_chip = device.whole_chip && may_take_whole_chip();
  return device;
}

namespace {

struct CUDABackend {
  static constexpr bool kCuda = true;

  struct Guard {
    explicit Guard(const at::Tensor& X) : guard(X.device()) {}
    c10::cuda::CUDAGuard guard;
  };

  // A copy: may_take_whole_chip() runs Python, which may call a group norm.
  static Plan plan(const Problem& problem, const at::Tensor& X) {
    const Device& device = cuda_device(X.device().index());
    const Plan plan = cached_plan(problem, device);
    if (!takes_whole_chip(plan) || may_take_whole_chip()) {
      return plan;
    }
    Device part = device;
    part.whole_chip = false;
    return cached_plan(problem, part);
  }

  static at::Tensor empty(
      at::IntArrayRef sizes,
      at::IntArrayRef strides,
      at::ScalarType type,
      const at::Tensor& X) {
    return at::Tensor(
        at::detail::empty_strided_cuda(sizes, strides, type, X.device()));
  }

  // Stock's CUDA kernels take eps in X's dtype, which is the statistics'.
  static double eps(double eps, at::ScalarType type) {
    switch (type) {
      case at::kHalf:
        return static_cast<float>(c10::Half(static_cast<float>(eps)));
      case at::kBFloat16:
        return static_cast<float>(c10::BFloat16(static_cast<float>(eps)));
      case at::kFloat:
        return static_cast<float>(eps);
      default:
        return eps;
    }
  }

  // A copy, where there is one, is aligned.
  static bool
  adds(const Problem& problem, const at::Tensor& X, const at::Tensor& added) {
    return problem.is_fused() &&
        added.sizes() == at::IntArrayRef{problem.N, problem.C} &&
        added.scalar_type() == X.scalar_type() &&
        added.device() == X.device() &&
        (!added.is_contiguous() ||
         reinterpret_cast<uintptr_t>(added.const_data_ptr()) % 16 == 0);
  }

  static void run(
      const Problem& problem,
      const Plan& plan,
      const ForwardArguments& arguments) {
    C10_CUDA_CHECK(launch_forward(
        problem, plan, arguments, c10::cuda::getCurrentCUDAStream().stream()));
  }

  static void run(
      const Problem& problem,
      const Plan& plan,
      const BackwardArguments& arguments) {
    C10_CUDA_CHECK(launch_backward(
        problem, plan, arguments, c10::cuda::getCurrentCUDAStream().stream()));
  }

  template <typename... Arguments>
  static Result stock_forward(const Arguments&... arguments) {
    return at::cuda::native_group_norm(arguments...);
  }

  template <typename... Arguments>
  static Result stock_backward(const Arguments&... arguments) {
    return at::cuda::native_group_norm_backward(arguments...);
  }
};

TORCH_LIBRARY_IMPL(gn_override, CUDA, m) {
  implement_activated<CUDABackend>(m);
}

} // namespace

Result native_group_norm_cuda(
    const at::Tensor& X,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    double eps) {
  return forward<CUDABackend>(X, gamma, beta, N, C, HxW, group, eps);
}

Result native_group_norm_backward_cuda(
    const at::Tensor& dY,
    const at::Tensor& X,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    const OptionalTensor& gamma,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    std::array<bool, 3> output_mask) {
  return backward<CUDABackend>(
      dY, X, mean, rstd, gamma, N, C, HxW, group, output_mask);
}

} // namespace gn_override::binding
