// Calls of the launchers for tests/test_emulator.py, which has a mirror of
// Call.
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator.h"
#include "native/launch/launch.h"
#include "native/plan/plan.h"

using namespace gn_override;

namespace {

struct Call {
  int64_t backward;
  int64_t dtype;
  int64_t param_dtype;
  int64_t wide_statistics;
  int64_t wide_output;
  int64_t N, C, HxW, G;
  int64_t activation;
  int64_t alignment;
  // Pins, as in Problem's file.
  int64_t scheme, columns, share, threads;
  int64_t code; // emulator::Code
  int64_t l2_bytes; // 0: that of the device
  int64_t multiprocessors; // likewise, for the plan alone
  int64_t seed;
  double eps;
  const void* dY;
  const void* X;
  const void* added; // null: nothing
  const void* gamma;
  const void* beta;
  void* Y;
  void* mean; // read by the backward
  void* rstd; // likewise
  void* dX; // null: not wanted
  void* dgamma; // likewise
  void* dbeta; // likewise
};

Problem problem_of(const Call& call) {
  Problem problem;
  problem.direction =
      call.backward ? Direction::kBackward : Direction::kForward;
  problem.dtype = static_cast<DType>(call.dtype);
  problem.param_dtype = static_cast<DType>(call.param_dtype);
  problem.wide_statistics = call.wide_statistics != 0;
  problem.wide_output = call.wide_output != 0;
  problem.N = call.N;
  problem.C = call.C;
  problem.HxW = call.HxW;
  problem.G = call.G;
  problem.activation = static_cast<Activation>(call.activation);
  problem.adds = call.added != nullptr && call.backward == 0;
  problem.alignment = static_cast<int>(call.alignment);
  problem.want_dX = call.dX != nullptr;
  problem.want_dgamma = call.dgamma != nullptr;
  problem.want_dbeta = call.dbeta != nullptr;
  return problem;
}

Device device_of(const Call& call) {
  emulator::use(static_cast<emulator::Code>(call.code));
  Device device;
  if (describe_device(device) != cudaSuccess) {
    throw std::runtime_error("describe_device() failed");
  }
  if (call.l2_bytes > 0) {
    device.l2_bytes = call.l2_bytes;
  }
  if (call.multiprocessors > 0) {
    device.sm_count = static_cast<int>(call.multiprocessors);
  }
  device.pins.scheme = static_cast<Scheme>(call.scheme);
  device.pins.columns = static_cast<int>(call.columns);
  device.pins.share = static_cast<int>(call.share);
  device.pins.threads = static_cast<int>(call.threads);
  return device;
}

// Full of NaN, and with as much behind it that nobody may write.
class Workspace {
 public:
  explicit Workspace(size_t bytes)
      : bytes_(bytes),
        memory_(
            static_cast<unsigned char*>(
                std::aligned_alloc(256, (bytes + kGuard + 255) / 256 * 256))) {
    std::fill_n(memory_.get(), bytes + kGuard, kPoison);
  }
  void* data() const {
    return memory_.get();
  }
  bool is_overrun() const {
    const unsigned char* const guard = memory_.get() + bytes_;
    return std::any_of(
        guard, guard + kGuard, [](auto byte) { return byte != kPoison; });
  }

 private:
  static constexpr size_t kGuard = 4096;
  static constexpr unsigned char kPoison = 0xff;
  struct Free {
    void operator()(unsigned char* memory) const {
      std::free(memory);
    }
  };
  size_t bytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

// The operands of a call, which are NaN until the kernels wait for what came
// before them in the stream.
class LateOperands {
 public:
  LateOperands(const Problem& problem, const Call& call) {
    const auto hide = [&](const void* data, int64_t count, DType dtype) {
      if (data != nullptr) {
        auto* const bytes =
            static_cast<unsigned char*>(const_cast<void*>(data));
        saved_.push_back({bytes, {bytes, bytes + count * size_of(dtype)}});
        std::ranges::fill_n(bytes, count * size_of(dtype), 0xff);
      }
    };
    hide(call.X, problem.numel(), problem.dtype);
    hide(call.gamma, problem.C, problem.param_dtype);
    hide(call.beta, problem.C, problem.param_dtype);
    hide(call.added, problem.N * problem.C, problem.dtype);
    if (call.backward) {
      const int64_t groups = problem.N * problem.G;
      hide(call.dY, problem.numel(), problem.output_dtype());
      hide(call.mean, groups, problem.statistics_dtype());
      hide(call.rstd, groups, problem.statistics_dtype());
    }
    emulator::later([this] { show(); });
  }
  LateOperands(const LateOperands&) = delete;
  ~LateOperands() {
    show();
  }

