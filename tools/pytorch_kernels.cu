// Gives Python the CUDA kernels of group norm that stand in a checkout of
// PyTorch, beside those of the torch that runs: the half of
// tools/pytorch_kernels.py that is compiled, with the checkout's folder of CUDA
// kernels among the include paths.
#include <ATen/native/group_norm.h>

// The checkout's functions shall have names, and not the place of torch's own.
#undef REGISTER_DISPATCH
#define REGISTER_DISPATCH(name, function) \
  static constexpr auto name##OfCheckout = function;

// Younger than some versions of torch whose headers these are.
#ifndef C10_WARP_SIZE_UPPER_BOUND
#define C10_WARP_SIZE_UPPER_BOUND C10_WARP_SIZE
#endif

#include "group_norm_kernel.cu"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>

namespace {

using at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;

int64_t pixels(const Tensor& X) {
  return X.numel() / (X.size(0) * X.size(1));
}

// (Y, mean, rstd) of a dense X, of whose dtype gamma and beta are.
Three forward(
    const Tensor& X,
    const Tensor& gamma,
    const Tensor& beta,
    int64_t groups,
    double eps) {
  Tensor Y = at::empty_like(X);
  Tensor mean = at::empty({X.size(0), groups}, X.options());
  Tensor rstd = at::empty({X.size(0), groups}, X.options());
  at::native::GroupNormKernelOfCheckout(
      X,
      gamma,
      beta,
      X.size(0),
      X.size(1),
      pixels(X),
      groups,
      eps,
      Y,
      mean,
      rstd);
  return {Y, mean, rstd};
}

// (dX, dgamma, dbeta); dY is laid out as X.
Three backward(
    const Tensor& dY,
    const Tensor& X,
    const Tensor& mean,
    const Tensor& rstd,
    const Tensor& gamma) {
  Tensor dX = at::empty_like(X);
  Tensor dgamma = at::empty_like(gamma);
  Tensor dbeta = at::empty_like(gamma);
  at::native::GroupNormBackwardKernelOfCheckout(
      dY,
      X,
      mean,
      rstd,
      gamma,
      X.size(0),
      X.size(1),
      pixels(X),
      mean.size(1),
      dX,
      dgamma,
      dbeta);
  return {dX, dgamma, dbeta};
}

TORCH_LIBRARY(gn_override_pytorch_kernels, library) {
  library.def(
      "forward(Tensor X, Tensor gamma, Tensor beta, int groups, float eps) "
      "-> (Tensor, Tensor, Tensor)",
      &forward);
  library.def(
      "backward(Tensor dY, Tensor X, Tensor mean, Tensor rstd, Tensor gamma) "
      "-> (Tensor, Tensor, Tensor)",
      &backward);
}

} // namespace
