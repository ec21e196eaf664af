// Masked softmax over spans and bits of an array of scores.
//
// An excluded score is never read, a score of -inf excludes too. A row that sees nothing has weights
// 0 and log-sum-exp -inf; one that sees a NaN or +inf is NaN at the keys it sees and in its
// log-sum-exp, and 0 elsewhere.
#pragma once

#include <cstdint>

#include "executor.h"
#include "types.h"

namespace attnspan {

// Does the rows [first, last) of B*H*L, one after the other: the scalar twin, which later kernels
// are compared with.
void softmax_rows(const Softmax& task, int64_t first, int64_t last);

// Splits the rows over the executor. `task` must come from check_softmax.
void softmax(const Softmax& task, Executor& executor);

}  // namespace attnspan
