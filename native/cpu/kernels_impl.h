// The CPU kernels, compiled once per instruction set by the kernels_*.cpp
// files. vector.h says why nothing here may leave this file's unnamed
// namespace.
//
// Conventions:
//   X, Y, dY, dX   rows of C elements; `width` = elements of a (folded) row
//   A              accumulator type, V its vector, kLanes<T> elements of V
//   loops over a row are over whole vectors, then once with kTail = true for
//   the n < kLanes<T> elements that are left
//   rows are taken R at a time, so that R loads and sums of a column are in
//   flight and the arrays of accumulators are touched once for R rows
//   sums over rows have one order, whatever the number of threads
//
// Statistics. Each channel has a running (mean, M2) that takes R rows at once:
// with S1, S2 = the sums of x - mean and (x - mean)^2 over the new rows, and n
// the rows then counted,
//   mean' = mean + S1 / n        M2' = M2 + S2 - S1^2 / n.
// The new rows are no more than the old ones, so S1^2 / n <= S2 / 2: there is
// no cancellation, however large the mean. The first R rows use their own mean
// for `mean`. Chunks are short (see policy_cpu.cpp), so that rounding of
// the running mean does not add up; chunks and channels are merged in double.
#pragma once

#include "native/cpu/activation.h"
#include "native/cpu/kernels.h"
#include "native/cpu/vector.h"

namespace gn_override {
namespace {

using cpu::Affine;
using cpu::Chunk;
using cpu::Gradient;
using cpu::Sample;

static_assert(kLanes<float> <= kMostLanes);

// Rows of a map at a time. Sums take kSumRows, which keeps 8 chains busy; maps
// also hold the parameters, which pays where an element takes more than a few
// instructions: an activation, or the conversion from and to two bytes.
template <typename T, bool kFused>
constexpr int kMapRows = kFused || sizeof(T) == 2 ? 4 : 1;

// The cache that memory is asked into, as __builtin_prefetch() counts
// localities. Level 1 can wait for few lines, too few to hide the memory's
// latency at its rate where that is all the work that a line brings. Of
// two-byte types a line brings twice as much, and maps write a line for each
// one that they read.
constexpr int kIntoLevel1 = 3;
constexpr int kIntoLevel2 = 2;
template <typename T>
constexpr int kIntoForSums = sizeof(T) == 2 ? kIntoLevel1 : kIntoLevel2;
constexpr int kIntoForMaps = kIntoLevel1;

// Asks for the memory that the next rows need: column v of R rows of p, as far
// ahead as the next block of rows and `ahead` bytes at least; for nothing where
// that is 0. The hardware's prefetching stops at each page and follows R rows
// at once poorly. Past the tensor's end it has no effect. What is written is
// not asked for: stores wait for their lines without it.
template <int R, int kInto, typename T>
__attribute__((always_inline)) inline void
prefetch(const T* p, int64_t stride, int64_t v, int64_t ahead) {
  constexpr int64_t kLine = 64 / sizeof(T);
  if (ahead == 0 || (kLanes<T> < kLine && v % kLine != 0)) {
    return; // a line is asked for with its first vector
  }
  const int64_t least = ahead / static_cast<int64_t>(sizeof(T));
  const T* next = p + (R * stride > least ? R * stride : least) + v;
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    __builtin_prefetch(next + r * stride, /*rw=*/0, kInto);
  }
}

template <typename A>
A* as(void* p) {
  return static_cast<A*>(p);
}
template <typename A>
const A* as(const void* p) {
  return static_cast<const A*>(p);
}

// column(kTail, v, n) for each vector [v, v + n) of a row.
template <int64_t kStep, typename Column>
inline void for_columns(int64_t begin, int64_t end, Column column) {
  int64_t v = begin;
  for (; v + kStep <= end; v += kStep) {
    column.template operator()<false>(v, kStep);
  }
  if (v < end) {
    column.template operator()<true>(v, end - v);
  }
}

// block<R>(row) for blocks of R = kMost rows, then for the rows left over in
// smaller powers of two.
template <int kMost, typename Block>
inline void for_rows(int64_t begin, int64_t end, Block block) {
  int64_t row = begin;
  for (; row + kMost <= end; row += kMost) {
    block.template operator()<kMost>(row);
  }
  if constexpr (kMost > 1) {
    for_rows<kMost / 2>(row, end, block);
  }
}

// -- statistics -------------------------------------------------------------

// Adds R rows. Their squares are summed by themselves before they join M2:
// fewer additions at the total's magnitude, so less rounding.
template <int R, bool kFirst, typename T, typename A>
inline void add_moments(
    const T* X,
    int64_t stride,
    int64_t width,
    int64_t ahead,
    int64_t rows_before,
    A* mean,
    A* M2) {
  using V = Vector<A>;
  const A inverse = A(1) / static_cast<A>(rows_before + R);
  for_columns<kLanes<T>>(0, width, [&]<bool kTail>(int64_t v, int64_t n) {
    prefetch<R, kIntoForSums<T>>(X, stride, v, ahead);
    V x[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      x[r] = load<kTail>(X + r * stride + v, n);
    }
    V old_mean;
    if constexpr (kFirst) {
      old_mean = x[0];
#pragma GCC unroll 8
      for (int r = 1; r < R; ++r) {
        old_mean += x[r];
      }
      old_mean *= A(1) / R;
    } else {
      old_mean = load<kTail>(mean + v, n);
    }
    V sum{};
    V sum2{};
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const V deviation = x[r] - old_mean;
      sum += deviation;
      sum2 = fma(deviation, deviation, sum2);
    }
    const V step = sum * inverse;
    store<kTail>(mean + v, n, old_mean + step);
    sum2 = fma(-sum, step, sum2);
    if constexpr (!kFirst) {
      sum2 += load<kTail>(M2 + v, n);
    }
    store<kTail>(M2 + v, n, sum2);
  });
}

