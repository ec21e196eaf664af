// Vectors of one instruction set, for files that define ATTNSPAN_SET, its name, before they include this.
//
// Everything is in a namespace of that name, and no inline function or template of the standard library
// is used behind it: the linker keeps one copy of each, and must not keep one that other machines can't
// run. Operators come with the compiler's vector types; what they don't say (a fused multiply-add, a
// maximum that lets NaN through, a broadcast that stays a broadcast) is spelled out.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "half.h"

namespace attnspan {
namespace ATTNSPAN_SET {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__ARM_NEON)
constexpr int kVectorBytes = 16;
#else
constexpr int kVectorBytes = 32;  // the scalar twin too: its vectors are loops for the compiler
#endif

#define ATTNSPAN_INLINE inline __attribute__((always_inline))

typedef float F32 __attribute__((vector_size(kVectorBytes)));
typedef double F64 __attribute__((vector_size(kVectorBytes)));
typedef int32_t I32 __attribute__((vector_size(kVectorBytes)));
typedef int64_t I64 __attribute__((vector_size(kVectorBytes)));
typedef uint32_t U32 __attribute__((vector_size(kVectorBytes)));
typedef uint32_t U32Half __attribute__((vector_size(kVectorBytes / 2)));

// What belongs to an element type: its vector V, the masks M that comparisons give, integers as wide,
// and U, 32-bit words, one a lane.
template <class T>
struct Types;
template <>
struct Types<float> {
  using V = F32;
  using M = I32;
  using Int = int32_t;
  using U = U32;
  static constexpr int kMantissa = 23;
  // kMagic is 1.5 * 2^mantissa plus the bias of an exponent; e^kFar is too small.
  static constexpr float kLowest = -3.402823466e38f, kMagic = 12583039.0f, kFar = -88.03f;
};
template <>
struct Types<double> {
  using V = F64;
  using M = I64;
  using Int = int64_t;
  using U = U32Half;
  static constexpr int kMantissa = 52;
  static constexpr double kLowest = -1.7976931348623157e308, kMagic = 6755399441056767.0, kFar = -709.1;
};

template <class T>
using VecOf = typename Types<T>::V;
template <class T>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(T));

