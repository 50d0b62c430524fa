// CUDA C++ for a CPU: as much of it as the kernels use. Included ahead of every
// file; the toolkit's headers give the rest.
//
// A kernel's threads are fibers of one thread of the CPU. A fiber runs until it
// waits for others; which one goes on then is drawn at random, those of one
// slow block or warp after the others, so that a barrier that is missing shows
// as a wrong result of some seed. What a GPU may do late is done as late as it
// may be: copies to shared memory when they are waited for, stores to another
// block when all that the block expects is sent, a kernel when the one behind
// it, launched to overlap, can do no more without. Shared memory is full of NaN
// at first. A deadlock is an error.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

// Blocks that run one after the other can share what is static, in a thread of
// the CPU for each, so that nothing is left of the block before.
#undef __shared__
#undef __launch_bounds__
#undef __forceinline__
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __forceinline__ inline

namespace emulator {

// -- what hardware.cuh does ---------------------------------------------------

unsigned char* dynamic_shared_memory();
void copy_later(void* to, const void* from, size_t bytes);
void prefetch(const void* first, const void* last);
void end_batch();
void wait_for_copies(int batches);
void arrive_at_cluster();
void wait_for_cluster();
void begin_counting(uint64_t* barrier);
void expect_bytes(uint64_t* barrier, int bytes);
void send(
    const void* value,
    size_t bytes,
    void* slot,
    uint64_t* barrier,
    int block);
void wait_for_bytes(uint64_t* barrier);
void wait_for_grid();
void wait_for_previous_kernel();

// -- what CUDA does -----------------------------------------------------------

void wait_for_block();
uint64_t shuffle(uint64_t word, int from);

// Takes a grid into the stream; finish() runs what is left there.
cudaError_t launch(
    const cudaLaunchConfig_t& config,
    const std::function<void()>& kernel);

template <typename... Parameters, typename... Arguments>
cudaError_t launch(
    const cudaLaunchConfig_t* config,
    void (*kernel)(Parameters...),
    Arguments... arguments) {
  return launch(*config, [=] { kernel(arguments...); });
}

} // namespace emulator

#define cudaLaunchKernelEx emulator::launch

// The runtime library takes a kernel as a function, too.
template <typename... Parameters>
cudaError_t cudaFuncGetAttributes(
    cudaFuncAttributes* attributes,
    void (*kernel)(Parameters...)) {
  return cudaFuncGetAttributes(
      attributes, reinterpret_cast<const void*>(kernel));
}

template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(
    void (*kernel)(Parameters...),
    cudaFuncAttribute attribute,
    int value) {
  return cudaFuncSetAttribute(
      reinterpret_cast<const void*>(kernel), attribute, value);
}

template <typename... Parameters>
cudaError_t cudaOccupancyMaxActiveClusters(
    int* clusters,
    void (*kernel)(Parameters...),
    const cudaLaunchConfig_t* config) {
  return cudaOccupancyMaxActiveClusters(
      clusters, reinterpret_cast<const void*>(kernel), config);
}

// Of the fiber that runs.
inline uint3 threadIdx;
inline uint3 blockIdx;
inline dim3 blockDim;
inline dim3 gridDim;

inline void __syncthreads() {
  emulator::wait_for_block();
}

template <typename T>
T __shfl_sync(unsigned, T value, int lane) {
  uint64_t word = 0;
  memcpy(&word, &value, sizeof(T));
  word = emulator::shuffle(word, lane);
  memcpy(&value, &word, sizeof(T));
  return value;
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask) {
  return __shfl_sync(mask, value, threadIdx.x % 32 ^ lane_mask);
}

template <typename T>
T __ldcs(const T* address) {
  return *address;
}

template <typename T>
void __stcs(T* address, T value) {
  *address = value;
}

inline int __ffs(int x) {
  return __builtin_ffs(x);
}

inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>((uint64_t{x} * y) >> 32);
}

inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}

inline float __frsqrt_rn(float x) {
  return static_cast<float>(1 / std::sqrt(static_cast<double>(x)));
}

inline double normcdf(double x) {
  return std::erfc(-x * M_SQRT1_2) / 2;
}

using std::isfinite;
using std::isinf;
using std::max;
using std::min;
