#include "checks.h"

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <limits>

namespace attnspan {
namespace {

constexpr int64_t kLimit = std::numeric_limits<std::ptrdiff_t>::max();

// Each interval within [0, S], none before the end of the last. Rows that broadcast are read once.
std::string check_intervals(const Spans& spans, const Sizes& sizes) {
  const auto distinct = [&](int axis, int64_t size) {
    return spans.start.stride[axis] == 0 && spans.stop.stride[axis] == 0 ? 1 : size;
  };
  const int64_t B = distinct(0, sizes.B), H = distinct(1, sizes.H), L = distinct(2, sizes.L);
  for (int64_t b = 0; b < B; ++b) {
    for (int64_t h = 0; h < H; ++h) {
      for (int64_t l = 0; l < L; ++l) {
        const int32_t* start = spans.start.row(b, h, l);
        const int32_t* stop = spans.stop.row(b, h, l);
        int64_t before = 0;
        for (int64_t r = 0; r < spans.R; ++r) {
          const int64_t i = start[r * spans.start.stride[3]], j = stop[r * spans.stop.stride[3]];
          if (i < before || j < i || j > sizes.S) {
            const int64_t at[4] = {b, h, l, r};
            return wrong("spans", "[" + std::to_string(i) + ", " + std::to_string(j) + ") at " + show(at),
                         "sorted, disjoint intervals within [0, " + std::to_string(sizes.S) + "]");
          }
          before = j;
        }
      }
    }
  }
  return "";
}

template <class T>
View<T> view(const Array& a, const int64_t (&stride)[4]) {
  return {static_cast<T*>(a.data), {stride[0], stride[1], stride[2], stride[3]}};
}

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

// Two threads must never write one element: with the axes in order of their strides, each must
// step over all that the smaller ones reach.
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

std::string check_spans(const Array& start, const Array& stop, const Sizes& sizes, Spans* spans) {
  const int64_t R = start.shape[3], shape[4] = {sizes.B, sizes.H, sizes.L, R};
  int64_t start_stride[4], stop_stride[4];
  std::string error = check_array("start", start, 4, shape, true, start_stride);
  if (error.empty()) error = check_array("stop", stop, 4, shape, true, stop_stride);
  if (!error.empty()) return error;
  *spans = {view<const int32_t>(start, start_stride), view<const int32_t>(stop, stop_stride), R};
  const bool nobody = sizes.B == 0 || sizes.H == 0 || sizes.L == 0;
  return nobody ? "" : check_intervals(*spans, sizes);
}

std::string check_bits(const Array& bits, const Sizes& sizes, Bits* words) {
  const int64_t shape[4] = {sizes.B, sizes.H, sizes.L, (sizes.S + 7) / 8};
  int64_t stride[4];
  const std::string error = check_array("bits", bits, 1, shape, true, stride);
  if (error.empty()) *words = view<const uint8_t>(bits, stride);
  return error;
}

}  // namespace attnspan