template <class T>
ATTNSPAN_INLINE VecOf<T> load(const T* from) {
  VecOf<T> v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
template <class V, class T>
ATTNSPAN_INLINE void store(T* to, V v) {
  std::memcpy(to, &v, sizeof v);
}
template <class T>
ATTNSPAN_INLINE VecOf<T> splat(T x) {
  return x - VecOf<T>{};  // x + 0 would turn -0 into 0
}

#if defined(__AVX512F__)
ATTNSPAN_INLINE F32 broadcast(const float* x) { return (F32)_mm512_set1_ps(*x); }
ATTNSPAN_INLINE F64 broadcast(const double* x) { return (F64)_mm512_set1_pd(*x); }
ATTNSPAN_INLINE F32 fma(F32 a, F32 b, F32 c) { return (F32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
ATTNSPAN_INLINE F64 fma(F64 a, F64 b, F64 c) {
  return (F64)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
}
#elif defined(__AVX2__)
ATTNSPAN_INLINE F32 broadcast(const float* x) { return (F32)_mm256_broadcast_ss(x); }
ATTNSPAN_INLINE F64 broadcast(const double* x) { return (F64)_mm256_broadcast_sd(x); }
ATTNSPAN_INLINE F32 fma(F32 a, F32 b, F32 c) { return (F32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
ATTNSPAN_INLINE F64 fma(F64 a, F64 b, F64 c) {
  return (F64)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
}
#elif defined(__ARM_NEON)
ATTNSPAN_INLINE F32 broadcast(const float* x) { return (F32)vld1q_dup_f32(x); }
ATTNSPAN_INLINE F64 broadcast(const double* x) { return (F64)vld1q_dup_f64(x); }
ATTNSPAN_INLINE F32 fma(F32 a, F32 b, F32 c) {
  return (F32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
ATTNSPAN_INLINE F64 fma(F64 a, F64 b, F64 c) {
  return (F64)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
}
#else
template <class T>
ATTNSPAN_INLINE VecOf<T> broadcast(const T* x) {
  return splat(*x);
}
ATTNSPAN_INLINE F32 fma(F32 a, F32 b, F32 c) {
  for (int i = 0; i < kLanes<float>; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
ATTNSPAN_INLINE F64 fma(F64 a, F64 b, F64 c) {
  for (int i = 0; i < kLanes<double>; ++i) c[i] = __builtin_fma(a[i], b[i], c[i]);
  return c;
}
#endif
ATTNSPAN_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
ATTNSPAN_INLINE double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }

// The second where either is NaN.
#if defined(__AVX2__) && !defined(__AVX512F__)
ATTNSPAN_INLINE F32 larger(F32 a, F32 b) { return (F32)_mm256_max_ps((__m256)a, (__m256)b); }
ATTNSPAN_INLINE F64 larger(F64 a, F64 b) { return (F64)_mm256_max_pd((__m256d)a, (__m256d)b); }
#else
template <class V>
ATTNSPAN_INLINE V larger(V a, V b) {
  return a > b ? a : b;
}
#endif

// Whether any lane of a mask is set.
template <class M>
ATTNSPAN_INLINE bool any(M mask) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  int64_t words[kVectorBytes / 8], all = 0;
  std::memcpy(words, &mask, sizeof mask);
  for (const int64_t word : words) all |= word;
  return all != 0;
#endif
}

// Lane i of the mask is bit i of `bits`.
template <class T>
ATTNSPAN_INLINE typename Types<T>::M mask_of(uint64_t bits) {
  typename Types<T>::M lane;
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = typename Types<T>::Int{1} << i;
  const auto all = static_cast<typename Types<T>::Int>(bits) - typename Types<T>::M{};
  return (all & lane) == lane;
}

template <class M>
ATTNSPAN_INLINE uint64_t bits_of(M mask) {
  uint64_t bits = 0;
  for (int i = 0; i < static_cast<int>(sizeof(mask) / sizeof(mask[0])); ++i) {
    bits |= static_cast<uint64_t>(mask[i] & 1) << i;
  }
  return bits;
}

template <class M, class V>
ATTNSPAN_INLINE V where(M mask, V yes) {  // 0 elsewhere
  return (V)((M)yes & mask);
}

template <int... K>
struct Indices {};
template <int N, int... K>
struct FirstIndices : FirstIndices<N - 1, N - 1, K...> {};
template <int... K>
struct FirstIndices<0, K...> {
  using List = Indices<K...>;
};

// Of two rows of a square, `step` apart, the blocks beside the diagonal change places.
template <int step, class V, int... K>
ATTNSPAN_INLINE void swap_blocks(V& a, V& b, Indices<K...>) {
  constexpr int N = sizeof...(K);
#ifdef __clang__
  const V above = __builtin_shufflevector(a, b, ((K & step) ? N + K - step : K)...);
  const V below = __builtin_shufflevector(a, b, ((K & step) ? N + K : K + step)...);
#else  // which every GCC has
  using M = decltype(a < b);
  const V above = __builtin_shuffle(a, b, M{((K & step) ? N + K - step : K)...});
  const V below = __builtin_shuffle(a, b, M{((K & step) ? N + K : K + step)...});
#endif
  a = above;
  b = below;
}

// rows[i][j] becomes rows[j][i].
template <int step, class V, int N>
ATTNSPAN_INLINE void transpose(V (&rows)[N]) {
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    if ((i & step) == 0) swap_blocks<step>(rows[i], rows[i + step], typename FirstIndices<N>::List{});
  }
  if constexpr (step > 1) transpose<step / 2>(rows);
}

// to[d][i] = rows[i][d], for as many rows as a vector has lanes, `width` wide.
template <class T>
ATTNSPAN_INLINE void lay_across(const T* rows, int64_t row, int64_t width, T* to, int64_t to_row) {
  constexpr int N = kLanes<T>;
  int64_t d = 0;
  for (; d + N <= width; d += N) {
    VecOf<T> square[N];
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) square[i] = load(rows + i * row + d);
    transpose<N / 2>(square);
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) store(to + (d + i) * to_row, square[i]);
  }
  for (; d < width; ++d) {
    for (int i = 0; i < N; ++i) to[d * to_row + i] = rows[i * row + d];
  }
}

// The polynomials are minimax fits made for this: 2^f = 1 + f * P(f) on [-0.501, 0.501], relative error
// 2.6e-9 and 1.8e-17; tanh t = t + t^3 P(t^2) on [0, 0.63], relative to t 4.7e-9 and 1.7e-20.
template <class T>
struct Fits;
template <>
struct Fits<float> {
  static constexpr float kExp2[] = {0.6931472154036439f,   0.2402265280929588f,   0.05550309706344458f,
                                    0.009617689296058048f, 0.001340695055332185f, 0.0001559548454517311f};
  static constexpr float kTanh[] = {-0.3333327831545441f, 0.1333132896155020f, -0.05372923010862664f,
                                    0.02060200794069446f, -0.005660789238804258f};
};
template <>
struct Fits<double> {
  static constexpr double kExp2[] = {0.6931471805599457062,    0.2402265069591009865,
                                     0.0555041086647897666,    0.009618129107606587941,
                                     0.001333355815355087588,  0.0001540353044226849638,
                                     0.00001525272731130288768, 1.321544225109657684e-6,
                                     1.018066614264408677e-7,  7.072655179385442063e-9,
                                     4.076998850380938321e-10};
  static constexpr double kTanh[] = {-0.3333333333333333223,   0.133333333333331137,
                                     -0.05396825396810046581,  0.02186948853074613479,
                                     -0.00886323541730534124,  0.003592126527150100491,
                                     -0.001455820675105912918, 0.0005899404891283754363,
                                     -0.0002387385912919771953, 0.0000956711459681236808,
                                     -0.00003649813008462834206, 0.00001167672751579936067,
                                     -2.223667854253646846e-6};
};

template <class T, int N>
ATTNSPAN_INLINE VecOf<T> polynomial(const T (&c)[N], VecOf<T> x) {
  VecOf<T> y = splat(c[N - 1]);
#pragma GCC unroll 16
  for (int i = N - 2; i >= 0; --i) y = fma(y, x, splat(c[i]));
  return y;
}

// e^x for x <= 1, exactly 1 at 0, NaN at NaN, and 0 where it is below the smallest normal numbers: the
// exponent's bits are 0 then.
template <class T>
ATTNSPAN_INLINE VecOf<T> exp(VecOf<T> x) {
  using M = typename Types<T>::M;
  const VecOf<T> log2e = splat(T(1.4426950408889634074));
  x = larger(splat(Types<T>::kFar), x);
  const VecOf<T> shifted = fma(x, log2e, splat(Types<T>::kMagic));  // its low bits: whole part and bias
  const VecOf<T> f = fma(x, log2e, Types<T>::kMagic - shifted);
  const VecOf<T> p = fma(polynomial(Fits<T>::kExp2, f), f, splat(T{1}));
  return p * (VecOf<T>)((M)shifted << Types<T>::kMantissa);
}

template <class T>
ATTNSPAN_INLINE VecOf<T> tanh(VecOf<T> x) {
  using M = typename Types<T>::M;
  const M sign = (M)x & (M)splat(T(-0.0));
  const VecOf<T> size = (VecOf<T>)((M)x ^ sign);
  const VecOf<T> square = x * x;
  const VecOf<T> small = fma(polynomial(Fits<T>::kTanh, square) * square, x, x);
  const VecOf<T> e = exp<T>(size * T(-2));
  const VecOf<T> big = (VecOf<T>)((M)((T(1) - e) / (T(1) + e)) | sign);
  return size < T(0.625) ? small : big;
}

ATTNSPAN_INLINE F32 to_floating(I32 x) { return __builtin_convertvector(x, F32); }

// Words of 32 bits to masks as wide as the elements.
ATTNSPAN_INLINE I32 widen_mask(I32 mask, float) { return mask; }
typedef int32_t I32Half __attribute__((vector_size(kVectorBytes / 2)));
ATTNSPAN_INLINE I64 widen_mask(I32Half mask, double) { return __builtin_convertvector(mask, I64); }

// Rows of a narrow type as float32.
typedef uint16_t U16Half __attribute__((vector_size(kVectorBytes / 2)));
ATTNSPAN_INLINE void widen_row(const Bfloat* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kLanes<float> <= n; i += kLanes<float>) {
    U16Half bits;
    std::memcpy(&bits, from + i, sizeof bits);
    store(to + i, (F32)(__builtin_convertvector(bits, U32) << 16));
  }
  for (; i < n; ++i) to[i] = widen(from[i]);
}
ATTNSPAN_INLINE void widen_row(const Half* from, int64_t n, float* to) {
  int64_t i = 0;
#if defined(__AVX2__)
  for (; i + 8 <= n; i += 8) {
    __m128i half;
    std::memcpy(&half, from + i, sizeof half);
    const __m256 wide = _mm256_cvtph_ps(half);
    std::memcpy(to + i, &wide, sizeof wide);
  }
#endif
  for (; i < n; ++i) to[i] = widen(from[i]);
}

}  // namespace ATTNSPAN_SET
}  // namespace attnspan
