// JAX: the dot kernel as XLA FFI handlers on the CPU. They translate buffers to arrays and back, no more.
#include <cstring>
#include <string>
#include <vector>

#include "../core/dot.h"
#include "../core/isa.h"
#include "ffi.h"
#include "xla.h"

namespace attnspan {
namespace {

// The bits of `present`, in the order in which the operands follow those that are always there.
enum Operands { kKeyBias, kBias, kSlopes, kAlign, kStart, kStop, kBits, kSeed, kOperands };
constexpr xf::DataType kIntegers[] = {xf::S32, xf::S32, xf::S32, xf::U8, xf::U32};  // of those from kAlign on

// A call's operands and results, under vmap with axes in front of their own.
class Call {
 public:
  std::string error;

  Call(xf::RemainingArgs args, xf::RemainingRets rets, bool swapped) : args_(args), rets_(rets), swapped_(swapped) {}

  Operand* operand(xf::DataType dtype, size_t own = 4, bool heads = false) {
    const auto buffer = args_.get<xf::AnyBuffer>(argument_++);
    if (!buffer || buffer->element_type() != dtype) {
      if (error.empty()) error = "operand " + std::to_string(argument_) + ": missing, or of another dtype";
      return nullptr;
    }
    kept_.push_back(std::make_unique<Operand>(*buffer, own, heads && swapped_));
    return kept_.back().get();
  }
  Operand* result(xf::DataType dtype, size_t own = 4, bool heads = false) {
    auto found = rets_.get<xf::AnyBuffer>(result_++);
    if (!found || (**found).element_type() != dtype) {
      if (error.empty()) error = "result " + std::to_string(result_) + ": missing, or of another dtype";
      return nullptr;
    }
    const xf::AnyBuffer buffer = **found;
    if (lead.size() == 0) lead = {buffer.dimensions().begin(), buffer.dimensions().size() - own};
    bytes_.push_back(buffer.size_bytes());
    data_.push_back(buffer.untyped_data());
    kept_.push_back(std::make_unique<Operand>(buffer, own, heads && swapped_));
    return kept_.back().get();
  }
  void clear_last() { std::memset(data_.back(), 0, bytes_.back()); }

  Given at(const Operand* operand, int64_t index) const {
    return operand == nullptr ? Given{false, {}} : Given{true, operand->at(index, lead)};
  }
  int64_t count() const {
    int64_t n = 1;
    for (const int64_t size : lead) n *= size;
    return n;
  }

  xf::Span<const int64_t> lead;

 private:
  xf::RemainingArgs args_;
  xf::RemainingRets rets_;
  const bool swapped_;
  size_t argument_ = 0, result_ = 0;
  std::vector<std::unique_ptr<Operand>> kept_;
  std::vector<size_t> bytes_;
  std::vector<void*> data_;
};

struct Numbers {
  double scale, softcap, dropout;
  int64_t draws, present;
};

// q, k, v and what else a problem is made of.
struct Inputs {
  Dtype dtype;
  xf::DataType type, sums;
  Operand *q, *k, *v, *more[kOperands] = {};

