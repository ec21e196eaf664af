// What the checks of all kernels are made of. Each gives "", or what is wrong.
#pragma once

#include <string>

#include "types.h"

namespace attnspan {

std::string show(const int64_t (&numbers)[4]);
std::string wrong(const char* name, const std::string& given, const std::string& needed);

// Checks the shape, the address and how far the strides reach; gives the strides of a View. Where the
// array `broadcasts`, each of its first three axes may have one entry.
std::string check_array(const char* name, const Array& a, int64_t item, const int64_t (&shape)[4],
                        bool broadcasts, int64_t (&stride)[4]);

// That no two elements of an output are one.
std::string check_writable(const char* name, const Array& a);

// Of B, H and L queries and S keys, the values of start and stop included.
std::string check_spans(const Array& start, const Array& stop, const Sizes& sizes, Spans* spans);
std::string check_bits(const Array& bits, const Sizes& sizes, Bits* view);

}  // namespace attnspan
