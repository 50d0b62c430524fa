// The CPU kernels as a table, compiled once per instruction set by the
// kernels_*.cpp files. vector.h says why nothing in what is included here may
// leave its unnamed namespace.
#pragma once

#include "native/cpu/gradients.h"
#include "native/cpu/groups.h"
#include "native/cpu/kernels.h"
#include "native/cpu/moments.h"
#include "native/cpu/normalize.h"

namespace gn_override {
namespace {

template <typename T>
constexpr cpu::ElementKernels element_kernels() {
  return {moments<T>, normalize<T>, gradient_sums<T>, input_gradient<T>};
}

template <typename P>
constexpr cpu::ParameterKernels parameter_kernels() {
  return {
      finish_statistics<P>,
      expand_parameters<P>,
      finish_sums<P>,
      store_totals<P>};
}

// In the order of DType.
constexpr cpu::Kernels make_kernels(const char* name) {
  return {
      name,
      add_totals,
      {element_kernels<float>(),
       element_kernels<double>(),
       element_kernels<Half>(),
       element_kernels<BFloat16>()},
      {parameter_kernels<float>(),
       parameter_kernels<double>(),
       parameter_kernels<Half>(),
       parameter_kernels<BFloat16>()}};
}

} // namespace
} // namespace gn_override
