// Activations of the normalised X, and their derivatives, on vectors.
//
// Each is Z times a gate between 0 and 1, so its derivative is gate + Z gate':
//   relu       1 where Z > 0, else 0
//   silu       sigma(Z) = 1 / (1 + e^-Z)
//   gelu       Phi(Z), the distribution function of the normal distribution
//   gelu_tanh  (1 + tanh u) / 2 = sigma(2u), u = sqrt(2/pi) (Z + 0.044715 Z^3)
// (Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016.)
//
// Exponentials are of numbers that are not positive, and a gate near 0 is
// computed as such, not as 1 minus a gate near 1. So relative errors are a few
// units in the last place all the way down of silu and, where there is a fused
// multiply-add, of gelu (see `lost` in normal()). Elsewhere an error of the
// exponential's argument comes from its rounding: of so many units as the
// argument is large, 2u for gelu_tanh, Z^2 / 2 for gelu. That is a hundred of
// them in float and 700 in double, where the gate is next to nothing.
//
// Their functions are inlined by force: GCC leaves some to a call when the file
// has grown by others, and a call for each vector is slow.
#pragma once

#include "native/cpu/vector.h"
#include "native/plan/problem.h"

namespace gn_override {
namespace {

// Constants of the functions below in a type of elements.
template <typename A>
struct Constants;

template <>
struct Constants<float> {
  static constexpr int kFractionBits = 23;
  // Adding it rounds to an integer, which then is in the last bits.
  static constexpr float kRound = 0x1.8p23f;
  static constexpr float kExponentBias = 127;
  static constexpr float kLeastExponent = -100; // of one factor, see exp
  static constexpr float kLeastArgument = -104; // e^x is zero below
  // ln 2, its head of so few bits that products with exponents are exact.
  static constexpr float kLn2Head = 0x1.63p-1f;
  static constexpr float kLn2Rest = -0x1.bd0106p-13f;
  static constexpr int kExpTerms = 8;
  static constexpr float kMostNormal = 15; // Phi(-z) is zero above
  static constexpr float kTailPlace = 0.25f;
  static constexpr float kTail[] = {
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
};

template <>
struct Constants<double> {
  static constexpr int kFractionBits = 52;
  static constexpr double kRound = 0x1.8p52;
  static constexpr double kExponentBias = 1023;
  static constexpr double kLeastExponent = -1000;
  static constexpr double kLeastArgument = -746;
  static constexpr double kLn2Head = 0x1.62e42feep-1;
  static constexpr double kLn2Rest = 0x1.a39ef35793c76p-33;
  static constexpr int kExpTerms = 14;
  static constexpr double kMostNormal = 39;
  static constexpr double kTailPlace = 0.2;
  static constexpr double kTail[] = {
      0.079788456080286535,  0.079788456080286729,   0.076596917837028849,
      0.070213841355389633,  0.061022210953057682,   0.049788004904119942,
      0.037583380641327116,  0.025636930239475105,   0.015085300216189293,
      0.0071050584972254622, 0.00032174633828284448, 0.0038605626449119139,
      -0.020076890917692113, 0.048901694108663081,   -0.10997415719857462,
      0.18856767048297493,   -0.25040863823996057,   0.25594064162503793,
      -0.19250987113973225,  0.10149056154743828,    -0.035360895169039563,
      0.0073240490010920188, -0.00068502988778825966};
};

// 1 / n! for n < 14.
constexpr double kInverseFactorials[] = {
    1.0,
    1.0,
    1.0 / 2,
    1.0 / 6,
    1.0 / 24,
    1.0 / 120,
    1.0 / 720,
    1.0 / 5040,
    1.0 / 40320,
    1.0 / 362880,
    1.0 / 3628800,
    1.0 / 39916800,
    1.0 / 479001600,
    1.0 / 6227020800};

// 2^n for integers n that are exponents of normal numbers.
template <typename A>
inline Vector<A> power_of_two(Vector<A> n) {
  using K = Constants<A>;
  const Vector<A> biased = n + (K::kRound + K::kExponentBias);
  return (Vector<A>)((Mask<A>)biased << K::kFractionBits);
}

// e^x for x <= 0, to within two units in the last place: 2^n e^r with n an
// integer and |r| <= ln 2 / 2, where Taylor's series is short. 2^n is two
// factors, since n goes below the exponents of normal numbers.
template <typename A>
__attribute__((always_inline)) inline Vector<A> exp_of_negative(Vector<A> x) {
  using K = Constants<A>;
  using V = Vector<A>;
  constexpr A kLog2E = static_cast<A>(1.44269504088896340736);
  const V least = broadcast<V>(K::kLeastArgument);
  x = x < least ? least : x;
  const V n = fma(x, broadcast<V>(kLog2E), broadcast<V>(K::kRound)) - K::kRound;
  V r = fma(n, broadcast<V>(-K::kLn2Head), x);
  r = fma(n, broadcast<V>(-K::kLn2Rest), r);
  V sum = broadcast<V>(static_cast<A>(kInverseFactorials[K::kExpTerms - 1]));
#pragma GCC unroll 16
  for (int i = K::kExpTerms - 2; i >= 0; --i) {
    sum = fma(sum, r, broadcast<V>(static_cast<A>(kInverseFactorials[i])));
  }
  const V least_exponent = broadcast<V>(K::kLeastExponent);
  const V first = n < least_exponent ? least_exponent : n;
  return sum * power_of_two<A>(first) * power_of_two<A>(n - first);
}

template <typename V>
inline V absolute(V x) {
  return x < V{} ? -x : x;
}

template <typename A>
struct Gate {
  Vector<A> value;
  Vector<A> slope; // derivative
};

template <typename A>
__attribute__((always_inline)) inline Gate<A> sigmoid(Vector<A> z) {
  const Vector<A> e = exp_of_negative<A>(-absolute(z));
  const Vector<A> larger = A(1) / (e + A(1)); // sigma(|z|)
  const Vector<A> smaller = e * larger;
  return {z < Vector<A>{} ? smaller : larger, smaller * larger};
}

// Phi(-a) = e^(-a^2 / 2) t P(t) for a >= 0, with t = 1 / (1 + kTailPlace a) and
// P a polynomial, of coefficients kTail: t P(t) is erfcx(a / sqrt 2) / 2,
// interpolated at Chebyshev points of t in [0, 1]; its relative error is below
// 2^-24 in float and 2^-54 in double.
template <typename A>
__attribute__((always_inline)) inline Gate<A> normal(Vector<A> z) {
  using K = Constants<A>;
  using V = Vector<A>;
  constexpr A kDensity = static_cast<A>(0.398942280401432677940); // 1/sqrt 2pi
  constexpr int kTerms = sizeof(K::kTail) / sizeof(A);
  const V most = broadcast<V>(K::kMostNormal);
  const V size = absolute(z);
  const V a = size < most ? size : most;
  const V square = a * a;
  const V lost = fma(a, a, -square); // to rounding
  V e = exp_of_negative<A>(square * A(-0.5));
  e = fma(e, lost * A(-0.5), e);
  const V t = A(1) / fma(a, broadcast<V>(K::kTailPlace), broadcast<V>(A(1)));
  V polynomial = broadcast<V>(K::kTail[kTerms - 1]);
#pragma GCC unroll 32
  for (int i = kTerms - 2; i >= 0; --i) {
    polynomial = fma(polynomial, t, broadcast<V>(K::kTail[i]));
  }
  const V tail = e * (t * polynomial);
  return {z < V{} ? tail : A(1) - tail, e * kDensity};
}

template <Activation kActivation, typename A>
__attribute__((always_inline)) inline Gate<A> gate(Vector<A> z) {
  if constexpr (kActivation == Activation::kSilu) {
    return sigmoid<A>(z);
  } else if constexpr (kActivation == Activation::kGelu) {
    return normal<A>(z);
  } else {
    static_assert(kActivation == Activation::kGeluTanh);
    constexpr A kLinear =
        static_cast<A>(1.59576912160573071176); // 2 sqrt(2/pi)
    constexpr A kCubic = static_cast<A>(0.0713548162726002487764); // * 0.044715
    const Vector<A> square = z * z;
    const Vector<A> factor = square * kCubic + kLinear;
    Gate<A> result = sigmoid<A>(z * factor);
    result.slope *= square * (3 * kCubic) + kLinear;
    return result;
  }
}

// Calls f<activation>(). The switch is outside of the loops over vectors, which
// hide each other's latency.
template <typename F>
inline void with_activation(Activation activation, F f) {
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

// z = activation(z). A NaN stays one.
template <typename A, int R>
inline void activate(Activation activation, Vector<A> (&z)[R]) {
  with_activation(activation, [&]<Activation kActivation>() {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if constexpr (kActivation == Activation::kRelu) {
        z[r] = z[r] < Vector<A>{} ? Vector<A>{} : z[r];
      } else {
        z[r] *= gate<kActivation, A>(z[r]).value;
      }
    }
  });
}

// dy, the gradient of activation(z), becomes that of z. relu has none at 0.
template <typename A, int R>
inline void differentiate(
    Activation activation,
    const Vector<A> (&z)[R],
    Vector<A> (&dy)[R]) {
  with_activation(activation, [&]<Activation kActivation>() {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      if constexpr (kActivation == Activation::kRelu) {
        dy[r] = z[r] <= Vector<A>{} ? Vector<A>{} : dy[r];
      } else {
        const Gate<A> g = gate<kActivation, A>(z[r]);
        dy[r] *= z[r] * g.slope + g.value;
      }
    }
  });
}

} // namespace
} // namespace gn_override
