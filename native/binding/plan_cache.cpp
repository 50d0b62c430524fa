#include "native/binding/plan_cache.h"

#include <array>
#include <cstdint>
#include <memory>

namespace gn_override::binding {

namespace {

struct Entry {
  Problem problem; // N = 0, which has no plan of ours, while it is empty
  Device device;
  Plan plan;
};

constexpr size_t kEntries = 128; // a power of two
// A problem is in one of so many entries from its index on: a few dozens, of a
// model, all find a place.
constexpr size_t kPlaces = 8;

size_t index_of(const Problem& problem) {
  uint64_t hash = 0;
  const auto mix = [&](int64_t value) {
    // Knuth's multiplicative hash, by 2^64 over the golden ratio.
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 32;
  };
  mix(problem.N);
  mix(problem.C);
  mix(problem.HxW);
  mix(problem.G);
  int64_t options = problem.alignment;
  for (const int option :
       {static_cast<int>(problem.device),
        static_cast<int>(problem.direction),
        static_cast<int>(problem.param_dtype),
        static_cast<int>(problem.wide_statistics),
        static_cast<int>(problem.wide_output),
        static_cast<int>(problem.activation),
        static_cast<int>(problem.adds),
        static_cast<int>(problem.dtype)}) {
    options = 8 * options + option;
  }
  mix(options);
  return hash % kEntries;
}

} // namespace

Plan cached_plan(const Problem& asked, const Device& device) {
  Problem problem = asked; // but for what no plan depends on
  problem.want_dX = problem.want_dgamma = problem.want_dbeta = true;
  // On the heap: a thread that never asks has no room for them.
  thread_local const auto entries =
      std::make_unique<std::array<Entry, kEntries>>();
  const size_t index = index_of(problem);
  size_t place = index; // for a new one: that of its index if none is empty
  for (size_t i = 0; i < kPlaces; ++i) {
    const size_t at = (index + i) % kEntries;
    const Entry& entry = (*entries)[at];
    if (entry.problem == problem && entry.device == device) {
      return entry.plan;
    }
    if (entry.problem.N == 0) {
      place = at;
      break;
    }
  }
  Entry& entry = (*entries)[place];
  entry = {problem, device, make_plan(problem, device)};
  return entry.plan;
}

} // namespace gn_override::binding
