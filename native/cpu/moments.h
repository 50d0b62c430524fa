// Statistics of the channels of a chunk.
//
// Each channel has a running (mean, M2) that takes R rows at once: with S1, S2
// = the sums of x - mean and (x - mean)^2 over the new rows, and n the rows
// then counted,
//   mean' = mean + S1 / n        M2' = M2 + S2 - S1^2 / n.
// The new rows are no more than the old ones, so S1^2 / n <= S2 / 2: there is
// no cancellation, however large the mean. The first R rows use their own mean
// for `mean`. Chunks are short (see policy_cpu.cpp), so that rounding of
// the running mean does not add up; chunks and channels are merged in double.
#pragma once

#include "native/cpu/rows.h"

namespace gn_override {
namespace {

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

} // namespace
} // namespace gn_override
