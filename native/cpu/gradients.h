// The backward pass over the rows of a chunk: the sums, then dX.
#pragma once

#include "native/cpu/activation.h"
#include "native/cpu/rows.h"

namespace gn_override {
namespace {

using cpu::Gradient;

// Where dZ is kept for input_gradient(); nowhere if null.
template <typename T>
struct Kept {
  T* dZ;
  bool stream;

  Kept operator+(int64_t at) const {
    return {dZ ? dZ + at : nullptr, stream};
  }

  template <int R, bool kTail>
  void store_rows(
      int64_t stride,
      int64_t v,
      int64_t n,
      const Vector<Accumulator<T>> (&dz)[R]) const {
    if (!kTail && stream) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        store_output<kTail, !kTail>(dZ + r * stride + v, n, dz[r]);
      }
    } else if (dZ) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        store<kTail>(dZ + r * stride + v, n, dz[r]);
      }
    }
  }
};

// dZ of R rows at column v; `centred` are their X - center.
template <typename A, int R>
inline void differentiate_rows(
    const Gradient& gradient,
    int64_t v,
    const Vector<A> (&centred)[R],
    Vector<A> (&dy)[R]) {
  using V = Vector<A>;
  const V a = load(as<A>(gradient.dZ_scale) + v);
  const V b = load(as<A>(gradient.beta) + v);
  V z[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    z[r] = fma(centred[r], a, b);
  }
  differentiate<A>(gradient.activation, z, dy);
}

// dZ and X - center of R rows at column v.
template <int R, int kInto, bool kTail, bool kFused, typename T>
__attribute__((always_inline)) inline void load_rows(
    const T* dY,
    const T* X,
    int64_t stride,
    int64_t v,
    int64_t n,
    int64_t ahead,
    const Gradient& gradient,
    Vector<Accumulator<T>> (&dz)[R],
    Vector<Accumulator<T>> (&centred)[R]) {
  using A = Accumulator<T>;
  prefetch<R, kInto>(dY, stride, v, ahead);
  prefetch<R, kInto>(X, stride, v, ahead);
  const Vector<A> m = load(as<A>(gradient.center) + v);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    dz[r] = load<kTail>(dY + r * stride + v, n);
    centred[r] = load<kTail>(X + r * stride + v, n) - m;
  }
  if constexpr (kFused) {
    differentiate_rows<A>(gradient, v, centred, dz);
  }
}

// -- the sums ---------------------------------------------------------------

template <int R, bool kFirst, bool kFused, typename T, typename A>
inline void add_gradient_sums(
    const T* dY,
    const T* X,
    Kept<T> kept,
    int64_t stride,
    int64_t width,
    int64_t ahead,
    const Gradient& gradient,
    A* dZ_X,
    A* dZ_1) {
  using V = Vector<A>;
  for_columns<kLanes<T>>(0, width, [&]<bool kTail>(int64_t v, int64_t n) {
    V dz[R];
    V x[R]; // centred
    load_rows<R, kIntoForSums<T>, kTail, kFused>(
        dY, X, stride, v, n, ahead, gradient, dz, x);
    if constexpr (kFused) {
      kept.template store_rows<R, kTail>(stride, v, n, dz);
    }
    V sum_X{};
    V sum_1{};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      sum_X = fma(dz[r], x[r], sum_X);
      sum_1 += dz[r];
    }
    if constexpr (!kFirst) {
      sum_X += load<kTail>(dZ_X + v, n);
      sum_1 += load<kTail>(dZ_1 + v, n);
    }
    store<kTail>(dZ_X + v, n, sum_X);
    store<kTail>(dZ_1 + v, n, sum_1);
  });
}

template <bool kFused, typename T, typename A>
inline void row_gradient_sums(
    const T* dY,
    const T* X,
    Kept<T> kept,
    int64_t rows,
    int64_t width,
    int64_t ahead,
    const Gradient& gradient,
    A* dZ_X,
    A* dZ_1) {
  for_rows<kSumRows>(0, rows, [&]<int R>(int64_t row) {
    const auto add = [&]<bool kFirst>() {
      const int64_t at = row * width;
      add_gradient_sums<R, kFirst, kFused>(
          dY + at,
          X + at,
          kept + at,
          width,
          width,
          ahead,
          gradient,
          dZ_X,
          dZ_1);
    };
    if (row == 0) {
      add.template operator()<true>();
    } else {
      add.template operator()<false>();
    }
  });
}

