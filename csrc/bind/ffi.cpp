// JAX: an XLA FFI handler on the CPU. It translates buffers to arrays and back, no more.
#include "ffi.h"

#include <memory>
#include <string>

#include "../core/isa.h"
#include "../core/softmax.h"
#include "../core/validate.h"
#include "ffi_arrays.h"

namespace attnspan {
namespace {

xf::Error run_softmax(xf::ThreadPool pool, xf::AnyBuffer scores, xf::Buffer<xf::S32> start,
                      xf::Buffer<xf::S32> stop, xf::RemainingArgs rest, xf::Result<xf::AnyBuffer> weights,
                      xf::Result<xf::AnyBuffer> lse) {
  if (!isa_in_use().error.empty()) return xf::Error::InvalidArgument(isa_in_use().error);
  Dtype dtype;
  if (!dtype_of(scores.element_type(), &dtype) || weights->element_type() != scores.element_type() ||
      lse->element_type() != (dtype == Dtype::f64 ? xf::F64 : xf::F32)) {
    return xf::Error::InvalidArgument("scores, weights, lse: dtypes that don't belong together");
  }
  const auto shape = weights->dimensions();
  const size_t rank = shape.size();
  if (rank < 4 || scores.dimensions().size() != rank || start.dimensions().size() != rank ||
      stop.dimensions().size() != rank || lse->dimensions().size() != rank - 1) {
    return xf::Error::InvalidArgument("scores, start, stop, weights, lse: numbers of axes that don't belong together");
  }
  const xf::Span<const int64_t> lead(shape.begin(), rank - 4);
  const Operand in(scores), first(start), last(stop), out(*weights), out_lse(*lse, 3);
  bool fits = in.fits(lead, true) && first.fits(lead, true) && last.fits(lead, true) && out_lse.fits(lead, false);
  std::unique_ptr<Operand> bits;
  if (rest.size() > 0) {
    const auto words = rest.get<xf::Buffer<xf::U8>>(0);
    if (!words) return words.error();
    if (words->dimensions().size() != rank) return xf::Error::InvalidArgument("bits: another number of axes");
    bits = std::make_unique<Operand>(*words);
    fits = fits && bits->fits(lead, true);
  }
  if (!fits) return xf::Error::InvalidArgument("scores, start, stop, bits, lse: axes of vmap that don't belong together");

  int64_t count = 1;
  for (const int64_t n : lead) count *= n;
  XlaPool executor(pool);
  for (int64_t i = 0; i < count; ++i) {
    const Array words = bits ? bits->at(i, lead) : Array{};
    const SoftmaxArrays arrays{in.at(i, lead),       first.at(i, lead), last.at(i, lead),
                               bits ? &words : nullptr, out.at(i, lead),   out_lse.at(i, lead)};
    Softmax task;
    const std::string error = check_softmax(dtype, arrays, &task);
    if (!error.empty()) return xf::Error::InvalidArgument(error);
    softmax(task, executor);
  }
  return xf::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(handler, run_softmax,
                       xf::Ffi::Bind()
                           .Ctx<xf::ThreadPool>()
                           .Arg<xf::AnyBuffer>()
                           .Arg<xf::Buffer<xf::S32>>()
                           .Arg<xf::Buffer<xf::S32>>()
                           .RemainingArgs()
                           .Ret<xf::AnyBuffer>()
                           .Ret<xf::AnyBuffer>());

}  // namespace

void* softmax_handler() { return reinterpret_cast<void*>(handler); }

}  // namespace attnspan