 private:
  struct Saved {
    unsigned char* to;
    std::vector<unsigned char> bytes;
  };
  void show() {
    for (const auto& [to, bytes] : saved_) {
      std::ranges::copy(bytes, to);
    }
    saved_.clear();
  }
  std::vector<Saved> saved_;
};

// Bytes of the samples from `n` on that kernels asked the L2 cache for; throws
// where they asked for others, or twice.
int64_t prefetched_bytes(const Problem& problem, const Call& call, int64_t n) {
  const int64_t sample = problem.numel() / problem.N;
  const auto samples = [&](const void* operand, DType dtype) {
    const auto* const bytes = static_cast<const unsigned char*>(operand);
    const int64_t size = sample * size_of(dtype);
    return emulator::Range{bytes + n * size, bytes + problem.N * size};
  };
  std::vector operands{samples(call.X, problem.dtype)};
  if (call.backward) {
    operands.push_back(samples(call.dY, problem.output_dtype()));
  }
  std::vector<emulator::Range> asked = emulator::prefetched();
  std::ranges::sort(asked, {}, &emulator::Range::first);
  int64_t bytes = 0;
  for (size_t i = 0; i < asked.size(); ++i) {
    const auto& [first, last] = asked[i];
    if (std::ranges::none_of(operands, [&](const emulator::Range& operand) {
          return operand.first <= first && first < last && last <= operand.last;
        })) {
      throw std::runtime_error("a prefetch of what no later block reads");
    }
    if (i > 0 && first < asked[i - 1].last) {
      throw std::runtime_error("a prefetch of what another asks for");
    }
    bytes += last - first;
  }
  return bytes;
}

std::string run_call(const Call& call) {
  emulator::clear_prefetched();
  const Problem problem = problem_of(call);
  const Plan plan = make_plan(problem, device_of(call));
  if (plan.scheme == Scheme::kAten) {
    return to_string(plan);
  }
  const Workspace workspace(plan.workspace_bytes);
  const LateOperands operands(problem, call);
  cudaError_t error = cudaSuccess;
  if (call.backward) {
    error = launch_backward(
        problem,
        plan,
        {.dY = call.dY,
         .X = call.X,
         .mean = call.mean,
         .rstd = call.rstd,
         .gamma = call.gamma,
         .beta = call.beta,
         .dX = call.dX,
         .dgamma = call.dgamma,
         .dbeta = call.dbeta,
         .workspace = workspace.data()},
        nullptr);
  } else {
    error = launch_forward(
        problem,
        plan,
        {.X = call.X,
         .added = call.added,
         .gamma = call.gamma,
         .beta = call.beta,
         .Y = call.Y,
         .mean = call.mean,
         .rstd = call.rstd,
         .eps = call.eps,
         .workspace = workspace.data()},
        nullptr);
  }
  if (error != cudaSuccess) {
    return "error: cudaError_t " + std::to_string(error);
  }
  emulator::finish();
  if (workspace.is_overrun()) {
    return "error: a store beyond the workspace";
  }
  const int64_t first_later =
      plan.scheme == Scheme::kCooperative ? plan.samples_per_wave : 0;
  return to_string(plan) + " prefetched=" +
      std::to_string(prefetched_bytes(problem, call, first_later));
}

} // namespace

// The plan as text, or "error: " and why; the next call overwrites it.
extern "C" const char* run(const Call* call) {
  static std::string text;
  emulator::seed(static_cast<uint64_t>(call->seed));
  try {
    text = run_call(*call);
  } catch (const std::exception& error) {
    text = std::string("error: ") + error.what();
  }
  return text.c_str();
}
