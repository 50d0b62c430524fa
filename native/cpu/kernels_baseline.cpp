// Compiled with the flags that every file gets: SSE2 on x86-64.
#include "native/cpu/make_kernels.h"

namespace gn_override::cpu {

constinit const Kernels kBaselineKernels = make_kernels("baseline");

} // namespace gn_override::cpu
