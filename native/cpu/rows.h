// How the kernels go through the rows of a chunk, ask for those to come, and
// write an output.
//
//   X, Y, dY, dX   rows of C elements; `width` = elements of a (folded) row
//   A              accumulator type, V its vector, kLanes<T> elements of V
//   loops over a row are over whole vectors, then once with kTail = true for
//   the n < kLanes<T> elements that are left
//   rows are taken R at a time, so that R loads and sums of a column are in
//   flight and the arrays of accumulators are touched once for R rows
//   sums over rows have one order, whatever the number of threads
#pragma once

#include "native/cpu/kernels.h"
#include "native/cpu/vector.h"

namespace gn_override {
namespace {

using cpu::Chunk;

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

// map<R, kStream>(at, n, ahead) for the n elements from `at` on of the chunk's
// rows, R rows at once, and of what the fold leaves over, which is shorter.
template <int kRows, typename T, typename Map>
inline void map_chunk(Chunk chunk, const T* output, Map map) {
  const int64_t width = chunk.fold * chunk.C;
  const int64_t rows = chunk.rows / chunk.fold;
  const auto run = [&]<bool kStream>() {
    for_rows<kRows>(0, rows, [&]<int R>(int64_t row) {
      map.template operator()<R, kStream>(row * width, width, chunk.ahead);
    });
  };
  if (can_stream(chunk, output, width)) {
    run.template operator()<true>();
    end_streaming();
  } else {
    run.template operator()<false>();
  }
  const int64_t at = rows * width;
  map.template operator()<1, false>(at, chunk.rows * chunk.C - at, 0);
}

} // namespace
} // namespace gn_override
