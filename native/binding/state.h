// The switches and the call counters, which a process has once.
#pragma once

#include <cstdint>
#include <map>
#include <string>

namespace gn_override::binding {

// Whether calls may go to our kernels. One relaxed atomic read.
bool is_on();
// Returns the state before.
bool set_on(bool on);

// Whether torch.autocast leaves a CUDA group norm in its input's dtype, which
// is float32 otherwise, as in PyTorch.
bool autocast_preserves();
// Returns the state before.
bool set_autocast_preserves(bool preserves);

// By the operator that ran; the last two are group_norm_act with a Y wider than
// X, which is what autocast makes of group_norm.
enum class Op : uint8_t {
  kForward,
  kBackward,
  kActForward,
  kActBackward,
  kAutocastForward,
  kAutocastBackward
};

// Count a call that ran on our kernels by policy rule, or one that went to aten
// by reason. Both texts must have static storage.
void count_taken(Op op, bool cuda, const char* rule);
void count_declined(Op op, bool cuda, const char* reason);
// "native_group_norm cuda two_pass" or "native_group_norm cuda aten: <reason>"
// -> calls since the last reset.
std::map<std::string, int64_t> counters();
void reset_counters();

// Open while our autograd and composite kernels for torch 2.11 - 2.13 pass a
// channels-last tensor down to the native ops, which stock refuses there on
// CUDA. A call that is declined after all (the switch was flipped by another
// thread, say) is then given tensors as stock's own composite would give them.
class RawLayoutScope {
 public:
  RawLayoutScope();
  ~RawLayoutScope();
  RawLayoutScope(const RawLayoutScope&) = delete;
  RawLayoutScope& operator=(const RawLayoutScope&) = delete;

  static bool is_open(); // on this thread
};

} // namespace gn_override::binding
