// What the planner and the CPU kernels have to agree on about rows.
#pragma once

#include <cstdint>

namespace gn_override {

// Elements of the widest vector.
constexpr int64_t kMostLanes = 16;

// Rows that sums take at once. A chunk of so many, or of a multiple, leaves
// none to smaller blocks.
constexpr int64_t kSumRows = 8;

// Most elements of a folded row: folded sums are on the stack.
constexpr int64_t kMaxFoldedRow = 4096;

} // namespace gn_override
