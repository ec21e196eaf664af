// The one place where what comes from outside is checked. Nothing behind it checks again.
#pragma once

#include <string>

#include "types.h"

namespace attnspan {

struct SoftmaxArrays {
  Array scores;       // (B, H, L, S)
  Array start, stop;  // int32 (B|1, H|1, L|1, R)
  const Array* bits;  // uint8 (B|1, H|1, L|1, ceil(S/8)), or null
  Array weights;      // (B, H, L, S)
  Array lse;          // (B, H, L, 1)
};

// Fills `task` and returns "", or returns what is wrong. Reads the spans, so they must not change
// before the task is done.
std::string check_softmax(Dtype dtype, const SoftmaxArrays& arrays, Softmax* task);

}  // namespace attnspan
