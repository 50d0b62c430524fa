// make_plan(), remembered: a model asks for few plans, many times.
#pragma once

#include "native/plan/plan.h"

namespace gn_override::binding {

// make_plan(problem, device). The calling thread remembers its latest plans.
Plan cached_plan(const Problem& problem, const Device& device);

} // namespace gn_override::binding
