// Activations of the normalised X, and their derivatives.
//
// Each is Z times a gate between 0 and 1, so its derivative is gate + Z gate':
//   relu       1 where Z > 0, else 0
//   silu       sigma(Z) = 1 / (1 + e^-Z)
//   gelu       Phi(Z), the distribution function of the normal distribution
//   gelu_tanh  (1 + tanh u) / 2 = sigma(2u), u = sqrt(2/pi) (Z + 0.044715 Z^3)
// (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.)
//
// A gate near 0 is computed as such, not as 1 minus a gate near 1. Relative
// errors are a few units in the last place of float, or of double; where the
// result is rounded to two bytes, cheaper functions leave 2^-16 at most.
//
// Kernels have an activation where kFused is true. What the others do not need
// is marked "kFused alone", at the end of the line: codegen/group_norm.yaml
// takes such lines out of the change to PyTorch.
#pragma once

#include "native/kernels/hardware.cuh"
#include "native/kernels/tile.cuh"
#include "native/kernels/vector.cuh"
#include "native/plan/problem.h"

namespace gn_override {

constexpr float kLog2OfE = 1.44269504f;

// e^x
template <typename T>
__device__ __forceinline__ Accumulator<T> exponential(Accumulator<T> x) {
  if constexpr (sizeof(T) == 2) {
    return approximate_exp2(x * kLog2OfE);
  } else {
    return ::exp(x);
  }
}

// 1 / x for x >= 1 or, in float, 1 <= x < 2^126.
template <typename T>
__device__ __forceinline__ Accumulator<T> inverse(Accumulator<T> x) {
  const Accumulator<T> result = reciprocal(x);
  if constexpr (sizeof(T) == 4) { // a step of Newton's method
    return fmaf(result, fmaf(-x, result, 1.0f), result);
  } else {
    return result;
  }
}

// Replaces each x >= 1 by 1 / x. kSharing neighbours, a power of two, share a
// reciprocal, that of their product. False if one is less than 2^-126 or a NaN:
// those that share it are wrong.
template <int kSharing, int n>
__device__ __forceinline__ bool invert(float (&x)[n]) {
  bool in_range = true;
  if constexpr (kSharing == 1 || n == 1) {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      x[i] = reciprocal(x[i]);
      in_range &= x[i] > 0;
    }
  } else {
    float of_both[n / 2];
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      of_both[i] = x[2 * i] * x[2 * i + 1];
    }
    in_range = invert<kSharing / 2>(of_both);
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float first = of_both[i] * x[2 * i + 1];
      x[2 * i + 1] = of_both[i] * x[2 * i];
      x[2 * i] = first;
    }
  }
  return in_range;
}

template <typename Acc>
struct Gate {
  Acc value;
  Acc slope; // derivative
};

template <typename T>
__device__ __forceinline__ Gate<Accumulator<T>> sigmoid(Accumulator<T> z) {
  using Acc = Accumulator<T>;
  if constexpr (sizeof(T) == 2) { // the fewest instructions
    const Acc value = inverse<T>(1 + exponential<T>(-z));
    return {value, value - value * value};
  } else {
    const Acc e = exponential<T>(-::fabs(z));
    const Acc larger = inverse<T>(1 + e); // sigma(|z|)
    const Acc smaller = e * larger;
    return {z < 0 ? smaller : larger, smaller * larger};
  }
}

// Phi(-a) = e^(-a^2 / 2) t P(t) for a >= 0, with t = 1 / (1 + kPlace a): t P(t)
// is erfcx(a / sqrt 2) / 2, interpolated at Chebyshev points of t in [0, 1],
// with a relative error below 2^-24, or 2^-16 for results of two bytes.
template <typename T>
struct NormalTail {
  static constexpr float kPlace = 0.25f;
  static constexpr int kTerms = 10;
  __device__ static constexpr float coefficient(int i) {
    constexpr float values[kTerms] = {
        0.099735561f,
        0.0997373968f,
        0.0934395147f,
        0.0818896318f,
        0.0574462582f,
        0.0682739957f,
        -0.0397468634f,
        0.103798858f,
        -0.0853892299f,
        0.0208148884f};
    return values[i];
  }
};

struct NormalTailOfHalf {
  static constexpr float kPlace = 0.4f;
  static constexpr int kTerms = 7;
  __device__ static constexpr float coefficient(int i) {
    constexpr float values[kTerms] = {
        0.15957693f,
        0.159569995f,
        0.134579556f,
        0.0749288336f,
        0.0632933903f,
        -0.142684897f,
        0.050739733f};
    return values[i];
  }
};
template <>
struct NormalTail<__half> : NormalTailOfHalf {};
template <>
struct NormalTail<__nv_bfloat16> : NormalTailOfHalf {};

template <typename T>
__device__ __forceinline__ Gate<Accumulator<T>> normal(Accumulator<T> z) {
  using Acc = Accumulator<T>;
  constexpr Acc kDensity = static_cast<Acc>(0.398942280401432677940);
  // Beyond, Phi(-a) is zero; infinity would give what is not a number.
  const Acc a = ::fmin(::fabs(z), static_cast<Acc>(sizeof(T) == 8 ? 39 : 15));
  const Acc square = a * a;
  Acc e = exponential<T>(square * static_cast<Acc>(-0.5));
  if constexpr (sizeof(T) > 2) { // what rounding took from the square
    e = ::fma(e, ::fma(a, a, -square) * static_cast<Acc>(-0.5), e);
  }
  if constexpr (sizeof(T) == 8) {
    return {::normcdf(z), kDensity * e};
  } else {
    using Tail = NormalTail<T>;
    const Acc t = inverse<T>(fmaf(a, Tail::kPlace, 1.0f));
    Acc polynomial = Tail::coefficient(Tail::kTerms - 1);
#pragma unroll
    for (int i = Tail::kTerms - 2; i >= 0; --i) {
      polynomial = fmaf(polynomial, t, Tail::coefficient(i));
    }
    const Acc tail = e * (t * polynomial);
    return {z < 0 ? tail : 1 - tail, kDensity * e};
  }
}

