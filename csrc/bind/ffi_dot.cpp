// JAX: the dot kernel as XLA FFI handlers on the CPU. Buffers are translated to arrays and back, no more.
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "../core/dot.h"
#include "../core/isa.h"
#include "ffi.h"
#include "ffi_arrays.h"

namespace attnspan {
namespace {

enum class Kind { data, sum, integer, byte, word };

// One place among what a call is given or gives back. Places that are not taken are left out of it.
struct Slot {
  const char* name;
  Kind kind;
  size_t own;      // axes beside those of vmap
  bool ordered;    // whether its axes follow the call's order
};

enum Input { q, k, v, key_bias, bias, slopes, align, start, stop, bits, seed, out, top, inverse, dout, dlse };
constexpr Slot kInputs[] = {
    {"q", Kind::data, 4, true},          {"k", Kind::data, 4, true},         {"v", Kind::data, 4, true},
    {"key_bias", Kind::sum, 4, false},   {"bias", Kind::sum, 4, false},      {"slopes", Kind::sum, 4, false},
    {"align", Kind::integer, 4, false},  {"start", Kind::integer, 4, false}, {"stop", Kind::integer, 4, false},
    {"bits", Kind::byte, 4, false},      {"seed", Kind::word, 4, false},     {"out", Kind::sum, 4, true},
    {"top", Kind::sum, 3, false},        {"inverse", Kind::sum, 3, false},   {"dout", Kind::sum, 4, true},
    {"dlse", Kind::sum, 3, false},
};
constexpr Slot kForward[] = {
    {"out", Kind::sum, 4, true},      {"lse", Kind::sum, 3, false},        {"top", Kind::sum, 3, false},
    {"inverse", Kind::sum, 3, false}, {"entropy", Kind::sum, 3, false},    {"max_weight", Kind::sum, 3, false},
    {"jacobian_norm", Kind::sum, 3, false},
};
constexpr Slot kBackward[] = {
    {"dq", Kind::sum, 4, true},          {"dk", Kind::sum, 4, true},     {"dv", Kind::sum, 4, true},
    {"dkey_bias", Kind::sum, 4, false},  {"dbias", Kind::sum, 4, false}, {"dslopes", Kind::sum, 4, false},
};

struct Attributes {
  double scale, softcap, dropout;
  int64_t draws;
  std::string_view order;  // of q, k, v, out and their gradients: BHLD or BLHD
  int64_t given, asked;    // bit i: whether place i is taken
};

// The operands of a call by place, and how its axes of vmap are gone through.
class Call {
 public:
  // Whether the call is well formed; `error` says what is wrong. Shapes beside the axes of vmap are checked later.
  template <size_t n>
  bool read(xf::RemainingArgs args, xf::RemainingRets rets, const Attributes& a, const Slot (&results)[n],
            size_t inputs) {
    if (!isa_in_use().error.empty()) return wrong(isa_in_use().error);
    if (a.order != "BHLD" && a.order != "BLHD") return wrong("order: needed BHLD or BLHD");
    if (args.size() == 0 || !dtype_of(args.get<xf::AnyBuffer>(0)->element_type(), &dtype)) {
      return wrong("q: needed a floating dtype");
    }
    type_ = args.get<xf::AnyBuffer>(0)->element_type();
    size_t taken = 0;
    for (size_t i = 0; i < inputs; ++i) {
      in_.emplace_back();
      if ((a.given >> i & 1) == 0) continue;
      const auto buffer = args.get<xf::AnyBuffer>(taken++);
      if (!buffer || !take(*buffer, kInputs[i], a.order, &in_)) return misfit(kInputs[i].name);
    }
    if (taken != args.size()) return wrong("given: more operands than places");
    taken = 0;
    for (size_t i = 0; i < n; ++i) {
      out_.emplace_back();
      if ((a.asked >> i & 1) == 0) continue;
      auto buffer = rets.get<xf::AnyBuffer>(taken++);
      if (!buffer || !take(**buffer, results[i], a.order, &out_)) return misfit(results[i].name);
    }
    if (taken == 0 || taken != rets.size()) return wrong("asked: more results than places");
    if (!in_[q] || !in_[k] || !in_[v]) return wrong("q, k, v: needed");
    auto first = rets.get<xf::AnyBuffer>(0);
    const auto shape = (*first)->dimensions();
    lead_ = xf::Span<const int64_t>(shape.begin(), axes_);
    for (size_t i = 0; i < inputs; ++i) {
      if (in_[i] && !in_[i]->fits(lead_, true)) return misfit(kInputs[i].name);
    }
    for (size_t i = 0; i < n; ++i) {
      if (out_[i] && !out_[i]->fits(lead_, false)) return misfit(results[i].name);
    }
    count_ = 1;
    for (const int64_t size : lead_) count_ *= size;
    fold_ = true;
    for (const auto* all : {&in_, &out_}) {
      for (const auto& one : *all) fold_ = fold_ && (!one || one->folds(lead_, in_[q]->batch()));
    }
    return true;
  }

  int64_t calls() const { return fold_ ? 1 : count_; }
  Given in(Input slot, int64_t i) const {
    // What has a gradient, or must be there for each entry of B, is written out.
    return at(in_[slot], i, slot <= bias || slot >= Input::out);
  }
  Given out(size_t slot, int64_t i) const { return at(out_[slot], i, true); }
  void clear(size_t slot) const {
    if (out_[slot]) std::memset(out_[slot]->data(), 0, static_cast<size_t>(out_[slot]->bytes()));
  }