// rows >= 1 rows of `width` elements, one after the other.
template <typename T, typename A>
inline void row_moments(
    const T* X,
    int64_t rows,
    int64_t width,
    int64_t ahead,
    A* mean,
    A* M2) {
  for_rows<kSumRows>(0, rows, [&]<int R>(int64_t row) {
    const auto add = [&]<bool kFirst>() {
      add_moments<R, kFirst>(
          X + row * width, width, width, ahead, row, mean, M2);
    };
    if (row == 0) {
      add.template operator()<true>();
    } else {
      add.template operator()<false>();
    }
  });
}

// A sum with an infinity in it is infinite, as stock's is, but the deviations
// from it are NaN: give the channels where that happened their plain mean. And
// where the squares of numbers overflowed, M2 is infinite.
template <typename T, typename A>
inline void
repair_moments(const T* X, int64_t rows, int64_t C, A* mean, A* M2) {
  using V = Vector<A>;
  Mask<A> any{};
  for_columns<kLanes<T>>(0, C, [&]<bool kTail>(int64_t v, int64_t n) {
    const V m = load<kTail>(mean + v, n);
    const V s = load<kTail>(M2 + v, n);
    any |= (m - m != V{}) | (s - s != V{});
  });
  bool found = false;
  for (int64_t i = 0; i < kLanes<T>; ++i) {
    found |= any[i] != 0;
  }
  if (!found) {
    return;
  }
  for_columns<kLanes<T>>(0, C, [&]<bool kTail>(int64_t v, int64_t n) {
    V sum{};
    for (int64_t r = 0; r < rows; ++r) {
      sum += load<kTail>(X + r * C + v, n);
    }
    V m = load<kTail>(mean + v, n);
    const V s = load<kTail>(M2 + v, n);
    m = m - m != V{} ? sum / static_cast<A>(rows) : m;
    const V infinity = V{} + static_cast<A>(__builtin_inf());
    store<kTail>(mean + v, n, m);
    store<kTail>(M2 + v, n, ((s - s != V{}) & (m - m == V{})) ? infinity : s);
  });
}

