// NumPy and PyTorch: addresses, shapes and strides come in as integers. Translation only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../core/dispatch.h"
#include "../core/executor.h"
#include "../core/isa.h"
#include "../core/softmax.h"
#include "../core/validate.h"
#include "ffi.h"

namespace nb = nanobind;

namespace attnspan {
namespace {

using Four = std::array<int64_t, 4>;
using Given = std::tuple<std::uintptr_t, Four, Four>;  // address, shape, strides in elements

Array array_of(const Given& given) {
  Array array;
  array.data = reinterpret_cast<void*>(std::get<0>(given));
  std::copy(std::get<1>(given).begin(), std::get<1>(given).end(), array.shape);
  std::copy(std::get<2>(given).begin(), std::get<2>(given).end(), array.stride);
  return array;
}

Dtype dtype_of(const std::string& name) {
  if (name == "float16") return Dtype::f16;
  if (name == "bfloat16") return Dtype::bf16;
  if (name == "float32") return Dtype::f32;
  if (name == "float64") return Dtype::f64;
  throw std::invalid_argument("dtype: given " + name + ", needed float16, bfloat16, float32 or float64");
}

std::unique_ptr<Executor> executor_of(const std::string& name, int64_t threads) {
  if (name == "openmp" || (name == "auto" && OpenMp::loaded())) return std::make_unique<OpenMp>(threads);
  return std::make_unique<Pool>(threads);
}

void run_softmax(const std::string& dtype, const Given& scores, const Given& start, const Given& stop,
                 const std::optional<Given>& bits, const Given& weights, const Given& lse, int64_t threads,
                 const std::string& executor) {
  if (!isa_in_use().error.empty()) throw std::invalid_argument(isa_in_use().error);
  const Array words = bits ? array_of(*bits) : Array{};
  const SoftmaxArrays arrays{array_of(scores),        array_of(start),   array_of(stop),
                             bits ? &words : nullptr, array_of(weights), array_of(lse)};
  Softmax task;
  const std::string error = check_softmax(dtype_of(dtype), arrays, &task);
  if (!error.empty()) throw std::invalid_argument(error);
  const auto chosen = executor_of(executor, threads);
  const nb::gil_scoped_release others_may_run;
  softmax(task, *chosen);
}

std::string isa() {
  if (!isa_in_use().error.empty()) throw std::invalid_argument(isa_in_use().error);
  return name_of(isa_in_use().isa);
}

std::vector<std::string> isas() {
  std::vector<std::string> names;
  for (const Isa isa : supported()) names.emplace_back(name_of(isa));
  return names;
}

}  // namespace
}  // namespace attnspan

NB_MODULE(_native, m) {
  m.def("masked_softmax", &attnspan::run_softmax, nb::arg("dtype"), nb::arg("scores"), nb::arg("start"),
        nb::arg("stop"), nb::arg("bits").none(), nb::arg("weights"), nb::arg("lse"), nb::arg("threads"),
        nb::arg("executor"));
  m.def("isa", &attnspan::isa);
  m.def("isas", &attnspan::isas);
  m.def("kernel_isa", [] { return std::string(attnspan::name_of(attnspan::kernels().isa)); });
  m.def("openmp_loaded", &attnspan::OpenMp::loaded);
  m.def("softmax_handler", [] { return nb::capsule(attnspan::softmax_handler()); });
}