  std::string problem(const Attributes& a, int64_t i, Dot* dot) const {
    return check_dot({dtype, in(q, i).array, in(k, i).array, in(v, i).array, a.scale, a.softcap, in(key_bias, i),
                      in(bias, i), in(slopes, i), in(align, i), in(start, i), in(stop, i), in(bits, i), a.dropout,
                      in(seed, i), a.draws},
                     dot);
  }

  Dtype dtype;
  std::string error;

 private:
  bool wrong(const std::string& what) {
    error = what;
    return false;
  }
  bool misfit(const std::string& name) {
    return wrong(name + ": given a dtype, a number of axes or axes of vmap that don't go with those of q");
  }

  bool take(const xf::AnyBuffer& buffer, const Slot& slot, std::string_view order,
            std::vector<std::optional<Operand>>* to) {
    const xf::DataType sums = dtype == Dtype::f64 ? xf::F64 : xf::F32;
    const xf::DataType needed = slot.kind == Kind::data      ? type_
                                : slot.kind == Kind::sum     ? sums
                                : slot.kind == Kind::integer ? xf::S32
                                : slot.kind == Kind::byte    ? xf::U8
                                                             : xf::U32;
    const size_t rank = buffer.dimensions().size();
    if (buffer.element_type() != needed || rank < slot.own) return false;
    if (to == &in_ && in_.size() == 1) axes_ = rank - slot.own;  // q's
    if (rank - slot.own != axes_) return false;
    to->back().emplace(buffer, slot.own, slot.ordered && order == "BLHD");
    return true;
  }

  Given at(const std::optional<Operand>& operand, int64_t i, bool spread) const {
    if (!operand) return {false, Array{}};
    return {true, fold_ ? operand->folded(count_, lead_, in_[q]->batch(), spread) : operand->at(i, lead_)};
  }

  xf::DataType type_;
  std::vector<std::optional<Operand>> in_, out_;
  size_t axes_ = 0;
  xf::Span<const int64_t> lead_;
  int64_t count_ = 1;
  bool fold_ = true;
};

xf::Error run_forward(xf::ThreadPool pool, xf::RemainingArgs args, xf::RemainingRets rets, double scale,
                      double softcap, double dropout, int64_t draws, std::string_view order, int64_t given,
                      int64_t asked) {
  const Attributes a{scale, softcap, dropout, draws, order, given, asked};
  Call call;
  if (!call.read(args, rets, a, kForward, Input::out)) return xf::Error::InvalidArgument(call.error);
  XlaPool executor(pool);
  return without_throwing([&] {
    for (int64_t i = 0; i < call.calls(); ++i) {
      DotForward task{};
      std::string error = call.problem(a, i, &task.problem);
      if (error.empty()) {
        error = check_dot_forward({call.out(0, i).array, call.out(1, i), call.out(2, i), call.out(3, i),
                                   call.out(4, i), call.out(5, i), call.out(6, i)},
                                  &task);
      }
      if (!error.empty()) return xf::Error::InvalidArgument(error);
      dot_forward(task, executor);
    }
    return xf::Error::Success();
  });
}

xf::Error run_backward(xf::ThreadPool pool, xf::RemainingArgs args, xf::RemainingRets rets, double scale,
                       double softcap, double dropout, int64_t draws, std::string_view order, int64_t given,
                       int64_t asked) {
  const Attributes a{scale, softcap, dropout, draws, order, given, asked};
  Call call;
  if (!call.read(args, rets, a, kBackward, std::size(kInputs))) return xf::Error::InvalidArgument(call.error);
  for (size_t slot = 1; slot < 5; ++slot) call.clear(slot);  // the kernel adds to all but dq and dslopes
  XlaPool executor(pool);
  return without_throwing([&] {
    for (int64_t i = 0; i < call.calls(); ++i) {
      DotBackward task{};
      std::string error = call.problem(a, i, &task.problem);
      if (error.empty()) {
        error = check_dot_backward({call.in(Input::out, i).array, call.in(top, i).array, call.in(inverse, i).array,
                                    call.in(dout, i).array, call.in(dlse, i), call.out(0, i), call.out(1, i),
                                    call.out(2, i), call.out(3, i), call.out(4, i), call.out(5, i)},
                                   &task);
      }
      if (!error.empty()) return xf::Error::InvalidArgument(error);
      dot_backward(task, executor);
    }
    return xf::Error::Success();
  });
}

auto binding() {
  return xf::Ffi::Bind()
      .Ctx<xf::ThreadPool>()
      .RemainingArgs()
      .RemainingRets()
      .Attr<double>("scale")
      .Attr<double>("softcap")
      .Attr<double>("dropout")
      .Attr<int64_t>("draws")
      .Attr<std::string_view>("order")
      .Attr<int64_t>("given")
      .Attr<int64_t>("asked");
}

XLA_FFI_DEFINE_HANDLER(forward_handler, run_forward, binding());
XLA_FFI_DEFINE_HANDLER(backward_handler, run_backward, binding());

}  // namespace

void* dot_forward_handler() { return reinterpret_cast<void*>(forward_handler); }
void* dot_backward_handler() { return reinterpret_cast<void*>(backward_handler); }

}  // namespace attnspan
