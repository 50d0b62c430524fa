// Compiled with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c.
#include "native/cpu/make_kernels.h"

namespace gn_override::cpu {

constinit const Kernels kAVX512Kernels = make_kernels("avx512");

} // namespace gn_override::cpu
