// Times every plan of group normalisation calls, without torch: the half of
// tools/tune.py that runs on the GPU, in a few milliseconds a plan.
//
//   tune REPETITIONS FINALISTS < shapes > plans
//
// A GPU that was idle is faster for some microseconds, and more so with some
// plans than with others. So the plans that are fastest in a few REPETITIONS,
// so many FINALISTS and the policy's, are timed again as they keep it busy.
//
// shapes: lines of "name N C HxW G dtype activation"; dtype is float32 or
// bfloat16, activation as Python names it.
// plans: lines of "name direction copy_us plan_us moved_us policy error plan",
// where direction is fwd or bwd, plan_us is 0 unless the plan is a finalist,
// moved_us is what the traffic of a finalist takes without its arithmetic (see
// move_kernel) or 0, policy is 1 for the plan that the policy chooses, error
// the largest difference of a result (Y; dX, dgamma, dbeta) from the two-pass
// scheme's over the largest number of that result, and plan what to_string()
// says.
//
// A figure is the median of replays of a CUDA graph with a cold L2 cache.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "native/kernels/hardware.cuh"
#include "native/launch/launch_kernel.cuh"
#include "native/plan/plan.h"
#include "native/plan/shared_memory.h"

using namespace gn_override;

#define CHECK(call)                   \
  do {                                \
    const cudaError_t error = (call); \
    if (error != cudaSuccess) {       \
      fprintf(                        \
          stderr,                     \
          "%s:%d: %s\n",              \
          __FILE__,                   \
          __LINE__,                   \
          cudaGetErrorString(error)); \
      exit(1);                        \
    }                                 \
  } while (0)