template <typename T>
void moments(const void* X_, Chunk chunk, void* mean_, void* M2_) {
  using A = Accumulator<T>;
  using V = Vector<A>;
  const T* X = as<T>(X_);
  A* mean = as<A>(mean_);
  A* M2 = as<A>(M2_);
  const int64_t C = chunk.C;
  const int64_t fold = chunk.fold;
  const int64_t rows = chunk.rows / fold;
  if (fold == 1 || rows == 0) {
    row_moments(X, chunk.rows, C, chunk.ahead, mean, M2);
    repair_moments(X, chunk.rows, C, mean, M2);
    return;
  }
  A folded_mean[kMaxFoldedRow];
  A folded_M2[kMaxFoldedRow];
  const int64_t left = chunk.rows % fold;
  row_moments(X, rows, fold * C, chunk.ahead, folded_mean, folded_M2);
  add_moments<1, false>(
      X + rows * fold * C, 0, left * C, 0, rows, folded_mean, folded_M2);

  const A inverse = A(1) / static_cast<A>(chunk.rows);
  const A per_copy = A(1) / static_cast<A>(fold);
  for_columns<kLanes<T>>(0, C, [&]<bool kTail>(int64_t v, int64_t n) {
    // Relative to a mean, so that a large one stays exact, and to that of all
    // copies: one copy's may be far from it.
    V origin{};
    for (int64_t j = 0; j < fold; ++j) {
      origin += load<kTail>(folded_mean + j * C + v, n) * per_copy;
    }
    V sum{};
    for (int64_t j = 0; j < fold; ++j) {
      const V m = load<kTail>(folded_mean + j * C + v, n);
      sum += (m - origin) * static_cast<A>(rows + (j < left));
    }
    const V step = sum * inverse;
    V sum2{};
    for (int64_t j = 0; j < fold; ++j) {
      const V m = load<kTail>(folded_mean + j * C + v, n);
      const V deviation = (m - origin) - step;
      sum2 += load<kTail>(folded_M2 + j * C + v, n);
      sum2 += deviation * deviation * static_cast<A>(rows + (j < left));
    }
    store<kTail>(mean + v, n, origin + step);
    store<kTail>(M2 + v, n, sum2);
  });
  repair_moments(X, chunk.rows, C, mean, M2);
}

// -- normalisation ----------------------------------------------------------

// Whether rows of `width` elements at p can be streamed, which needs every
// vector to be an aligned line.
template <typename T>
inline bool can_stream(Chunk chunk, const T* p, int64_t width) {
  return chunk.stream && kCanStream<T> && width % kLanes<T> == 0 &&
      reinterpret_cast<uintptr_t>(p) % 64 == 0;
}

template <bool kTail, bool kStream, typename T>
inline void store_output(T* p, int64_t n, Vector<Accumulator<T>> v) {
  if constexpr (kStream && kCanStream<T>) {
    store_streaming(p, v);
  } else {
    store<kTail>(p, n, v);
  }
}

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
  const int64_t width = chunk.fold * chunk.C;
  const int64_t rows = chunk.rows / chunk.fold;
  const auto run = [&]<bool kStream>() {
    for_rows<kMapRows<T, kFused>>(0, rows, [&]<int R>(int64_t row) {
      const int64_t at = row * width;
      normalize_rows<R, kStream, kFused>(
          X + at, Y + at, width, width, chunk.ahead, affine);
    });
  };
  if (can_stream(chunk, Y, width)) {
    run.template operator()<true>();
    end_streaming();
  } else {
    run.template operator()<false>();
  }
  const int64_t at = rows * width;
  normalize_rows<1, false, kFused>(
      X + at, Y + at, 0, chunk.rows * chunk.C - at, 0, affine);
}

template <typename T>
void normalize(const void* X, void* Y, Chunk chunk, const Affine& affine) {
  if (affine.activation == Activation::kIdentity) {
    normalize_chunk<false>(as<T>(X), as<T>(Y), chunk, affine);
  } else {
    normalize_chunk<true>(as<T>(X), as<T>(Y), chunk, affine);
  }
}

