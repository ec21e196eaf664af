// The dot kernel's entries, for one instruction set: see vec.h.
#pragma once

#include "dot_backward.h"
#include "dot_forward.h"
#include "dot_one_query.h"

namespace attnspan {
namespace ATTNSPAN_SET {

template <class T, class X>
ATTNSPAN_INLINE void run(const ForwardJob& job, int64_t item) {
  const DotForward& task = *job.task;
  if (task.problem.n.L > kLanes<T>) return Forward<T, X, 3>(job).run(item);
  // One query alone; what is asked about it, and dropout, are the panels'.
  if (task.problem.n.L == 1 && task.problem.dropout == 0 && task.entropy.data == nullptr) {
    return OneQuery<T, X>(job).run(item);
  }
  Forward<T, X, 1>(job).run(item);
}
template <class T, class X>
ATTNSPAN_INLINE void run(const BackwardJob& job, int64_t item) {
  Backward<T, X>(job).run(item);
}

template <class Job>
ATTNSPAN_INLINE void run(const Job& job, int64_t item) {
  switch (job.task->problem.dtype) {
    case Dtype::f16: return run<float, Half>(job, item);
    case Dtype::bf16: return run<float, Bfloat>(job, item);
    case Dtype::f32: return run<float, float>(job, item);
    case Dtype::f64: return run<double, double>(job, item);
  }
}

void dot_forward_item(const ForwardJob& job, int64_t item) { run(job, item); }
void dot_backward_item(const BackwardJob& job, int64_t item) { run(job, item); }

}  // namespace ATTNSPAN_SET
}  // namespace attnspan
