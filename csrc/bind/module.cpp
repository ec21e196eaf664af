// NumPy and PyTorch: addresses, shapes and strides come in as integers. Translation only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <string>
#include <vector>

#include "../core/dispatch.h"
#include "../core/dot.h"
#include "../core/isa.h"
#include "../core/softmax.h"
#include "../core/validate.h"
#include "arrays.h"
#include "dot.h"
#include "ffi.h"

namespace attnspan {
namespace {

void run_softmax(const std::string& dtype, const Described& scores, const Described& start, const Described& stop,
                 const std::optional<Described>& bits, const Described& weights, const Described& lse, int64_t threads,
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
  nb::set_leak_warnings(false);  // attnspan.repeated keeps records as long as the process lives
  m.def("masked_softmax", &attnspan::run_softmax, nb::arg("dtype"), nb::arg("scores"), nb::arg("start"),
        nb::arg("stop"), nb::arg("bits").none(), nb::arg("weights"), nb::arg("lse"), nb::arg("threads"),
        nb::arg("executor"));
  attnspan::define_dot(m);
  m.attr("most_width") = attnspan::kMostWidth;
  m.def("isa", &attnspan::isa);
  m.def("isas", &attnspan::isas);
  m.def("kernel_isa", [] { return std::string(attnspan::name_of(attnspan::kernels().isa)); });
  m.def("openmp_loaded", &attnspan::OpenMp::loaded);
  m.def("softmax_handler", [] { return nb::capsule(attnspan::softmax_handler()); });
  m.def("dot_forward_handler", [] { return nb::capsule(attnspan::dot_forward_handler()); });
  m.def("dot_backward_handler", [] { return nb::capsule(attnspan::dot_backward_handler()); });
}
