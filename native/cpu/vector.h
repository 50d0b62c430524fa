// Vectors of one instruction set: what kernels_impl.h needs, and no more.
//
// Included only by the kernels_*.cpp files, each compiled with its own flags.
// Everything is in an unnamed namespace, and nothing here or in kernels_impl.h
// calls an inline function of another header (std:: included): the linker keeps
// one copy of such a function for all files, and if that were the AVX-512 one,
// a machine without AVX-512 would execute it.
//
// GCC's vector extension gives arithmetic, comparison and ?: on vectors of any
// width; intrinsics serve fused multiply-add, half and partial loads and stores.
#pragma once

#include <cstdint>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace gn_override {
namespace {

#if defined(__AVX512F__)
#define GN_OVERRIDE_VECTOR_BYTES 64
#elif defined(__AVX2__)
#define GN_OVERRIDE_VECTOR_BYTES 32
#else
#define GN_OVERRIDE_VECTOR_BYTES 16
#endif

constexpr int64_t kVectorBytes = GN_OVERRIDE_VECTOR_BYTES;

typedef float FloatVector __attribute__((vector_size(kVectorBytes)));
typedef double DoubleVector __attribute__((vector_size(kVectorBytes)));
typedef int32_t Int32Vector __attribute__((vector_size(kVectorBytes)));
typedef int64_t Int64Vector __attribute__((vector_size(kVectorBytes)));
typedef uint32_t UInt32Vector __attribute__((vector_size(kVectorBytes)));
typedef uint16_t UInt16Vector __attribute__((vector_size(kVectorBytes / 2)));
typedef float HalfFloatVector __attribute__((vector_size(kVectorBytes / 2)));

// Storage formats of 16 bits; arithmetic is in float.
struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// Accumulator: the type that the elements of a tensor of T are computed in.
template <typename T>
struct AccumulatorOf {
  using Type = float;
};
template <>
struct AccumulatorOf<double> {
  using Type = double;
};
template <typename T>
using Accumulator = typename AccumulatorOf<T>::Type;

template <typename A>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Type = FloatVector;
  using Mask = Int32Vector;
};
template <>
struct VectorOf<double> {
  using Type = DoubleVector;
  using Mask = Int64Vector;
};
template <typename A>
using Vector = typename VectorOf<A>::Type;
template <typename A>
using Mask = typename VectorOf<A>::Mask;

// Elements of a vector of accumulators.
template <typename T>
constexpr int64_t kLanes =
    kVectorBytes / static_cast<int64_t>(sizeof(Accumulator<T>));

