// The policy tables, one file each: policy_cuda.cpp, policy_cpu.cpp; and what
// both begin and end with.
#pragma once

#include <span>

#include "native/plan/plan.h"

namespace gn_override {

std::span<const Rule> policy_cuda();
std::span<const Rule> policy_cpu();

inline constexpr Condition kChannelsLast{
    "a dense channels-last X of more than one pixel and one channel",
    [](const Problem& problem, const Device&) {
      return problem.channels_last;
    }};
inline constexpr Condition kNotEmpty{
    "at least one element",
    [](const Problem& problem, const Device&) { return problem.numel() > 0; }};

// The last one: takes every problem.
inline constexpr Rule kAtenRule{
    Scheme::kAten,
    {},
    [](const Problem&, const Device&) -> std::optional<Plan> { return Plan{}; },
    "stock kernels: NCHW-contiguous inputs are theirs"};

} // namespace gn_override
