#ifndef USE_ROCM
#define TORCH_ASSERT_ONLY_METHOD_OPERATORS
#include <ATen/native/cuda/group_norm_channels_last.h>

#include <ATen/Dispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/cuda/group_norm/launch/launch.h>
#include <ATen/native/cuda/group_norm/plan/plan_cache.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAMacros.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/CallOnce.h>
#include <c10/util/env.h>

#ifndef AT_PER_OPERATOR_HEADERS
#include <ATen/Functions.h>
#else
#include <ATen/ops/empty.h>
#endif

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>

namespace at::native {

namespace {

using namespace group_norm_nhwc;

// A launch of all multiprocessors waits for the kernels of other streams to
// end, and would wait forever if one of these waits for what comes after it, as
// a kernel that receives from another process may. A process without such
// kernels may ask for these launches, which are the fastest for large samples.
bool may_take_whole_chip() {
  static const bool asked =
      c10::utils::check_env("TORCH_GROUP_NORM_WHOLE_CHIP").value_or(false);
  return asked;
}

struct DescribedOnce {
  c10::once_flag once;
  Device device;
};

// Figures of the current device, read once a process. Those of a part of it,
// which a green context is, are the first such part's.
const Device& current_device() {
  static std::array<DescribedOnce, C10_COMPILE_TIME_MAX_GPUS> wholes;
  static std::array<DescribedOnce, C10_COMPILE_TIME_MAX_GPUS> parts;
  const bool whole = has_whole_chip(c10::cuda::getCurrentCUDAStream());
  DescribedOnce& described =
      (whole ? wholes : parts)[c10::cuda::current_device()];
  c10::call_once(described.once, [&device = described.device, whole] {
    C10_CUDA_CHECK(describe_device(device));
    device.whole_chip = device.whole_chip && whole && may_take_whole_chip();
  });
  return described.device;
}

std::optional<DType> dtype_of(const Tensor& X) {
  switch (X.scalar_type()) {
    case kFloat:
      return DType::kFloat;
    case kDouble:
      return DType::kDouble;
    case kHalf:
      return DType::kHalf;
    case kBFloat16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

// And not NCHW-contiguous as well.
bool is_channels_last(const Tensor& X) {
  return !X.is_contiguous() &&
      (X.is_contiguous(MemoryFormat::ChannelsLast) ||
       X.is_contiguous(MemoryFormat::ChannelsLast3d));
}

using Tensors = std::initializer_list<const Tensor*>;

// Its storage may have been resized to nothing.
bool is_allocated(const Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->storage_initialized();
}

// Each is undefined or has `numel` elements of X's dtype, without gaps.
bool fit(const Tensors& tensors, const Tensor& X, int64_t numel) {
  return std::ranges::all_of(tensors, [&](const Tensor* tensor) {
    return !tensor->defined() ||
        (tensor->numel() == numel && tensor->is_contiguous() &&
         tensor->scalar_type() == X.scalar_type() && is_allocated(*tensor));
  });
}

// Each is undefined or has X's sizes, layout and dtype.
bool are_like(const Tensors& tensors, const Tensor& X) {
  return std::ranges::all_of(tensors, [&](const Tensor* tensor) {
    return !tensor->defined() ||
        (tensor->sizes() == X.sizes() && is_channels_last(*tensor) &&
         tensor->scalar_type() == X.scalar_type() && is_allocated(*tensor));
  });
}

// The largest power of two, at most 16, that divides every address.
int alignment_of(const Tensors& tensors) {
  uintptr_t bits = 16;
  for (const Tensor* const tensor : tensors) {
    if (tensor->defined()) {
      bits |= reinterpret_cast<uintptr_t>(tensor->const_data_ptr());
    }
  }
  return static_cast<int>(bits & (~bits + 1));
}

// The question for the planner; none if the kernels do not take the operands.
// `alike` are of X's size, X among them.
std::optional<Problem> problem_of(
    Direction direction,
    const Tensor& X,
    const Tensors& alike,
    const Tensors& statistics,
    const Tensors& parameters,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group) {
  const std::optional<DType> dtype = dtype_of(X);
  const bool taken = dtype && is_channels_last(X) && X.numel() > 0 &&
      X.size(0) == N && X.size(1) == C && HxW == X.numel() / N / C &&
      group > 0 && C % group == 0 && are_like(alike, X) &&
      fit(statistics, X, N * group) && fit(parameters, X, C);
  if (!taken) {
    return std::nullopt;
  }
  Problem problem;
  problem.direction = direction;
  problem.dtype = *dtype;
  problem.N = N;
  problem.C = C;
  problem.HxW = HxW;
  problem.G = group;
  problem.alignment = alignment_of(alike);
  if (problem.alignment < size_of(*dtype)) {
    return std::nullopt; // as after set_() to an odd place in a storage
  }
  return problem;
}

// None if no kernel takes the problem on the current device and stream.
std::optional<Plan> plan_of(const Problem& problem) {
  const Device& device = current_device();
  if (device.compute_capability < kLeastComputeCapability) {
    return std::nullopt; // the kernels are empty: see is_served() in reduce.cuh
  }
  const Plan plan = cached_plan(problem, device);
  return plan.scheme == Scheme::kNone ? std::nullopt : std::optional(plan);
}

Tensor empty_workspace(const Plan& plan, const Tensor& X) {
  return plan.workspace_bytes == 0
      ? Tensor()
      : at::empty({plan.workspace_bytes}, X.options().dtype(kByte));
}

const void* data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

void* mutable_data_or_null(const Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

// To X's dtype, as the other kernels take it.
double rounded(double eps, const Tensor& X) {
  return AT_DISPATCH_FLOATING_TYPES_AND2(
      kHalf, kBFloat16, X.scalar_type(), "group_norm_channels_last", [&] {
        return static_cast<double>(static_cast<scalar_t>(eps));
      });
}

} // namespace

bool group_norm_channels_last(
    const Tensor& X,
    const Tensor& gamma,
    const Tensor& beta,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    double eps,
    Tensor& Y,
    Tensor& mean,
    Tensor& rstd) {
  const std::optional<Problem> problem = problem_of(
      Direction::kForward,
      X,
      {&X, &Y},
      {&mean, &rstd},
      {&gamma, &beta},
      N,
      C,
      HxW,
      group);
  const std::optional<Plan> plan = problem ? plan_of(*problem) : std::nullopt;
  if (!plan) {
    return false;
  }
  const Tensor workspace = empty_workspace(*plan, X);
  ForwardArguments arguments;
  arguments.X = X.const_data_ptr();
  arguments.gamma = data_or_null(gamma);
  arguments.beta = data_or_null(beta);
  arguments.Y = Y.mutable_data_ptr();
  arguments.mean = mean.mutable_data_ptr();
  arguments.rstd = rstd.mutable_data_ptr();
  arguments.eps = rounded(eps, X);
  arguments.workspace = mutable_data_or_null(workspace);
  C10_CUDA_CHECK(launch_forward(
      *problem, *plan, arguments, c10::cuda::getCurrentCUDAStream()));
  return true;
}

bool group_norm_channels_last_backward(
    const Tensor& dY,
    const Tensor& X,
    const Tensor& mean,
    const Tensor& rstd,
    const Tensor& gamma,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    Tensor& dX,
    Tensor& dgamma,
    Tensor& dbeta) {
  std::optional<Problem> problem = problem_of(
      Direction::kBackward,
      X,
      {&X, &dY, &dX},
      {&mean, &rstd},
      {&gamma, &dgamma, &dbeta},
      N,
      C,
      HxW,
      group);
  if (!problem) {
    return false;
  }
  problem->want_dX = dX.defined();
  problem->want_dgamma = dgamma.defined();
  problem->want_dbeta = dbeta.defined();
  const std::optional<Plan> plan = plan_of(*problem);
  if (!plan) {
    return false;
  }
  const Tensor workspace = empty_workspace(*plan, X);
  BackwardArguments arguments;
  arguments.dY = dY.const_data_ptr();
  arguments.X = X.const_data_ptr();
  arguments.mean = mean.const_data_ptr();
  arguments.rstd = rstd.const_data_ptr();
  arguments.gamma = data_or_null(gamma);
  arguments.dX = mutable_data_or_null(dX);
  arguments.dgamma = mutable_data_or_null(dgamma);
  arguments.dbeta = mutable_data_or_null(dbeta);
  arguments.workspace = mutable_data_or_null(workspace);
  C10_CUDA_CHECK(launch_backward(
      *problem, *plan, arguments, c10::cuda::getCurrentCUDAStream()));
  return true;
}

} // namespace at::native
#endif // USE_ROCM
