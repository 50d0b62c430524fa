// The machine as the planner sees it.
#pragma once

#include "native/plan/problem.h"

namespace gn_override::binding {

Device cpu_device();

#if GN_OVERRIDE_WITH_CUDA
// Figures of a CUDA device, read once per device and process.
const Device& cuda_device(int index);
// Pins plans on every device, for tuning runs. Not while other threads run.
void pin_plans(const Pins& pins);
// The current device's, or null where there is no GPU or driver.
const Device* current_cuda_device();
// Device::whole_chip as far as other processes go: gn_override/_whole_chip.py.
bool may_take_whole_chip();
#endif

} // namespace gn_override::binding