template <bool kFused, typename T, typename A>
void chunk_gradient_sums(
    const T* dY,
    const T* X,
    T* dZ,
    Chunk chunk,
    const Gradient& gradient,
    A* dZ_X,
    A* dZ_1) {
  using V = Vector<A>;
  const int64_t C = chunk.C;
  const int64_t fold = chunk.fold;
  const int64_t rows = chunk.rows / fold;
  const int64_t width = rows > 0 ? fold * C : C;
  const Kept<T> kept{dZ, dZ && can_stream(chunk, dZ, width)};
  if (width == C) {
    row_gradient_sums<kFused>(
        dY, X, kept, chunk.rows, C, chunk.ahead, gradient, dZ_X, dZ_1);
    return;
  }
  A folded_X[kMaxFoldedRow];
  A folded_1[kMaxFoldedRow];
  row_gradient_sums<kFused>(
      dY, X, kept, rows, width, chunk.ahead, gradient, folded_X, folded_1);
  const int64_t at = rows * width;
  add_gradient_sums<1, false, kFused>(
      dY + at,
      X + at,
      kept + at,
      0,
      chunk.rows * C - at,
      0,
      gradient,
      folded_X,
      folded_1);
  for_columns<kLanes<T>>(0, C, [&]<bool kTail>(int64_t v, int64_t n) {
    V sum_X{};
    V sum_1{};
    for (int64_t j = 0; j < fold; ++j) {
      sum_X += load<kTail>(folded_X + j * C + v, n);
      sum_1 += load<kTail>(folded_1 + j * C + v, n);
    }
    store<kTail>(dZ_X + v, n, sum_X);
    store<kTail>(dZ_1 + v, n, sum_1);
  });
}

template <typename T>
void gradient_sums(
    const void* dY,
    const void* X,
    void* dZ,
    Chunk chunk,
    const Gradient& gradient,
    void* dZ_X,
    void* dZ_1) {
  using A = Accumulator<T>;
  const auto run = [&]<bool kFused>() {
    chunk_gradient_sums<kFused>(
        as<T>(dY),
        as<T>(X),
        as<T>(dZ),
        chunk,
        gradient,
        as<A>(dZ_X),
        as<A>(dZ_1));
  };
  if (gradient.activation == Activation::kIdentity) {
    run.template operator()<false>();
  } else {
    run.template operator()<true>();
    end_streaming();
  }
}

// -- gradient of X ----------------------------------------------------------

template <int R, bool kStream, bool kFused, typename T>
inline void input_gradient_rows(
    const T* dY,
    const T* X,
    T* dX,
    int64_t stride,
    int64_t width,
    int64_t ahead,
    const Gradient& gradient) {
  using A = Accumulator<T>;
  using V = Vector<A>;
  const A* dZ_scale = as<A>(gradient.dZ_scale);
  const A* X_scale = as<A>(gradient.X_scale);
  const A* shift = as<A>(gradient.shift);
  for_columns<kLanes<T>>(0, width, [&]<bool kTail>(int64_t v, int64_t n) {
    V dz[R];
    V x[R]; // centred
    load_rows<R, kIntoForMaps, kTail, kFused>(
        dY, X, stride, v, n, ahead, gradient, dz, x);
    const V a = load(dZ_scale + v);
    const V b = load(X_scale + v);
    const V c = load(shift + v);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      store_output<kTail, kStream>(
          dX + r * stride + v, n, fma(dz[r], a, fma(x[r], b, c)));
    }
  });
}

template <bool kFused, typename T>
void chunk_input_gradient(
    const T* dY,
    const T* X,
    T* dX,
    Chunk chunk,
    const Gradient& gradient) {
  const int64_t stride = chunk.fold * chunk.C;
  map_chunk<kMapRows<T, kFused>>(
      chunk,
      dX,
      [&]<int R, bool kStream>(int64_t at, int64_t n, int64_t ahead) {
        input_gradient_rows<R, kStream, kFused>(
            dY + at, X + at, dX + at, stride, n, ahead, gradient);
      });
}

template <typename T>
void input_gradient(
    const void* dY,
    const void* X,
    void* dX,
    Chunk chunk,
    const Gradient& gradient) {
  if (gradient.activation == Activation::kIdentity) {
    chunk_input_gradient<false>(
        as<T>(dY), as<T>(X), as<T>(dX), chunk, gradient);
  } else {
    chunk_input_gradient<true>(as<T>(dY), as<T>(X), as<T>(dX), chunk, gradient);
  }
}

} // namespace
} // namespace gn_override
