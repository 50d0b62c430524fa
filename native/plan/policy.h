// The policy tables, one file each: policy_cuda.cpp, policy_cpu.cpp.
#pragma once

#include <span>

#include "native/plan/plan.h"

namespace gn_override {

std::span<const Rule> policy_cuda();
std::span<const Rule> policy_cpu();

} // namespace gn_override
