#include "native/binding/state.h"

#include <array>
#include <atomic>

namespace gn_override::binding {

namespace {

std::atomic<bool> on{false};

// Slots are claimed by the outcome's address, once, and never given back, so
// counting takes neither a lock nor an allocation. Outcomes are string
// literals; equal texts at several addresses are added up when read.
struct Slot {
  std::atomic<const char*> outcome{nullptr};
  std::atomic<int64_t> calls{0};
};
constexpr int kSlots = 32;
using Table = std::array<Slot, kSlots>;

constexpr std::array kTableNames{
    "native_group_norm cpu ",
    "native_group_norm cuda ",
    "native_group_norm_backward cpu ",
    "native_group_norm_backward cuda ",
    "native_group_norm cpu aten: ",
    "native_group_norm cuda aten: ",
    "native_group_norm_backward cpu aten: ",
    "native_group_norm_backward cuda aten: ",
};
std::array<Table, kTableNames.size()> tables;

void count(Table& table, const char* outcome) {
  for (Slot& slot : table) {
    const char* owner = slot.outcome.load(std::memory_order_acquire);
    if (owner == nullptr &&
        slot.outcome.compare_exchange_strong(owner, outcome)) {
      owner = outcome;
    }
    if (owner == outcome) {
      slot.calls.fetch_add(1, std::memory_order_relaxed);
      return;
    }
  }
}

thread_local int raw_layout_scopes = 0;

} // namespace

bool is_on() {
  return on.load(std::memory_order_relaxed);
}

bool set_on(bool value) {
  return on.exchange(value);
}

void count_taken(Op op, bool cuda, const char* rule) {
  count(tables[(op == Op::kBackward ? 2 : 0) + (cuda ? 1 : 0)], rule);
}

void count_declined(Op op, bool cuda, const char* reason) {
  count(tables[(op == Op::kBackward ? 6 : 4) + (cuda ? 1 : 0)], reason);
}

std::map<std::string, int64_t> counters() {
  std::map<std::string, int64_t> result;
  for (size_t table = 0; table < tables.size(); ++table) {
    for (const Slot& slot : tables[table]) {
      const char* outcome = slot.outcome.load(std::memory_order_acquire);
      const int64_t calls = slot.calls.load(std::memory_order_relaxed);
      if (outcome != nullptr && calls > 0) {
        result[std::string(kTableNames[table]) + outcome] += calls;
      }
    }
  }
  return result;
}

void reset_counters() {
  for (auto& table : tables) {
    for (Slot& slot : table) {
      slot.calls.store(0, std::memory_order_relaxed);
    }
  }
}

RawLayoutScope::RawLayoutScope() {
  ++raw_layout_scopes;
}

RawLayoutScope::~RawLayoutScope() {
  --raw_layout_scopes;
}

bool RawLayoutScope::is_open() {
  return raw_layout_scopes > 0;
}

} // namespace gn_override::binding
