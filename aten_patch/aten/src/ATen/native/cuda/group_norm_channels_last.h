// Group normalization of channels-last tensors on CUDA, behind the dispatch
// stubs of ATen/native/group_norm.h. The kernels, and the planner that chooses
// among them, are in ATen/native/cuda/group_norm. Not built for ROCm.
#pragma once

#include <cstdint>

namespace at {
class Tensor;

namespace native {

// Both take what the stubs take, launch on the current stream and return true.
// Or they touch nothing and return false, which leaves the call to the kernels
// of group_norm_kernel.cu, where
//   * X is not channels-last (4-D, 5-D), or is NCHW-contiguous as well, which
//     one pixel or one channel makes it, or is empty;
//   * another operand of X's size is not laid out as X;
//   * X is not float, double, half or bfloat16, or another operand's dtype is
//     not X's;
//   * the address of an operand of X's size is not a multiple of its elements';
//   * an operand has no memory, or the arguments do not fit together: those
//     kernels raise the errors;
//   * N or C is beyond what a grid can count (2^30);
//   * the device is older than compute capability 8.0.
// Layouts: X, Y, dY, dX are [N, HxW, C] in memory; mean, rstd [N, group];
// gamma, beta, dgamma, dbeta [C]. Sums are kept in float, or in double for
// double tensors. Offsets are 64-bit.
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
    Tensor& rstd);

// Gradients that are undefined tensors are not computed.
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
    Tensor& dbeta);

} // namespace native
} // namespace at
