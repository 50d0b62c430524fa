// Y of the rows of a chunk.
#pragma once

#include "native/cpu/activation.h"
#include "native/cpu/rows.h"

namespace gn_override {
namespace {

using cpu::Affine;

template <int R, bool kStream, bool kFused, typename T>
inline void normalize_rows(
    const T* X,
    T* Y,
    int64_t stride,
    int64_t width,
    int64_t ahead,
    const Affine& affine) {
  using A = Accumulator<T>;
  using V = Vector<A>;
  const A* center = as<A>(affine.center);
  const A* scale = as<A>(affine.scale);
  const A* shift = as<A>(affine.shift);
  for_columns<kLanes<T>>(0, width, [&]<bool kTail>(int64_t v, int64_t n) {
    prefetch<R, kIntoForMaps>(X, stride, v, ahead);
    const V m = load(center + v);
    const V a = load(scale + v);
    const V b = load(shift + v);
    V y[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V x = load<kTail>(X + r * stride + v, n);
      y[r] = fma(x - m, a, b);
    }
    if constexpr (kFused) {
      activate<A>(affine.activation, y);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      store_output<kTail, kStream>(Y + r * stride + v, n, y[r]);
    }
  });
}

template <bool kFused, typename T>
void normalize_chunk(const T* X, T* Y, Chunk chunk, const Affine& affine) {
  const int64_t stride = chunk.fold * chunk.C;
  map_chunk<kMapRows<T, kFused>>(
      chunk, Y, [&]<int R, bool kStream>(int64_t at, int64_t n, int64_t ahead) {
        normalize_rows<R, kStream, kFused>(
            X + at, Y + at, stride, n, ahead, affine);
      });
}

template <typename T>
void normalize(const void* X, void* Y, Chunk chunk, const Affine& affine) {
  if (affine.activation == Activation::kIdentity) {
    normalize_chunk<false>(as<T>(X), as<T>(Y), chunk, affine);
  } else {
    normalize_chunk<true>(as<T>(X), as<T>(Y), chunk, affine);
  }
}

} // namespace
} // namespace gn_override
