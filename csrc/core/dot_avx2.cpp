// The dot kernel for AVX2, FMA and F16C.
#define ATTNSPAN_SET avx2
#include "dot_kernel.h"
