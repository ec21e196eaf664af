// JAX: an XLA FFI handler on the CPU. It translates buffers to arrays and back, no more.
#include "ffi.h"

#include <algorithm>
#include <memory>
#include <string>

#include "../core/executor.h"
#include "../core/isa.h"
#include "../core/softmax.h"
#include "../core/validate.h"
#include "xla/ffi/api/ffi.h"

namespace attnspan {
namespace {

namespace xf = xla::ffi;

// XLA's own threads. A handler runs on one of them, and all may be in handlers at once: Job never
// waits for a helper that has not started.
class XlaPool final : public Executor {
 public:
  explicit XlaPool(xf::ThreadPool& pool) : pool_(pool) {}

  void run(void* context, int64_t items, Item fn) override {
    const int64_t helpers = std::min(pool_.num_threads(), items) - 1;
    if (helpers <= 0 || forked()) return Serial().run(context, items, fn);
    const auto job = std::make_shared<Job>(context, items, fn);
    for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([job] { job->help(); });
    job->finish();
  }

 private:
  xf::ThreadPool& pool_;
};

bool dtype_of(xf::DataType type, Dtype* dtype) {
  switch (type) {
    case xf::F16: *dtype = Dtype::f16; return true;
    case xf::BF16: *dtype = Dtype::bf16; return true;
    case xf::F32: *dtype = Dtype::f32; return true;
    case xf::F64: *dtype = Dtype::f64; return true;
    default: return false;
  }
}

// One operand under vmap: axes in front of its own four, each of the call's size or 1.
class Operand {
 public:
  // `own` is 4, or 3 for log-sum-exp, which gets a last axis of 1.
  template <class Buffer>
  explicit Operand(const Buffer& buffer, size_t own = 4)
      : data_(static_cast<char*>(buffer.untyped_data())),
        shape_(buffer.dimensions()),
        lead_(shape_.size() - own),
        item_(static_cast<int64_t>(xf::ByteWidth(buffer.element_type()))) {
    array_.shape[3] = 1;
    std::copy(shape_.begin() + lead_, shape_.end(), array_.shape);
    int64_t step = 1;
    for (int i = 3; i >= 0; --i) {
      array_.stride[i] = step;
      step *= array_.shape[i];
    }
  }

  // The array at a row-major index into the leading axes of the call.
  Array at(int64_t index, xf::Span<const int64_t> lead) const {
    int64_t slice = 0, step = 1;
    for (size_t i = lead_; i-- > 0; index /= lead[i]) {
      slice += (shape_[i] == 1 ? 0 : index % lead[i]) * step;
      step *= shape_[i];
    }
    Array array = array_;
    int64_t bytes = item_;
    for (const int64_t n : array.shape) bytes *= n;
    array.data = data_ + slice * bytes;
    return array;
  }

 private:
  char* data_;
  xf::Span<const int64_t> shape_;
  size_t lead_;
  int64_t item_;
  Array array_;
};

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
  const xf::Span<const int64_t> lead(shape.begin(), shape.size() - 4);
  const Operand in(scores), first(start), last(stop), out(*weights), out_lse(*lse, 3);
  std::unique_ptr<Operand> bits;
  if (rest.size() > 0) {
    const auto words = rest.get<xf::Buffer<xf::U8>>(0);
    if (!words) return words.error();
    bits = std::make_unique<Operand>(*words);
  }

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