// -- sums of the backward pass ----------------------------------------------

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
  const A* center = as<A>(gradient.center);
  for_columns<kLanes<T>>(0, width, [&]<bool kTail>(int64_t v, int64_t n) {
    prefetch<R, kIntoForSums<T>>(dY, stride, v, ahead);
    prefetch<R, kIntoForSums<T>>(X, stride, v, ahead);
    const V m = load(center + v);
    V dz[R];
    V x[R]; // centred
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      dz[r] = load<kTail>(dY + r * stride + v, n);
      x[r] = load<kTail>(X + r * stride + v, n) - m;
    }
    if constexpr (kFused) {
      differentiate_rows<A>(gradient, v, x, dz);
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
  const A* center = as<A>(gradient.center);
  const A* dZ_scale = as<A>(gradient.dZ_scale);
  const A* X_scale = as<A>(gradient.X_scale);
  const A* shift = as<A>(gradient.shift);
  for_columns<kLanes<T>>(0, width, [&]<bool kTail>(int64_t v, int64_t n) {
    prefetch<R, kIntoForMaps>(dY, stride, v, ahead);
    prefetch<R, kIntoForMaps>(X, stride, v, ahead);
    const V m = load(center + v);
    const V a = load(dZ_scale + v);
    const V b = load(X_scale + v);
    const V c = load(shift + v);
    V dz[R];
    V x[R]; // centred
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      dz[r] = load<kTail>(dY + r * stride + v, n);
      x[r] = load<kTail>(X + r * stride + v, n) - m;
    }
    if constexpr (kFused) {
      differentiate_rows<A>(gradient, v, x, dz);
    }
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
  const int64_t width = chunk.fold * chunk.C;
  const int64_t rows = chunk.rows / chunk.fold;
  const auto map = [&]<int R, bool kStream>(
                       int64_t at, int64_t n, int64_t ahead) {
    input_gradient_rows<R, kStream, kFused>(
        dY + at, X + at, dX + at, width, n, ahead, gradient);
  };
  const auto run = [&]<bool kStream>() {
    for_rows<kMapRows<T, kFused>>(0, rows, [&]<int R>(int64_t row) {
      map.template operator()<R, kStream>(row * width, width, chunk.ahead);
    });
  };
  if (can_stream(chunk, dX, width)) {
    run.template operator()<true>();
    end_streaming();
  } else {
    run.template operator()<false>();
  }
  const int64_t at = rows * width;
  map.template operator()<1, false>(at, chunk.rows * chunk.C - at, 0);
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

// -- from the chunks to the groups of a sample ------------------------------
//
// Channels [begin, end) are those of the sample's range of groups. Other ranges
// of the same sample run at the same time: stores do not go past `end`.

constexpr int64_t kDoubleLanes = kLanes<double>;

inline int64_t rows_of(const Sample& sample, int64_t chunk) {
  return chunk + 1 < sample.chunks ? sample.rows_per_chunk
                                   : sample.HxW - chunk * sample.rows_per_chunk;
}

template <typename A>
inline const A* partial(const Sample& sample, int64_t chunk, int which) {
  return as<A>(sample.partials) + (2 * chunk + which) * sample.stride;
}

inline double add_lanes(DoubleVector lanes) {
  double total = 0;
#pragma GCC unroll 8
  for (int64_t lane = 0; lane < kDoubleLanes; ++lane) {
    total += lanes[lane];
  }
  return total;
}

inline double sum(const double* values, int64_t count) {
  DoubleVector lanes{};
  int64_t i = 0;
  for (; i + kDoubleLanes <= count; i += kDoubleLanes) {
    lanes += load(values + i);
  }
  double total = i > 0 ? add_lanes(lanes) : 0;
  for (; i < count; ++i) {
    total += values[i];
  }
  return total;
}

template <typename A>
inline double dot(const A* a, const double* b, int64_t count) {
  DoubleVector lanes{};
  int64_t i = 0;
  for (; i + kDoubleLanes <= count; i += kDoubleLanes) {
    lanes += load_double(a + i) * load(b + i);
  }
  double total = i > 0 ? add_lanes(lanes) : 0;
  for (; i < count; ++i) {
    total += static_cast<double>(a[i]) * b[i];
  }
  return total;
}

template <typename A>
inline void fill(A* array, int64_t count, A value) {
  const auto v = broadcast<Vector<A>>(value);
  int64_t i = 0;
  for (; i + kLanes<A> <= count; i += kLanes<A>) {
    store(array + i, v);
  }
  for (; i < count; ++i) {
    array[i] = value;
  }
}

template <typename A>
inline void multiply(A* array, int64_t count, A factor) {
  int64_t i = 0;
  for (; i + kLanes<A> <= count; i += kLanes<A>) {
    store(array + i, load(array + i) * factor);
  }
  for (; i < count; ++i) {
    array[i] *= factor;
  }
}

// The first of the fold copies of [begin, end) to the others.
template <typename A>
inline void
copy_folds(A* array, int64_t begin, int64_t end, int64_t C, int64_t fold) {
  for (int64_t j = 1; j < fold; ++j) {
    for_columns<kLanes<A>>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
      store<kTail>(array + j * C + v, n, load<kTail>(array + v, n));
    });
  }
}

// gamma or beta.
template <bool kTail, typename P>
inline Vector<Accumulator<P>> load_parameter(const P* p, int64_t n) {
  return without_payload(load<kTail>(p, n));
}

// Element g of mean or rstd.
template <typename P>
inline Accumulator<P>
load_statistic(const Sample& sample, const void* statistics, int64_t g) {
  return without_payload(
      sample.wide_statistics ? as<Accumulator<P>>(statistics)[g]
                             : load_one(as<P>(statistics) + g));
}
template <typename P>
inline void store_statistic(
    const Sample& sample,
    void* statistics,
    int64_t g,
    Accumulator<P> value) {
  if (sample.wide_statistics) {
    as<Accumulator<P>>(statistics)[g] = value;
  } else {
    store_one(as<P>(statistics) + g, value);
  }
}

template <typename P>
void finish_statistics(
    const Sample& sample,
    const void* gamma_,
    const void* beta_,
    double eps,
    void* mean,
    void* rstd,
    const Affine& affine) {
  using A = Accumulator<P>;
  const P* gamma = as<P>(gamma_);
  const P* beta = as<P>(beta_);
  A* center = as<A>(affine.center);
  A* scale = as<A>(affine.scale);
  A* shift = as<A>(affine.shift);
  double* sums = sample.scratch;
  double* means = sample.scratch + sample.stride;
  const int64_t D = sample.D;
  const int64_t begin = sample.group_begin * D;
  const int64_t end = sample.group_end * D;
  const double count = static_cast<double>(D) * sample.HxW;

  // Relative to one channel's mean: those of a constant group do not round.
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    const double origin = partial<A>(sample, 0, 0)[g * D];
    fill(means + g * D, D, origin - origin == 0 ? origin : 0.0);
  }
  for_columns<kDoubleLanes>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    const DoubleVector origin = load<kTail>(means + v, n);
    DoubleVector total{};
    for (int64_t k = 0; k < sample.chunks; ++k) {
      total += (load_double(partial<A>(sample, k, 0) + v) - origin) *
          static_cast<double>(rows_of(sample, k));
    }
    store<kTail>(sums + v, n, total);
  });
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    fill(means + g * D, D, means[g * D] + sum(sums + g * D, D) / count);
  }
  for_columns<kDoubleLanes>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    const DoubleVector m = load<kTail>(means + v, n);
    DoubleVector total{};
    for (int64_t k = 0; k < sample.chunks; ++k) {
      const DoubleVector d = load_double(partial<A>(sample, k, 0) + v) - m;
      total += load_double(partial<A>(sample, k, 1) + v);
      total += d * d * static_cast<double>(rows_of(sample, k));
    }
    store<kTail>(sums + v, n, total);
  });
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    const double m = means[g * D];
    const double r =
        without_payload(1 / __builtin_sqrt(sum(sums + g * D, D) / count + eps));
    const A rounded = static_cast<A>(m);
    const A rest = static_cast<A>(m - static_cast<double>(rounded));
    store_statistic<P>(sample, mean, g, rounded);
    store_statistic<P>(sample, rstd, g, static_cast<A>(r));
    fill(center + g * D, D, rounded);
    fill(scale + g * D, D, static_cast<A>(r));
    fill(shift + g * D, D, rest);
  }
  for_columns<kLanes<A>>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    using V = Vector<A>;
    V a = load<kTail>(scale + v, n);
    V b{};
    if (gamma) {
      a *= load_parameter<kTail>(gamma + v, n);
    }
    if (beta) {
      b = load_parameter<kTail>(beta + v, n);
    }
    b = fma(-load<kTail>(shift + v, n), a, b);
    store<kTail>(scale + v, n, a);
    store<kTail>(shift + v, n, b);
  });
  copy_folds(center, begin, end, sample.C, sample.fold);
  copy_folds(scale, begin, end, sample.C, sample.fold);
  copy_folds(shift, begin, end, sample.C, sample.fold);
}

