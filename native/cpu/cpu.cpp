// Scheduling of the CPU kernels: batches of samples, chunks of rows.
//
// A batch of samples, few enough to stay in the caches, takes three steps, each
// a parallel loop:
//   chunks            partial sums of each
//   ranges of groups  the sums of the chunks -> statistics, parameters of a map
//   chunks            the map to Y or dX
// A thread gets the same run of chunks in the first and the last step, and goes
// through it backwards in the last one: what it has read last is read first.
//
// Backward has two steps more: one before these, in which each channel gets its
// group's statistics, and one before the map, which adds a batch's sums to the
// totals of dgamma and dbeta. The sums of most activations leave dZ in dX's
// memory for the map.
//
// Where samples fit a thread's cache, there is one parallel loop over the slots
// instead, and each takes its samples through the same steps on its own; what
// is left when the samples do not divide evenly is done in shared batches.
#include "native/cpu/cpu.h"

#include <algorithm>
#include <atomic>
#include <string_view>
#include <type_traits>

#include "native/cpu/kernels.h"
#include "native/cpu/output_memory.h"
#include "native/plan/workspace_cpu.h"

namespace gn_override {

namespace {

using cpu::Chunk;
using cpu::Kernels;
using cpu::Sample;

// Elements that are worth waking a thread for.
constexpr int64_t kGrain = 16384;

// Channels of a range of groups at least, where a sample's sums are finished by
// more than one thread.
constexpr int64_t kChannelsPerRange = 64;

bool has([[maybe_unused]] const Kernels& kernels) {
#if defined(__x86_64__)
  if (&kernels == &cpu::kAVX512Kernels) {
    return __builtin_cpu_supports("avx512f") &&
        __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && has(cpu::kAVX2Kernels);
  }
  if (&kernels == &cpu::kAVX2Kernels) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __builtin_cpu_supports("f16c");
  }
#endif
  return true;
}

// Best first.
constexpr const Kernels* kAll[] = {
#if defined(__x86_64__)
    &cpu::kAVX512Kernels,
    &cpu::kAVX2Kernels,
#endif
    &cpu::kBaselineKernels,
};

std::atomic<const Kernels*>& chosen() {
  static std::atomic<const Kernels*> kernels{
      *std::ranges::find_if(kAll, [](const Kernels* k) { return has(*k); })};
  return kernels;
}

// body(begin, end) over ranges of [0, count); an item costs `elements`.
template <typename Body>
void parallel(
    const ParallelFor& parallel_for,
    int64_t count,
    int64_t elements,
    Body body) {
  const int64_t grain = std::max<int64_t>(1, kGrain / elements);
  parallel_for.run(
      count,
      grain,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<Body*>(context))(begin, end);
      },
      &body);
}

// body(i) for all items; each thread takes its own from the first on, or from
// the last.
template <typename Body>
void for_each(
    const ParallelFor& parallel_for,
    int64_t count,
    int64_t elements,
    Body body) {
  parallel(parallel_for, count, elements, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      body(i);
    }
  });
}
template <typename Body>
void for_each_from_last(
    const ParallelFor& parallel_for,
    int64_t count,
    int64_t elements,
    Body body) {
  parallel(parallel_for, count, elements, [&](int64_t begin, int64_t end) {
    for (int64_t i = end - 1; i >= begin; --i) {
      body(i);
    }
  });
}

void run_serially(
    int64_t count,
    int64_t,
    void (*body)(void* context, int64_t begin, int64_t end),
    void* context) {
  body(context, 0, count);
}

size_t index(DType dtype) {
  return static_cast<size_t>(dtype);
}

template <typename Void>
Void* advance(Void* p, int64_t elements, int64_t size) {
  using Byte = std::conditional_t<std::is_const_v<Void>, const char, char>;
  return static_cast<Byte*>(p) + elements * size;
}

