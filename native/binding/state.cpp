#include "native/binding/state.h"

#include <array>
#include <atomic>

namespace gn_override::binding {

namespace {

std::atomic<bool> on{false};
std::atomic<bool> preserves_dtype{false};

// Slots are claimed by the outcome's address, once, and never given back, so
// counting takes neither a lock nor an allocation. Outcomes are texts that
// last, fewer than there are slots; equal ones at several addresses are added
// up when read.
struct Slot {
  std::atomic<const char*> outcome{nullptr};
  std::atomic<int64_t> calls{0};
};
constexpr int kSlots = 32;
using Table = std::array<Slot, kSlots>;

constexpr std::array kOpNames{
    // by Op
    "native_group_norm",
    "native_group_norm_backward",
    "group_norm_act",
    "group_norm_act_backward",
    "group_norm_autocast",
    "group_norm_autocast_backward",
};
// By op, device (CPU, CUDA) and whether the call was declined.
std::array<Table, 4 * kOpNames.size()> tables;

Table& table_of(Op op, bool cuda, bool declined) {
  return tables[4 * static_cast<size_t>(op) + 2 * cuda + declined];
}

std::string name_of(size_t table) {
  return std::string(kOpNames[table / 4]) +
      (table / 2 % 2 ? " cuda " : " cpu ") + (table % 2 ? "aten: " : "");
}

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

bool autocast_preserves() {
  return preserves_dtype.load(std::memory_order_relaxed);
}

bool set_autocast_preserves(bool preserves) {
  return preserves_dtype.exchange(preserves);
}

void count_taken(Op op, bool cuda, const char* rule) {
  count(table_of(op, cuda, /*declined=*/false), rule);
}

void count_declined(Op op, bool cuda, const char* reason) {
  count(table_of(op, cuda, /*declined=*/true), reason);
}

std::map<std::string, int64_t> counters() {
  std::map<std::string, int64_t> result;
  for (size_t table = 0; table < tables.size(); ++table) {
    for (const Slot& slot : tables[table]) {
      const char* outcome = slot.outcome.load(std::memory_order_acquire);
      const int64_t calls = slot.calls.load(std::memory_order_relaxed);
      if (outcome != nullptr && calls > 0) {
        result[name_of(table) + outcome] += calls;
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