namespace {

cudaStream_t stream;

// Of fill, copy and compare.
constexpr int kBlocks = 1024;
constexpr int kThreads = 256;

class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    CHECK(cudaMalloc(&data_, bytes));
    poison();
  }
  Memory(const Memory&) = delete;
  ~Memory() {
    cudaFree(data_);
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const {
    return bytes_;
  }
  void poison() const {
    CHECK(cudaMemsetAsync(data_, 0xff, bytes_, stream));
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

// Numbers of mean 0.3 and deviation 1, by SplitMix64 (Steele et al. 2014) and
// Box and Muller.
template <typename T>
__global__ void fill(T* out, int64_t count, uint64_t seed) {
  for (int64_t i = int64_t{1} * blockIdx.x * blockDim.x + threadIdx.x;
       i < count;
       i += int64_t{1} * gridDim.x * blockDim.x) {
    uint64_t z = (seed << 40) + (i + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    z ^= z >> 31;
    const float u = ((z >> 40) + 0.5f) / (1 << 24);
    const float v = ((z & 0xffffff) + 0.5f) / (1 << 24);
    out[i] = static_cast<T>(0.3f + sqrtf(-2 * logf(u)) * cospif(2 * v));
  }
}

__global__ void copy(const uint4* from, uint4* to, int64_t count) {
  const int64_t i = int64_t{1} * blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) {
    to[i] = from[i];
  }
}

// worst[0] = max |a - b|, worst[1] = max |b|, as the bits of floats; a NaN
// counts as infinity.
template <typename T>
__global__ void compare(const T* a, const T* b, int64_t count, int* worst) {
  float difference = 0;
  float largest = 0;
  for (int64_t i = int64_t{1} * blockIdx.x * blockDim.x + threadIdx.x;
       i < count;
       i += int64_t{1} * gridDim.x * blockDim.x) {
    const auto x = static_cast<float>(a[i]);
    const auto y = static_cast<float>(b[i]);
    difference = x - y == x - y ? fmaxf(difference, fabsf(x - y)) : INFINITY;
    largest = fmaxf(largest, fabsf(y));
  }
  atomicMax(worst, __float_as_int(difference));
  atomicMax(worst + 1, __float_as_int(largest));
}

// What any kernel of a plan's geometry that reads its inputs once has to do:
// each block brings its pixels of X, and backward of dY, to shared memory,
// meets the blocks that share its groups, and writes as many.
template <bool kWholeChip>
__global__ void __launch_bounds__(512) move_kernel(
    Shape shape,
    Tiling tiling,
    int vector,
    const uint4* X,
    const uint4* dY, // backward alone
    uint4* out) {
  const auto block = static_cast<int>(blockIdx.x);
  const int item = tiling.splits.quotient(block);
  const int n = tiling.column_tiles.quotient(item);
  const Position at(
      shape,
      tiling,
      vector,
      n,
      block - item * tiling.splits.divisor(),
      item - n * tiling.column_tiles.divisor());
  const int pixels = pixels_of_thread(tiling, at);
  const int64_t offset = at.offset(shape) / vector;
  const int64_t step = int64_t{1} * tiling.rows.divisor() * shape.C / vector;

  auto* const kept =
      reinterpret_cast<uint4*>(dynamic_shared_memory()) + threadIdx.x;
  const int of_dY = pixels * static_cast<int>(blockDim.x);
  for (int i = 0; i < pixels; ++i) {
    copy_async(kept + i * blockDim.x, X + offset + i * step);
    if (dY != nullptr) {
      copy_async(kept + of_dY + i * blockDim.x, dY + offset + i * step);
    }
  }
  end_batch();
  wait_for_copies<0>();
  if constexpr (kWholeChip) {
    wait_for_grid();
  } else {
    arrive_at_cluster();
    wait_for_cluster();
  }
  for (int i = pixels - 1; i >= 0; --i) {
    __stcs(out + offset + i * step, kept[i * blockDim.x]);
  }
}

// Whether move_kernel does what the plan does: it keeps all inputs, in vectors
// of 16 bytes.
bool keeps_all(const Problem& problem, const Plan& plan) {
  const bool whole_chip = plan.scheme == Scheme::kCooperative &&
      plan.samples_per_wave == problem.N &&
      plan.pixels_kept >= pixels_of_thread(plan);
  return (whole_chip || plan.scheme == Scheme::kResident) &&
      plan.vector * size_of(problem.dtype) == sizeof(uint4);
}

void move(
    const Problem& problem,
    const Plan& plan,
    const uint4* X,
    const uint4* dY,
    uint4* out) {
  const bool whole_chip = plan.scheme == Scheme::kCooperative;
  const int operands = dY == nullptr ? 1 : 2;
  const LaunchShape shape{
      .blocks = blocks_of(plan, problem.N),
      .threads = static_cast<unsigned>(plan.threads),
      .shared_bytes = pixels_of_thread(plan) * plan.threads * operands *
          static_cast<int64_t>(sizeof(uint4)),
      .cluster = static_cast<unsigned>(plan.cluster),
      .cooperative = whole_chip};
  const Shape sizes = shape_of(problem);
  const Tiling tiling = tiling_of(problem, plan);
  CHECK(
      whole_chip ? launch_kernel<move_kernel<true>>(
                       shape, stream, sizes, tiling, plan.vector, X, dY, out)
                 : launch_kernel<move_kernel<false>>(
                       shape, stream, sizes, tiling, plan.vector, X, dY, out));
}

struct Replays {
  int before; // those that are timed
  int timed;
};
constexpr Replays kBusy = {50, 150};

// Microseconds of what `enqueue` puts on the stream.
double median(const std::function<void()>& enqueue, const Replays& replays) {
  static const Memory flushed(size_t{256} << 20); // more than any L2 cache
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  enqueue();
  CHECK(cudaStreamEndCapture(stream, &graph));
  CHECK(cudaGraphInstantiate(&replay, graph, 0));
  std::vector<cudaEvent_t> events(2 * replays.timed);
  for (cudaEvent_t& event : events) {
    CHECK(cudaEventCreate(&event));
  }
  for (int i = -replays.before; i < replays.timed; ++i) {
    CHECK(cudaMemsetAsync(flushed.as<void>(), 0, flushed.bytes(), stream));
    if (i >= 0) {
      CHECK(cudaEventRecord(events[2 * i], stream));
    }
    CHECK(cudaGraphLaunch(replay, stream));
    if (i >= 0) {
      CHECK(cudaEventRecord(events[2 * i + 1], stream));
    }
  }
  CHECK(cudaStreamSynchronize(stream));
  std::vector<float> milliseconds(replays.timed);
  for (int i = 0; i < replays.timed; ++i) {
    CHECK(cudaEventElapsedTime(
        &milliseconds[i], events[2 * i], events[2 * i + 1]));
  }
  for (cudaEvent_t& event : events) {
    CHECK(cudaEventDestroy(event));
  }
  CHECK(cudaGraphExecDestroy(replay));
  CHECK(cudaGraphDestroy(graph));
  const auto middle = milliseconds.begin() + replays.timed / 2;
  std::ranges::nth_element(milliseconds, middle);
  return 1e3 * *middle;
}

// What a call returns: Y, or dX, dgamma and dbeta.
struct Results {
  Memory output;
  Memory dgamma;
  Memory dbeta;

  explicit Results(const Problem& problem)
      : output(problem.bytes()),
        dgamma(problem.C * size_of(problem.dtype)),
        dbeta(problem.C * size_of(problem.dtype)) {}

  std::vector<const Memory*> of(Direction direction) const {
    if (direction == Direction::kForward) {
      return {&output};
    }
    return {&output, &dgamma, &dbeta};
  }
};

// The largest difference of a result over its largest number.
template <typename T>
float error_of(
    const Results& found,
    const Results& expected,
    Direction direction) {
  static const Memory worst(2 * sizeof(float));
  float error = 0;
  for (size_t i = 0; i < found.of(direction).size(); ++i) {
    const Memory& memory = *found.of(direction)[i];
    CHECK(cudaMemsetAsync(worst.as<void>(), 0, worst.bytes(), stream));
    compare<<<kBlocks, kThreads, 0, stream>>>(
        memory.as<T>(),
        expected.of(direction)[i]->as<T>(),
        static_cast<int64_t>(memory.bytes() / sizeof(T)),
        worst.as<int>());
    CHECK(cudaGetLastError());
    float both[2];
    CHECK(cudaMemcpyAsync(
        both, worst.as<void>(), sizeof(both), cudaMemcpyDefault, stream));
    CHECK(cudaStreamSynchronize(stream));
    error = std::max(error, both[0] / both[1]);
  }
  return error;
}

// The plans of a problem: that of the estimates first, then all that pins lead
// to.
std::vector<Plan> plans_of(const Problem& problem, Device device) {
  std::vector<Plan> plans{estimated_plan(problem, device)};
  const auto add = [&](Scheme scheme, int columns, int share, int threads) {
    device.pins = {scheme, columns, share, threads};
    const Plan plan = make_plan(problem, device);
    if (plan.scheme == scheme &&
        std::ranges::find(plans, plan) == plans.end()) {
      plans.push_back(plan);
    }
    return plan.scheme == scheme;
  };
  add(Scheme::kTwoPass, 0, 0, 0);
  for (int threads = 32; threads <= kMaxRegisterThreads; threads *= 2) {
    add(Scheme::kRegisters, 0, 0, threads);
  }
  for (int columns = 1; columns <= 512; ++columns) {
    for (int threads = 96; threads <= 512; threads += 32) {
      for (int cluster = 1; cluster <= 16; ++cluster) {
        add(Scheme::kResident, columns, cluster, threads);
      }
    }
    // More than 24 waves are never the fastest.
    for (int64_t samples = problem.N; samples > 0 && 24 * samples >= problem.N;
         samples = samples * 3 / 4) {
      for (int threads = 192; threads <= 512; threads += 32) {
        add(Scheme::kCooperative, columns, static_cast<int>(samples), threads);
      }
    }
  }
  return plans;
}

template <typename T>
void measure(
    const std::string& name,
    Problem problem,
    const Device& device,
    int repetitions,
    size_t finalists) {
  const int64_t numel = problem.numel();
  const Memory X(problem.bytes());
  const Memory dY(problem.bytes());
  const Results found(problem);
  const Results expected(problem);
  const Memory gamma(problem.C * sizeof(T));
  const Memory beta(problem.C * sizeof(T));
  const int64_t of_statistics = size_of(problem.statistics_dtype());
  const Memory mean(problem.N * problem.G * of_statistics);
  const Memory rstd(problem.N * problem.G * of_statistics);
  uint64_t seed = 0;
  for (const auto& [memory, count] :
       {std::pair{&X, numel},
        std::pair{&dY, numel},
        std::pair{&gamma, problem.C},
        std::pair{&beta, problem.C}}) {
    fill<<<kBlocks, kThreads, 0, stream>>>(
        memory->template as<T>(), count, ++seed);
    CHECK(cudaGetLastError());
  }
  const int64_t vectors = problem.bytes() / sizeof(uint4);
  const auto blocks = static_cast<unsigned>(vectors / kThreads + 1);
  const double copy_us = median(
      [&] {
        copy<<<blocks, kThreads, 0, stream>>>(
            X.as<uint4>(), found.output.as<uint4>(), vectors);
        CHECK(cudaGetLastError());
      },
      kBusy);

  for (const Direction direction :
       {Direction::kForward, Direction::kBackward}) {
    problem.direction = direction;
    const bool forward = direction == Direction::kForward;
    const auto enqueue =
        [&](const Plan& plan, const Memory& workspace, const Results& to) {
          if (forward) {
            CHECK(launch_forward(
                problem,
                plan,
                {.X = X.as<void>(),
                 .gamma = gamma.as<void>(),
                 .beta = beta.as<void>(),
                 .Y = to.output.as<void>(),
                 .mean = mean.as<void>(),
                 .rstd = rstd.as<void>(),
                 .eps = 1e-5,
                 .workspace = workspace.as<void>()},
                stream));
          } else {
            CHECK(launch_backward(
                problem,
                plan,
                {.dY = dY.as<void>(),
                 .X = X.as<void>(),
                 .mean = mean.as<void>(),
                 .rstd = rstd.as<void>(),
                 .gamma = gamma.as<void>(),
                 .beta = beta.as<void>(),
                 .dX = to.output.as<void>(),
                 .dgamma = to.dgamma.as<void>(),
                 .dbeta = to.dbeta.as<void>(),
                 .workspace = workspace.as<void>()},
                stream));
          }
        };
    const std::vector<Plan> plans = plans_of(problem, device);
    Device two_pass = device;
    two_pass.pins.scheme = Scheme::kTwoPass;
    const Plan reference = make_plan(problem, two_pass);
    {
      const Memory workspace(reference.workspace_bytes + 1);
      enqueue(reference, workspace, expected);
      CHECK(cudaStreamSynchronize(stream));
    }
    struct Timed {
      const Plan* plan;
      float error;
      double us; // of a few replays
    };
    std::vector<Timed> ranking;
    for (const Plan& plan : plans) {
      const Memory workspace(plan.workspace_bytes + 1);
      for (const Memory* memory : found.of(direction)) {
        memory->poison();
      }
      enqueue(plan, workspace, found);
      const float error = error_of<T>(found, expected, direction);
      ranking.push_back(
          {&plan,
           error,
           median([&] { enqueue(plan, workspace, found); }, {2, repetitions})});
    }
    std::ranges::stable_sort(ranking, {}, &Timed::us);
    for (size_t rank = 0; rank < ranking.size(); ++rank) {
      const Plan& plan = *ranking[rank].plan;
      const bool of_policy = plan == plans[0];
      double plan_us = 0;
      double moved_us = 0;
      if (rank < finalists || of_policy) {
        const Memory workspace(plan.workspace_bytes + 1);
        plan_us = median([&] { enqueue(plan, workspace, found); }, kBusy);
        if (keeps_all(problem, plan)) {
          moved_us = median(
              [&] {
                move(
                    problem,
                    plan,
                    X.as<uint4>(),
                    forward ? nullptr : dY.as<uint4>(),
                    found.output.as<uint4>());
              },
              kBusy);
        }
      }
      printf(
          "%s %s %.2f %.2f %.2f %d %.1e %s\n",
          name.c_str(),
          forward ? "fwd" : "bwd",
          copy_us,
          plan_us,
          moved_us,
          of_policy,
          ranking[rank].error,
          to_string(plan).c_str());
    }
  }
}

} // namespace

int main(int argc, char** argv) {
  // In the order of Activation.
  constexpr std::array<std::string_view, 5> kActivations{
      "identity", "relu", "silu", "gelu", "gelu_tanh"};
  const int repetitions = argc > 1 ? std::max(1, atoi(argv[1])) : 9;
  const size_t finalists = argc > 2 ? std::max(1, atoi(argv[2])) : 12;
  CHECK(cudaStreamCreate(&stream));
  Device device;
  CHECK(describe_device(device));
  char name[64];
  char dtype[16];
  char activation[16];
  Problem problem;
  long long N, C, HxW, G;
  while (scanf(
             "%63s %lld %lld %lld %lld %15s %15s",
             name,
             &N,
             &C,
             &HxW,
             &G,
             dtype,
             activation) == 7) {
    problem.N = N;
    problem.C = C;
    problem.HxW = HxW;
    problem.G = G;
    const auto found = std::ranges::find(kActivations, activation);
    if (found == kActivations.end()) {
      fprintf(stderr, "unknown activation %s\n", activation);
      return 1;
    }
    problem.activation = static_cast<Activation>(found - kActivations.begin());
    problem.wide_statistics = problem.is_fused();
    if (std::string(dtype) == "float32") {
      problem.dtype = problem.param_dtype = DType::kFloat;
      measure<float>(name, problem, device, repetitions, finalists);
    } else if (std::string(dtype) == "bfloat16") {
      problem.dtype = problem.param_dtype = DType::kBFloat16;
      measure<__nv_bfloat16>(name, problem, device, repetitions, finalists);
    } else {
      fprintf(stderr, "unknown dtype %s\n", dtype);
      return 1;
    }
    fflush(stdout);
  }
  return 0;
}
