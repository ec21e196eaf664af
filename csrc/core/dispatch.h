// The kernels by instruction set. A new one is compiled for its set and gets its line in the table.
#pragma once

#include <cstdint>

#include "isa.h"
#include "types.h"

namespace attnspan {

struct Kernels {
  Isa isa;
  void (*softmax_rows)(const Softmax& task, int64_t first, int64_t last);
};

// Those for the instruction set in use, or the scalar ones where it has none of its own.
const Kernels& kernels();

}  // namespace attnspan
