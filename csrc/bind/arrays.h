// How NumPy's and PyTorch's arrays, dtypes and threads come in: as integers and names.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>

#include "../core/executor.h"
#include "../core/types.h"

namespace nb = nanobind;

namespace attnspan {

using Four = std::array<int64_t, 4>;
using Described = std::tuple<std::uintptr_t, Four, Four>;  // address, shape, strides in elements

inline Array array_of(const Described& given) {
  Array array;
  array.data = reinterpret_cast<void*>(std::get<0>(given));
  std::copy(std::get<1>(given).begin(), std::get<1>(given).end(), array.shape);
  std::copy(std::get<2>(given).begin(), std::get<2>(given).end(), array.stride);
  return array;
}

inline Dtype dtype_of(const std::string& name) {
  if (name == "float16") return Dtype::f16;
  if (name == "bfloat16") return Dtype::bf16;
  if (name == "float32") return Dtype::f32;
  if (name == "float64") return Dtype::f64;
  throw std::invalid_argument("dtype: given " + name + ", needed float16, bfloat16, float32 or float64");
}

inline std::unique_ptr<Executor> executor_of(const std::string& name, int64_t threads) {
  if (name == "openmp" || (name == "auto" && OpenMp::loaded())) return std::make_unique<OpenMp>(threads);
  return std::make_unique<Pool>(threads);
}

}  // namespace attnspan
