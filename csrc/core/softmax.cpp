#include "softmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "dispatch.h"
#include "half.h"

namespace attnspan {
namespace {

constexpr int64_t kItemScores = 8192;  // an item of fewer scores costs more to hand over than to do

// The keys that one query sees.
struct Keys {
  const int32_t *start, *stop;
  const uint8_t* bits;
  int64_t start_stride, stop_stride, bits_stride, R;

  Keys(const Softmax& task, int64_t b, int64_t h, int64_t l)
      : start(task.spans.start.row(b, h, l)),
        stop(task.spans.stop.row(b, h, l)),
        bits(task.bits.data ? task.bits.row(b, h, l) : nullptr),
        start_stride(task.spans.start.stride[3]),
        stop_stride(task.spans.stop.stride[3]),
        bits_stride(task.bits.stride[3]),
        R(task.spans.R) {}

  template <class Visit>
  void each(Visit visit) const {
    for (int64_t r = 0; r < R; ++r) {
      for (int64_t j = start[r * start_stride]; j < stop[r * stop_stride]; ++j) {
        if (bits == nullptr || (bits[j / 8 * bits_stride] >> (j % 8) & 1)) visit(j);
      }
    }
  }
};

int64_t offset(const int64_t* stride, int64_t b, int64_t h, int64_t l) {
  return b * stride[0] + h * stride[1] + l * stride[2];
}

// T is the dtype of scores and weights, A that of the sums.
template <class T, class A>
void row(const Softmax& task, int64_t b, int64_t h, int64_t l) {
  constexpr A inf = std::numeric_limits<A>::infinity(), nan = std::numeric_limits<A>::quiet_NaN();
  const Keys keys(task, b, h, l);
  const T* scores = static_cast<const T*>(task.scores) + offset(task.scores_stride, b, h, l);
  T* weights = static_cast<T*>(task.weights) + offset(task.weights_stride, b, h, l);
  A* lse = static_cast<A*>(task.lse) + offset(task.lse_stride, b, h, l);
  const auto score = [&](int64_t j) -> A { return widen(scores[j * task.scores_stride[3]]); };
  const auto put = [&](int64_t j, A w) { narrow(w, &weights[j * task.weights_stride[3]]); };

  A top = -inf;
  bool finite = true;
  keys.each([&](int64_t j) {
    const A s = score(j);
    if (!(s < inf)) finite = false;  // NaN too
    if (s > top) top = s;
  });
  for (int64_t j = 0; j < task.sizes.S; ++j) put(j, 0);
  if (!finite) {
    *lse = nan;
    keys.each([&](int64_t j) {
      if (score(j) != -inf) put(j, nan);
    });
    return;
  }
  if (top == -inf) {
    *lse = -inf;
    return;
  }
  A total = 0;
  keys.each([&](int64_t j) { total += std::exp(score(j) - top); });  // -inf adds exactly 0
  *lse = top + std::log(total);
  keys.each([&](int64_t j) { put(j, std::exp(score(j) - top) / total); });
}

template <class T, class A>
void rows(const Softmax& task, int64_t first, int64_t last) {
  const Sizes& n = task.sizes;
  for (int64_t i = first; i < last; ++i) row<T, A>(task, i / n.L / n.H, i / n.L % n.H, i % n.L);
}

}  // namespace

void softmax_rows(const Softmax& task, int64_t first, int64_t last) {
  switch (task.dtype) {
    case Dtype::f16: return rows<Half, float>(task, first, last);
    case Dtype::bf16: return rows<Bfloat, float>(task, first, last);
    case Dtype::f32: return rows<float, float>(task, first, last);
    case Dtype::f64: return rows<double, double>(task, first, last);
  }
}

void softmax(const Softmax& task, Executor& executor) {
  struct Split {
    const Softmax& task;
    int64_t rows, rows_an_item;
  };
  const Sizes& n = task.sizes;
  Split split{task, n.B * n.H * n.L, std::max<int64_t>(1, kItemScores / std::max<int64_t>(1, n.S))};
  const int64_t items = (split.rows + split.rows_an_item - 1) / split.rows_an_item;
  executor.run(&split, items, [](void* context, int64_t item) {
    const Split& part = *static_cast<const Split*>(context);
    const int64_t first = item * part.rows_an_item;
    kernels().softmax_rows(part.task, first, std::min(first + part.rows_an_item, part.rows));
  });
}

}  // namespace attnspan