// A batch of consecutive samples: where its chunks and its sums are. Indices n,
// i and j are of a sample, a chunk and a range of groups in the batch.
class Batch {
 public:
  Batch(
      const Problem& problem,
      const Plan& plan,
      const CPUWorkspace& layout,
      const CPUWorkspace::Batch& offsets,
      char* workspace,
      int64_t first,
      int64_t samples)
      : problem_(problem),
        plan_(plan),
        layout_(layout),
        offsets_(offsets),
        workspace_(workspace),
        ranges_(
            std::clamp<int64_t>(problem.C / kChannelsPerRange, 1, problem.G)),
        first_(first),
        samples_(samples) {}

  int64_t first() const {
    return first_;
  }
  int64_t samples() const {
    return samples_;
  }
  int64_t chunks() const {
    return samples_ * plan_.splits;
  }
  int64_t ranges() const {
    return samples_ * ranges_;
  }

  // In elements of a chunk. Merging takes doubles, two passes over the sums of
  // each chunk and some ten over the channels.
  int64_t chunk_cost() const {
    return plan_.pixels_per_split * problem_.C;
  }
  int64_t merge_cost() const {
    return (20 + 4 * plan_.splits + 4 * plan_.fold) * problem_.C / ranges_;
  }
  int64_t expand_cost() const {
    return (2 + plan_.fold) * problem_.C / ranges_;
  }

  int64_t sample_of_chunk(int64_t i) const {
    return i / plan_.splits;
  }
  int64_t sample_of_range(int64_t j) const {
    return j / ranges_;
  }
  Chunk chunk(int64_t i, bool stream) const {
    const int64_t row = i % plan_.splits * plan_.pixels_per_split;
    return {
        std::min(plan_.pixels_per_split, problem_.HxW - row),
        problem_.C,
        plan_.fold,
        stream,
        plan_.bytes_ahead};
  }
  // The chunk's first element in X, Y, dY or dX.
  template <typename Void>
  Void* rows(Void* tensor, int64_t i) const {
    const int64_t n = first_ + i / plan_.splits;
    const int64_t row = i % plan_.splits * plan_.pixels_per_split;
    return advance(
        tensor, (n * problem_.HxW + row) * problem_.C, size_of(problem_.dtype));
  }
  // The sample's first group in mean or rstd.
  template <typename Void>
  Void* groups(Void* tensor, int64_t n) const {
    return advance(
        tensor,
        (first_ + n) * problem_.G,
        size_of(problem_.statistics_dtype()));
  }

  void* partial(int64_t i, int64_t which) const {
    return workspace_ + (2 * i + which) * layout_.stride * layout_.accumulator;
  }
  void* map(int64_t n, int64_t which) const {
    return workspace_ + offsets_.maps +
        (n * layout_.arrays_of_map + which) * layout_.folded_stride *
        layout_.accumulator;
  }
  double* sums(int64_t n, int64_t which) const {
    return reinterpret_cast<double*>(workspace_ + offsets_.sums) +
        (2 * n + which) * layout_.stride;
  }

  Sample sample(int64_t j) const {
    const int64_t n = j / ranges_;
    const int64_t range = j % ranges_;
    return {
        .group_begin = range * problem_.G / ranges_,
        .group_end = (range + 1) * problem_.G / ranges_,
        .D = problem_.D(),
        .C = problem_.C,
        .HxW = problem_.HxW,
        .fold = plan_.fold,
        .chunks = plan_.splits,
        .rows_per_chunk = plan_.pixels_per_split,
        .stride = layout_.stride,
        .wide_statistics = problem_.wide_statistics,
        .partials = partial(n * plan_.splits, 0),
        .scratch = sums(n, 0)};
  }

 private:
  const Problem& problem_;
  const Plan& plan_;
  const CPUWorkspace& layout_;
  const CPUWorkspace::Batch& offsets_;
  char* workspace_;
  int64_t ranges_;
  int64_t first_;
  int64_t samples_;
};

// Whether the sums leave dZ where dX will be, and the map reads it from there.
// An exponential is worth that, where dZ stays in a cache and where it does
// not. relu's comparison is not.
bool keeps_dZ(const Problem& problem) {
  return problem.want_dX && problem.is_fused() &&
      problem.activation != Activation::kRelu;
}