template <typename P>
void expand_parameters(
    const Sample& sample,
    const void* gamma_,
    const void* beta_,
    const void* mean,
    const void* rstd,
    const Gradient& gradient) {
  using A = Accumulator<P>;
  using V = Vector<A>;
  const P* gamma = as<P>(gamma_);
  const P* beta_in = as<P>(beta_);
  A* center = as<A>(gradient.center);
  A* dZ_scale = as<A>(gradient.dZ_scale);
  A* beta = as<A>(gradient.beta);
  const int64_t D = sample.D;
  const int64_t begin = sample.group_begin * D;
  const int64_t end = sample.group_end * D;
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    fill(center + g * D, D, load_statistic<P>(sample, mean, g));
  }
  copy_folds(center, begin, end, sample.C, sample.fold);
  if (gradient.activation == Activation::kIdentity) {
    return;
  }
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    fill(dZ_scale + g * D, D, load_statistic<P>(sample, rstd, g));
  }
  for_columns<kLanes<A>>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    if (gamma) {
      const V r = load<kTail>(dZ_scale + v, n);
      store<kTail>(dZ_scale + v, n, r * load_parameter<kTail>(gamma + v, n));
    }
    store<kTail>(
        beta + v, n, beta_in ? load_parameter<kTail>(beta_in + v, n) : V{});
  });
  copy_folds(dZ_scale, begin, end, sample.C, sample.fold);
  copy_folds(beta, begin, end, sample.C, sample.fold);
}

