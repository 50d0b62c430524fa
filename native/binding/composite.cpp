#include "native/binding/composite.h"

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <array>
#include <string>

#include "native/binding/autograd.h"
#include "native/plan/names.h"

namespace gn_override::binding {

namespace {

using at::Tensor;

Tensor activate(const Tensor& Z, Activation activation) {
  switch (activation) {
    case Activation::kIdentity:
      return Z;
    case Activation::kRelu:
      return at::relu(Z);
    case Activation::kSilu:
      return at::silu(Z);
    case Activation::kGelu:
      return at::gelu(Z, "none");
    case Activation::kGeluTanh:
      return at::gelu(Z, "tanh");
  }
  return Z;
}

Tensor differentiate(const Tensor& dY, const Tensor& Z, Activation activation) {
  switch (activation) {
    case Activation::kIdentity:
      return dY;
    case Activation::kRelu:
      return at::threshold_backward(dY, Z, 0);
    case Activation::kSilu:
      return at::silu_backward(dY, Z);
    case Activation::kGelu:
      return at::gelu_backward(dY, Z, "none");
    case Activation::kGeluTanh:
      return at::gelu_backward(dY, Z, "tanh");
  }
  return dY;
}

at::ScalarType accumulator_type(const Tensor& X) {
  return X.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// What aten's group_norm does not take, it refuses in its own words.
void check_arguments(
    const Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta) {
  const at::ScalarType type = X.scalar_type();
  const at::ScalarType param_type = param_type_of(type, gamma, beta);
  const bool half = is_half(type);
  const auto fits = [&](const OptionalTensor& parameter) {
    return !defined(parameter) ||
        (parameter->dim() == 1 && parameter->sym_numel() == X.sym_size(1) &&
         parameter->scalar_type() == param_type);
  };
  if (X.dim() < 2 || group <= 0 || X.sym_size(1) % group != 0 ||
      !(half || type == at::kFloat || type == at::kDouble) ||
      (param_type != type && !(half && param_type == at::kFloat)) ||
      !fits(gamma) || !fits(beta)) {
    at::group_norm(X, group, gamma, beta);
  }
}

// Y's type.
at::ScalarType output_type(
    const Tensor& X,
    std::optional<at::ScalarType> out_dtype) {
  const at::ScalarType type = X.scalar_type();
  const at::ScalarType result = out_dtype.value_or(type);
  TORCH_CHECK_VALUE(
      result == type || (result == at::kFloat && is_half(type)),
      std::string(
          "gn_override: out_dtype must be the input's, or Float for a "
          "half-precision input, got ") +
          at::toString(result) + " for " + at::toString(type));
  return result;
}

// gamma or beta as an accumulator. Up to 2.13 stock's native_group_norm takes
// no strided one.
Tensor accumulated(const Tensor& parameter, const Tensor& X) {
  return parameter.to(accumulator_type(X)).contiguous();
}

// gamma, ones where there is none: stock's double backward and some masks of
// its backward refuse a norm without one.
Tensor weight_of(const OptionalTensor& gamma, const Tensor& X) {
  return defined(gamma)
      ? accumulated(*gamma, X)
      : at::ones_symint(
            {X.sym_size(1)}, X.options().dtype(accumulator_type(X)));
}

} // namespace

Activation parse_activation(std::string_view name) {
  const std::optional<Activation> activation = value_of<Activation>(name);
  TORCH_CHECK_VALUE(
      activation,
      "gn_override: activation must be one of " + names_of<Activation>() +
          ", got \"" + std::string(name) + "\"");
  return *activation;
}

Result composite_forward_in(
    at::MemoryFormat format,
    const Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation,
    std::optional<at::ScalarType> out_dtype) {
  const Activation kind = parse_activation(activation);
  check_arguments(X, group, gamma, beta);
  const at::ScalarType result_type = output_type(X, out_dtype);
  const SymbolicSizes sizes(X);
  const auto [Z, mean, rstd] = at::native_group_norm_symint(
      X.to(accumulator_type(X)).contiguous(format),
      weight_of(gamma, X),
      defined(beta) ? OptionalTensor(accumulated(*beta, X)) : std::nullopt,
      sizes.N,
      sizes.C,
      sizes.HxW,
      group,
      eps);
  return {activate(Z, kind).to(result_type), mean, rstd};
}

Result composite_forward(
    const Tensor& X,
    int64_t group,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    double eps,
    std::string_view activation,
    std::optional<at::ScalarType> out_dtype) {
  return composite_forward_in(
      at::MemoryFormat::Contiguous,
      X,
      group,
      gamma,
      beta,
      eps,
      activation,
      out_dtype);
}

Result composite_backward(
    const Tensor& dY,
    const Tensor& X,
    const Tensor& mean,
    const Tensor& rstd,
    const OptionalTensor& gamma,
    const OptionalTensor& beta,
    int64_t group,
    std::string_view activation,
    std::array<bool, 3> output_mask) {
  const Activation kind = parse_activation(activation);
  check_arguments(X, group, gamma, beta);
  const SymbolicSizes sizes(X);
  const at::ScalarType type = accumulator_type(X);
  const Tensor x = X.to(type).contiguous();
  const Tensor weight = weight_of(gamma, X);
  Tensor dZ = dY.to(type);
  if (kind != Activation::kIdentity) {
    const std::array of_group{sizes.N, c10::SymInt(group), c10::SymInt(1)};
    Tensor Z = x.reshape_symint({sizes.N, group, sizes.C / group * sizes.HxW});
    Z = (Z - mean.reshape_symint(of_group)) * rstd.reshape_symint(of_group);
    Z = Z.reshape_symint({sizes.N, sizes.C, sizes.HxW}) * weight.unsqueeze(1);
    if (defined(beta)) {
      Z = Z + accumulated(*beta, X).unsqueeze(1);
    }
    dZ = differentiate(dZ, Z.reshape_symint(X.sym_sizes()), kind);
  }
  auto [dX, dgamma, dbeta] = at::native_group_norm_backward_symint(
      dZ.contiguous(),
      x,
      mean.to(type),
      rstd.to(type),
      weight,
      sizes.N,
      sizes.C,
      sizes.HxW,
      group,
      {true, true, true});
  const at::ScalarType param_type =
      param_type_of(dY.scalar_type(), gamma, beta);
  return {
      output_mask[0] ? dX.to(X.scalar_type()) : Tensor(),
      output_mask[1] ? dgamma.to(param_type) : Tensor(),
      output_mask[2] ? dbeta.to(param_type) : Tensor()};
}

} // namespace gn_override::binding
