#include "native/binding/classify.h"

#include <ATen/ops/empty_strided.h>
#include <c10/core/MemoryFormat.h>

#include <algorithm>
#include <bit>
#include <cstdint>

namespace gn_override::binding {

namespace {

std::optional<DType> to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return DType::kFloat;
    case at::kDouble:
      return DType::kDouble;
    case at::kHalf:
      return DType::kHalf;
    case at::kBFloat16:
      return DType::kBFloat16;
    default:
      return std::nullopt;
  }
}

// In bytes, at most 16, which is that of a fake tensor.
int alignment_of(const at::Tensor& tensor) {
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return 1 << std::countr_zero(address | 16);
}

// A GPU loads whole elements: at other addresses stock raises its error. Of a
// wide dY, whose alignment counts by X's elements, 0 is less than one.
void decline_misaligned(Classified& result) {
  const Problem& problem = result.problem;
  if (problem.device == DeviceType::kCUDA &&
      problem.alignment < size_of(problem.dtype)) {
    result.declined = "misaligned input";
  }
}

// A parameter is [C], a statistic has N * G elements; both of `type`, on X's
// device.
bool fits(
    const at::Tensor& tensor,
    const at::Tensor& X,
    at::ScalarType type,
    int64_t numel) {
  return tensor.numel() == numel && tensor.scalar_type() == type &&
      tensor.device() == X.device() && tensor.layout() == at::kStrided;
}

// The dimension that is i-th from the innermost in channels-last order: C, then
// the spatial ones from the last to the first, then N.
int64_t channels_last_dim(int64_t i, int64_t dim) {
  return i == 0 ? 1 : i == dim - 1 ? 0 : dim - i;
}

// NCHW and channels-last are the same memory.
bool has_one_layout(const at::Tensor& X) {
  return X.dim() >= 2 && X.dim() <= 5 &&
      (X.size(1) == 1 || X.numel() == X.size(0) * X.size(1));
}

// gamma and beta, as far as they are given, are [C] of `type`.
bool parameters_fit(
    const at::Tensor& X,
    const std::optional<at::Tensor>& gamma,
    const std::optional<at::Tensor>& beta,
    at::ScalarType type) {
  for (const auto* parameter : {&gamma, &beta}) {
    if (defined(*parameter) &&
        ((*parameter)->dim() != 1 || !fits(**parameter, X, type, X.size(1)))) {
      return false;
    }
  }
  return true;
}

// What forward and backward ask of X and of the integers: first what most
// declined calls fail.
Classified classify_common(
    const at::Tensor& X,
    at::ScalarType param_type,
    at::ScalarType output_type,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group) {
  Classified result;
  // Stock CUDA kernels refuse a half X with float parameters: there we serve
  // what is channels-last as well.
  const bool wide = output_type != X.scalar_type();
  const bool refused = X.is_cuda() && !wide && param_type != X.scalar_type();
  if (X.is_contiguous() && !(refused && has_one_layout(X))) {
    result.declined = "NCHW-contiguous input";
    return result;
  }
  if (!X.is_contiguous() && !prefers_channels_last(X)) {
    result.declined = "input is not channels-last";
    return result;
  }
  if (X.numel() == 0) {
    result.declined = "empty input";
    return result;
  }
  // A product of integers that lie may overflow to the right number.
  if (X.size(0) != N || X.size(1) != C || HxW != X.numel() / N / C) {
    result.declined = "N, C, HxW are not the input's";
    return result;
  }
  if (group <= 0 || C % group != 0) {
    result.declined = "channels are not divisible by groups";
    return result;
  }
  const auto dtype = to_dtype(X.scalar_type());
  const auto param_dtype = to_dtype(param_type);
  const auto fits = [&](at::ScalarType type) {
    return type == X.scalar_type() ||
        (is_half(X.scalar_type()) && type == at::kFloat);
  };
  if (!dtype || !param_dtype || !fits(param_type) || !fits(output_type) ||
      (wide && param_type != output_type)) {
    result.declined = "dtypes without kernels";
    return result;
  }
  if (wide && X.is_cpu()) {
    result.declined = "float32 from another dtype on a CPU";
    return result;
  }
  Problem& problem = result.problem;
  problem.device = X.is_cuda() ? DeviceType::kCUDA : DeviceType::kCPU;
  problem.dtype = *dtype;
  problem.param_dtype = *param_dtype;
  problem.wide_output = wide;
  problem.N = N;
  problem.C = C;
  problem.HxW = HxW;
  problem.G = group;
  problem.channels_last = true;
  return result;
}

Classified check_forward(
    const at::Tensor& X,
    const std::optional<at::Tensor>& gamma,
    const std::optional<at::Tensor>& beta,
    at::ScalarType output_type,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group) {
  const at::ScalarType param_type = param_type_of(output_type, gamma, beta);
  Classified result =
      classify_common(X, param_type, output_type, N, C, HxW, group);
  if (!result.declined && !parameters_fit(X, gamma, beta, param_type)) {
    result.declined = "weight or bias of another size, dtype or device";
  }
  return result;
}

} // namespace

