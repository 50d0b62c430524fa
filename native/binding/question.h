// What only Python knows.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace gn_override::binding {

// An operator () -> bool that is implemented in Python. No mode or transform
// that is under way sees such a call.
class PythonQuestion {
 public:
  explicit PythonQuestion(const char* name)
      : op_(c10::Dispatcher::singleton()
                .findSchemaOrThrow(name, "")
                .typed<bool()>()) {}

  bool operator()() const {
    const c10::impl::ExcludeDispatchKeyGuard guard{
        c10::DispatchKeySet(c10::DispatchKeySet::FULL)};
    return op_.call();
  }

 private:
  c10::TypedOperatorHandle<bool()> op_;
};

} // namespace gn_override::binding
