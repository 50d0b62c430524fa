// The machine as the planner sees it.
#pragma once

#include <optional>

#include "native/plan/problem.h"

namespace gn_override::binding {

Device cpu_device();

#if GN_OVERRIDE_WITH_CUDA
// Pins plans on every device, for tuning runs. Not while other threads run.
void pin_plans(const Pins& pins);
// The current CUDA device as a call on its current stream sees it; none where
// there is no GPU or driver.
std::optional<Device> current_cuda_device();
#endif

} // namespace gn_override::binding
