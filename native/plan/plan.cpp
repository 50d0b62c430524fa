#include "native/plan/plan.h"

#include <sstream>
#include <string_view>

#include "native/plan/policy.h"

namespace gn_override {

namespace {

bool matches(const Rule& rule, const Problem& problem, const Device& device) {
  for (const Condition& condition : rule.conditions) {
    if (!condition.holds(problem, device)) {
      return false;
    }
  }
  return true;
}

const char* name(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return "float32";
    case DType::kDouble:
      return "float64";
    case DType::kHalf:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "?";
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
  const int operands = problem.direction == Direction::kForward ? 2
      : problem.want_dX                                         ? 3
                                                                : 2;
  return operands * problem.bytes();
}

} // namespace

std::span<const Rule> policy(DeviceType device) {
  return device == DeviceType::kCUDA ? policy_cuda() : policy_cpu();
}

Plan make_plan(const Problem& problem, const Device& device) {
  for (const Rule& rule : policy(problem.device)) {
    if (matches(rule, problem, device)) {
      Plan plan = rule.plan(problem, device);
      plan.rule = rule.name;
      return plan;
    }
  }
  return Plan{};
}

std::string to_string(const Problem& problem) {
  std::ostringstream out;
  out << (problem.device == DeviceType::kCUDA ? "cuda" : "cpu")
      << (problem.direction == Direction::kForward ? " forward" : " backward")
      << " N=" << problem.N << " C=" << problem.C << " HxW=" << problem.HxW
      << " G=" << problem.G << ' ' << name(problem.dtype);
  if (problem.param_dtype != problem.dtype) {
    out << " with " << name(problem.param_dtype) << " parameters";
  }
  out << (problem.channels_last ? " channels-last" : " NCHW");
  if (problem.alignment < 16) {
    out << " aligned to " << problem.alignment << " bytes";
  }
  return out.str();
}

std::string to_string(const Plan& plan) {
  std::ostringstream out;
  out << plan.rule;
  if (plan.scheme == Scheme::kTwoPass) {
    out << " vector=" << plan.vector << " columns=" << plan.columns
        << " rows=" << plan.rows << " column_tiles=" << plan.column_tiles
        << " splits=" << plan.splits
        << " pixels_per_split=" << plan.pixels_per_split;
  }
  if (plan.workspace_bytes > 0) {
    out << " workspace_bytes=" << plan.workspace_bytes;
  }
  return out.str();
}

std::string explain(const Problem& problem, const Device& device) {
  std::ostringstream declined;
  for (const Rule& rule : policy(problem.device)) {
    if (matches(rule, problem, device)) {
      Plan plan = rule.plan(problem, device);
      plan.rule = rule.name;
      std::ostringstream out;
      out << "{\"problem\": " << quoted(to_string(problem))
          << ", \"rule\": " << quoted(rule.name)
          << ", \"reason\": " << quoted(rule.reason)
          << ", \"plan\": " << quoted(to_string(plan))
          << ", \"workspace_bytes\": " << plan.workspace_bytes
          << ", \"minimum_bytes\": " << minimum_bytes(problem)
          << ", \"declined\": [" << declined.str() << "]}";
      return out.str();
    }
    declined << (declined.tellp() > 0 ? ", " : "")
             << "{\"rule\": " << quoted(rule.name) << ", \"failed\": [";
    const char* separator = "";
    for (const Condition& condition : rule.conditions) {
      if (!condition.holds(problem, device)) {
        declined << separator << quoted(condition.text);
        separator = ", ";
      }
    }
    declined << "]}";
  }
  return "{}";
}

} // namespace gn_override
