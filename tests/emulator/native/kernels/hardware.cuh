// native/kernels/hardware.cuh for a CPU.
#pragma once

#include "cuda.h"

namespace gn_override {

using emulator::arrive_at_cluster;
using emulator::begin_counting;
using emulator::dynamic_shared_memory;
using emulator::end_batch;
using emulator::expect_bytes;
using emulator::prefetch;
using emulator::wait_for_bytes;
using emulator::wait_for_cluster;
using emulator::wait_for_grid;
using emulator::wait_for_previous_kernel;

constexpr bool kHasClusters = true;

inline float approximate_exp2(float x) {
  return std::exp2(x);
}

inline float approximate_reciprocal(float x) {
  return 1 / x;
}

enum class Eviction { kFirst, kNormal };

inline uint64_t cache_policy(Eviction) {
  return 0;
}

template <typename Vector, typename T>
void copy_async(Vector* shared, const T* global, uint64_t = 0) {
  static_assert(sizeof(Vector) >= 4);
  emulator::copy_later(shared, global, sizeof(Vector));
}

template <int kBatches>
void wait_for_copies() {
  emulator::wait_for_copies(kBatches);
}

template <typename Value>
void send(const Value& value, Value* slot, uint64_t* barrier, int block) {
  emulator::send(&value, sizeof(Value), slot, barrier, block);
}

// The emulator starts each kernel as if the one before had allowed it at once.
inline void allow_next_kernel() {}

} // namespace gn_override
