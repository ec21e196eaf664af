#include <cmath>
#include <limits>

#include "checks.h"
#include "dot.h"

namespace attnspan {
namespace {

constexpr int64_t kMost = std::numeric_limits<int32_t>::max();

struct Needed {
  const char* name;
  int64_t item;
  int64_t shape[4];
  bool broadcasts;  // 1 may stand in place of one of the first three axes
  bool unit;        // neighbours along the last axis lie side by side
};

// An input. What is not given keeps its null address.
template <class T>
std::string take(const Needed& needed, const Given& given, View<T>* to) {
  if (!given.given) return "";
  int64_t stride[4];
  std::string error = check_array(needed.name, given.array, needed.item, needed.shape, needed.broadcasts, stride);
  if (!error.empty()) return error;
  if (needed.unit && given.array.shape[3] > 1 && stride[3] != 1) {
    return wrong(needed.name, "a last axis of stride " + std::to_string(stride[3]), "stride 1 along it");
  }
  *to = view<T>(given.array, stride);
  // What is given and holds nothing is still there.
  static const double nothing = 0;
  if (to->data == nullptr) to->data = (T*)&nothing;
  return "";
}

std::string put(const Needed& needed, const Given& given, View<void>* to) {
  std::string error = take(needed, given, to);
  if (error.empty() && given.given) error = check_writable(needed.name, given.array);
  return error;
}

std::string sizes_of(const DotArrays& a, DotSizes* n) {
  *n = {a.q.shape[0], a.q.shape[1], a.k.shape[1], a.q.shape[2], a.k.shape[2], a.q.shape[3], a.v.shape[3]};
  for (const Array* x : {&a.q, &a.k, &a.v}) {
    for (const int64_t size : x->shape) {
      if (size < 0) return wrong("q, k, v", "shape " + show(x->shape), "sizes of 0 or more");
    }
  }
  if (n->L > kMost || n->S > kMost) {
    return wrong("q, k", std::to_string(n->L) + " queries and " + std::to_string(n->S) + " keys",
                 "fewer than 2^31 of each");
  }
  if (n->G == 0 ? n->H != 0 : n->H % n->G != 0) {
    return wrong("k", std::to_string(n->G) + " key/value heads beside " + std::to_string(n->H) + " query heads",
                 "a number of heads that divides them");
  }
  int64_t items = kQueryTile + n->L;
  if (__builtin_mul_overflow(items, n->B, &items) || __builtin_mul_overflow(items, n->H, &items) ||
      __builtin_mul_overflow(n->B * (n->S + kKeyTile), n->G, &items)) {
    return wrong("q", "shape " + show(a.q.shape), "fewer than 2^63 rows");
  }
  return "";
}

}  // namespace

std::string check_dot(const DotArrays& a, Dot* dot) {
  *dot = {};
  std::string error = sizes_of(a, &dot->n);
  if (!error.empty()) return error;
  const DotSizes& n = dot->n;
  const int64_t item = size_of(a.dtype), sum = size_of(accumulation(a.dtype));
  dot->dtype = a.dtype;
  const auto need = [&error](std::string found) { error = error.empty() ? found : error; };
  need(take({"q", item, {n.B, n.H, n.L, n.D}, false, true}, {true, a.q}, &dot->q));
  need(take({"k", item, {n.B, n.G, n.S, n.D}, false, true}, {true, a.k}, &dot->k));
  need(take({"v", item, {n.B, n.G, n.S, n.E}, false, true}, {true, a.v}, &dot->v));
  need(take({"key_bias", sum, {n.B, n.H, 1, n.S}, true, true}, a.key_bias, &dot->key_bias));
  need(take({"bias", sum, {n.B, n.H, n.L, n.S}, true, true}, a.bias, &dot->bias));
  need(take({"slopes", sum, {n.B, n.H, 1, 1}, true, false}, a.slopes, &dot->slopes));
  need(take({"align", 4, {n.B, 1, 1, 1}, true, false}, a.align, &dot->align));
  need(take({"bits", 1, {n.B, n.H, n.L, (n.S + 7) / 8}, true, false}, a.bits, &dot->bits));
  if (!error.empty()) return error;
  if (a.slopes.given != a.align.given) return wrong("slopes, align", "one of them", "both, or neither");
  if (a.start.given != a.stop.given) return wrong("start, stop", "one of them", "both, or neither");
  if (a.start.given) {
    error = check_spans(a.start.array, a.stop.array, {n.B, n.H, n.L, n.S}, &dot->spans);
    static const int32_t nothing = 0;  // without queries there is no address, and still a mask
    if (dot->spans.start.data == nullptr) dot->spans.start.data = dot->spans.stop.data = &nothing;
    if (!error.empty()) return error;
  }
  if (!std::isfinite(a.scale)) return wrong("scale", std::to_string(a.scale), "a finite number");
  if (!(a.softcap >= 0) || std::isinf(a.softcap)) {
    return wrong("softcap", std::to_string(a.softcap), "a positive finite number, or 0 for none");
  }
  if (!(a.dropout >= 0 && a.dropout < 1)) {
    return wrong("dropout", std::to_string(a.dropout), "a number p with 0 <= p < 1");
  }
  if (a.dropout > 0) {
    if (!a.seed.given) return wrong("seed", "none", "two words a sequence wherever dropout acts");
    if (a.draws < 1) return wrong("draws", std::to_string(a.draws), "1 or more");
    error = take({"seed", 4, {n.B, 1, 1, 2}, true, false}, a.seed, &dot->seed);
  }
  dot->scale = a.scale;
  dot->softcap = a.softcap;
  dot->dropout = a.dropout;
  dot->draws = a.draws;
  return error;
}

std::string check_dot_forward(const DotForwardArrays& a, DotForward* task) {
  const DotSizes& n = task->problem.n;
  const int64_t sum = size_of(accumulation(task->problem.dtype));
  std::string error = put({"out", sum, {n.B, n.H, n.L, n.E}, false, false}, {true, a.out}, &task->out);
  const auto row = [&](const char* name, const Given& given, View<void>* to) {
    if (error.empty()) error = put({name, sum, {n.B, n.H, n.L, 1}, false, false}, given, to);
  };
  row("lse", a.lse, &task->lse);
  row("top", a.top, &task->top);
  row("inverse", a.inverse, &task->inverse);
  row("entropy", a.entropy, &task->entropy);
  row("max_weight", a.max_weight, &task->max_weight);
  row("jacobian_norm", a.jacobian_norm, &task->jacobian_norm);
  if (!error.empty()) return error;
  if (a.entropy.given != a.max_weight.given || a.entropy.given != a.jacobian_norm.given) {
    return wrong("entropy, max_weight, jacobian_norm", "some of them", "all, or none");
  }
  return "";
}

std::string check_dot_backward(const DotBackwardArrays& a, DotBackward* task) {
  const Dot& dot = task->problem;
  const DotSizes& n = dot.n;
  const int64_t sum = size_of(accumulation(dot.dtype));
  std::string error;
  const auto need = [&error](std::string found) { error = error.empty() ? found : error; };
  need(take({"out", sum, {n.B, n.H, n.L, n.E}, false, false}, {true, a.out}, &task->out));
  need(take({"top", sum, {n.B, n.H, n.L, 1}, false, false}, {true, a.top}, &task->top));
  need(take({"inverse", sum, {n.B, n.H, n.L, 1}, false, false}, {true, a.inverse}, &task->inverse));
  need(take({"dout", sum, {n.B, n.H, n.L, n.E}, false, false}, {true, a.dout}, &task->dout));
  need(take({"dlse", sum, {n.B, n.H, n.L, 1}, false, false}, a.dlse, &task->dlse));
  need(put({"dq", sum, {n.B, n.H, n.L, n.D}, false, true}, a.dq, &task->dq));
  need(put({"dk", sum, {n.B, n.G, n.S, n.D}, false, true}, a.dk, &task->dk));
  need(put({"dv", sum, {n.B, n.G, n.S, n.E}, false, true}, a.dv, &task->dv));
  need(put({"dkey_bias", sum, {n.B, n.H, 1, n.S}, false, true}, a.dkey_bias, &task->dkey_bias));
  need(put({"dslopes", sum, {n.B, n.H, n.L, 1}, false, false}, a.dslopes, &task->dslopes));
  if (!error.empty()) return error;
  if (a.dq.given != a.dk.given) return wrong("dq, dk", "one of them", "both, or neither");
  const bool one_row = dot.bias.data != nullptr && dot.bias.stride[2] == 0 && dot.softcap == 0;
  if (a.dkey_bias.given && dot.key_bias.data == nullptr && !one_row) {
    return wrong("dkey_bias", "one", "none without a key_bias, or a bias of one row and no softcap");
  }
  if (a.dslopes.given && dot.slopes.data == nullptr) return wrong("dslopes", "one", "none without slopes");
  if (a.dbias.given) {
    if (dot.bias.data == nullptr) return wrong("dbias", "one", "none without bias");
    const auto size = [](int64_t stride, int64_t all) { return stride == 0 ? 1 : all; };
    const int64_t shape[4] = {size(dot.bias.stride[0], n.B), size(dot.bias.stride[1], n.H), n.L, n.S};
    error = put({"dbias", sum, {shape[0], shape[1], n.L, n.S}, false, true}, a.dbias, &task->dbias);
    if (error.empty() && n.L > 1 && dot.bias.stride[2] == 0) {
      error = wrong("dbias", "a bias that is one row for all queries", "a bias with a row for each");
    }
  }
  return error;
}

}  // namespace attnspan
