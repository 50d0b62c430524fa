#include "native/plan/plan.h"

#include <string_view>

#include "native/plan/measured_cuda.h"
#include "native/plan/names.h"
#include "native/plan/policy.h"

namespace gn_override {

namespace {

// The rule's plan; none where it declines.
std::optional<Plan>
plan_of(const Rule& rule, const Problem& problem, const Device& device) {
  for (const Condition& condition : rule.conditions) {
    if (!condition.holds(problem, device)) {
      return std::nullopt;
    }
  }
  return rule.plan(problem, device);
}

// Our texts hold no control characters: quotes and backslashes are all there is
// to escape.
std::string quoted(std::string_view text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      result += '\\';
    }
    result += c;
  }
  return result + "\"";
}

// X and Y; or dY and X, and dX where it is wanted.
int64_t minimum_bytes(const Problem& problem) {
  const bool writes =
      problem.direction == Direction::kForward || problem.want_dX;
  return problem.numel() *
      (problem.element_bytes_read() +
       (writes ? problem.element_bytes_written() : 0));
}

// Why a problem goes to a rule, and whether its plan was measured.
// pinned: by with_measured_pins().
std::string reason(
    const Rule& rule,
    const Problem& problem,
    const Device& device,
    const Device& pinned) {
  std::string result = rule.reason;
  const MeasuredPlan* row = measured_plan(problem, device);
  if (row != nullptr && row->pins == pinned.pins) {
    result += std::string("; this plan was measured on ") +
        measured_device(device)->name + ", and takes " +
        std::to_string(static_cast<int>(100 * row->share + 0.5)) +
        "% of the time of the one that the estimates choose";
  }
  return result;
}

} // namespace

std::span<const Rule> policy(DeviceType device) {
  return device == DeviceType::kCUDA ? policy_cuda() : policy_cpu();
}

Plan estimated_plan(const Problem& problem, const Device& device) {
  for (const Rule& rule : policy(problem.device)) {
    if (const std::optional<Plan> plan = plan_of(rule, problem, device)) {
      return *plan;
    }
  }
  return Plan{};
}

Plan make_plan(const Problem& problem, const Device& device) {
  return estimated_plan(problem, with_measured_pins(problem, device));
}

// No iostreams here: a second copy of their locale data, linked in statically
// by some compilers' runtimes, does not work inside a Python process.
std::string to_string(const Problem& problem) {
  std::string out = problem.device == DeviceType::kCUDA ? "cuda" : "cpu";
  out += problem.direction == Direction::kForward ? " forward" : " backward";
  out += " N=" + std::to_string(problem.N);
  out += " C=" + std::to_string(problem.C);
  out += " HxW=" + std::to_string(problem.HxW);
  out += " G=" + std::to_string(problem.G);
  out += std::string(" ") + name_of(problem.dtype);
  if (problem.wide_output) {
    out += std::string(" to ") + name_of(problem.output_dtype());
  }
  if (problem.param_dtype != problem.dtype) {
    out += std::string(" with ") + name_of(problem.param_dtype) + " parameters";
  }
  if (problem.is_fused()) {
    out += std::string(" ") + name_of(problem.activation);
  }
  out += problem.channels_last ? " channels-last" : " NCHW";
  if (problem.alignment < 16) {
    out += " aligned to " + std::to_string(problem.alignment) + " bytes";
  }
  return out;
}

std::string to_string(const Device& device) {
  std::string out = "threads=" + std::to_string(device.threads) +
      " multiprocessors=" + std::to_string(device.sm_count) +
      " compute_capability=" + std::to_string(device.compute_capability) +
      " shared_memory_per_block=" +
      std::to_string(device.shared_memory_per_block) +
      " l2_bytes=" + std::to_string(device.l2_bytes) +
      " l2_policies=" + std::to_string(device.l2_policies) + " clusters=";
  for (size_t size = 1; size < device.clusters.size(); ++size) {
    out += (size == 1 ? "" : ",") + std::to_string(device.clusters[size]);
  }
  return out + " whole_chip=" + std::to_string(device.whole_chip);
}

std::string to_string(const Plan& plan) {
  std::string out = name_of(plan.scheme);
  const auto field = [&](const char* label, int64_t value) {
    out += std::string(" ") + label + "=" + std::to_string(value);
  };
  if (plan.scheme == Scheme::kRegisters || plan.scheme == Scheme::kResident ||
      plan.scheme == Scheme::kCooperative || plan.scheme == Scheme::kTwoPass) {
    field("vector", plan.vector);
    field("columns", plan.columns);
    field("rows", plan.rows);
    field("column_tiles", plan.column_tiles);
    field("splits", plan.splits);
    field("pixels_per_split", plan.pixels_per_split);
    field("threads", plan.threads);
    field("shared_bytes", plan.shared_bytes);
  }
  if (plan.scheme == Scheme::kRegisters) {
    field("pixels_kept", plan.pixels_kept);
  }
  if (plan.scheme == Scheme::kResident) {
    field("cluster", plan.cluster);
  }
  if (plan.scheme == Scheme::kCooperative) {
    field("samples_per_wave", plan.samples_per_wave);
    field("pixels_kept", plan.pixels_kept);
    field("pixels_cached", plan.pixels_cached);
  }
  if (plan.scheme == Scheme::kChannelsLastCPU) {
    field("splits", plan.splits);
    field("pixels_per_split", plan.pixels_per_split);
    field("fold", plan.fold);
    field("slots", plan.slots);
    field("samples_per_batch", plan.samples_per_batch);
  }
  if (plan.bytes_ahead > 0) {
    field("bytes_ahead", plan.bytes_ahead);
  }
  if (plan.workspace_bytes > 0) {
    field("workspace_bytes", plan.workspace_bytes);
  }
  return out;
}

std::string explain(const Problem& problem, const Device& device) {
  const Device pinned = with_measured_pins(problem, device);
  std::string declined;
  for (const Rule& rule : policy(problem.device)) {
    if (const std::optional<Plan> plan = plan_of(rule, problem, pinned)) {
      return "{\"problem\": " + quoted(to_string(problem)) +
          ", \"machine\": " + quoted(to_string(device)) +
          ", \"rule\": " + quoted(name_of(rule.scheme)) +
          ", \"reason\": " + quoted(reason(rule, problem, device, pinned)) +
          ", \"plan\": " + quoted(to_string(*plan)) +
          ", \"workspace_bytes\": " + std::to_string(plan->workspace_bytes) +
          ", \"minimum_bytes\": " + std::to_string(minimum_bytes(problem)) +
          ", \"declined\": [" + declined + "]}";
    }
    std::string failed;
    for (const Condition& condition : rule.conditions) {
      if (!condition.holds(problem, device)) {
        failed += (failed.empty() ? "" : ", ") + quoted(condition.text);
      }
    }
    if (failed.empty()) {
      failed = quoted(
          plan_of(rule, problem, device)
              ? "no other plan that was measured to be faster"
              : "a plan that fits and is estimated to be the fastest");
    }
    declined += std::string(declined.empty() ? "" : ", ") +
        "{\"rule\": " + quoted(name_of(rule.scheme)) + ", \"failed\": [" +
        failed + "]}";
  }
  return "{}";
}

} // namespace gn_override
