// What a block of the resident schemes keeps in shared memory, and how it gets
// there.
#pragma once

#include "native/kernels/hardware.cuh"
#include "native/kernels/tile.cuh"
#include "native/kernels/vector.cuh"

namespace gn_override {

// Brings `count` elements of a parameter to shared memory. fetch() starts the
// loads, so that they are ahead of whatever the caller starts next; store()
// waits for them and calls store_at(i, value).
template <typename T>
struct ParameterCopy {
  using Acc = Accumulator<T>;
  ParameterIn<T> parameter;
  Acc otherwise;
  int count;
  int64_t first = 0;
  typename ParameterIn<T>::Raw own = 0;

  __device__ ParameterCopy(ParameterIn<T> parameter, Acc otherwise, int count)
      : parameter(parameter), otherwise(otherwise), count(count) {}

  __device__ void fetch(int64_t from) {
    first = from;
    if (threadIdx.x < count) {
      own = parameter.fetch(first + threadIdx.x);
    }
  }

  template <typename Store>
  __device__ void store(Store store_at) const {
    if (threadIdx.x < count) {
      store_at(threadIdx.x, parameter.value_of(own, otherwise));
    }
    // More elements than threads are rare.
    for (int i = threadIdx.x + blockDim.x; i < count; i += blockDim.x) {
      store_at(i, parameter.at(first + i, otherwise));
    }
  }
};

// One operand's share of a thread, in shared memory.
template <typename T, int kVector>
struct Slab {
  Vector<T, kVector>* vectors;

  __device__ Slab(unsigned char* shared)
      : vectors(reinterpret_cast<Vector<T, kVector>*>(shared) + threadIdx.x) {}

  __device__ Vector<T, kVector>* at(int i) const {
    return vectors + i * blockDim.x;
  }

  // The pixels from `first` on.
  template <int kPixels>
  __device__ void read(int first, Vector<T, kVector> (&pixel)[kPixels]) const {
    const Vector<T, kVector>* from = at(first);
#pragma unroll
    for (int i = 0; i < kPixels; ++i) {
      pixel[i] = *from;
      from += blockDim.x;
    }
  }
};

// What the L2 cache shall keep of a thread's pixels: the `cached` before the
// last `still_there`, which are in shared memory when they are needed again.
// All others make room for them. None: the cache is left alone.
template <bool kWholeChip>
struct Retention {
  bool leads; // the cache
  uint64_t once;
  uint64_t again;
  int first;
  int last;

  __device__ Retention(int pixels, int still_there, int cached)
      : leads(cached > 0),
        once(cache_policy(Eviction::kFirst)),
        again(cache_policy(Eviction::kNormal)),
        first(pixels - still_there - cached),
        last(pixels - still_there) {}

  // Copies a pixel of a run that begins with pixel i, for the first time or the
  // second.
  template <typename T, int kVector>
  __device__ void
  copy(Vector<T, kVector>* shared, const T* global, int i, bool second) const {
    if (!kWholeChip || !leads) {
      copy_async(shared, global);
    } else {
      const bool keep = !second && i >= first && i < last;
      copy_async(shared, global, keep ? again : once);
    }
  }
};

// A thread's pixels pass through its part of the slab in batches of kPixels,
// each of which has a place there. The first batches stay in theirs; the others
// share the last kAhead places, each of which is used again once its batch has
// been. read() takes them in order; then write() takes them from the last to
// the first: what must be copied again is what was read last before, and may
// still be in the L2 cache, which has no use for what stays in place.
//
// Copies are kAhead batches ahead of their use. Each step ends one batch of
// copies, of nothing if there is nothing left to copy, so what a step waits for
// is always the kAhead-th last.
//
// With kKeepsAll each batch has a place of its own, and there is one wave.
//
// Little of this is unrolled: a small input runs each instruction once, and
// waits for many of them to be fetched.
//
// Callers give
//   copy(first, place, Pixels<n>())   starts the copies of n of the thread's
//                                     pixels to a place
//   use(first, place, Pixels<n>())    uses them
template <int kPixels, int kAhead, bool kKeepsAll>
struct Ring {
  int places; // at least kAhead, or enough for all batches
  int count; // pixels of the thread
  int batches;
  // Waves take the places in turns from either end: the next wave's first
  // batches move in while the last batches of this one are still in place.
  bool reversed = false;

  __device__ Ring(int places, int count)
      : places(places),
        count(count),
        batches((count + kPixels - 1) / kPixels) {}

  // Calls f for the pixels of a batch.
  template <typename F>
  __device__ void of_batch(int batch, bool from_end, F f) const {
    const int first = batch * kPixels;
    const int to = place(batch, from_end);
    if (count - first >= kPixels) {
      f(first, to, Pixels<kPixels>());
    } else {
      for_each_run_of_pixels<1>(count - first, [&](int i, auto pixels) {
        f(first + i, to + i, pixels);
      });
    }
  }

  // Whether the batch that starts with pixel `first` is in its place from
  // read() to write().
  __device__ bool stays(int first) const {
    const int batch = first / kPixels;
    return kKeepsAll || batch < places - kAhead || batch >= batches - kAhead;
  }

  // As the index of its first pixel.
  __device__ int place(int batch, bool from_end) const {
    if constexpr (kKeepsAll) {
      return kPixels * batch;
    }
    const int kept = places - kAhead;
    const int i = batch < kept ? batch : kept + (batch - kept) % kAhead;
    return kPixels * (from_end ? places - 1 - i : i);
  }

  // Starts the copies of the first wave that are ahead of read(): all kAhead
  // batches, or those from kFirst on that are before kEnd.
  template <int kFirst = 0, int kEnd = kAhead, typename Copy>
  __device__ void begin(Copy copy) const {
#pragma unroll 2
    for (int batch = kFirst; batch < kEnd; ++batch) {
      if (batch < batches) {
        of_batch(batch, reversed, copy);
      }
      end_batch();
    }
  }

  template <typename Copy, typename Use>
  __device__ void read(Copy copy, Use use) const {
#pragma unroll 1
    for (int batch = 0; batch < batches; ++batch) {
      wait_for_copies<kAhead - 1>();
      of_batch(batch, reversed, use);
      const int ahead = batch + kAhead;
      if (ahead < batches) {
        of_batch(ahead, reversed, copy);
      }
      end_batch();
    }
  }

  // copy_next() copies for the next wave, if there is one.
  template <typename Copy, typename CopyNext, typename Use>
  __device__ void write(bool has_next, Copy copy, CopyNext copy_next, Use use)
      const {
#pragma unroll 1
    for (int batch = has_next ? max(batches, kAhead) - 1 : batches - 1;
         batch >= 0;
         --batch) {
      wait_for_copies<kAhead - 1>();
      if (batch < batches) {
        of_batch(batch, reversed, use);
      }
      if constexpr (kKeepsAll) {
        continue;
      }
      const int again = batch - kAhead;
      const int next = kAhead - 1 - batch;
      if (again >= places - kAhead) {
        of_batch(again, reversed, copy);
      } else if (has_next && next >= 0 && next < batches) {
        of_batch(next, !reversed, copy_next);
      }
      end_batch();
    }
  }
};

} // namespace gn_override
