// Vectors of one instruction set: what the kernels need, and no more.
//
// Included only by the kernels_*.cpp files, each compiled with its own flags,
// through make_kernels.h. All that this file and those above it define is in an
// unnamed namespace, and nothing in them calls an inline function of another
// header (std:: included): the linker keeps one copy of such a function for all
// files, and if that were the AVX-512 one, a machine without AVX-512 would
// execute it.
//
// GCC's vector extension gives arithmetic, comparison and ?: on vectors of any
// width; intrinsics serve fused multiply-add, half and partial loads and
// stores.
#pragma once

#include <cstdint>

#if defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

namespace gn_override {
namespace {

#if defined(__AVX512F__)
constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int64_t kVectorBytes = 32;
#else
constexpr int64_t kVectorBytes = 16;
#endif

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

// v, but every NaN the default one, so that rounding to fewer bits cannot make
// it a number: it may carry out of other payloads.
template <typename V>
inline V without_payload(V v) {
  return v == v ? v : V{} + __builtin_nanf("");
}

// 16-bit integers to the low halves of 32-bit ones and back, where no other
// instruction is for them. Intrinsics, since GCC 12 takes
// __builtin_convertvector apart into smaller vectors.
#if !defined(__AVX512F__)
inline UInt32Vector load_bits(const uint16_t* p) {
#if defined(__AVX2__)
  return (UInt32Vector)_mm256_cvtepu16_epi32(
      _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__SSE2__)
  return (UInt32Vector)_mm_unpacklo_epi16(
      _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)),
      _mm_setzero_si128());
#else
  UInt16Vector v;
  __builtin_memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, UInt32Vector);
#endif
}

inline void store_bits(uint16_t* p, UInt32Vector v) {
#if defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)v, (__m256i)v);
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
#elif defined(__SSE2__)
  // The pack saturates signed numbers: extend the sign of the low half first.
  const __m128i low = _mm_srai_epi32(_mm_slli_epi32((__m128i)v, 16), 16);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi32(low, low));
#else
  const auto narrowed = __builtin_convertvector(v, UInt16Vector);
  __builtin_memcpy(p, &narrowed, sizeof(narrowed));
#endif
}
#endif