at::ScalarType to_scalar_type(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return at::kFloat;
    case DType::kDouble:
      return at::kDouble;
    case DType::kHalf:
      return at::kHalf;
    case DType::kBFloat16:
      return at::kBFloat16;
  }
  return at::kFloat;
}

at::ScalarType param_type_of(
    at::ScalarType otherwise,
    const std::optional<at::Tensor>& gamma,
    const std::optional<at::Tensor>& beta) {
  return defined(gamma) ? gamma->scalar_type()
      : defined(beta)   ? beta->scalar_type()
                        : otherwise;
}

bool is_channels_last(const at::Tensor& X) {
  const int64_t dim = X.dim();
  if (dim < 3 || dim > 5 || X.layout() != at::kStrided || X.is_contiguous()) {
    return false;
  }
  // The stride of a dimension of size 1 says nothing.
  int64_t expected = 1;
  for (int64_t i = 0; i < dim; ++i) {
    const int64_t d = channels_last_dim(i, dim);
    if (X.size(d) != 1 && X.stride(d) != expected) {
      return false;
    }
    expected *= X.size(d);
  }
  return true;
}

bool prefers_channels_last(const at::Tensor& X) {
  if (is_channels_last(X)) {
    return true;
  }
  if (X.layout() != at::kStrided || X.is_contiguous()) {
    return false;
  }
  const at::MemoryFormat format = X.suggest_memory_format();
  return format == at::MemoryFormat::ChannelsLast ||
      format == at::MemoryFormat::ChannelsLast3d;
}

c10::SmallVector<int64_t, 5> channels_last_strides(at::IntArrayRef sizes) {
  const auto dim = static_cast<int64_t>(sizes.size());
  c10::SmallVector<int64_t, 5> strides(dim);
  int64_t stride = 1;
  for (int64_t i = 0; i < dim; ++i) {
    const int64_t d = channels_last_dim(i, dim);
    strides[d] = stride;
    stride *= sizes[d];
  }
  return strides;
}

at::Tensor to_channels_last(const at::Tensor& X) {
  if (is_channels_last(X) || (X.is_contiguous() && has_one_layout(X))) {
    return X;
  }
  return at::empty_strided(
             X.sizes(), channels_last_strides(X.sizes()), X.options())
      .copy_(X);
}

std::array<int64_t, 3> sizes_of(const at::Tensor& X) {
  int64_t HxW = 1;
  for (int64_t d = 2; d < X.dim(); ++d) {
    HxW *= X.size(d);
  }
  return {X.size(0), X.size(1), HxW};
}

Classified classify_forward(
    const at::Tensor& X,
    const std::optional<at::Tensor>& gamma,
    const std::optional<at::Tensor>& beta,
    at::ScalarType output_type,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group) {
  Classified result =
      check_forward(X, gamma, beta, output_type, N, C, HxW, group);
  if (!result.declined) {
    result.problem.direction = Direction::kForward;
    // A copy made by to_channels_last() is aligned at least as well.
    result.problem.alignment = alignment_of(X);
    decline_misaligned(result);
  }
  return result;
}

bool takes_forward(
    const at::Tensor& X,
    const std::optional<at::Tensor>& gamma,
    const std::optional<at::Tensor>& beta,
    at::ScalarType output_type,
    int64_t group) {
  if (X.dim() < 2) {
    return false;
  }
  const auto [N, C, HxW] = sizes_of(X);
  return !check_forward(X, gamma, beta, output_type, N, C, HxW, group).declined;
}

Classified classify_backward(
    const at::Tensor& dY,
    const at::Tensor& X,
    const at::Tensor& mean,
    const at::Tensor& rstd,
    const std::optional<at::Tensor>& gamma,
    const std::optional<at::Tensor>& beta,
    at::ScalarType param_type,
    at::ScalarType output_type,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t group,
    std::array<bool, 3> output_mask) {
  Classified result =
      classify_common(X, param_type, output_type, N, C, HxW, group);
  if (result.declined) {
    return result;
  }
  if (dY.sizes() != X.sizes() || !fits(dY, X, output_type, X.numel())) {
    result.declined = "gradient of another size, dtype or device";
    return result;
  }
  Problem& problem = result.problem;
  problem.wide_statistics = mean.scalar_type() != param_type;
  const at::ScalarType statistics_type =
      to_scalar_type(problem.statistics_dtype());
  if (!fits(mean, X, statistics_type, N * group) ||
      !fits(rstd, X, statistics_type, N * group)) {
    result.declined = "statistics of another size, dtype or device";
    return result;
  }
  if (!parameters_fit(X, gamma, beta, param_type)) {
    result.declined = "weight or bias of another size, dtype or device";
    return result;
  }
  problem.direction = Direction::kBackward;
  const auto wider = static_cast<int>(dY.element_size() / X.element_size());
  problem.alignment = std::min(alignment_of(X), alignment_of(dY) / wider);
  problem.want_dX = output_mask[0];
  problem.want_dgamma = output_mask[1];
  problem.want_dbeta = output_mask[2];
  decline_misaligned(result);
  return result;
}

} // namespace gn_override::binding
