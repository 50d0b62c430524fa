// Runs the planner and the CPU kernels alone, without torch, for a sanitizer.
//
// Every operand and the workspace is a heap block of exactly its size, so that
// an access beside one is an error of AddressSanitizer. Outputs and workspace
// are full of NaN before: what is not written, or read before it is written,
// shows in the outputs.
//
// Reads lines of
//   backward dtype param_dtype wide N C HxW G activation gamma beta
//   want_dX want_dgamma want_dbeta offset threads
// where gamma and beta say whether there is one, and offset is that of the
// tensors of X's size in elements. Runs each with every instruction set that
// the machine has, prints how many calls it made, and fails at the first wrong
// one. The argument "short" makes every output one element too small.
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <string_view>
#include <thread>
#include <vector>

#include "native/cpu/cpu.h"

using namespace gn_override;

namespace {

int threads = 1;
int64_t missing = 0; // elements that outputs are too small

void run_on_threads(
    int64_t count,
    int64_t,
    void (*body)(void* context, int64_t begin, int64_t end),
    void* context) {
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) {
    const int64_t begin = count * t / threads;
    const int64_t end = count * (t + 1) / threads;
    if (begin < end) {
      pool.emplace_back(body, context, begin, end);
    }
  }
  for (std::thread& thread : pool) {
    thread.join();
  }
}

constexpr ParallelFor kThreads{run_on_threads};

// A heap block of so many elements and no byte more; null if there are none.
class Block {
 public:
  Block(DType dtype, int64_t elements, int64_t offset = 0)
      : dtype_(dtype), elements_(elements), offset_(offset) {
    if (elements > 0) {
      bytes_.reset(new char[(elements + offset) * size_of(dtype)]);
      std::memset(bytes_.get(), 0xFF, (elements + offset) * size_of(dtype));
    }
  }

  void* data() {
    return bytes_ ? bytes_.get() + offset_ * size_of(dtype_) : nullptr;
  }

  // Numbers from 1 to 2: any mantissa, the exponent of 1.
  Block& fill() {
    constexpr uint64_t kOne[] = {
        0x3F800000, 0x3FF0000000000000, 0x3C00, 0x3F80};
    constexpr int kMantissa[] = {23, 52, 10, 7};
    const auto type = static_cast<size_t>(dtype_);
    const int64_t size = size_of(dtype_);
    for (int64_t i = 0; i < elements_; ++i) {
      random_ = random_ * 6364136223846793005 + 1442695040888963407;
      const uint64_t bits = kOne[type] | random_ >> (64 - kMantissa[type]);
      std::memcpy(static_cast<char*>(data()) + i * size, &bits, size);
    }
    return *this;
  }

  bool has_nan() {
    constexpr uint64_t kInfinity[] = {
        0x7F800000, 0x7FF0000000000000, 0x7C00, 0x7F80};
    const int64_t size = size_of(dtype_);
    for (int64_t i = 0; i < elements_ - missing; ++i) {
      uint64_t bits = 0;
      std::memcpy(&bits, static_cast<char*>(data()) + i * size, size);
      const uint64_t magnitude = bits & ~(uint64_t{1} << (8 * size - 1));
      if (magnitude > kInfinity[static_cast<size_t>(dtype_)]) {
        return true;
      }
    }
    return false;
  }

 private:
  static inline uint64_t random_ = 1;
  DType dtype_;
  int64_t elements_;
  int64_t offset_;
  std::unique_ptr<char[]> bytes_;
};

struct Free {
  void operator()(void* p) const {
    std::free(p);
  }
};

std::unique_ptr<void, Free> workspace_of(const Plan& plan) {
  void* p = nullptr;
  if (posix_memalign(&p, 256, plan.workspace_bytes) != 0) {
    std::abort();
  }
  std::memset(p, 0xFF, plan.workspace_bytes);
  return std::unique_ptr<void, Free>(p);
}

bool run(Problem problem, bool has_gamma, bool has_beta, int64_t offset) {
  Device device;
  device.threads = threads;
  const Plan plan = make_plan(problem, device);
  if (plan.scheme != Scheme::kChannelsLastCPU) {
    std::cerr << "not served: " << to_string(problem) << "\n";
    return false;
  }
  const auto workspace = workspace_of(plan);
  const int64_t numel = problem.numel();
  const int64_t groups = problem.N * problem.G;
  const DType statistics = problem.statistics_dtype();
  const bool backward = problem.direction == Direction::kBackward;
  const auto asked = [](bool wanted, int64_t elements) {
    return wanted ? elements - missing : 0;
  };
  Block X(problem.dtype, numel, offset);
  Block gamma(problem.param_dtype, has_gamma ? problem.C : 0);
  Block beta(problem.param_dtype, has_beta ? problem.C : 0);
  X.fill(), gamma.fill(), beta.fill();
  if (!backward) {
    Block Y(problem.dtype, numel - missing, offset);
    Block mean(statistics, groups);
    Block rstd(statistics, groups);
    cpu_forward(
        problem,
        plan,
        {.X = X.data(),
         .gamma = gamma.data(),
         .beta = beta.data(),
         .Y = Y.data(),
         .mean = mean.data(),
         .rstd = rstd.data(),
         .eps = 1e-5,
         .workspace = workspace.get()},
        kThreads);
    return !Y.has_nan() && !mean.has_nan() && !rstd.has_nan();
  }
  Block dY(problem.dtype, numel, offset);
  Block mean(statistics, groups);
  Block rstd(statistics, groups);
  dY.fill(), mean.fill(), rstd.fill();
  Block dX(problem.dtype, asked(problem.want_dX, numel), offset);
  Block dgamma(problem.param_dtype, asked(problem.want_dgamma, problem.C));
  Block dbeta(problem.param_dtype, asked(problem.want_dbeta, problem.C));
  cpu_backward(
      problem,
      plan,
      {.dY = dY.data(),
       .X = X.data(),
       .mean = mean.data(),
       .rstd = rstd.data(),
       .gamma = gamma.data(),
       .beta = beta.data(),
       .dX = dX.data(),
       .dgamma = dgamma.data(),
       .dbeta = dbeta.data(),
       .workspace = workspace.get()},
      kThreads);
  return !dX.has_nan() && !dgamma.has_nan() && !dbeta.has_nan();
}

} // namespace

int main(int argc, char** argv) {
  missing = argc > 1 && std::string_view(argv[1]) == "short";
  int64_t calls = 0;
  Problem problem;
  int backward, dtype, param_dtype, wide, activation, has_gamma, has_beta;
  int64_t offset;
  while (std::cin >> backward >> dtype >> param_dtype >> wide >> problem.N >>
         problem.C >> problem.HxW >> problem.G >> activation >> has_gamma >>
         has_beta >> problem.want_dX >> problem.want_dgamma >>
         problem.want_dbeta >> offset >> threads) {
    problem.device = DeviceType::kCPU;
    problem.direction = static_cast<Direction>(backward);
    problem.dtype = static_cast<DType>(dtype);
    problem.param_dtype = static_cast<DType>(param_dtype);
    problem.wide_statistics = wide;
    problem.activation = static_cast<Activation>(activation);
    for (const char* set : {"baseline", "avx2", "avx512"}) {
      if (!set_cpu_instruction_set(set)) {
        continue;
      }
      if (!run(problem, has_gamma, has_beta, offset)) {
        std::cerr << set << ": NaN in " << to_string(problem) << "\n";
        return 1;
      }
      ++calls;
    }
  }
  std::cout << calls << "\n";
}