// Full vectors, of any alignment.
inline FloatVector load(const float* p) {
  FloatVector v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
inline void store(float* p, FloatVector v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

inline DoubleVector load(const double* p) {
  DoubleVector v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
inline void store(double* p, DoubleVector v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

// A bfloat16 is the high half of a float's bits; rounding is to nearest, ties
// to even. A NaN stays one, as the low half of its bits is zero: see
// without_payload().
#if defined(__AVX512F__)
typedef uint16_t WordVector __attribute__((vector_size(64)));

// A permutation of 16-bit words moves the bits of a vector up, another one
// down. Intrinsics of AVX-512 have all-ones masks, here and below: GCC 12 warns
// of its own headers in the others.
inline FloatVector load(const BFloat16* p) {
  constexpr WordVector kPlaces = {0, 0,  0, 1,  0, 2,  0, 3,  0, 4, 0,
                                  5, 0,  6, 0,  7, 0,  8, 0,  9, 0, 10,
                                  0, 11, 0, 12, 0, 13, 0, 14, 0, 15};
  const auto words = _mm512_castsi256_si512(
      _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return (FloatVector)_mm512_maskz_permutexvar_epi16(
      0xaaaaaaaa, (__m512i)kPlaces, words);
}
inline void store(BFloat16* p, FloatVector v) {
  constexpr WordVector kPlaces = {
      1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
  const auto bits = (__m512i)v;
  const __mmask16 odd =
      _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
  const __m512i rounded = _mm512_mask_add_epi32(
      _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)),
      odd,
      bits,
      _mm512_set1_epi32(0x8000));
  const __m512i words =
      _mm512_maskz_permutexvar_epi16(~0u, (__m512i)kPlaces, rounded);
  __builtin_memcpy(p, &words, sizeof(words) / 2);
}
#else
inline FloatVector load(const BFloat16* p) {
  return (FloatVector)(load_bits(&p->bits) << 16);
}
inline void store(BFloat16* p, FloatVector v) {
  const auto bits = (UInt32Vector)v;
  store_bits(&p->bits, (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
#endif

#if defined(__AVX512F__)
inline FloatVector load(const Half* p) {
  return _mm512_maskz_cvtph_ps(
      0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline void store(Half* p, FloatVector v) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(p),
      _mm512_maskz_cvtps_ph(
          0xffff, v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#elif defined(__AVX2__)
inline FloatVector load(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline void store(Half* p, FloatVector v) {
  _mm_storeu_si128(
      reinterpret_cast<__m128i*>(p),
      _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
#else
// Exponent and fraction move to float's places, and the exponent gets its bias.
// A subnormal is so many units in the last place of [0.5, 1): no float is
// subnormal here, which a processor may be told to take for 0.
inline FloatVector load(const Half* p) {
  const auto bits = (Int32Vector)load_bits(&p->bits);
  const Int32Vector sign = (bits & 0x8000) << 16;
  const Int32Vector half = bits & 0x7fff;
  const Int32Vector normal = (half << 13) + (112 << 23);
  const auto subnormal = (Int32Vector)((FloatVector)(half | 0x3f000000) - 0.5f);
  const Int32Vector special = (half << 13) | 0x7f800000;
  const Int32Vector finite = half < 0x400 ? subnormal : normal;
  return (FloatVector)(sign | (half < 0x7c00 ? finite : special));
}
inline void store(Half* p, FloatVector v) {
  const auto bits = (Int32Vector)v;
  const Int32Vector sign = (bits >> 16) & 0x8000;
  const Int32Vector magnitude = bits & 0x7fffffff;
  // Normal numbers: rebias the exponent, round to nearest even in the carry. A
  // carry out of the largest one gives infinity, as it should. Unsigned: what
  // is not normal, and is not used, wraps around.
  const auto even = (UInt32Vector)(magnitude >> 13) & 1;
  const auto normal =
      (Int32Vector)(((UInt32Vector)magnitude - (112u << 23) + 0xfff + even) >>
                    13);
  // Subnormal ones: the unit in the last place of [0.5, 1) is that of half's
  // subnormals, so the addition rounds.
  const auto shifted = (Int32Vector)((FloatVector)magnitude + 0.5f);
  const Int32Vector infinity = Int32Vector{} + 0x7c00;
  const Int32Vector nan = Int32Vector{} + 0x7e00;
  Int32Vector result = magnitude < 0x38800000 ? shifted - 0x3f000000 : normal;
  result = magnitude >= 0x47800000 ? infinity : result;
  result = magnitude > 0x7f800000 ? nan : result;
  store_bits(&p->bits, (UInt32Vector)(sign | result));
}
#endif

// Stores past the caches, of vectors that are whole lines: p is aligned.
template <typename T>
constexpr bool kCanStream = kLanes<T> * sizeof(T) == 64;

#if defined(__AVX512F__)
inline void store_streaming(float* p, FloatVector v) {
  _mm512_stream_ps(p, v);
}
inline void store_streaming(double* p, DoubleVector v) {
  _mm512_stream_pd(p, v);
}
#endif

// Before other threads may read what was streamed.
inline void end_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// The first n elements, 0 < n < lanes; nothing after them is touched, and the
// other lanes are zero.
#if defined(__AVX512F__)
inline FloatVector load_first(const float* p, int64_t n) {
  return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1 << n) - 1), p);
}
inline void store_first(float* p, int64_t n, FloatVector v) {
  _mm512_mask_storeu_ps(p, static_cast<__mmask16>((1 << n) - 1), v);
}
inline DoubleVector load_first(const double* p, int64_t n) {
  return _mm512_maskz_loadu_pd(static_cast<__mmask8>((1 << n) - 1), p);
}
inline void store_first(double* p, int64_t n, DoubleVector v) {
  _mm512_mask_storeu_pd(p, static_cast<__mmask8>((1 << n) - 1), v);
}
// Halves and bfloat16s: a masked copy of their bits.
template <typename T>
inline FloatVector load_first(const T* p, int64_t n) {
  const auto mask = static_cast<__mmask16>((1 << n) - 1);
  T all[kLanes<T>];
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(all), _mm256_maskz_loadu_epi16(mask, p));
  return load(all);
}
template <typename T>
inline void store_first(T* p, int64_t n, FloatVector v) {
  const auto mask = static_cast<__mmask16>((1 << n) - 1);
  T all[kLanes<T>];
  store(all, v);
  _mm256_mask_storeu_epi16(
      p, mask, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(all)));
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
#if defined(__AVX512F__)
  return _mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(p));
#elif defined(__AVX2__)
  return _mm256_cvtps_pd(_mm_loadu_ps(p));
#else
  HalfFloatVector v;
  __builtin_memcpy(&v, p, sizeof(v));
  return __builtin_convertvector(v, DoubleVector);
#endif
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
