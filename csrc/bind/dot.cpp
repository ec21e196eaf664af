// The dot kernel for NumPy and PyTorch. What is checked once, shapes, strides and masks, is kept as an
// object; a call hands over addresses.
#include "dot.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <memory>
#include <optional>

#include "../core/dot.h"
#include "../core/isa.h"
#include "arrays.h"

namespace attnspan {
namespace {

using Maybe = std::optional<Described>;
using Address = std::uintptr_t;  // 0 is none

Given given(const Maybe& described) {
  return {described.has_value(), described ? array_of(*described) : Array{}};
}

void raise(const std::string& error) {
  if (!error.empty()) throw std::invalid_argument(error);
}

// Rows of an output: one after the other, (B, H, L, width).
Array packed(Address address, int64_t B, int64_t H, int64_t L, int64_t width) {
  return {reinterpret_cast<void*>(address), {B, H, L, width}, {H * L * width, L * width, width, 1}};
}

class DotProblem {
 public:
  DotProblem(const std::string& dtype, const Described& q, const Described& k, const Described& v, double scale,
             double softcap, const Maybe& key_bias, const Maybe& bias, const Maybe& slopes, const Maybe& align,
             const Maybe& start, const Maybe& stop, const Maybe& bits, double dropout, const Maybe& seed,
             int64_t draws) {
    raise(isa_in_use().error);
    raise(check_dot({dtype_of(dtype), array_of(q), array_of(k), array_of(v), scale, softcap, given(key_bias),
                     given(bias), given(slopes), given(align), given(start), given(stop), given(bits), dropout,
                     given(seed), draws},
                    &dot_));
    if (bias) std::copy(std::get<1>(*bias).begin(), std::get<1>(*bias).end(), bias_shape_);
  }

  void forward(Address q, Address k, Address v, Address out, Address lse, Address top, Address inverse,
               Address entropy, Address max_weight, Address jacobian_norm, int64_t threads,
               const std::string& executor) const {
    DotForward task{};
    task.problem = at(q, k, v);
    const DotSizes& n = dot_.n;
    const auto row = [&](Address address) -> Given { return {address != 0, packed(address, n.B, n.H, n.L, 1)}; };
    raise(check_dot_forward({packed(out, n.B, n.H, n.L, n.E), row(lse), row(top), row(inverse), row(entropy),
                             row(max_weight), row(jacobian_norm)},
                            &task));
    const auto chosen = executor_of(executor, threads);
    const nb::gil_scoped_release others_may_run;
    dot_forward(task, *chosen);
  }

  void backward(Address q, Address k, Address v, Address out, Address top, Address inverse, const Described& dout,
                const Maybe& dlse, Address dq, Address dk, Address dv, Address dkey_bias, Address dbias,
                Address dslopes, int64_t threads, const std::string& executor) const {
    DotBackward task{};
    task.problem = at(q, k, v);
    const DotSizes& n = dot_.n;
    const auto to = [](Address address, int64_t B, int64_t H, int64_t L, int64_t width) -> Given {
      return {address != 0, packed(address, B, H, L, width)};
    };
    raise(check_dot_backward(
        {packed(out, n.B, n.H, n.L, n.E), packed(top, n.B, n.H, n.L, 1), packed(inverse, n.B, n.H, n.L, 1),
         array_of(dout), given(dlse), to(dq, n.B, n.H, n.L, n.D), to(dk, n.B, n.G, n.S, n.D),
         to(dv, n.B, n.G, n.S, n.E), to(dkey_bias, n.B, n.H, 1, n.S),
         to(dbias, bias_shape_[0], bias_shape_[1], n.L, n.S), to(dslopes, n.B, n.H, n.L, 1)},
        &task));
    const auto chosen = executor_of(executor, threads);
    const nb::gil_scoped_release others_may_run;
    dot_backward(task, *chosen);
  }

 private:
  Dot at(Address q, Address k, Address v) const {
    const auto aligned = static_cast<Address>(size_of(dot_.dtype)) - 1;
    if (((q | k | v) & aligned) != 0) throw std::invalid_argument("q, k, v: given an address that is not aligned");
    Dot dot = dot_;
    dot.q.data = reinterpret_cast<const void*>(q);
    dot.k.data = reinterpret_cast<const void*>(k);
    dot.v.data = reinterpret_cast<const void*>(v);
    return dot;
  }

  Dot dot_;
  int64_t bias_shape_[4] = {};
};

}  // namespace

void define_dot(nb::module_& m) {
  nb::class_<DotProblem>(m, "DotProblem")
      .def(nb::init<const std::string&, const Described&, const Described&, const Described&, double, double,
                    const Maybe&, const Maybe&, const Maybe&, const Maybe&, const Maybe&, const Maybe&,
                    const Maybe&, double, const Maybe&, int64_t>(),
           nb::arg("dtype"), nb::arg("q"), nb::arg("k"), nb::arg("v"), nb::arg("scale"), nb::arg("softcap"),
           nb::arg("key_bias").none(), nb::arg("bias").none(), nb::arg("slopes").none(), nb::arg("align").none(),
           nb::arg("start").none(), nb::arg("stop").none(), nb::arg("bits").none(), nb::arg("dropout"),
           nb::arg("seed").none(), nb::arg("draws"))
      .def("forward", &DotProblem::forward)
      .def("backward", &DotProblem::backward);
}

}  // namespace attnspan
