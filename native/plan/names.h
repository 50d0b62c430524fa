// Names that people read and write: of dtypes and activations as Python has
// them, and of schemes.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "native/plan/problem.h"

namespace gn_override {

template <typename Value>
struct Named {
  const char* name;
  Value value;
};

template <typename Value>
constexpr std::array<Named<Value>, 0> kNames{};
template <>
inline constexpr std::array kNames<DType>{
    Named{"float32", DType::kFloat},
    Named{"float64", DType::kDouble},
    Named{"float16", DType::kHalf},
    Named{"bfloat16", DType::kBFloat16},
};
template <>
inline constexpr std::array kNames<Activation>{
    Named{"identity", Activation::kIdentity},
    Named{"relu", Activation::kRelu},
    Named{"silu", Activation::kSilu},
    Named{"gelu", Activation::kGelu},
    Named{"gelu_tanh", Activation::kGeluTanh},
};
template <>
inline constexpr std::array kNames<Scheme>{
    Named{"aten", Scheme::kAten},
    Named{"registers", Scheme::kRegisters},
    Named{"resident", Scheme::kResident},
    Named{"cooperative", Scheme::kCooperative},
    Named{"two_pass", Scheme::kTwoPass},
    Named{"channels_last", Scheme::kChannelsLastCPU},
};

template <typename Value>
constexpr const char* name_of(Value value) {
  return std::ranges::find(kNames<Value>, value, &Named<Value>::value)->name;
}

template <typename Value>
constexpr std::optional<Value> value_of(std::string_view name) {
  for (const Named<Value>& named : kNames<Value>) {
    if (named.name == name) {
      return named.value;
    }
  }
  return std::nullopt;
}

// For messages: "float32, float64, ...".
template <typename Value>
std::string names_of() {
  std::string result;
  for (const Named<Value>& named : kNames<Value>) {
    result += (result.empty() ? "" : ", ") + std::string(named.name);
  }
  return result;
}

} // namespace gn_override
