// The dot kernel for NEON.
#define ATTNSPAN_SET neon
#include "dot_kernel.h"
