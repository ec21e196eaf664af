// What the checks of all kernels are made of. Each gives "" or what is wrong.
#pragma once

#include <cstdint>
#include <string>

#include "types.h"

namespace attnspan {

std::string show(const int64_t (&numbers)[4]);
std::string wrong(const char* name, const std::string& given, const std::string& needed);

// Checks the shape, the address and how far the strides reach; gives the strides of a View.
std::string check_array(const char* name, const Array& a, int64_t item, const int64_t (&shape)[4],
                        bool broadcasts, int64_t (&stride)[4]);

// Two threads must never write one element: with the axes in order of their strides, each must
// step over all that the smaller ones reach.
std::string check_writable(const char* name, const Array& a);

// Sorted, disjoint intervals within [0, S]; their values are read.
std::string check_spans(const Array& start, const Array& stop, const Sizes& sizes, Spans* spans);

template <class T>
View<T> view(const Array& a, const int64_t (&stride)[4]) {
  return {static_cast<T*>(a.data), {stride[0], stride[1], stride[2], stride[3]}};
}

}  // namespace attnspan