// With M = D * HxW, r = rstd, xhat = (X - mean) * r and sums over the group,
//   dX = r * (gamma dZ - sum(gamma dZ) / M - xhat * sum(gamma dZ xhat) / M).
template <typename P>
void finish_sums(
    const Sample& sample,
    const void* gamma_,
    const void* rstd,
    const Gradient& gradient) {
  using A = Accumulator<P>;
  const P* gamma = as<P>(gamma_);
  A* dZ_scale = as<A>(gradient.dZ_scale);
  A* X_scale = as<A>(gradient.X_scale);
  A* shift = as<A>(gradient.shift);
  double* dgamma = sample.scratch;
  double* dbeta = sample.scratch + sample.stride;
  const int64_t D = sample.D;
  const int64_t begin = sample.group_begin * D;
  const int64_t end = sample.group_end * D;
  const double count = static_cast<double>(D) * sample.HxW;

  for_columns<kDoubleLanes>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    DoubleVector sum_X{};
    DoubleVector sum_1{};
    for (int64_t k = 0; k < sample.chunks; ++k) {
      sum_X += load_double(partial<A>(sample, k, 0) + v);
      sum_1 += load_double(partial<A>(sample, k, 1) + v);
    }
    store<kTail>(dgamma + v, n, sum_X);
    store<kTail>(dbeta + v, n, sum_1);
  });
  // dZ_scale holds gamma until its sums are known.
  for_columns<kLanes<A>>(begin, end, [&]<bool kTail>(int64_t v, int64_t n) {
    store<kTail>(
        dZ_scale + v,
        n,
        gamma ? load_parameter<kTail>(gamma + v, n)
              : broadcast<Vector<A>>(A(1)));
  });
  for (int64_t g = sample.group_begin; g < sample.group_end; ++g) {
    const int64_t c = g * D;
    const A rounded = load_statistic<P>(sample, rstd, g);
    const double r = static_cast<double>(rounded);
    const double sum_X = dot(dZ_scale + c, dgamma + c, D);
    const double sum_1 = dot(dZ_scale + c, dbeta + c, D);
    multiply(dgamma + c, D, r);
    multiply(dZ_scale + c, D, rounded);
    // In this order: r^3 alone underflows where X is huge.
    fill(X_scale + c, D, static_cast<A>(-r * (r * (r * sum_X)) / count));
    fill(shift + c, D, static_cast<A>(-r * sum_1 / count));
  }
  copy_folds(dZ_scale, begin, end, sample.C, sample.fold);
  copy_folds(X_scale, begin, end, sample.C, sample.fold);
  copy_folds(shift, begin, end, sample.C, sample.fold);
}

inline void add_totals(const double* sums, int64_t count, double* totals) {
  for_columns<kDoubleLanes>(0, count, [&]<bool kTail>(int64_t v, int64_t n) {
    store<kTail>(
        totals + v, n, load<kTail>(totals + v, n) + load<kTail>(sums + v, n));
  });
}

template <typename P>
void store_totals(const double* totals, int64_t count, void* gradient) {
  P* out = as<P>(gradient);
  for (int64_t c = 0; c < count; ++c) {
    store_one(out + c, static_cast<Accumulator<P>>(totals[c]));
  }
}

// -- the table --------------------------------------------------------------

template <typename T>
constexpr cpu::ElementKernels element_kernels() {
  return {moments<T>, normalize<T>, gradient_sums<T>, input_gradient<T>};
}

template <typename P>
constexpr cpu::ParameterKernels parameter_kernels() {
  return {
      finish_statistics<P>,
      expand_parameters<P>,
      finish_sums<P>,
      store_totals<P>};
}

// In the order of DType.
constexpr cpu::Kernels make_kernels(const char* name) {
  return {
      name,
      add_totals,
      {element_kernels<float>(),
       element_kernels<double>(),
       element_kernels<Half>(),
       element_kernels<BFloat16>()},
      {parameter_kernels<float>(),
       parameter_kernels<double>(),
       parameter_kernels<Half>(),
       parameter_kernels<BFloat16>()}};
}

} // namespace
} // namespace gn_override
