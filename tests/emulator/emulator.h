// What a test may ask of the emulator besides the launches of kernels.
#pragma once

#include <cstdint>

namespace emulator {

// Of the order in which threads run.
void seed(uint64_t value);

} // namespace emulator
