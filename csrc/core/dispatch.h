// The kernels by instruction set. A new one is compiled for its set and gets its line in the table.
#pragma once

#include <cstdint>

#include "dot_tiles.h"
#include "isa.h"
#include "types.h"

namespace attnspan {

struct Kernels {
  Isa isa;
  void (*softmax_rows)(const Softmax& task, int64_t first, int64_t last);
  void (*dot_forward_item)(const ForwardJob& job, int64_t item);
  void (*dot_backward_item)(const BackwardJob& job, int64_t item);
};

// Those for an instruction set, or the scalar ones where it has none of its own.
const Kernels& kernels_of(Isa isa);

// Those for the instruction set in use.
const Kernels& kernels();

}  // namespace attnspan
