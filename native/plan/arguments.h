// The operands of a call as raw pointers: all that crosses from the binding to
// the launchers and to the CPU kernels besides Problem and Plan.
#pragma once

namespace gn_override {

struct ForwardArguments {
  const void* X = nullptr;
  const void* added = nullptr; // [N, C] of X's type where Problem::adds
  const void* gamma = nullptr; // null: ones
  const void* beta = nullptr; // null: zeros
  void* Y = nullptr;
  void* mean = nullptr;
  void* rstd = nullptr;
  double eps = 0;
  void* workspace = nullptr; // Plan::workspace_bytes, at 256; CPU: at 64
};

struct BackwardArguments {
  const void* dY = nullptr;
  const void* X = nullptr;
  const void* mean = nullptr;
  const void* rstd = nullptr;
  const void* gamma = nullptr; // null: ones
  const void* beta = nullptr; // null: zeros; read where Problem::is_fused()
  void* dX = nullptr; // null where Problem does not want it
  void* dgamma = nullptr; // likewise
  void* dbeta = nullptr; // likewise
  void* workspace = nullptr; // Plan::workspace_bytes, at 256; CPU: at 64
};

} // namespace gn_override
