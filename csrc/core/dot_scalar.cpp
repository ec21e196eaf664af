// The dot kernel for the compiler's baseline: the twin that the others are compared with.
#define ATTNSPAN_SET scalar
#include "dot_kernel.h"
