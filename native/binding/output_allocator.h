// The memory of outputs on a CPU.
#pragma once

#include <c10/core/Allocator.h>

#include <cstdint>

namespace gn_override::binding {

// PyTorch's allocator, with a memory: blocks of 32 MB and more stay with the
// process when they are freed, while there is room, and serve later requests
// of as many bytes. From that size on glibc, if nobody tells it otherwise,
// takes each block from the system and gives it back at once, and to fill new
// pages with zeros takes the system as long as the norm does.
//
// The system may have the pages of what is kept back whenever it runs short,
// without a word (Linux's MADV_FREE; elsewhere nothing is kept). It cannot have
// those that a forked process shares, so a fork ends the keeping of all blocks
// that were there.
//
// Nothing is kept or served while the override is off, where memory that is
// kept could be missed all the same (a limit on the address space, memory that
// is not overcommitted), in a thread whose memory is profiled, where PyTorch is
// to fill what it allocates, or with GN_OVERRIDE_KEEP_MEMORY=0 in the
// environment.
c10::Allocator* output_allocator();

// Bytes that are kept, those that the system took included.
int64_t kept_bytes();

// Gives all of it back.
void drop_kept_memory();

} // namespace gn_override::binding