  DotArrays arrays(const Call& call, const Numbers& n, int64_t i) const {
    const auto given = [&](int which) { return call.at(more[which], i); };
    return {dtype,          q->at(i, call.lead), k->at(i, call.lead), v->at(i, call.lead), n.scale,
            n.softcap,      given(kKeyBias),     given(kBias),        given(kSlopes),      given(kAlign),
            given(kStart),  given(kStop),        given(kBits),        n.dropout,           given(kSeed),
            n.draws};
  }
};

std::string take(xf::DataType type, Call* call, Inputs* inputs) {
  if (!isa_in_use().error.empty()) return isa_in_use().error;
  if (!dtype_of(type, &inputs->dtype)) return "q: of no floating dtype of 16, 32 or 64 bits";
  inputs->type = type;
  inputs->sums = inputs->dtype == Dtype::f64 ? xf::F64 : xf::F32;
  inputs->q = call->operand(type, 4, true);
  inputs->k = call->operand(type, 4, true);
  inputs->v = call->operand(type, 4, true);
  return call->error;
}

std::string take_more(int64_t present, Call* call, Inputs* inputs) {
  for (int i = 0; i < kOperands; ++i) {
    if ((present >> i & 1) == 0) continue;
    inputs->more[i] = call->operand(i < kAlign ? inputs->sums : kIntegers[i - kAlign]);
  }
  return call->error;
}

xf::Error failed(const std::string& error) { return xf::Error::InvalidArgument(error); }

xf::Error forward(xf::ThreadPool pool, xf::RemainingArgs args, xf::RemainingRets rets, double scale, double softcap,
                  double dropout, int64_t draws, int64_t present, bool swapped, bool looks) {
  Call call(args, rets, swapped);
  Inputs in;
  const auto q = args.get<xf::AnyBuffer>(0);
  if (!q) return q.error();
  std::string error = take(q->element_type(), &call, &in);
  if (error.empty()) error = take_more(present, &call, &in);
  if (!error.empty()) return failed(error);
  Operand* const out = call.result(in.sums, 4, true);
  Operand* rows[6] = {};
  for (int i = 0; i < (looks ? 6 : 3); ++i) rows[i] = call.result(in.sums, 3);
  if (!call.error.empty()) return failed(call.error);
  XlaPool executor(pool);
  for (int64_t i = 0; i < call.count(); ++i) {
    DotForward task{};
    error = check_dot(in.arrays(call, {scale, softcap, dropout, draws, present}, i), &task.problem);
    const auto row = [&](int which) { return call.at(rows[which], i); };
    if (error.empty()) {
      error = check_dot_forward({out->at(i, call.lead), row(0), row(1), row(2), row(3), row(4), row(5)}, &task);
    }
    if (!error.empty()) return failed(error);
    dot_forward(task, executor);
  }
  return xf::Error::Success();
}

xf::Error backward(xf::ThreadPool pool, xf::RemainingArgs args, xf::RemainingRets rets, double scale,
                   double softcap, double dropout, int64_t draws, int64_t present, bool swapped, bool keys,
                   bool bias, bool slopes) {
  Call call(args, rets, swapped);
  Inputs in;
  const auto q = args.get<xf::AnyBuffer>(0);
  if (!q) return q.error();
  std::string error = take(q->element_type(), &call, &in);
  if (!error.empty()) return failed(error);
  Operand* const out = call.operand(in.sums, 4, true);
  Operand* const top = call.operand(in.sums, 3);
  Operand* const inverse = call.operand(in.sums, 3);
  Operand* const dout = call.operand(in.sums, 4, true);
  Operand* const dlse = call.operand(in.sums, 3);
  error = take_more(present, &call, &in);
  Operand* const dq = call.result(in.sums, 4, true);
  Operand* const dk = call.result(in.sums, 4, true);
  if (call.error.empty()) call.clear_last();
  Operand* const dv = call.result(in.sums, 4, true);
  if (call.error.empty()) call.clear_last();
  Operand* const dkeys = keys ? call.result(in.sums) : nullptr;
  if (keys && call.error.empty()) call.clear_last();
  Operand* const dbias = bias ? call.result(in.sums) : nullptr;
  if (bias && call.error.empty()) call.clear_last();
  Operand* const dslopes = slopes ? call.result(in.sums, 3) : nullptr;
  if (!call.error.empty()) return failed(call.error);
  XlaPool executor(pool);
  for (int64_t i = 0; i < call.count(); ++i) {
    DotBackward task{};
    error = check_dot(in.arrays(call, {scale, softcap, dropout, draws, present}, i), &task.problem);
    const auto at = [&](Operand* operand) { return call.at(operand, i); };
    if (error.empty()) {
      error = check_dot_backward({at(out).array, at(top).array, at(inverse).array, at(dout).array, at(dlse), at(dq),
                                  at(dk), at(dv), at(dkeys), at(dbias), at(dslopes)},
                                 &task);
    }
    if (!error.empty()) return failed(error);
    dot_backward(task, executor);
  }
  return xf::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(forward_handler, forward,
                       xf::Ffi::Bind()
                           .Ctx<xf::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<double>("scale")
                           .Attr<double>("softcap")
                           .Attr<double>("dropout")
                           .Attr<int64_t>("draws")
                           .Attr<int64_t>("present")
                           .Attr<bool>("swapped")
                           .Attr<bool>("looks"));

XLA_FFI_DEFINE_HANDLER(backward_handler, backward,
                       xf::Ffi::Bind()
                           .Ctx<xf::ThreadPool>()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<double>("scale")
                           .Attr<double>("softcap")
                           .Attr<double>("dropout")
                           .Attr<int64_t>("draws")
                           .Attr<int64_t>("present")
                           .Attr<bool>("swapped")
                           .Attr<bool>("keys")
                           .Attr<bool>("bias")
                           .Attr<bool>("slopes"));

}  // namespace

void* dot_forward_handler() { return reinterpret_cast<void*>(forward_handler); }
void* dot_backward_handler() { return reinterpret_cast<void*>(backward_handler); }

}  // namespace attnspan