// step(batch, pool) for all samples in batches: where threads have samples of
// their own, as many whole runs for each as there are, then the rest together.
template <typename Step>
void for_batches(
    const Problem& problem,
    const Plan& plan,
    const CPUWorkspace& layout,
    char* workspace,
    const ParallelFor& pool,
    Step step) {
  const ParallelFor serial{run_serially};
  int64_t done = 0;
  if (plan.slots > 0) {
    const int64_t run = layout.samples_per_run;
    const int64_t samples = problem.N / (run * plan.slots) * run; // of a slot
    done = plan.slots * samples;
    parallel(
        pool,
        plan.slots,
        samples * problem.HxW * problem.C,
        [&](int64_t begin, int64_t end) {
          char* own = workspace + begin * layout.own.bytes;
          for (int64_t n = begin * samples; n < end * samples; ++n) {
            step(Batch(problem, plan, layout, layout.own, own, n, 1), serial);
          }
        });
  }
  char* shared = workspace + plan.slots * layout.own.bytes;
  for (int64_t n = done; n < problem.N; n += plan.samples_per_batch) {
    const int64_t samples = std::min(plan.samples_per_batch, problem.N - n);
    step(Batch(problem, plan, layout, layout.shared, shared, n, samples), pool);
  }
}

} // namespace

void cpu_forward(
    const Problem& problem,
    const Plan& plan,
    const ForwardArguments& arguments,
    const ParallelFor& parallel_for) {
  const Kernels& kernels = *chosen().load(std::memory_order_relaxed);
  const auto& element = kernels.element[index(problem.dtype)];
  const auto& parameter = kernels.parameter[index(problem.param_dtype)];
  const CPUWorkspace layout(problem, plan);
  char* workspace = static_cast<char*>(arguments.workspace);
  const bool stream =
      cpu::prepare_output(arguments.Y, problem.bytes(), cpu::kLeastStreamedY);

  const auto step = [&](const Batch& batch, const ParallelFor& pool) {
    const auto affine = [&](int64_t n) {
      return cpu::Affine{
          .center = batch.map(n, 0),
          .scale = batch.map(n, 1),
          .shift = batch.map(n, 2),
          .activation = problem.activation};
    };
    for_each(pool, batch.chunks(), batch.chunk_cost(), [&](int64_t i) {
      element.moments(
          batch.rows(arguments.X, i),
          batch.chunk(i, stream),
          batch.partial(i, 0),
          batch.partial(i, 1));
    });
    for_each(pool, batch.ranges(), batch.merge_cost(), [&](int64_t j) {
      const int64_t n = batch.sample_of_range(j);
      parameter.finish_statistics(
          batch.sample(j),
          arguments.gamma,
          arguments.beta,
          arguments.eps,
          batch.groups(arguments.mean, n),
          batch.groups(arguments.rstd, n),
          affine(n));
    });
    for_each_from_last(
        pool, batch.chunks(), batch.chunk_cost(), [&](int64_t i) {
          element.normalize(
              batch.rows(arguments.X, i),
              batch.rows(arguments.Y, i),
              batch.chunk(i, stream),
              affine(batch.sample_of_chunk(i)));
        });
  };
  for_batches(problem, plan, layout, workspace, parallel_for, step);
}

