// Conversions of 16-bit floats: all patterns there and back, and rounding between neighbours.
#include "../core/half.h"

#include <cmath>

#include "check.h"

using namespace attnspan;

namespace {

template <class T>
float there(uint32_t bits) {
  return widen(T{static_cast<uint16_t>(bits)});
}

template <class T>
uint16_t back(float x) {
  T narrowed;
  narrow(x, &narrowed);
  return narrowed.bits;
}

// `infinity` is the pattern of +inf; those above it are NaNs, those below finite and ascending.
template <class T>
void check_all(uint32_t infinity) {
  for (uint32_t bits = 0; bits < 0x8000; ++bits) {
    const float x = there<T>(bits), minus = there<T>(bits | 0x8000);
    if (bits > infinity) {
      CHECK(std::isnan(x) && std::isnan(minus));
      CHECK(std::isnan(there<T>(back<T>(x))));
      continue;
    }
    CHECK(minus == -x && std::signbit(minus));
    CHECK(back<T>(x) == bits && back<T>(minus) == (bits | 0x8000));
    if (bits + 1 >= infinity) continue;
    const float next = there<T>(bits + 1), middle = x + (next - x) / 2;
    CHECK(x < next && x < middle && middle < next);
    CHECK(back<T>(middle) == (bits % 2 ? bits + 1 : bits));  // ties to even
    CHECK(back<T>(std::nextafter(middle, 0.0f)) == bits);
    CHECK(back<T>(std::nextafter(middle, next)) == bits + 1);
  }
}

}  // namespace

TEST(float16_both_ways) {
  check_all<Half>(0x7C00);
  CHECK(there<Half>(1) == std::ldexp(1.0f, -24));
  CHECK(there<Half>(0x3C00) == 1.0f && there<Half>(0x7BFF) == 65504.0f);
  CHECK(back<Half>(65519.0f) == 0x7BFF && back<Half>(65520.0f) == 0x7C00 && back<Half>(3e38f) == 0x7C00);
  CHECK(back<Half>(1e-30f) == 0 && back<Half>(-1e-30f) == 0x8000);
}

TEST(bfloat16_both_ways) {
  check_all<Bfloat>(0x7F80);
  CHECK(there<Bfloat>(0x3F80) == 1.0f && back<Bfloat>(3.4e38f) == 0x7F80);
}
