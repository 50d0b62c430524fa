// Group normalisation of channels-last tensors on the CPU.
//
// Plain pointers and sizes: no torch, no threads of its own, no allocation.
#pragma once

#include <cstdint>

#include "native/plan/arguments.h"
#include "native/plan/plan.h"

namespace gn_override {

// Runs body(context, begin, end) over disjoint ranges that cover [0, count) on
// the caller's thread pool and returns when all are done; grain = least items
// that are worth a thread.
struct ParallelFor {
  void (*run)(
      int64_t count,
      int64_t grain,
      void (*body)(void* context, int64_t begin, int64_t end),
      void* context);
};

// The plan is of scheme kChannelsLastCPU, made for this problem. Results do
// not depend on the number of threads.
void cpu_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    const ParallelFor& parallel_for);
void cpu_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    const ParallelFor& parallel_for);

// The instruction set in use: "avx512", "avx2" or "baseline". The best that
// the machine has, unless set otherwise.
const char* cpu_instruction_set();

// For tests and measurements: use this one. False, and no change, if the build
// or the machine does not have it.
bool set_cpu_instruction_set(const char* name);

} // namespace gn_override
