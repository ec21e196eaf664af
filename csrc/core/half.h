// float16 and bfloat16 as bit patterns. Integer arithmetic alone, so that no
// flush-to-zero mode, which XLA's threads run in, changes a subnormal. Static: files compiled for
// other instruction sets must not share a copy.
#pragma once

#include <cstdint>
#include <cstring>

namespace attnspan {

struct Half {
  uint16_t bits;
};
struct Bfloat {
  uint16_t bits;
};

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

// Drops the lowest `count` (1 to 31) bits, rounding to nearest, ties to even.
static inline uint32_t round_off(uint32_t x, int count) {
  const uint32_t half = uint32_t{1} << (count - 1);
  return (x + half - 1 + ((x >> count) & 1)) >> count;
}

static inline float widen(float x) { return x; }
static inline double widen(double x) { return x; }
static inline float widen(Bfloat x) { return float_of(uint32_t{x.bits} << 16); }

static inline float widen(Half x) {
  const uint32_t sign = uint32_t{x.bits & 0x8000u} << 16;
  uint32_t exponent = (x.bits >> 10) & 0x1F, mantissa = x.bits & 0x3FFu;
  if (exponent == 0x1F) return float_of(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) {
    if (mantissa == 0) return float_of(sign);
    exponent = 1;
    while ((mantissa & 0x400u) == 0) {  // a subnormal half is a normal float
      mantissa <<= 1;
      --exponent;
    }
    mantissa &= 0x3FFu;
  }
  return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));  // unsigned: wraps back
}

static inline void narrow(float x, float* to) { *to = x; }
static inline void narrow(double x, double* to) { *to = x; }

static inline void narrow(float x, Bfloat* to) {
  const uint32_t bits = bits_of(x);
  const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;  // rounding could carry it into infinity
  to->bits = static_cast<uint16_t>(nan ? (bits >> 16) | 0x40u : round_off(bits, 16));
}

static inline void narrow(float x, Half* to) {
  const uint32_t bits = bits_of(x), sign = (bits >> 16) & 0x8000u, size = bits & 0x7FFFFFFFu;
  const int32_t exponent = static_cast<int32_t>(size >> 23) - 112;
  uint32_t half;
  if (size > 0x7F800000u) {
    half = 0x7E00u;  // NaN
  } else if (exponent >= 31) {
    half = 0x7C00u;
  } else if (exponent > 0) {
    half = round_off(size - (uint32_t{112} << 23), 13);  // a carry gives the next power, or infinity
  } else if (exponent >= -10) {
    half = round_off((size & 0x7FFFFFu) | 0x800000u, 14 - exponent);  // a subnormal half
  } else {
    half = 0;
  }
  to->bits = static_cast<uint16_t>(sign | half);
}

}  // namespace attnspan
