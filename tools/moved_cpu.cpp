// The CPU forward without its arithmetic: the steps of native/cpu/cpu.cpp with
// kernels that read X, and then copy X to Y. What that takes on a machine, with
// its caches and its threads, is what the norm cannot be faster than by these
// steps. tools/bench_cpu.py --moved builds this.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cstring>

#include "native/cpu/cpu.h"
#include "native/cpu/kernels.h"
#include "native/cpu/vector.h"

namespace gn_override {

namespace {

using cpu::Affine;
using cpu::Chunk;
using cpu::Sample;

constexpr int kAtOnce = 4; // vectors
constexpr int64_t kStep = kAtOnce * sizeof(FloatVector);

template <typename T>
int64_t bytes_of(const Chunk& chunk) {
  return chunk.rows * chunk.C * static_cast<int64_t>(sizeof(T));
}

// body(byte, vectors) for all whole steps of [0, bytes); returns their end.
template <typename Body>
int64_t for_steps(const char* X, int64_t bytes, int64_t ahead, Body body) {
  int64_t at = 0;
  for (; at + kStep <= bytes; at += kStep) {
    if (ahead > 0) {
      for (int64_t line = 0; line < kStep; line += 64) {
        __builtin_prefetch(X + at + line + ahead, /*rw=*/0, /*locality=*/2);
      }
    }
    FloatVector x[kAtOnce];
    for (int i = 0; i < kAtOnce; ++i) {
      x[i] = load(reinterpret_cast<const float*>(X + at) + i * kLanes<float>);
    }
    body(at, x);
  }
  return at;
}

// M2 gets a vector that depends on all of X, so that X is read.
template <typename T>
void read(const void* X, Chunk chunk, void* /*mean*/, void* M2) {
  UInt32Vector all[kAtOnce] = {};
  const auto gather = [&](int64_t, const FloatVector(&x)[kAtOnce]) {
    for (int i = 0; i < kAtOnce; ++i) {
      all[i] ^= (UInt32Vector)x[i];
    }
  };
  const auto* bytes = static_cast<const char*>(X);
  for_steps(bytes, bytes_of<T>(chunk), chunk.ahead, gather);
  const UInt32Vector result = all[0] ^ all[1] ^ all[2] ^ all[3];
  std::memcpy(M2, &result, sizeof(result));
}

template <typename T>
void copy(const void* X, void* Y, Chunk chunk, const Affine&) {
  const auto* from = static_cast<const char*>(X);
  auto* to = static_cast<char*>(Y);
  const auto run = [&](auto store_at) {
    return for_steps(
        from,
        bytes_of<T>(chunk),
        chunk.ahead,
        [&](int64_t at, const FloatVector(&x)[kAtOnce]) {
          for (int i = 0; i < kAtOnce; ++i) {
            store_at(
                reinterpret_cast<float*>(to + at) + i * kLanes<float>, x[i]);
          }
        });
  };
  int64_t done = 0;
  if constexpr (kCanStream<float>) {
    if (chunk.stream && reinterpret_cast<uintptr_t>(to) % 64 == 0) {
      done = run([](auto* p, const auto& v) { store_streaming(p, v); });
      end_streaming();
    }
  }
  if (done == 0) {
    done = run([](float* p, FloatVector v) { store(p, v); });
  }
  std::memcpy(to + done, from + done, bytes_of<T>(chunk) - done);
}

void finish_nothing(
    const Sample&,
    const void*,
    const void*,
    double,
    void*,
    void*,
    const Affine&) {}

template <typename T>
constexpr cpu::ElementKernels kMove{.moments = read<T>, .normalize = copy<T>};
constexpr cpu::ParameterKernels kNothing{.finish_statistics = finish_nothing};

constexpr cpu::Kernels kMoving{
    .name = "moving",
    .element = {kMove<float>, kMove<double>, kMove<Half>, kMove<BFloat16>},
    .parameter = {kNothing, kNothing, kNothing, kNothing}};

} // namespace

namespace cpu {

constinit const Kernels kBaselineKernels = kMoving;
#if defined(__x86_64__)
constinit const Kernels kAVX2Kernels = kMoving;
constinit const Kernels kAVX512Kernels = kMoving;
#endif

} // namespace cpu

namespace {

void run_on_torch_pool(
    int64_t count,
    int64_t grain,
    void (*body)(void* context, int64_t begin, int64_t end),
    void* context) {
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    body(context, begin, end);
  });
}

// Of any type of that size: these kernels know no other difference.
DType dtype_of_size(int64_t bytes) {
  return bytes == 2 ? DType::kBFloat16
      : bytes == 4  ? DType::kFloat
                    : DType::kDouble;
}

// Copies X, which is channels-last and dense, to Y by the steps of a forward.
void moved(const at::Tensor& X, const at::Tensor& Y, int64_t groups) {
  Problem problem;
  problem.device = DeviceType::kCPU;
  problem.dtype = problem.param_dtype = dtype_of_size(X.element_size());
  problem.N = X.size(0);
  problem.C = X.size(1);
  problem.HxW = X.numel() / (problem.N * problem.C);
  problem.G = groups;
  Device device;
  device.threads = at::get_num_threads();
  const Plan plan = make_plan(problem, device);
  const at::Tensor workspace =
      at::empty({plan.workspace_bytes}, X.options().dtype(at::kByte));
  cpu_forward(
      problem,
      plan,
      {.X = X.const_data_ptr(),
       .Y = Y.mutable_data_ptr(),
       .workspace = workspace.mutable_data_ptr()},
      {run_on_torch_pool});
}

TORCH_LIBRARY_FRAGMENT(gn_override_tools, m) {
  m.def("moved(Tensor input, Tensor(a!) out, int num_groups) -> ()", moved);
}

} // namespace

} // namespace gn_override
