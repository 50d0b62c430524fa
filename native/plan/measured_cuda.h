// Plans that tools/tune.py found to be faster than those that the policy
// chooses by its estimates: for shapes that models use, in half and bfloat16. A
// row holds for its shape alone, on GPUs of one compute capability and number
// of multiprocessors. tools/tune.py prints rows for the GPU that it runs on.
#pragma once

#include <array>
#include <span>

#include "native/plan/plan.h"

namespace gn_override {

struct MeasuredPlan {
  Direction direction;
  Activation activation;
  int64_t N;
  int64_t C;
  int64_t HxW;
  int64_t G;
  Pins pins;
  double share; // of the time that the estimates' plan takes
};

namespace measured {

using enum Direction;
using enum Activation;
using enum Scheme;

// benchmarks/results/tune-models-*-h200.json, tune-unet-*-h200.json.
// clang-format off: a row a line.
inline constexpr auto kOfH200 = std::to_array<MeasuredPlan>({
    // Stable Diffusion 1.5 and XL
    {kForward, kIdentity, 1, 256, 54400, 32, {kCooperative, 8, 1, 512}, 0.97},
    {kForward, kIdentity, 1, 640, 1024, 32, {kResident, 10, 8, 320}, 0.95},
    {kForward, kIdentity, 1, 640, 4096, 32, {kResident, 10, 8, 320}, 0.89},
    {kForward, kIdentity, 1, 640, 16384, 32, {kCooperative, 40, 1, 384}, 0.97},
    {kForward, kIdentity, 1, 1920, 4096, 32, {kCooperative, 30, 1, 256}, 0.98},
    {kForward, kIdentity, 2, 320, 4096, 32, {kResident, 10, 8, 320}, 0.92},
    {kForward, kIdentity, 2, 960, 4096, 32, {kCooperative, 30, 2, 256}, 0.98},
    {kForward, kIdentity, 2, 960, 16384, 32, {kCooperative, 30, 1, 256}, 0.98},
    {kForward, kIdentity, 2, 1920, 256, 32, {kResident, 15, 8, 128}, 0.97},
    {kForward, kIdentity, 2, 1920, 1024, 32, {kResident, 30, 6, 256}, 0.93},
    {kForward, kIdentity, 4, 960, 1024, 32, {kResident, 30, 6, 256}, 0.94},
    {kForward, kIdentity, 4, 960, 4096, 32, {kCooperative, 30, 4, 256}, 0.97},
    {kForward, kIdentity, 4, 1920, 1024, 32, {kResident, 30, 7, 384}, 0.93},
    {kForward, kIdentity, 4, 1920, 4096, 32, {kCooperative, 30, 2, 256}, 0.92},
    {kForward, kIdentity, 8, 320, 4096, 32, {kCooperative, 40, 8, 352}, 0.95},
    {kForward, kIdentity, 8, 640, 256, 32, {kResident, 10, 2, 160}, 0.94},
    {kForward, kIdentity, 8, 960, 1024, 32, {kResident, 30, 7, 384}, 0.94},
    {kForward, kIdentity, 8, 960, 4096, 32, {kCooperative, 30, 4, 256}, 0.89},
    {kForward, kIdentity, 8, 1280, 1024, 32, {kResident, 20, 2, 256}, 0.96},
    {kForward, kIdentity, 8, 1280, 4096, 32, {kResident, 10, 16, 160}, 0.91},
    {kForward, kIdentity, 8, 1920, 4096, 32, {kResident, 15, 16, 256}, 0.86},
    {kForward, kSilu, 1, 640, 1024, 32, {kResident, 5, 8, 160}, 0.94},
    {kForward, kSilu, 1, 640, 4096, 32, {kResident, 5, 6, 256}, 0.91},
    {kForward, kSilu, 2, 256, 54400, 32, {kCooperative, 16, 2, 384}, 0.97},
    {kForward, kSilu, 2, 320, 1024, 32, {kResident, 5, 8, 160}, 0.94},
    {kForward, kSilu, 2, 640, 256, 32, {kResident, 10, 4, 160}, 0.97},
    {kForward, kSilu, 2, 1280, 64, 32, {kRegisters, 0, 0, 160}, 0.93},
    {kForward, kSilu, 2, 1920, 256, 32, {kResident, 15, 8, 128}, 0.95},
    {kForward, kSilu, 2, 1920, 1024, 32, {kResident, 15, 7, 128}, 0.96},
    {kForward, kSilu, 4, 640, 4096, 32, {kCooperative, 40, 4, 480}, 0.84},
    {kForward, kSilu, 8, 320, 4096, 32, {kCooperative, 40, 8, 480}, 0.97},
    {kForward, kSilu, 8, 960, 4096, 32, {kCooperative, 30, 4, 384}, 0.91},
    {kBackward, kIdentity, 1, 512, 9216, 32, {kCooperative, 16, 1, 384}, 0.94},
    {kBackward, kIdentity, 1, 512, 36864, 32, {kCooperative, 16, 1, 256}, 0.97},
    {kBackward, kIdentity, 1, 1280, 64, 32, {kRegisters, 0, 0, 160}, 0.96},
    {kBackward, kIdentity, 1, 1920, 4096, 32, {kCooperative, 30, 1, 256}, 0.97},
    {kBackward, kIdentity, 2, 320, 4096, 32, {kResident, 10, 8, 256}, 0.96},
    {kBackward, kIdentity, 2, 512, 16384, 32, {kCooperative, 8, 1, 352}, 0.92},
    {kBackward, kIdentity, 2, 640, 256, 32, {kResident, 5, 2, 160}, 0.98},
    {kBackward, kIdentity, 2, 640, 16384, 32, {kCooperative, 40, 1, 320}, 0.98},
    {kBackward, kIdentity, 2, 960, 1024, 32, {kResident, 30, 8, 256}, 0.96},
    {kBackward, kIdentity, 2, 960, 16384, 32, {kCooperative, 30, 1, 256}, 0.98},
    {kBackward, kIdentity, 2, 1280, 256, 32, {kResident, 10, 3, 224}, 0.96},
    {kBackward, kIdentity, 2, 1920, 1024, 32, {kResident, 15, 3, 256}, 0.93},
    {kBackward, kIdentity, 2, 1920, 4096, 32, {kCooperative, 30, 1, 256}, 0.89},
    {kBackward, kIdentity, 2, 2560, 1024, 32, {kResident, 20, 3, 160}, 0.97},
    {kBackward, kIdentity, 4, 960, 1024, 32, {kResident, 30, 6, 256}, 0.98},
    {kBackward, kIdentity, 4, 960, 4096, 32, {kCooperative, 30, 2, 256}, 0.91},
    {kBackward, kIdentity, 4, 1920, 1024, 32, {kCooperative, 30, 4, 256}, 0.97},
    {kBackward, kIdentity, 4, 1920, 4096, 32, {kCooperative, 30, 1, 256}, 0.93},
    {kBackward, kIdentity, 8, 320, 4096, 32, {kCooperative, 40, 8, 320}, 0.93},
    {kBackward, kIdentity, 8, 640, 256, 32, {kResident, 10, 1, 224}, 0.93},
    {kBackward, kIdentity, 8, 640, 1024, 32, {kCooperative, 40, 8, 512}, 0.97},
    {kBackward, kIdentity, 8, 960, 4096, 32, {kCooperative, 30, 2, 256}, 0.92},
    {kBackward, kIdentity, 8, 1280, 1024, 32, {kCooperative, 40, 8, 320}, 0.90},
    {kBackward, kIdentity, 8, 1280, 4096, 32, {kResident, 10, 16, 320}, 0.92},
    {kBackward, kIdentity, 8, 1920, 4096, 32, {kCooperative, 30, 1, 256}, 0.93},
    {kBackward, kIdentity, 8, 2560, 64, 32, {kResident, 30, 1, 256}, 0.90},
    {kBackward, kSilu, 1, 640, 1024, 32, {kResident, 5, 16, 160}, 0.95},
    {kBackward, kSilu, 1, 2560, 1024, 32, {kResident, 10, 7, 256}, 0.97},
    {kBackward, kSilu, 2, 320, 1024, 32, {kResident, 5, 8, 224}, 0.89},
    {kBackward, kSilu, 2, 640, 256, 32, {kResident, 5, 6, 224}, 0.95},
    {kBackward, kSilu, 2, 640, 1024, 32, {kResident, 15, 8, 480}, 0.96},
    {kBackward, kSilu, 2, 960, 1024, 32, {kCooperative, 30, 2, 256}, 0.96},
    {kBackward, kSilu, 2, 960, 4096, 32, {kCooperative, 30, 2, 256}, 0.96},
    {kBackward, kSilu, 2, 1280, 256, 32, {kResident, 5, 4, 160}, 0.97},
    {kBackward, kSilu, 2, 1920, 256, 32, {kResident, 15, 3, 448}, 0.91},
    {kBackward, kSilu, 2, 1920, 1024, 32, {kCooperative, 30, 2, 256}, 0.84},
    {kBackward, kSilu, 2, 1920, 4096, 32, {kCooperative, 30, 1, 256}, 0.96},
    {kBackward, kSilu, 2, 2560, 256, 32, {kResident, 10, 4, 160}, 0.87},
    {kBackward, kSilu, 2, 2560, 1024, 32, {kCooperative, 40, 2, 320}, 0.93},
    {kBackward, kSilu, 4, 1280, 256, 32, {kResident, 15, 2, 480}, 0.90},
    {kBackward, kSilu, 4, 2560, 256, 32, {kResident, 10, 2, 320}, 0.96},
    {kBackward, kSilu, 8, 960, 4096, 32, {kCooperative, 30, 4, 512}, 0.96},
    {kBackward, kSilu, 8, 1280, 64, 32, {kResident, 15, 1, 480}, 0.93},
    {kBackward, kSilu, 8, 2560, 64, 32, {kResident, 30, 1, 480}, 0.90},
    // ResNet-50
    {kForward, kIdentity, 16, 256, 3136, 32, {kResident, 8, 8, 256}, 0.97},
    {kForward, kIdentity, 32, 64, 12544, 32, {kCooperative, 8, 32, 224}, 0.97},
    {kForward, kIdentity, 32, 256, 196, 32, {kResident, 8, 2, 128}, 0.92},
    {kForward, kIdentity, 32, 256, 3136, 32, {kResident, 8, 8, 256}, 0.91},
    {kForward, kIdentity, 32, 512, 784, 32, {kResident, 8, 2, 256}, 0.92},
    {kForward, kIdentity, 32, 1024, 196, 32, {kResident, 8, 2, 96}, 0.95},
    {kForward, kIdentity, 64, 128, 784, 32, {kResident, 8, 2, 384}, 0.98},
    {kForward, kIdentity, 64, 128, 3136, 32, {kResident, 8, 8, 224}, 0.94},
    {kForward, kIdentity, 64, 256, 196, 32, {kResident, 8, 3, 96}, 0.96},
    {kForward, kIdentity, 64, 256, 784, 32, {kResident, 8, 2, 256}, 0.91},
    {kForward, kIdentity, 64, 512, 196, 32, {kResident, 8, 2, 96}, 0.94},
    {kForward, kIdentity, 128, 128, 784, 32, {kResident, 8, 2, 224}, 0.93},
    {kForward, kIdentity, 128, 256, 196, 32, {kResident, 8, 2, 96}, 0.96},
    {kForward, kIdentity, 256, 64, 3136, 32, {kResident, 8, 4, 256}, 0.95},
    {kForward, kRelu, 64, 128, 784, 32, {kResident, 8, 2, 192}, 0.96},
    {kForward, kRelu, 64, 128, 3136, 32, {kResident, 8, 8, 224}, 0.93},
    {kForward, kRelu, 64, 256, 196, 32, {kResident, 16, 2, 128}, 0.97},
    {kForward, kRelu, 64, 256, 784, 32, {kResident, 8, 2, 256}, 0.95},
    {kForward, kRelu, 64, 256, 3136, 32, {kResident, 8, 8, 256}, 0.90},
    {kForward, kRelu, 128, 128, 784, 32, {kResident, 8, 2, 192}, 0.95},
    {kForward, kRelu, 128, 128, 3136, 32, {kResident, 8, 8, 224}, 0.92},
    {kForward, kSilu, 32, 256, 3136, 32, {kResident, 8, 8, 256}, 0.89},
    {kForward, kSilu, 64, 256, 3136, 32, {kResident, 8, 8, 256}, 0.88},
    {kForward, kSilu, 64, 2048, 49, 32, {kResident, 16, 1, 128}, 0.98},
    {kForward, kSilu, 256, 2048, 49, 32, {kResident, 32, 1, 128}, 0.95},
    {kBackward, kIdentity, 16, 256, 3136, 32, {kCooperative, 8, 16, 480}, 0.88},
    {kBackward, kIdentity, 16, 2048, 49, 32, {kResident, 40, 1, 320}, 0.91},
    {kBackward, kIdentity, 32, 64, 3136, 32, {kCooperative, 8, 32, 384}, 0.89},
    {kBackward, kIdentity, 32, 128, 3136, 32, {kCooperative, 16, 32, 352}, 0.84},
    {kBackward, kIdentity, 64, 64, 3136, 32, {kCooperative, 8, 64, 256}, 0.86},
    {kBackward, kIdentity, 64, 1024, 196, 32, {kResident, 8, 2, 96}, 0.96},
    {kBackward, kIdentity, 64, 2048, 49, 32, {kResident, 16, 1, 160}, 0.94},
    {kBackward, kIdentity, 128, 64, 3136, 32, {kResident, 4, 4, 224}, 0.94},
    {kBackward, kIdentity, 128, 2048, 49, 32, {kResident, 16, 1, 128}, 0.97},
    {kBackward, kIdentity, 256, 512, 49, 32, {kResident, 16, 1, 160}, 0.94},
    {kBackward, kIdentity, 256, 512, 196, 32, {kResident, 8, 1, 256}, 0.98},
    {kBackward, kRelu, 64, 128, 784, 32, {kResident, 8, 2, 192}, 0.97},
    {kBackward, kRelu, 64, 256, 196, 32, {kResident, 16, 2, 192}, 0.95},
    {kBackward, kRelu, 64, 512, 49, 32, {kResident, 32, 1, 256}, 0.96},
    {kBackward, kRelu, 64, 1024, 196, 32, {kResident, 8, 2, 96}, 0.96},
    {kBackward, kRelu, 64, 2048, 49, 32, {kResident, 16, 1, 128}, 0.91},
    {kBackward, kRelu, 128, 2048, 49, 32, {kResident, 16, 1, 128}, 0.95},
    {kBackward, kSilu, 16, 2048, 49, 32, {kResident, 32, 2, 448}, 0.97},
    {kBackward, kSilu, 64, 64, 12544, 32, {kCooperative, 8, 11, 512}, 0.84},
    {kBackward, kSilu, 64, 1024, 196, 32, {kResident, 8, 1, 320}, 0.96},
    {kBackward, kSilu, 64, 2048, 49, 32, {kResident, 16, 1, 128}, 0.93},
    {kBackward, kSilu, 128, 2048, 49, 32, {kResident, 16, 1, 128}, 0.97},
    {kBackward, kSilu, 256, 2048, 49, 32, {kResident, 16, 1, 128}, 0.96},
    // Detection, three dimensions
    {kForward, kIdentity, 1, 256, 13600, 32, {kResident, 4, 9, 384}, 0.96},
    {kForward, kIdentity, 2, 256, 13600, 32, {kResident, 8, 8, 384}, 0.96},
    {kForward, kIdentity, 16, 320, 4096, 32, {kCooperative, 40, 16, 320}, 0.97},
});
// clang-format on

} // namespace measured

struct MeasuredDevice {
  const char* name; // of the one that ran
  int compute_capability;
  int sm_count;
  std::span<const MeasuredPlan> plans;
};

inline constexpr std::array kMeasuredDevices{
    MeasuredDevice{"an H200", 90, 132, measured::kOfH200}, // and H100 SXM
};

inline const MeasuredDevice* measured_device(const Device& device) {
  for (const MeasuredDevice& measured : kMeasuredDevices) {
    if (measured.compute_capability == device.compute_capability &&
        measured.sm_count == device.sm_count) {
      return &measured;
    }
  }
  return nullptr;
}

// The row for a problem, or null: where pins say otherwise, too.
inline const MeasuredPlan* measured_plan(
    const Problem& problem,
    const Device& device) {
  if (problem.device != DeviceType::kCUDA || device.pins != Pins{} ||
      !problem.channels_last || problem.alignment < 16 ||
      size_of(problem.dtype) != 2 || problem.wide_output) {
    return nullptr;
  }
  const MeasuredDevice* measured = measured_device(device);
  if (measured == nullptr) {
    return nullptr;
  }
  for (const MeasuredPlan& row : measured->plans) {
    if (row.direction == problem.direction &&
        row.activation == problem.activation && row.N == problem.N &&
        row.C == problem.C && row.HxW == problem.HxW && row.G == problem.G) {
      return &row;
    }
  }
  return nullptr;
}

// The device, with that row's pins if it has what such a plan needs.
inline Device with_measured_pins(const Problem& problem, const Device& device) {
  if (const MeasuredPlan* row = measured_plan(problem, device)) {
    Device pinned = device;
    pinned.pins = row->pins;
    if (estimated_plan(problem, pinned).scheme == row->pins.scheme) {
      return pinned;
    }
  }
  return device;
}

} // namespace gn_override
