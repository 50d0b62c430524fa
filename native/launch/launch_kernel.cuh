// One launch of a kernel, and what the schemes' launchers share.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <type_traits>

#include "native/kernels/tile.cuh"
#include "native/launch/launch.h"
#include "native/plan/shared_memory.h"

namespace gn_override {

struct LaunchShape {
  unsigned blocks;
  unsigned threads;
  int64_t shared_bytes = 0; // dynamic
  unsigned cluster = 1; // blocks of a cluster; more than one needs sm_90
  bool cooperative = false; // all blocks run at once
};

// What code has to be compiled for to know clusters and programmatic launches.
// A GPU of that capability may run what it has compiled of older PTX.
constexpr int kClusterCode = 90;

// Asks the driver once a kernel and device for what its launches may need:
// clusters of more than eight blocks and shared memory beyond 48 KiB have to be
// allowed.
// code: what the kernel was compiled for, as 10 * major + minor.
template <auto kKernel>
cudaError_t prepare(int& code) {
  code = 0;
  constexpr int kMaxDevices = 64;
  static std::array<std::atomic<int>, kMaxDevices> codes;
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess && device < kMaxDevices) {
    code = codes[device];
  }
  if (error != cudaSuccess || code != 0) {
    return error;
  }
  int most = 0;
  error = cudaDeviceGetAttribute(
      &most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) {
    error = cudaFuncGetAttributes(&attributes, kKernel);
  }
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(
        kKernel,
        cudaFuncAttributeMaxDynamicSharedMemorySize,
        most - static_cast<int>(attributes.sharedSizeBytes));
  }
  if (error == cudaSuccess) {
    if (attributes.ptxVersion >= kClusterCode &&
        cudaFuncSetAttribute(
            kKernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
            cudaSuccess) {
      cudaGetLastError(); // there are no such clusters: see count_clusters()
    }
    code = attributes.ptxVersion;
    if (device < kMaxDevices) {
      codes[device] = code;
    }
  }
  return error;
}

// Whether a launch in the stream may start before the kernel ahead of it ends.
// In a graph such launches have programmatic edges. Before CUDA 13, PyTorch's
// allocator asks a graph that is captured for edges in a way that knows none
// (graph_capture_record_stream_reuse).
inline bool may_start_early(int code, [[maybe_unused]] cudaStream_t stream) {
  if (code < kClusterCode) {
    return false;
  }
#if CUDART_VERSION < 13000
  auto capture = cudaStreamCaptureStatusNone;
  return cudaStreamIsCapturing(stream, &capture) == cudaSuccess &&
      capture == cudaStreamCaptureStatusNone;
#else
  return true;
#endif
}

template <auto kKernel, typename... Arguments>
cudaError_t launch_kernel(
    const LaunchShape& shape,
    cudaStream_t stream,
    Arguments... arguments) {
  int code;
  if (const cudaError_t error = prepare<kKernel>(code)) {
    return error;
  }
  std::array<cudaLaunchAttribute, 3> attributes;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
  config.stream = stream;
  config.attrs = attributes.data();
  if (shape.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = shape.cluster;
    attribute.val.clusterDim.y = 1;
    attribute.val.clusterDim.z = 1;
  }
  if (shape.cooperative) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
  }
  // Kernels call wait_for_previous_kernel() (see hardware.cuh).
  if (may_start_early(code, stream)) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  return cudaLaunchKernelEx(&config, kKernel, arguments...);
}

inline Shape shape_of(const Problem& problem) {
  return {
      problem.N,
      problem.HxW,
      static_cast<int>(problem.C),
      static_cast<int>(problem.G),
      FastDivisor(static_cast<int>(problem.D()))};
}

// At most `most_lanes` threads shall fold a segment (see fold_segments). A lane
// holds `held` of the parts of a group that it merges.
inline Tiling tiling_of(
    const Problem& problem,
    const Plan& plan,
    int most_lanes = kWarpSize,
    int held = 1) {
  // Neighbouring lanes, a power of two, for each of `items` at once.
  const auto lanes_of = [&](int64_t items, int most) {
    const auto lanes = std::clamp<int64_t>(plan.threads / items, 1, most);
    return static_cast<int>(std::bit_floor(static_cast<uint64_t>(lanes)));
  };
  const int64_t channels = int64_t{1} * plan.columns * plan.vector;
  // Of a tile: its whole groups, or what it may cut.
  const int64_t segments = channels % problem.D() == 0
      ? channels / problem.D()
      : std::min<int64_t>(problem.G, (channels - 1) / problem.D() + 2);
  const int lanes_per_segment = lanes_of(segments, most_lanes);
  // All groups at once, if the lanes can hold their parts.
  const int parts = plan.splits * std::max(1, lanes_per_segment / kWarpSize);
  const auto lanes_for = [](int items) {
    return static_cast<int>(
        std::bit_ceil(static_cast<unsigned>(std::min(items, kWarpSize))));
  };
  return {
      .pixels_per_split = plan.pixels_per_split,
      .splits = FastDivisor(plan.splits),
      .columns = FastDivisor(plan.columns),
      .rows = FastDivisor(plan.rows),
      .column_tiles = FastDivisor(plan.column_tiles),
      .turns = static_cast<int>(
          problem.HxW / (int64_t{1} * plan.rows * plan.splits)),
      .merge_shift = std::countr_zero(
          static_cast<unsigned>(
              channels_of_one_group(problem.D(), plan.vector))),
      .lanes_per_segment = lanes_per_segment,
      .lanes_per_channel = lanes_of(channels, kWarpSize),
      .lanes_per_exchange = std::clamp(
          lanes_of(segments, kWarpSize),
          lanes_for(static_cast<int>(ceil_div(parts, held))),
          lanes_for(parts))};
}

// Of a grid over `samples` samples.
inline unsigned blocks_of(const Plan& plan, int64_t samples) {
  return static_cast<unsigned>(samples * plan.splits * plan.column_tiles);
}

// Calls f with the plan's vector width as a compile-time constant: 16 bytes of
// Y, or a power of two less, down to kNarrowest bytes of X.
template <
    typename T,
    typename TY,
    int kNarrowest,
    int kVector = 16 / sizeof(TY),
    typename F>
cudaError_t with_vector(const Plan& plan, F f) {
  if constexpr (kVector * static_cast<int>(sizeof(T)) < kNarrowest) {
    return cudaErrorInvalidValue;
  } else if (plan.vector == kVector) {
    return f(std::integral_constant<int, kVector>());
  } else {
    return with_vector<T, TY, kNarrowest, kVector / 2>(plan, f);
  }
}

} // namespace gn_override
