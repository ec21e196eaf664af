// Attention with a dot-form score, forward and backward, without an array of scores:
//
//   s = softcap(scale * q . k + key_bias) + bias - slope * |i + align - j|,   out = dropout(softmax(s)) v
//
// over the pairs that spans and bits show. A bias of -inf excludes too. What is excluded does not
// exist: a key that no query sees, and a query that sees no key, may hold anything. A key or value that
// is not finite makes NaN exactly the rows that see it. Scores of finite inputs are finite: what
// overflows stops at the largest number.
#pragma once

#include <cstdint>
#include <string>

#include "executor.h"
#include "types.h"

namespace attnspan {

// Keys of one tile, everywhere: tiles start at multiples of it, so that a row's bits depend on its own
// keys only.
constexpr int64_t kKeyTile = 192;
// Queries of one work item.
constexpr int64_t kQueryTile = 96;
// Numbers of one query, key or value: each thread holds a tile of them.
constexpr int64_t kMostWidth = 65536;

struct DotSizes {
  int64_t B, H, G, L, S, D, E;  // query head h uses key/value head h / (H / G)
};

// What forward and backward share. q, k and v are of `dtype`; everything else in floating point is in
// its accumulation dtype. The last axis of q, k, v, key_bias and bias has stride 1 (bias and key_bias:
// or are absent, data null). An axis of size 1 that broadcasts has stride 0.
struct Dot {
  Dtype dtype;
  DotSizes n;
  View<const void> q, k, v;      // (B, H, L, D), (B, G, S, D), (B, G, S, E)
  double scale;
  double softcap;                // 0 is none
  View<const void> key_bias;     // (B|1, H|1, 1, S), finite, inside the softcap
  View<const void> bias;         // (B|1, H|1, L|1, S), behind the softcap
  View<const void> slopes;       // (B|1, H|1, 1, 1), of ALiBi
  View<const int32_t> align;     // (B|1, H|1, 1, 1), with slopes only
  Spans spans;                   // start.data null: every query sees every key
  Bits bits;                     // data null: none
  double dropout;                // the share dropped; 0 is none
  View<const uint32_t> seed;     // (B|1, 1, 1, 2): low, high; with dropout only
  int64_t draws;                 // row (b, h) draws as number (b % draws) * H + h; with dropout only
};

// What the forward pass writes. `top` and `inverse` are for the backward pass: the largest score of a
// row, and 1 / sum of e^(s - top), 0 where a row sees nothing.
struct DotForward {
  Dot problem;
  View<void> out;                                    // (B, H, L, E)
  View<void> lse, top, inverse;                      // (B, H, L, 1); data may be null
  View<void> entropy, max_weight, jacobian_norm;     // (B, H, L, 1); all null, or none
};

// What the backward pass reads and writes. dk and dv must come filled with zeros, dkey_bias and dbias
// too; the others are overwritten. A null address: that gradient is not asked for (dq, dk come together).
// dkey_bias is what comes back to a key's column: of key_bias, or without softcap of a bias of one row.
struct DotBackward {
  Dot problem;
  View<const void> out, top, inverse;  // as the forward pass wrote them
  View<const void> dout;               // (B, H, L, E), any strides
  View<const void> dlse;               // (B, H, L, 1), or null
  View<void> dq, dk, dv;               // (B, H, L, D), (B, G, S, D), (B, G, S, E): last stride 1
  View<void> dkey_bias;                // (B, H, 1, S): last stride 1
  View<void> dbias;                    // the shape of bias, with a row for each query; last stride 1
  View<void> dslopes;                  // (B, H, L, 1): the part of each row
};

// Arrays as they come from outside; `given` false stands for none.
struct Given {
  bool given;
  Array array;
};

struct DotArrays {
  Dtype dtype;
  Array q, k, v;
  double scale, softcap;
  Given key_bias, bias, slopes, align, start, stop, bits;
  double dropout;
  Given seed;
  int64_t draws;
};

// Fill the task's problem and return "", or return what is wrong. Reads the spans.
std::string check_dot(const DotArrays& arrays, Dot* problem);

struct DotForwardArrays {
  Array out;
  Given lse, top, inverse, entropy, max_weight, jacobian_norm;
};
std::string check_dot_forward(const DotForwardArrays& arrays, DotForward* task);  // task->problem is checked

struct DotBackwardArrays {
  Array out, top, inverse, dout;
  Given dlse, dq, dk, dv, dkey_bias, dbias, dslopes;
};
std::string check_dot_backward(const DotBackwardArrays& arrays, DotBackward* task);

// Tasks must come from the checks above.
void dot_forward(const DotForward& task, Executor& executor);
void dot_backward(const DotBackward& task, Executor& executor);

}  // namespace attnspan
