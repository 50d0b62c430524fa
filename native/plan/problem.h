// The question that the planner answers: one group normalisation call,
// described without torch and without CUDA.
//
// Conventions of everything under native/:
//   N  samples      C  channels     HxW  pixels (product of all spatial sizes)
//   G  groups       D = C / G       channels of a group
//   X, Y, dY, dX    [N, HxW, C] in memory (channels-last, dense)
//   mean, rstd      [N, G]          gamma, beta, dgamma, dbeta  [C]
#pragma once

#include <array>
#include <cstdint>

namespace gn_override {

enum class DType : uint8_t { kFloat, kDouble, kHalf, kBFloat16 };
enum class DeviceType : uint8_t { kCPU, kCUDA };
enum class Direction : uint8_t { kForward, kBackward };
// What the norm is followed by: Y = activation(Z) with Z the normalised X.
enum class Activation : uint8_t { kIdentity, kRelu, kSilu, kGelu, kGeluTanh };

constexpr int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat:
      return 4;
    case DType::kDouble:
      return 8;
    case DType::kHalf:
    case DType::kBFloat16:
      return 2;
  }
  return 0;
}

struct Problem {
  DeviceType device = DeviceType::kCUDA;
  Direction direction = Direction::kForward;
  DType dtype = DType::kFloat; // X, dX; Y, dY unless they are wide
  DType param_dtype = DType::kFloat; // gamma, beta, dgamma, dbeta
  // mean and rstd are of the type that sums are kept in (as for
  // group_norm_act); else of param_dtype.
  bool wide_statistics = false;
  // Y, dY, gamma and beta are of that type too (as under autocast).
  bool wide_output = false;
  int64_t N = 0;
  int64_t C = 0;
  int64_t HxW = 0;
  int64_t G = 0;
  Activation activation = Activation::kIdentity;
  bool adds = false; // forward with an activation: X + added takes X's place
  // X is dense in [N, HxW, C] order, and is not dense in [N, C, HxW] order as
  // well: a tensor that is both (HxW == 1 or C == 1) counts as NCHW, except
  // where PyTorch refuses it, which is half X with float parameters on CUDA.
  bool channels_last = true;
  // The widest access that the address of each [N, HxW, C] operand allows:
  // bytes of X, a power of two up to 16; of a wide Y or dY, as many elements.
  int alignment = 16;
  // Backward only: which gradients are asked for.
  bool want_dX = true;
  bool want_dgamma = true;
  bool want_dbeta = true;

  bool operator==(const Problem&) const = default;

  constexpr int64_t D() const {
    return C / G;
  }
  constexpr int64_t numel() const {
    return N * C * HxW;
  }
  constexpr int64_t bytes() const {
    return numel() * size_of(dtype);
  }
  // Of the type that sums are kept in.
  constexpr DType accumulator_dtype() const {
    return dtype == DType::kDouble ? DType::kDouble : DType::kFloat;
  }
  constexpr int64_t accumulator_bytes() const {
    return size_of(accumulator_dtype());
  }
  constexpr DType statistics_dtype() const {
    return wide_statistics ? accumulator_dtype() : param_dtype;
  }
  constexpr DType output_dtype() const {
    return wide_output ? accumulator_dtype() : dtype;
  }
  // Of an element of X and, backward, of dY.
  constexpr int64_t element_bytes_read() const {
    return size_of(dtype) +
        (direction == Direction::kForward ? 0 : size_of(output_dtype()));
  }
  // Of an element of Y, or of dX.
  constexpr int64_t element_bytes_written() const {
    return size_of(direction == Direction::kForward ? output_dtype() : dtype);
  }
  constexpr bool is_fused() const {
    return activation != Activation::kIdentity;
  }
  constexpr bool wants_parameters() const {
    return direction == Direction::kBackward && (want_dgamma || want_dbeta);
  }
};

enum class Scheme : uint8_t {
  kAten, // not ours: call the stock kernel
  kRegisters, // CUDA: blocks keep X in registers between the passes
  kResident, // CUDA: clusters keep X in shared memory between the passes
  kCooperative, // CUDA: so does the whole chip, a few samples at a time
  kTwoPass, // CUDA: statistics, then normalisation; X is read twice
  kChannelsLastCPU, // CPU: see native/cpu
};

// What a tuning run, or a plan of measured_cuda.h, pins of the CUDA plans; 0,
// or kAten, leaves it to the policy.
struct Pins {
  Scheme scheme = Scheme::kAten;
  int columns = 0; // resident, cooperative
  int share = 0; // resident, two_pass: splits; cooperative: samples of a wave
  int threads = 0; // at most; not for two_pass

  bool operator==(const Pins&) const = default;
};

// clusters[size]: how many clusters of `size` blocks run at once, with a block
// to a multiprocessor. A GPC holds a whole number of them, so some
// multiprocessors may stay idle. 0: not supported.
using ClusterCounts = std::array<int, 17>;

// What the planner may know of the machine.
struct Device {
  int threads = 1; // CPU: threads of the pool
  int sm_count = 0; // CUDA: multiprocessors
  // CUDA: 10 * major + minor; of what the kernels were compiled for if that is
  // less.
  int compute_capability = 0;
  int64_t shared_memory_per_block = 0; // CUDA: bytes, opt-in limit
  int64_t l2_bytes = 0; // CUDA
  ClusterCounts clusters = {}; // CUDA
  // CUDA: A launch may ask for all multiprocessors at once, or for clusters of
  // more than kPortableCluster blocks. It starts when the kernels that it has
  // no room beside have ended, and never if one of these waits for it.
  bool whole_chip = true;
  // CUDA: Copies to shared memory may tell the L2 cache what to keep.
  // ptxas 12.9 to 13.4 makes illegal instructions of some for 10.0 and later.
  bool l2_policies = true;
  Pins pins; // CUDA

  bool operator==(const Device&) const = default;
};

} // namespace gn_override