template <Activation kActivation, typename T>
__device__ __forceinline__ Gate<Accumulator<T>> gate(Accumulator<T> z) {
  using Acc = Accumulator<T>;
  if constexpr (kActivation == Activation::kSilu) {
    return sigmoid<T>(z);
  } else if constexpr (kActivation == Activation::kGelu) {
    return normal<T>(z);
  } else {
    static_assert(kActivation == Activation::kGeluTanh);
    // 2 sqrt(2/pi), and that times 0.044715
    constexpr Acc kLinear = static_cast<Acc>(1.59576912160573071176);
    constexpr Acc kCubic = static_cast<Acc>(0.0713548162726002487764);
    const Acc square = z * z;
    Gate<Acc> result = sigmoid<T>(z * (square * kCubic + kLinear));
    result.slope *= square * (3 * kCubic) + kLinear;
    return result;
  }
}

// silu in two bytes: the number of instructions limits how fast blocks write
// it, or the special function unit, where all blocks do so at once. So Z comes
// in units in which it is the exponent, although what is above 2^128 ln 2 is
// infinite there; and neighbours may share a reciprocal.
template <Activation kActivation, typename T>
constexpr bool kIsShortSilu =
    kActivation == Activation::kSilu && sizeof(T) == 2;

template <typename T>
__device__ __forceinline__ Accumulator<T> unit_of(Activation activation) {
  return sizeof(T) == 2 && activation == Activation::kSilu ? -kLog2OfE : 1;
}

// Neighbours that do so in kernels of the whole chip, see Normalization::write:
// the product that they share is too large where their mean Z is below -21.
constexpr int kNeighbours = 4;

// Replaces each z, which is Z in its unit, by activation(Z). A NaN stays one.
// False as of invert().
template <Activation kActivation, typename T, int kSharing, int n, typename Acc>
__device__ __forceinline__ bool activate(Acc (&z)[n]) {
  if constexpr (kIsShortSilu<kActivation, T>) {
    Acc gates[n]; // 1 / of them at first, in that unit
#pragma unroll
    for (int i = 0; i < n; ++i) {
      gates[i] = kLog2OfE * approximate_exp2(z[i]) + kLog2OfE;
    }
    const bool in_range = invert<kSharing>(gates);
#pragma unroll
    for (int i = 0; i < n; ++i) {
      z[i] *= -gates[i];
    }
    return in_range;
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if constexpr (kActivation == Activation::kRelu) {
        z[i] = z[i] < 0 ? 0 : z[i];
      } else {
        z[i] *= gate<kActivation, T>(z[i]).value;
      }
    }
    return true;
  }
}

// The gradient of z, given that of activation(z). relu has none at 0.
template <Activation kActivation, typename T>
__device__ __forceinline__ Accumulator<T> differentiate(
    Accumulator<T> z,
    Accumulator<T> dy) {
  if constexpr (kActivation == Activation::kRelu) {
    return z <= 0 ? 0 : dy;
  } else {
    const auto g = gate<kActivation, T>(z);
    return dy * (z * g.slope + g.value);
  }
}

// Calls f<activation>(): a branch that all threads take alike, once for all of
// a thread's channels.
template <typename F>
__device__ __forceinline__ void with_activation(Activation activation, F f) {
  switch (activation) {
    case Activation::kIdentity:
      return;
    case Activation::kRelu:
      return f.template operator()<Activation::kRelu>();
    case Activation::kSilu:
      return f.template operator()<Activation::kSilu>();
    case Activation::kGelu:
      return f.template operator()<Activation::kGelu>();
    case Activation::kGeluTanh:
      return f.template operator()<Activation::kGeluTanh>();
  }
}

// dZ = dY: of the kernels that are not fused with an activation.
struct NoDifferentiation {
  template <typename Acc>
  __device__ Acc operator()(int, Acc, Acc, Acc dy) const {
    return dy;
  }

  template <typename F>
  __device__ void with(F f) const {
    f(*this);
  }
};

// The map X -> Z of a channel: scale = rstd gamma, and shift = beta, less scale
// mean where that is folded in.
template <typename T, typename Acc>
__device__ __forceinline__ Pair<Acc>
channel_map(Acc mean, Acc rstd, Acc gamma, Acc beta) {
  const Acc scale = gamma * rstd;
  return {scale, kFoldsMean<T> ? beta - mean * scale : beta};
}

// dZ of dY for a thread's channels; map_of(j) is (scale, shift) of its j-th.
template <typename T, typename MapOf>
struct Differentiation {
  using Acc = Accumulator<T>;
  Activation activation;
  MapOf map_of;

  // Calls f(dZ_of) with dZ_of(j, x, x - mean, dy).
  template <typename F>
  __device__ void with(F f) const {
    with_activation(activation, [&]<Activation kActivation>() {
      f([&](int j, Acc x, Acc centred, Acc dy) {
        const Pair<Acc> map = map_of(j);
        const Acc z = (kFoldsMean<T> ? x : centred) * map.first + map.second;
        return differentiate<kActivation, T>(z, dy);
      });
    });
  }
};

template <bool kFused, typename T, typename MapOf>
__device__ __forceinline__ auto differentiation_of(
    Activation activation,
    MapOf map_of) {
  if constexpr (kFused) {
    return Differentiation<T, MapOf>{activation, map_of};
  } else {
    return NoDifferentiation();
  }
}

} // namespace gn_override
