// The dot kernel for AVX-512 F, BW, DQ and VL.
#define ATTNSPAN_SET avx512
#include "dot_kernel.h"
