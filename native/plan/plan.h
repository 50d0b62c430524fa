// The planner's answer: which kernels run a Problem, and in which geometry.
//
//   Problem + Device -> policy table (policy_cuda.cpp, policy_cpu.cpp)
//                    -> first rule that holds and has a plan -> Plan
//
// The last rule of each table has no conditions and hands the call to aten.
// Pure host C++: no torch, no CUDA, no global state.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "native/plan/problem.h"

namespace gn_override {

struct Plan {
  Scheme scheme = Scheme::kAten;

  // A tile is `columns` vectors of `vector` channels; `column_tiles` of them
  // span C. Each sample's pixels are cut into `splits` runs of
  // `pixels_per_split`. A block walks a split of a tile, `rows` pixels at a
  // time.
  int vector = 1;
  int columns = 1;
  int rows = 1;
  int column_tiles = 1;
  int splits = 1;
  int64_t pixels_per_split = 0;
  int threads = 0; // of a block: at least rows * columns, in whole warps
  // Blocks of a cluster: the splits of a sample or, backward, of all samples,
  // which then add up dgamma and dbeta as well.
  int cluster = 1;
  int64_t shared_bytes = 0; // dynamic, of a block
  // Cooperative: samples that the whole chip works on at a time.
  int64_t samples_per_wave = 0;
  // Registers, resident, cooperative: pixels that a thread has room for on
  // chip, in registers or in shared memory.
  int64_t pixels_kept = 0;
  // Cooperative: pixels of a thread, read just before those that it keeps, that
  // the L2 cache is asked to hold until they are read again.
  int64_t pixels_cached = 0;
  // Resident and cooperative: blocks prefetch to the L2 cache what a later
  // block or wave reads so many bytes later. 0: they do not.
  int64_t bytes_ahead = 0;

  // CPU, which cuts samples into `splits` runs of `pixels_per_split` too, and
  // asks for memory `bytes_ahead` of its reads.
  int fold = 1; // pixels that are read as one row
  int slots = 0; // threads that work on samples of their own; 0: none does
  int64_t samples_per_batch = 1; // that all threads work on together

  int64_t workspace_bytes = 0;

  bool operator==(const Plan&) const = default;
};

// CUDA: Older devices have no asynchronous copies to shared memory.
constexpr int kLeastComputeCapability = 80;

// Bytes of X above which a workspace shall be a small share of them.
constexpr int64_t kLargeTensor = int64_t{64} << 20;

// Blocks of a cluster that every device with clusters can launch.
constexpr int kPortableCluster = 8;

// Whether the plan is one for Device::whole_chip alone.
constexpr bool takes_whole_chip(const Plan& plan) {
  return plan.scheme == Scheme::kCooperative || plan.cluster > kPortableCluster;
}

// One requirement of a rule; `text` completes "needs ...".
struct Condition {
  const char* text;
  bool (*holds)(const Problem&, const Device&);
};

// A row of the policy table.
struct Rule {
  Scheme scheme;
  std::span<const Condition> conditions;
  // Of a Problem that meets the conditions; none where another rule's is
  // estimated to be faster.
  std::optional<Plan> (*plan)(const Problem&, const Device&);
  const char* reason; // why shapes that match go here, with the measurement
};

// The policy table of a device type, in order of preference.
std::span<const Rule> policy(DeviceType device);

// The first matching rule's plan, where no row of measured_cuda.h has a say.
Plan estimated_plan(const Problem& problem, const Device& device);

// The first matching rule's plan.
Plan make_plan(const Problem& problem, const Device& device);

// In one line, the fields that matter, for people: "two_pass vector=8 ...".
std::string to_string(const Problem& problem);
std::string to_string(const Device& device);
std::string to_string(const Plan& plan);

// The walk through the table as JSON:
//   {"problem": "...", "machine": "...", "rule": "...", "reason": "...",
//    "plan": "...", "workspace_bytes": n, "minimum_bytes": n, "declined":
//    [{"rule": "...", "failed": ["...", ...]}, ...]}
// minimum_bytes is the least memory traffic of the call: each operand of the
// size of X read or written once.
std::string explain(const Problem& problem, const Device& device);

} // namespace gn_override
