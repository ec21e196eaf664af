// Adds the dot kernel's class to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace attnspan {

void define_dot(nanobind::module_& m);

}  // namespace attnspan
