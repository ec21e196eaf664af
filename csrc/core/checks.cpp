#include "checks.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <limits>

namespace attnspan {
namespace {

constexpr int64_t kLimit = std::numeric_limits<std::ptrdiff_t>::max();

}  // namespace

std::string show(const int64_t (&numbers)[4]) {
  std::string text = "(";
  for (int i = 0; i < 4; ++i) text += (i ? ", " : "") + std::to_string(numbers[i]);
  return text + ")";
}

std::string wrong(const char* name, const std::string& given, const std::string& needed) {
  return std::string(name) + ": given " + given + ", needed " + needed;
}

std::string check_array(const char* name, const Array& a, int64_t item, const int64_t (&shape)[4],
                        bool broadcasts, int64_t (&stride)[4]) {
  bool empty = false;
  for (int i = 0; i < 4; ++i) {
    if (a.shape[i] < 0) return wrong(name, "shape " + show(a.shape), "sizes of 0 or more");
    if (a.shape[i] != shape[i] && !(broadcasts && i < 3 && a.shape[i] == 1)) {
      return wrong(name, "shape " + show(a.shape),
                   show(shape) + (broadcasts ? ", or 1 in place of one of the first three" : ""));
    }
    empty = empty || a.shape[i] == 0;
    stride[i] = a.shape[i] == 1 ? 0 : a.stride[i];
  }
  // Every offset in bytes, and the number of elements, must be a ptrdiff_t.
  int64_t count = item, reach = item;
  for (int i = 0; i < 4; ++i) {
    int64_t step;
    const int64_t size = stride[i] < -kLimit ? kLimit : std::abs(stride[i]);
    if (__builtin_mul_overflow(count, std::max<int64_t>(a.shape[i], 1), &count) ||
        __builtin_mul_overflow(size, std::max<int64_t>(a.shape[i] - 1, 0), &step) ||
        __builtin_mul_overflow(step, item, &step) || __builtin_add_overflow(reach, step, &reach) ||
        reach > kLimit) {
      return wrong(name, "shape " + show(a.shape) + " with strides " + show(a.stride),
                   "an array of less than 2^63 bytes");
    }
  }
  if (empty) {
    std::fill(stride, stride + 4, 0);  // no step from an address that may be null
    return "";
  }
  if (a.data == nullptr) return wrong(name, "a null pointer", "the address of its elements");
  if (reinterpret_cast<std::uintptr_t>(a.data) % static_cast<std::uintptr_t>(item) != 0) {
    return wrong(name, "an address that is no multiple of " + std::to_string(item), "aligned elements");
  }
  return "";
}

std::string check_writable(const char* name, const Array& a) {
  int order[4] = {0, 1, 2, 3};
  const auto step = [&a](int i) { return a.shape[i] > 1 ? std::abs(a.stride[i]) : 0; };
  std::sort(order, order + 4, [&](int i, int j) { return step(i) < step(j); });
  int64_t reach = 0;
  for (const int64_t size : a.shape) {
    if (size == 0) return "";
  }
  for (const int i : order) {
    if (a.shape[i] <= 1) continue;
    if (step(i) <= reach) {
      return wrong(name, "shape " + show(a.shape) + " with strides " + show(a.stride),
                   "an output whose elements lie apart");
    }
    reach += step(i) * (a.shape[i] - 1);
  }
  return "";
}

std::string check_spans(const Array& first, const Array& last, const Sizes& n, Spans* spans) {
  if (n.S > std::numeric_limits<int32_t>::max()) {
    return wrong("spans", std::to_string(n.S) + " keys", "fewer than 2^31: spans are int32");
  }
  const int64_t R = first.shape[3], needed[4] = {n.B, n.H, n.L, R};
  int64_t starts[4], stops[4];
  std::string error = check_array("start", first, 4, needed, true, starts);
  if (error.empty()) error = check_array("stop", last, 4, needed, true, stops);
  if (!error.empty()) return error;
  *spans = {view<const int32_t>(first, starts), view<const int32_t>(last, stops), R};
  if (n.B == 0 || n.H == 0 || n.L == 0) return "";
  // Where both broadcast, one row stands for all.
  int64_t shape[4];
  for (int i = 0; i < 4; ++i) shape[i] = std::max(first.shape[i], last.shape[i]);
  for (int64_t b = 0; b < shape[0]; ++b) {
    for (int64_t h = 0; h < shape[1]; ++h) {
      for (int64_t l = 0; l < shape[2]; ++l) {
        const int32_t* start = spans->start.row(b, h, l);
        const int32_t* stop = spans->stop.row(b, h, l);
        int64_t before = 0;
        for (int64_t r = 0; r < R; ++r) {
          const int64_t i = start[r * spans->start.stride[3]], j = stop[r * spans->stop.stride[3]];
          if (i < before || j < i || j > n.S) {
            const int64_t at[4] = {b, h, l, r};
            return wrong("spans", "[" + std::to_string(i) + ", " + std::to_string(j) + ") at " + show(at),
                         "sorted, disjoint intervals within [0, " + std::to_string(n.S) + "]");
          }
          before = j;
        }
      }
    }
  }
  return "";
}

}  // namespace attnspan
