// aten's CPU key.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/ops/native_group_norm_backward_cpu_dispatch.h>
#include <ATen/ops/native_group_norm_cpu_dispatch.h>

#include <torch/library.h>

#include "native/binding/activation.h"
#include "native/binding/devices.h"
#include "native/binding/generated/kernels.h"
#include "native/binding/output_allocator.h"
#include "native/binding/plan_cache.h"
#include "native/cpu/cpu.h"

namespace gn_override::binding {

Device cpu_device() {
  Device device;
  device.threads = at::get_num_threads();
  return device;
}

namespace {

void run_on_torch_pool(
    int64_t count,
    int64_t grain,
    void (*body)(void* context, int64_t begin, int64_t end),
    void* context) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    body(context, begin, end);
  });
}

constexpr ParallelFor kTorchPool{run_on_torch_pool};

struct CPUBackend {
  static constexpr bool kCuda = false;

  struct Guard {
    explicit Guard(const at::Tensor&) {}
  };

  static Plan plan(const Problem& problem, const at::Tensor&) {
    return cached_plan(problem, cpu_device());
  }

  static at::Tensor empty(
      at::IntArrayRef sizes,
      at::IntArrayRef strides,
      at::ScalarType type,
      const at::Tensor&) {
    return at::Tensor(
        at::detail::empty_strided_generic(
            sizes,
            strides,
            output_allocator(),
            c10::DispatchKeySet(c10::DispatchKey::CPU),
            type));
  }

  // Stock's CPU kernels use eps as it is given.
  static double eps(double eps, at::ScalarType) {
    return eps;
  }

  static bool adds(const Problem&, const at::Tensor&, const at::Tensor&) {
    return false;
  }

  static void run(
      const Problem& problem,
      const Plan& plan,
      const ForwardArguments& arguments) {
    cpu_forward(problem, plan, arguments, kTorchPool);
  }

  static void run(
      const Problem& problem,
      const Plan& plan,
      const BackwardArguments& arguments) {
    cpu_backward(problem, plan, arguments, kTorchPool);
  }

  template <typename... Arguments>
  static Result stock_forward(const Arguments&... arguments) {
    return at::cpu::native_group_norm(arguments...);
  }

  template <typename... Arguments>
  static Result stock_backward(const Arguments&... arguments) {
    return at::cpu::native_group_norm_backward(arguments...);
  }
};

TORCH_LIBRARY_IMPL(gn_override, CPU, m) {
  implement_activated<CPUBackend>(m);
}

} // namespace

Result native_group_norm_cpu(
    const at::Tensor& X,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    double eps) {
  return forward<CPUBackend>(X, gamma, beta, N, C, HxW, group, eps);
}

Result native_group_norm_backward_cpu(
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
  return backward<CPUBackend>(
      dY, X, mean, rstd, gamma, N, C, HxW, group, output_mask);
}

} // namespace gn_override::binding
