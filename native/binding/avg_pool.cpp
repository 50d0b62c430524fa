// Up to 2.13 PyTorch's backward of avg_pool1d and avg_pool2d forgets the
// padding where the input is channels-last, and on CUDA: the gradient is wrong,
// without a word (pytorch/pytorch#188344). PyTorch's group_norm hands on NCHW
// tensors there, ours channels-last ones. So that a net whose norms are
// followed by such a pool trains as it did, these calls go to the kernel for
// NCHW.
#if GN_OVERRIDE_STOCK_DROPS_LAYOUT

#include <ATen/ops/avg_pool2d_backward_cuda_dispatch.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>
#include <optional>

#include "native/binding/generated/kernels.h"
#include "native/binding/state.h"

namespace gn_override::binding {

at::Tensor avg_pool2d_backward_cuda(
    const at::Tensor& dY,
    const at::Tensor& X,
    at::IntArrayRef kernel_size,
    at::IntArrayRef stride,
    at::IntArrayRef padding,
    bool ceil_mode,
    bool count_include_pad,
    std::optional<int64_t> divisor_override) {
  const auto stock = [&](const at::Tensor& input) {
    return at::cuda::avg_pool2d_backward(
        dY,
        input,
        kernel_size,
        stride,
        padding,
        ceil_mode,
        count_include_pad,
        divisor_override);
  };
  const at::MemoryFormat format = X.suggest_memory_format();
  const bool is_padded =
      std::ranges::any_of(padding, [](int64_t size) { return size != 0; });
  if (!is_on() || !is_padded || format == at::MemoryFormat::Contiguous) {
    return stock(X);
  }
  // The gradient does not depend on the values of X.
  const at::Tensor nchw = at::empty_like(X, {}, at::MemoryFormat::Contiguous);
  return stock(nchw).contiguous(format);
}

} // namespace gn_override::binding

#endif // GN_OVERRIDE_STOCK_DROPS_LAYOUT
