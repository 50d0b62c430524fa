// Element types, vectors of up to 16 bytes, and their loads and stores.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "native/kernels/hardware.cuh"
#include "native/plan/problem.h"

namespace gn_override {

// X and dX are of T, Y and dY of TY: T itself or, where T is half or bfloat16,
// float. What is computed is as accurate as TY can show.

// The type that sums are kept in.
template <typename T>
using Accumulator =
    std::conditional_t<std::is_same_v<T, double>, double, float>;

// Whether a (X - mean) + b may be computed as a X + (b - a mean), for results
// of T, as PyTorch's channels-last kernels do for all. That cancels where
// |mean| is large against the deviation, and is off by up to 2^-24 |a mean|.
// Two-byte values that differ do so by 2^-11 of them or more: it is below the
// rounding of two-byte results unless nearly all of a group are equal.
template <typename T>
constexpr bool kFoldsMean = sizeof(T) == 2;

template <typename T>
__device__ __forceinline__ Accumulator<T> widen(T value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half2float(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __bfloat162float(value);
  } else {
    return value;
  }
}

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T narrow(Accumulator<T> value) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(value);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(value);
  } else {
    return value;
  }
}

// A pair of accumulators that travels through memory in one access.
template <typename Acc>
struct alignas(2 * sizeof(Acc)) Pair {
  Acc first;
  Acc second;
};

// kVector consecutive channels of one pixel.
template <typename T, int kVector>
struct alignas(sizeof(T) * kVector) Vector {
  T channel[kVector];

  // Channel j, widened. Of two bfloat16 in a word, one is what a shift leaves
  // of it and the other what a mask does; the compiler takes the latter in two
  // steps.
  __device__ Accumulator<T> operator[](int j) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16> && kVector % 2 == 0) {
      uint32_t pair;
      memcpy(&pair, &channel[j & ~1], sizeof(pair));
      return __uint_as_float(j % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
    } else {
      return widen(channel[j]);
    }
  }
};

// gamma, beta, mean, rstd and their gradients have Y's dtype or, where Y is
// half or bfloat16, may be float. They are touched once a thread, so a branch
// is cheaper than twice the kernels.
template <typename T>
struct ParameterIn {
  const void* data; // null: every element is `otherwise`
  bool is_float;

  ParameterIn(const void* data, DType dtype)
      : data(data), is_float(dtype == DType::kFloat) {}

  using Raw = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, Raw>;

  // Element i as it stands in memory, for value_of(): nothing waits for the
  // load before that.
  __device__ Raw fetch(int64_t i) const {
    if (data == nullptr) {
      return 0;
    }
    if constexpr (sizeof(T) == 2) {
      if (is_float) {
        return static_cast<const uint32_t*>(data)[i];
      }
    }
    return static_cast<const Bits*>(data)[i];
  }

  __device__ Accumulator<T> value_of(Raw raw, Accumulator<T> otherwise) const {
    if (data == nullptr) {
      return otherwise;
    }
    if constexpr (sizeof(T) == 2) {
      if (is_float) {
        return __uint_as_float(raw);
      }
    }
    T value;
    memcpy(&value, &raw, sizeof(T)); // little-endian
    return widen(value);
  }

  __device__ Accumulator<T> at(int64_t i, Accumulator<T> otherwise) const {
    return value_of(fetch(i), otherwise);
  }
};

template <typename T>
struct ParameterOut {
  void* data; // null: not wanted
  bool is_float;

  ParameterOut(void* data, DType dtype)
      : data(data), is_float(dtype == DType::kFloat) {}

  __device__ void set(int64_t i, Accumulator<T> value) const {
    if constexpr (sizeof(T) == 2) {
      if (is_float) {
        static_cast<float*>(data)[i] = value;
        return;
      }
    }
    static_cast<T*>(data)[i] = narrow<T>(value);
  }
};

template <int kBytes>
struct Word;
template <>
struct Word<16> {
  using type = uint4;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<4> {
  using type = unsigned int;
};
template <>
struct Word<2> {
  using type = unsigned short;
};

template <typename T, int kVector>
__device__ __forceinline__ Vector<T, kVector> load(const T* address) {
  using W = typename Word<sizeof(T) * kVector>::type;
  const W word = *reinterpret_cast<const W*>(address);
  Vector<T, kVector> result;
  memcpy(&result, &word, sizeof(word));
  return result;
}

// The first `pixels` of kPixels pixels, `step` elements apart.
template <typename T, int kVector, int kPixels>
__device__ __forceinline__ void load_pixels(
    const T* address,
    int64_t step,
    Vector<T, kVector> (&pixel)[kPixels],
    int pixels = kPixels) {
#pragma unroll
  for (int i = 0; i < kPixels; ++i) {
    if (i < pixels) {
      pixel[i] = load<T, kVector>(address);
    }
    address += step;
  }
}

// Results are never read by our own kernels: always a streaming store.
template <typename T, int kVector>
__device__ __forceinline__ void store(
    T* address,
    const Vector<T, kVector>& value) {
  using W = typename Word<sizeof(T) * kVector>::type;
  W word;
  memcpy(&word, &value, sizeof(word));
  __stcs(reinterpret_cast<W*>(address), word);
}

// A vector as it stands in memory: nothing waits for its load before this.
template <typename T, int kVector>
__device__ __forceinline__ Vector<T, kVector> unpack(uint4 word) {
  Vector<T, kVector> result;
  static_assert(sizeof(result) == sizeof(word));
  memcpy(&result, &word, sizeof(word));
  return result;
}

template <typename T, int kVector>
__device__ __forceinline__ Vector<T, kVector> unpack(
    const Vector<T, kVector>& vector) {
  return vector;
}

// Rounds kVector accumulators; pairs of halves take one instruction.
template <typename T, int kVector>
__device__ __forceinline__ Vector<T, kVector> narrow_all(
    const Accumulator<T> (&value)[kVector]) {
  Vector<T, kVector> result;
  if constexpr (sizeof(T) == 2 && kVector % 2 == 0) {
#pragma unroll
    for (int j = 0; j < kVector; j += 2) {
      if constexpr (std::is_same_v<T, __half>) {
        const __half2 pair = __floats2half2_rn(value[j], value[j + 1]);
        memcpy(&result.channel[j], &pair, sizeof(pair));
      } else {
        const __nv_bfloat162 pair =
            __floats2bfloat162_rn(value[j], value[j + 1]);
        memcpy(&result.channel[j], &pair, sizeof(pair));
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < kVector; ++j) {
      result.channel[j] = narrow<T>(value[j]);
    }
  }
  return result;
}

// 1 / value of one that is not near 0, to within a unit in the last place.
__device__ __forceinline__ float reciprocal(float value) {
  return approximate_reciprocal(value);
}

__device__ __forceinline__ double reciprocal(double value) {
  return 1 / value;
}

__device__ __forceinline__ float reciprocal_sqrt(float value) {
  return __frsqrt_rn(value);
}

__device__ __forceinline__ double reciprocal_sqrt(double value) {
  return 1 / ::sqrt(value); // more accurate than rsqrt()
}

} // namespace gn_override
