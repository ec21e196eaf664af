#include "dispatch.h"

#include "softmax.h"

namespace attnspan {

#define ATTNSPAN_DECLARE(set)                              \
  namespace set {                                          \
  void dot_forward_item(const ForwardJob&, int64_t item);  \
  void dot_backward_item(const BackwardJob&, int64_t item); \
  }
ATTNSPAN_DECLARE(scalar)
ATTNSPAN_DECLARE(avx2)
ATTNSPAN_DECLARE(avx512)
ATTNSPAN_DECLARE(neon)

namespace {

constexpr Kernels kTable[] = {
    {Isa::scalar, softmax_rows, scalar::dot_forward_item, scalar::dot_backward_item},
#if defined(ATTNSPAN_HAS_AVX2)
    {Isa::avx2, softmax_rows, avx2::dot_forward_item, avx2::dot_backward_item},
#endif
#if defined(ATTNSPAN_HAS_AVX512)
    {Isa::avx512, softmax_rows, avx512::dot_forward_item, avx512::dot_backward_item},
#endif
#if defined(ATTNSPAN_HAS_NEON)
    {Isa::neon, softmax_rows, neon::dot_forward_item, neon::dot_backward_item},
#endif
};

}  // namespace

const Kernels& kernels_of(Isa isa) {
  for (const Kernels& entry : kTable) {
    if (entry.isa == isa) return entry;
  }
  return kTable[0];
}

const Kernels& kernels() { return kernels_of(isa_in_use().isa); }

}  // namespace attnspan
