// How long CUDA plans take, in nanoseconds. Estimates: they rank the schemes
// and their candidates, and decide nothing else.
#pragma once

#include <cstdint>

#include "native/plan/plan.h"

namespace gn_override {

inline constexpr int64_t kBurst = 64; // bytes that DRAM moves at once
inline constexpr int64_t kSector = 32; // bytes of a part of a cache line
inline constexpr int64_t kWideVector = 16; // bytes

// Bytes of a vector of so many elements, of the wider of X and Y.
constexpr int64_t vector_bytes(const Problem& problem, int vector) {
  return vector * size_of(problem.output_dtype());
}

constexpr bool is_narrow(const Problem& problem, int vector) {
  return vector_bytes(problem, vector) < kWideVector;
}

// Waves of blocks of the resident scheme, of which so many share a
// multiprocessor.
int64_t resident_waves(
    const Problem& problem,
    const Device& device,
    const Plan& plan,
    int64_t blocks_at_once);

double estimate_resident(
    const Problem& problem,
    const Device& device,
    const Plan& plan,
    int64_t blocks_at_once);

double estimate_cooperative(const Problem& problem, const Plan& plan);

// Of any plan with vectors of so many elements.
double
estimate_two_pass(const Problem& problem, const Device& device, int vector);

} // namespace gn_override