template <typename V, typename T>
inline V load_bits(const T* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

// a * b + c, rounded once where the instruction set has it.
inline FloatVector fma(FloatVector a, FloatVector b, FloatVector c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline DoubleVector fma(DoubleVector a, DoubleVector b, DoubleVector c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

template <typename V, typename S>
inline V broadcast(S value) {
  return V{} + value;
}

inline FloatVector widen(UInt16Vector bits, BFloat16) {
  const auto wide = __builtin_convertvector(bits, UInt32Vector);
  return (FloatVector)(wide << 16);
}

// Round to nearest, ties to even; every NaN becomes the quiet one.
inline UInt16Vector narrow(FloatVector v, BFloat16) {
  const auto bits = (UInt32Vector)v;
  const UInt32Vector rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const UInt32Vector nan = UInt32Vector{} + 0x7fc0u;
  return __builtin_convertvector(v == v ? rounded : nan, UInt16Vector);
}

#if defined(__AVX512F__)
// All-ones masks: the forms without a mask make GCC 12 warn of its own headers.
inline FloatVector widen(UInt16Vector bits, Half) {
  return _mm512_maskz_cvtph_ps(0xffff, (__m256i)bits);
}
inline UInt16Vector narrow(FloatVector v, Half) {
  return (UInt16Vector)_mm512_maskz_cvtps_ph(
      0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif defined(__F16C__)
inline FloatVector widen(UInt16Vector bits, Half) {
  return _mm256_cvtph_ps((__m128i)bits);
}
inline UInt16Vector narrow(FloatVector v, Half) {
  return (UInt16Vector)_mm256_cvtps_ph(
      v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#else
// Exponent and fraction move to float's places; the product with 2^112 then
// corrects the exponent's bias, and makes subnormals normal.
inline FloatVector widen(UInt16Vector bits, Half) {
  const auto wide = __builtin_convertvector(bits, UInt32Vector);
  const UInt32Vector sign = (wide & 0x8000u) << 16;
  const UInt32Vector magnitude = (wide & 0x7fffu) << 13;
  const auto scaled = (UInt32Vector)((FloatVector)magnitude * 0x1p112f);
  const UInt32Vector special = magnitude | 0x7f800000u;
  return (FloatVector)(sign | (magnitude < 0x0f800000u ? scaled : special));
}

inline UInt16Vector narrow(FloatVector v, Half) {
  const auto bits = (UInt32Vector)v;
  const UInt32Vector sign = (bits >> 16) & 0x8000u;
  const UInt32Vector magnitude = bits & 0x7fffffffu;
  // Normal numbers: rebias the exponent, round to nearest even in the carry. A
  // carry out of the largest one gives infinity, as it should.
  const UInt32Vector normal =
      (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal ones: the unit in the last place of [0.5, 1) is that of half's
  // subnormals, so the addition rounds.
  const auto shifted = (UInt32Vector)((FloatVector)magnitude + 0.5f);
  const UInt32Vector subnormal = shifted - 0x3f000000u;
  const UInt32Vector infinity = UInt32Vector{} + 0x7c00u;
  const UInt32Vector nan = UInt32Vector{} + 0x7e00u;
  UInt32Vector result = magnitude < 0x38800000u ? subnormal : normal;
  result = magnitude >= 0x47800000u ? infinity : result;
  result = magnitude > 0x7f800000u ? nan : result;
  return __builtin_convertvector(sign | result, UInt16Vector);
}
#endif

// Full vectors, of any alignment.
inline FloatVector load(const float* p) {
  return load_bits<FloatVector>(p);
}
inline DoubleVector load(const double* p) {
  return load_bits<DoubleVector>(p);
}
template <typename T>
inline FloatVector load(const T* p) {
  return widen(load_bits<UInt16Vector>(p), T{});
}

inline void store(float* p, FloatVector v) {
  __builtin_memcpy(p, &v, sizeof(v));
}
inline void store(double* p, DoubleVector v) {
  __builtin_memcpy(p, &v, sizeof(v));
}
template <typename T>
inline void store(T* p, FloatVector v) {
  const UInt16Vector bits = narrow(v, T{});
  __builtin_memcpy(p, &bits, sizeof(bits));
}

// The first n elements, 0 < n < lanes; nothing after them is touched, and the
// other lanes are zero.
#if defined(__AVX512F__)
inline FloatVector load_first(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << n) - 1), p);
}
inline DoubleVector load_first(const double* p, int64_t n) {
  return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1 << n) - 1), p);
}
template <typename T>
inline FloatVector load_first(const T* p, int64_t n) {
  const auto mask = static_cast<__mmask16>((1 << n) - 1);
  return widen((UInt16Vector)_mm256_maskz_loadu_epi16(mask, p), T{});
}
inline void store_first(float* p, int64_t n, FloatVector v) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1 << n) - 1), v);
}
inline void store_first(double* p, int64_t n, DoubleVector v) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1 << n) - 1), v);
}
template <typename T>
inline void store_first(T* p, int64_t n, FloatVector v) {
  const auto mask = static_cast<__mmask16>((1 << n) - 1);
  _mm256_mask_storeu_epi16(p, mask, (__m256i)narrow(v, T{}));
}
#else
template <typename T>
inline Vector<Accumulator<T>> load_first(const T* p, int64_t n) {
  T all[kLanes<T>] = {};
  for (int64_t i = 0; i < n; ++i) {
    all[i] = p[i];
  }
  return load(all);
}
template <typename T>
inline void store_first(T* p, int64_t n, Vector<Accumulator<T>> v) {
  T all[kLanes<T>];
  store(all, v);
  for (int64_t i = 0; i < n; ++i) {
    p[i] = all[i];
  }
}
#endif

// n elements with n <= lanes. kTail says at compile time which case is meant.
template <bool kTail, typename T>
inline Vector<Accumulator<T>> load(const T* p, int64_t n) {
  if constexpr (kTail) {
    return load_first(p, n);
  } else {
    return load(p);
  }
}
template <bool kTail, typename T>
inline void store(T* p, int64_t n, Vector<Accumulator<T>> v) {
  if constexpr (kTail) {
    store_first(p, n, v);
  } else {
    store(p, v);
  }
}

// kLanes<double> accumulators, as doubles.
inline DoubleVector load_double(const double* p) {
  return load(p);
}
inline DoubleVector load_double(const float* p) {
  return __builtin_convertvector(load_bits<HalfFloatVector>(p), DoubleVector);
}
inline void store_double(double* p, DoubleVector v) {
  store(p, v);
}
inline void store_double(float* p, DoubleVector v) {
  const auto narrowed = __builtin_convertvector(v, HalfFloatVector);
  __builtin_memcpy(p, &narrowed, sizeof(narrowed));
}

// One element.
template <typename T>
inline Accumulator<T> load_one(const T* p) {
  return load_first(p, 1)[0];
}
template <typename T>
inline void store_one(T* p, Accumulator<T> value) {
  store_first(p, 1, broadcast<Vector<Accumulator<T>>>(value));
}

} // namespace
} // namespace gn_override