void cpu_backward(
    const Problem& problem,
    const Plan& plan,
    const BackwardArguments& arguments,
    const ParallelFor& parallel_for) {
  const Kernels& kernels = *chosen().load(std::memory_order_relaxed);
  const auto& element = kernels.element[index(problem.dtype)];
  const auto& parameter = kernels.parameter[index(problem.param_dtype)];
  const CPUWorkspace layout(problem, plan);
  char* workspace = static_cast<char*>(arguments.workspace);
  double* totals = reinterpret_cast<double*>(workspace + layout.totals);
  const int64_t samples_per_run = layout.samples_per_run;
  const bool want_totals = problem.wants_parameters();
  void* dZ = keeps_dZ(problem) ? arguments.dX : nullptr;
  const bool stream = problem.want_dX &&
      cpu::prepare_output(arguments.dX, problem.bytes(), cpu::kLeastStreamedDX);

  const auto step = [&](const Batch& batch, const ParallelFor& pool) {
    const auto gradient = [&](int64_t n) {
      return cpu::Gradient{
          .center = batch.map(n, 0),
          .dZ_scale = batch.map(n, 1),
          .X_scale = batch.map(n, 2),
          .shift = batch.map(n, 3),
          .beta = problem.is_fused() ? batch.map(n, 4) : nullptr,
          .activation = problem.activation};
    };
    for_each(pool, batch.ranges(), batch.expand_cost(), [&](int64_t j) {
      const int64_t n = batch.sample_of_range(j);
      parameter.expand_parameters(
          batch.sample(j),
          arguments.gamma,
          arguments.beta,
          batch.groups(arguments.mean, n),
          batch.groups(arguments.rstd, n),
          gradient(n));
    });
    for_each(pool, batch.chunks(), 2 * batch.chunk_cost(), [&](int64_t i) {
      element.gradient_sums(
          batch.rows(arguments.dY, i),
          batch.rows(arguments.X, i),
          dZ ? batch.rows(dZ, i) : nullptr,
          batch.chunk(i, stream),
          gradient(batch.sample_of_chunk(i)),
          batch.partial(i, 0),
          batch.partial(i, 1));
    });
    for_each(pool, batch.ranges(), batch.merge_cost(), [&](int64_t j) {
      const int64_t n = batch.sample_of_range(j);
      parameter.finish_sums(
          batch.sample(j),
          arguments.gamma,
          batch.groups(arguments.rstd, n),
          gradient(n));
    });
    if (want_totals) {
      parallel(
          pool,
          2 * layout.stride,
          2 * batch.samples(),
          [&](int64_t begin, int64_t end) {
            for (int64_t n = 0; n < batch.samples(); ++n) {
              const int64_t at = batch.first() + n;
              double* total = totals + at / samples_per_run * 2 * layout.stride;
              const double* sums = batch.sums(n, 0);
              if (at % samples_per_run == 0) {
                std::copy(sums + begin, sums + end, total + begin);
              } else {
                kernels.add_totals(sums + begin, end - begin, total + begin);
              }
            }
          });
    }
    if (problem.want_dX) {
      for_each_from_last(
          pool, batch.chunks(), 2 * batch.chunk_cost(), [&](int64_t i) {
            cpu::Gradient map = gradient(batch.sample_of_chunk(i));
            if (dZ) {
              map.activation = Activation::kIdentity;
            }
            element.input_gradient(
                batch.rows(dZ ? dZ : arguments.dY, i),
                batch.rows(arguments.X, i),
                batch.rows(arguments.dX, i),
                batch.chunk(i, stream),
                map);
          });
    }
  };
  for_batches(problem, plan, layout, workspace, parallel_for, step);

  if (want_totals) {
    parallel(
        parallel_for,
        2 * layout.stride,
        layout.runs,
        [&](int64_t begin, int64_t end) {
          for (int64_t run = 1; run < layout.runs; ++run) {
            kernels.add_totals(
                totals + run * 2 * layout.stride + begin,
                end - begin,
                totals + begin);
          }
        });
  }
  if (problem.want_dgamma) {
    parameter.store_totals(totals, problem.C, arguments.dgamma);
  }
  if (problem.want_dbeta) {
    parameter.store_totals(totals + layout.stride, problem.C, arguments.dbeta);
  }
}

const char* cpu_instruction_set() {
  return chosen().load(std::memory_order_relaxed)->name;
}

bool set_cpu_instruction_set(const char* name) {
  for (const Kernels* kernels : kAll) {
    if (std::string_view(kernels->name) == name && has(*kernels)) {
      chosen().store(kernels, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

} // namespace gn_override
