// Compiled with -mavx2 -mfma -mf16c.
#include "native/cpu/make_kernels.h"

namespace gn_override::cpu {

constinit const Kernels kAVX2Kernels = make_kernels("avx2");

} // namespace gn_override::cpu
