// What a kernel is given: plain structs, no owner, no framework.
//
// Letters as in the Python code: B batch, H heads, L queries, S keys, R intervals a query.
#pragma once

#include <cstdint>

namespace attnspan {

enum class Dtype { f16, bf16, f32, f64 };

constexpr int64_t size_of(Dtype dtype) {
  return dtype == Dtype::f64 ? 8 : dtype == Dtype::f32 ? 4 : 2;
}

// What sums run in.
constexpr Dtype accumulation(Dtype dtype) { return dtype == Dtype::f64 ? Dtype::f64 : Dtype::f32; }

// An array as its framework describes it; strides count elements.
struct Array {
  void* data;
  int64_t shape[4];
  int64_t stride[4];
};

struct Sizes {
  int64_t B, H, L, S;
};

// A checked array: an axis along which it broadcasts, or of size 1, has stride 0.
template <class T>
struct View {
  T* data;
  int64_t stride[4];

  // Always inline: files compiled for other instruction sets must not share a copy.
  __attribute__((always_inline)) T* row(int64_t b, int64_t h, int64_t l) const {
    return data + offset(b, h, l);
  }
  __attribute__((always_inline)) int64_t offset(int64_t b, int64_t h, int64_t l) const {
    return b * stride[0] + h * stride[1] + l * stride[2];
  }
};

// The visible keys as intervals [start, stop) within [0, S]: sorted, disjoint, R a query.
struct Spans {
  View<const int32_t> start, stop;
  int64_t R;
};

// What intervals don't say: key j is bit j % 8 of byte j / 8. Without bits, data is null.
using Bits = View<const uint8_t>;

// Scores (B, H, L, S) in; weights (B, H, L, S) in the scores' dtype and their log-sum-exp (B, H, L)
// in the accumulation dtype out. `stride[3]` of lse means nothing.
struct Softmax {
  Dtype dtype;
  Sizes sizes;
  const void* scores;
  void* weights;
  void* lse;
  int64_t scores_stride[4], weights_stride[4], lse_stride[4];
  Spans spans;
  Bits bits;
};

}  // namespace attnspan
