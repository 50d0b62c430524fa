// What aten_patch and the rendered kernels are in PyTorch's tree, as a library:
// installs them behind PyTorch's dispatch stubs and calls these.
#include <ATen/core/Tensor.h>
#include <ATen/native/cuda/group_norm_channels_last.h>
#include <ATen/native/group_norm.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <array>
#include <tuple>

namespace {

using at::Tensor;
using Result = std::tuple<Tensor, Tensor, Tensor>;

void forward_kernel(
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
  TORCH_CHECK(
      at::native::group_norm_channels_last(
          X, gamma, beta, N, C, HxW, group, eps, Y, mean, rstd),
      "left to the other kernels");
}

void backward_kernel(
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
  TORCH_CHECK(
      at::native::group_norm_channels_last_backward(
          dY, X, mean, rstd, gamma, N, C, HxW, group, dX, dgamma, dbeta),
      "left to the other kernels");
}

void install() {
  at::native::GroupNormKernel.set_cuda_dispatch_ptr(&forward_kernel);
  at::native::GroupNormBackwardKernel.set_cuda_dispatch_ptr(&backward_kernel);
}

Tensor or_undefined(const std::optional<Tensor>& tensor) {
  return tensor.value_or(Tensor());
}

// The stub, with outputs as native_group_norm allocates them.
Result forward(
    const Tensor& X,
    const std::optional<Tensor>& gamma,
    const std::optional<Tensor>& beta,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    double eps) {
  const c10::OptionalDeviceGuard guard(X.device());
  Tensor Y = at::empty_like(X);
  Tensor mean = at::empty({N, group}, X.options());
  Tensor rstd = at::empty({N, group}, X.options());
  at::native::GroupNormKernel(
      at::kCUDA,
      X,
      or_undefined(gamma),
      or_undefined(beta),
      N,
      C,
      HxW,
      group,
      eps,
      Y,
      mean,
      rstd);
  return {Y, mean, rstd};
}

// Likewise.
Result backward(
    const Tensor& dY,
    const Tensor& X,
    const Tensor& mean,
    const Tensor& rstd,
    const std::optional<Tensor>& gamma,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    std::array<bool, 3> output_mask) {
  const c10::OptionalDeviceGuard guard(X.device());
  Tensor dX = output_mask[0] ? at::empty_like(X) : Tensor();
  Tensor dgamma = output_mask[1] ? at::empty({C}, X.options()) : Tensor();
  Tensor dbeta = output_mask[2] ? at::empty({C}, X.options()) : Tensor();
  at::native::GroupNormBackwardKernel(
      at::kCUDA,
      dY,
      X,
      mean,
      rstd,
      or_undefined(gamma),
      N,
      C,
      HxW,
      group,
      dX,
      dgamma,
      dbeta);
  return {dX, dgamma, dbeta};
}

} // namespace

TORCH_LIBRARY(group_norm_stub, m) {
  m.def("install() -> ()", &install);
  m.def(
      "forward(Tensor input, Tensor? weight, Tensor? bias, int N, int C, "
      "int HxW, int group, float eps) -> (Tensor, Tensor, Tensor)",
      &forward);
  m.def(
      "backward(Tensor grad_out, Tensor input, Tensor mean, Tensor rstd, "
      "Tensor? weight, int N, int C, int HxW, int group, bool[3] output_mask) "
      "-> (Tensor, Tensor, Tensor)",
      &backward);
}
