// torch.ops.gn_override.*: the switch, the counters and the planner's answers.
// Registered through the dispatcher, so that no Python headers are needed and
// one build serves every Python.
#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>

#include "native/binding/activation.h"
#include "native/binding/classify.h"
#include "native/binding/devices.h"
#include "native/binding/output_allocator.h"
#include "native/binding/state.h"
#include "native/cpu/cpu.h"
#include "native/plan/names.h"
#include "native/plan/plan.h"
#include "native/plan/shared_memory.h"

namespace gn_override::binding {

namespace {

// Messages are put together as strings: see the note on iostreams in plan.cpp.

// What explain_shape() answers for where there is no GPU.
constexpr Device kH200{
    .sm_count = 132,
    .compute_capability = 90,
    .shared_memory_per_block = 232448,
    .l2_bytes = 62914560,
    .clusters = {0, 132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7},
    .pins = {},
};

DType parse_dtype(std::string_view name) {
  const std::optional<DType> dtype = value_of<DType>(name);
  TORCH_CHECK_VALUE(
      dtype,
      "gn_override: dtype must be one of " + names_of<DType>() + ", got " +
          std::string(name));
  return *dtype;
}

// Prepends members to a JSON object; `members` ends with ", ".
std::string with_members(
    const std::string& members,
    const std::string& object) {
  return "{" + members + object.substr(1);
}

std::string explain_on(
    const Problem& problem,
    const Device& device,
    const char* device_name) {
  return with_members(
      std::string("\"device\": \"") + device_name +
          "\", \"declined_by_binding\": null, ",
      explain(problem, device));
}

struct PlanningDevice {
  Device device;
  const char* name;
};

PlanningDevice planning_device(DeviceType type) {
  if (type == DeviceType::kCPU) {
    return {cpu_device(), "this CPU"};
  }
#if GN_OVERRIDE_WITH_CUDA
  if (const std::optional<Device> current = current_cuda_device()) {
    return {*current, "the current GPU"};
  }
#endif
  return {kH200, "an H200 (no GPU here)"};
}

bool set_enabled_op(bool on) {
  const bool before = set_on(on);
  if (!on) {
    drop_kept_memory();
  }
  return before;
}

bool set_cpu_instruction_set_op(std::string_view name) {
  return set_cpu_instruction_set(std::string(name).c_str());
}

c10::Dict<std::string, int64_t> counters_op() {
  c10::Dict<std::string, int64_t> result;
  for (const auto& [name, calls] : counters()) {
    result.insert(name, calls);
  }
  return result;
}

// What is not native_group_norm is group_norm_act, whose statistics are wide.
void set_operator(Problem& problem, Activation activation) {
  problem.activation = activation;
  problem.wide_statistics = problem.is_fused() || problem.wide_output;
}

std::string explain_tensor(
    const at::Tensor& input,
    const std::optional<at::Tensor>& weight,
    const std::optional<at::Tensor>& bias,
    int64_t num_groups,
    bool backward,
    std::string_view activation,
    std::optional<at::ScalarType> out_dtype) {
  const Activation kind = parse_activation(activation);
  TORCH_CHECK_VALUE(
      input.dim() >= 2,
      "gn_override: input must have at least 2 dimensions, got " +
          std::to_string(input.dim()));
  const bool served_device = input.is_cpu() || input.is_cuda();
  const char* declined = "the device is neither a CPU nor a CUDA device";
  if (served_device) {
    const auto [N, C, HxW] = sizes_of(input);
    Classified call = classify_forward(
        input,
        weight,
        bias,
        out_dtype.value_or(input.scalar_type()),
        N,
        C,
        HxW,
        num_groups);
    if (call.declined == nullptr) {
      call.problem.direction =
          backward ? Direction::kBackward : Direction::kForward;
      set_operator(call.problem, kind);
      const c10::OptionalDeviceGuard guard(input.device());
      const PlanningDevice planning = planning_device(call.problem.device);
      return explain_on(call.problem, planning.device, planning.name);
    }
    declined = call.declined;
  }
  return std::string("{\"declined_by_binding\": \"") + declined + "\"}";
}

std::string explain_shape(
    std::string device,
    bool backward,
    int64_t N,
    int64_t C,
    int64_t HxW,
    int64_t num_groups,
    std::string dtype,
    std::string param_dtype,
    bool channels_last,
    int64_t alignment,
    std::string_view activation,
    bool wide_output) {
  TORCH_CHECK_VALUE(
      device == "cpu" || device == "cuda",
      "gn_override: device must be cpu or cuda, got " + device);
  TORCH_CHECK_VALUE(
      N >= 0 && C > 0 && HxW > 0,
      "gn_override: needs N >= 0, C > 0 and HxW > 0, got N=" +
          std::to_string(N) + " C=" + std::to_string(C) +
          " HxW=" + std::to_string(HxW));
  TORCH_CHECK_VALUE(
      num_groups > 0 && C % num_groups == 0,
      "gn_override: num_groups must divide C=" + std::to_string(C) + ", got " +
          std::to_string(num_groups));
  TORCH_CHECK_VALUE(
      alignment == 1 || alignment == 2 || alignment == 4 || alignment == 8 ||
          alignment == 16,
      "gn_override: alignment must be 1, 2, 4, 8 or 16 bytes, got " +
          std::to_string(alignment));
  Problem problem;
  problem.device = device == "cuda" ? DeviceType::kCUDA : DeviceType::kCPU;
  problem.direction = backward ? Direction::kBackward : Direction::kForward;
  problem.dtype = parse_dtype(dtype);
  problem.param_dtype = parse_dtype(param_dtype);
  problem.wide_output = wide_output;
  TORCH_CHECK_VALUE(
      !wide_output || (size_of(problem.dtype) == 2 && device == "cuda"),
      "gn_override: a wide output needs a half-precision dtype on cuda, got " +
          dtype + " on " + device);
  problem.N = N;
  problem.C = C;
  problem.HxW = HxW;
  problem.G = num_groups;
  set_operator(problem, parse_activation(activation));
  // What is dense in both orders counts as NCHW, but where stock refuses it.
  const bool refused = problem.device == DeviceType::kCUDA && !wide_output &&
      problem.param_dtype != problem.dtype;
  problem.channels_last = channels_last && ((C > 1 && HxW > 1) || refused);
  problem.alignment =
      static_cast<int>(std::max<int64_t>(alignment, size_of(problem.dtype)));
  const PlanningDevice planning = planning_device(problem.device);
  return explain_on(problem, planning.device, planning.name);
}

#if GN_OVERRIDE_WITH_CUDA
void pin_plans_op(
    const std::string& scheme,
    int64_t columns,
    int64_t share,
    int64_t threads) {
  const std::optional<Scheme> pinned =
      scheme.empty() ? Scheme::kAten : value_of<Scheme>(scheme);
  TORCH_CHECK_VALUE(
      pinned && scheme != name_of(Scheme::kAten) &&
          pinned != Scheme::kChannelsLastCPU,
      "gn_override: scheme must be registers, resident, cooperative, two_pass "
      "or \"\" for any, got \"" +
          scheme + "\"");
  const int most =
      pinned == Scheme::kRegisters ? kMaxRegisterThreads : kMaxResidentThreads;
  TORCH_CHECK_VALUE(
      columns >= 0 && share >= 0 && threads >= 0 && threads <= most &&
          threads % kWarpSize == 0,
      "gn_override: needs columns >= 0, share >= 0 and whole warps of at "
      "most " +
          std::to_string(most) + " threads, got " + std::to_string(columns) +
          ", " + std::to_string(share) + " and " + std::to_string(threads));
  pin_plans({
      .scheme = *pinned,
      .columns = static_cast<int>(columns),
      .share = static_cast<int>(share),
      .threads = static_cast<int>(threads),
  });
}
#endif

std::string build_info() {
  std::string result = "{\"compiler\": \"";
#if defined(__clang__)
  result += "clang " __clang_version__;
#elif defined(__GNUC__)
  result += "gcc " __VERSION__;
#endif
  result += "\", \"cpu_instruction_set\": \"";
  result += cpu_instruction_set();
  result += "\", \"backends\": [\"cpu\"";
#if GN_OVERRIDE_WITH_CUDA
  result += ", \"cuda\"";
#endif
  return result + "]}";
}

TORCH_LIBRARY(gn_override, m) {
  m.def("set_enabled(bool on) -> bool", set_enabled_op);
  m.def("is_enabled() -> bool", is_on);
  m.def(
      "set_autocast_preserves(bool preserves) -> bool", set_autocast_preserves);
  m.def("autocast_preserves() -> bool", autocast_preserves);
  m.def("kept_bytes() -> int", kept_bytes);
  m.def("counters() -> Dict(str, int)", counters_op);
  m.def("reset_counters() -> ()", reset_counters);
  m.def(
      "explain(Tensor input, Tensor? weight, Tensor? bias, int num_groups, "
      "bool backward, str activation=\"identity\", "
      "ScalarType? out_dtype=None) -> str",
      explain_tensor);
  m.def(
      "explain_shape(str device, bool backward, int N, int C, int HxW, "
      "int num_groups, str dtype, str param_dtype, bool channels_last, "
      "int alignment, str activation=\"identity\", bool wide_output=False) -> "
      "str",
      explain_shape);
  m.def("build_info() -> str", build_info);
  m.def("may_take_whole_chip() -> bool"); // implemented in Python
  m.def("traces_for_elsewhere() -> bool"); // likewise
  m.def("traces_alone() -> bool"); // likewise
  m.def(
      "set_cpu_instruction_set(str name) -> bool", set_cpu_instruction_set_op);
#if GN_OVERRIDE_WITH_CUDA
  m.def(
      "pin_plans(str scheme, int columns, int share, int threads) -> ()",
      pin_plans_op);
#endif
}

} // namespace

} // namespace gn_override::binding
