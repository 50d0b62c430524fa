// What a test may ask of the emulator besides the launches of kernels.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace emulator {

// Of the order in which threads run.
void seed(uint64_t value);

// The device that runs what follows. All are GPUs of capability 9.0; the second
// has compiled the kernels of PTX for 8.0, which knows neither clusters nor
// programmatic launches, and the third's driver refuses clusters of more than
// eight blocks.
enum class Code { k90, k80, kSmallClusters };
void use(Code code);

// Work of the host's that the next kernel has to wait for, as for a kernel.
void later(std::function<void()> work);

// Runs all that has been launched.
void finish();

// What kernels have asked the L2 cache for since clear_prefetched().
struct Range {
  const unsigned char* first;
  const unsigned char* last;
};
const std::vector<Range>& prefetched();
void clear_prefetched();

} // namespace emulator
