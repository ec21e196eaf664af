#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

#include "checks.h"
#include "dot.h"

namespace attnspan {
namespace {

enum Kind : int {
  kPlain = 0,
  kBroadcasts = 1,  // each of the first three axes may have one entry
  kRows = 2,        // the last axis has stride 1
  kWritten = 4,
};

// Checks one thing after the other, up to the first that is wrong.
struct Checks {
  std::string error;

  void expect(bool right, const char* name, const std::string& given, const std::string& needed) {
    if (error.empty() && !right) error = wrong(name, given, needed);
  }

  template <class T>
  void array(const char* name, const Array& a, int64_t item, const int64_t (&shape)[4], int kind, View<T>* view) {
    int64_t stride[4];
    if (error.empty()) error = check_array(name, a, item, shape, (kind & kBroadcasts) != 0, stride);
    if (!error.empty()) return;
    const bool empty = std::find(a.shape, a.shape + 4, 0) != a.shape + 4;
    expect((kind & kRows) == 0 || empty || a.shape[3] == 1 || a.stride[3] == 1, name,
           "shape " + show(a.shape) + " with strides " + show(a.stride), "a last axis of stride 1");
    if (error.empty() && (kind & kWritten) != 0) error = check_writable(name, a);
    *view = {static_cast<T*>(a.data), {stride[0], stride[1], stride[2], stride[3]}};
  }

  template <class T>
  void array(const char* name, const Given& a, int64_t item, const int64_t (&shape)[4], int kind, View<T>* view) {
    if (a.given) array(name, a.array, item, shape, kind, view);
  }
};

std::string show(double x) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", x);
  return text;
}

std::string presence(bool given) { return given ? "one" : "none"; }

void check_numbers(const DotArrays& arrays, Checks* checks) {
  // The kernel takes scale and softcap, and what is one over it, in the dtype of the sums.
  const bool wide = arrays.dtype == Dtype::f64;
  const double most = wide ? std::numeric_limits<double>::max() / 2 : std::numeric_limits<float>::max() / 2.0;
  const double least = wide ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  const double scale = arrays.scale, softcap = arrays.softcap, dropout = arrays.dropout;
  checks->expect(std::abs(scale) <= most, "scale", show(scale), "a finite number, at most " + show(most));
  checks->expect(softcap == 0 || (softcap >= least && softcap <= most), "softcap", show(softcap),
                 "a number from " + show(least) + " to " + show(most) + ", or 0 for none");
  checks->expect(dropout >= 0 && dropout < 1, "dropout", show(dropout), "a share within [0, 1)");
  if (!(dropout > 0)) return;
  checks->expect(arrays.seed.given, "seed", "none", "two words, for a dropout of " + show(dropout));
  checks->expect(arrays.draws >= 1, "draws", std::to_string(arrays.draws), "1 or more");
}

}  // namespace

std::string check_dot(const DotArrays& arrays, Dot* problem) {
  const int64_t B = arrays.q.shape[0], H = arrays.q.shape[1], L = arrays.q.shape[2], D = arrays.q.shape[3];
  const int64_t G = arrays.k.shape[1], S = arrays.k.shape[2], E = arrays.v.shape[3];
  const int64_t item = size_of(arrays.dtype), wide = size_of(accumulation(arrays.dtype));
  *problem = {};
  problem->dtype = arrays.dtype;
  problem->n = {B, H, G, L, S, D, E};
  problem->scale = arrays.scale;
  problem->softcap = arrays.softcap;
  problem->dropout = arrays.dropout;
  problem->draws = arrays.draws;

  Checks checks;
  checks.array("q", arrays.q, item, {B, H, L, D}, kRows, &problem->q);
  checks.array("k", arrays.k, item, {B, G, S, D}, kRows, &problem->k);
  checks.array("v", arrays.v, item, {B, G, S, E}, kRows, &problem->v);
  checks.expect(G == 0 ? H == 0 : H % G == 0, "k", std::to_string(G) + " heads",
                "a number that divides the " + std::to_string(H) + " of q");
  const std::string widest = "at most " + std::to_string(kMostWidth) + ": a tile of them is held at once";
  checks.expect(D <= kMostWidth, "q", std::to_string(D) + " numbers a query", widest);
  checks.expect(E <= kMostWidth, "v", std::to_string(E) + " numbers a value", widest);
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  checks.expect(L <= most, "q", std::to_string(L) + " queries", "fewer than 2^31: dropout counts them in 32 bits");
  checks.expect(S <= most, "k", std::to_string(S) + " keys", "fewer than 2^31: spans are int32");
  check_numbers(arrays, &checks);

  checks.array("key_bias", arrays.key_bias, wide, {B, H, 1, S}, kBroadcasts | kRows, &problem->key_bias);
  checks.array("bias", arrays.bias, wide, {B, H, L, S}, kBroadcasts | kRows, &problem->bias);
  checks.array("slopes", arrays.slopes, wide, {B, H, 1, 1}, kBroadcasts, &problem->slopes);
  checks.array("align", arrays.align, 4, {B, H, 1, 1}, kBroadcasts, &problem->align);
  checks.expect(arrays.slopes.given == arrays.align.given, "align", presence(arrays.align.given),
                presence(arrays.slopes.given) + ": it goes with slopes");
  if (arrays.dropout > 0) {
    checks.array("seed", arrays.seed, 4, {B, 1, 1, 2}, kBroadcasts, &problem->seed);
  }

  checks.expect(arrays.start.given == arrays.stop.given, "stop", presence(arrays.stop.given),
                presence(arrays.start.given) + ": it goes with start");
  const Sizes sizes{B, H, L, S};
  if (arrays.start.given) {
    // Without an interval there is no address, which would mean that there are no spans.
    checks.expect(arrays.start.array.shape[3] != 0, "start", "shape " + show(arrays.start.array.shape),
                  "one interval or more a query; [0, 0) for none");
    if (checks.error.empty()) {
      checks.error = check_spans(arrays.start.array, arrays.stop.array, sizes, &problem->spans);
    }
  }
  if (checks.error.empty() && arrays.bits.given) {
    checks.error = check_bits(arrays.bits.array, sizes, &problem->bits);
  }
  return checks.error;
}

std::string check_dot_forward(const DotForwardArrays& arrays, DotForward* task) {
  const DotSizes& n = task->problem.n;
  const int64_t item = size_of(accumulation(task->problem.dtype)), row[4] = {n.B, n.H, n.L, 1};
  Checks checks;
  task->lse = task->top = task->inverse = task->entropy = task->max_weight = task->jacobian_norm = {};
  checks.array("out", arrays.out, item, {n.B, n.H, n.L, n.E}, kWritten, &task->out);
  checks.array("lse", arrays.lse, item, row, kWritten, &task->lse);
  checks.array("top", arrays.top, item, row, kWritten, &task->top);
  checks.array("inverse", arrays.inverse, item, row, kWritten, &task->inverse);
  checks.expect(arrays.top.given == arrays.inverse.given, "inverse", presence(arrays.inverse.given),
                presence(arrays.top.given) + ": it goes with top");
  checks.array("entropy", arrays.entropy, item, row, kWritten, &task->entropy);
  checks.array("max_weight", arrays.max_weight, item, row, kWritten, &task->max_weight);
  checks.array("jacobian_norm", arrays.jacobian_norm, item, row, kWritten, &task->jacobian_norm);
  const bool all = arrays.entropy.given;
  checks.expect(arrays.max_weight.given == all, "max_weight", presence(arrays.max_weight.given),
                presence(all) + ": it goes with entropy");
  checks.expect(arrays.jacobian_norm.given == all, "jacobian_norm", presence(arrays.jacobian_norm.given),
                presence(all) + ": it goes with entropy");
  return checks.error;
}

std::string check_dot_backward(const DotBackwardArrays& arrays, DotBackward* task) {
  const Dot& problem = task->problem;
  const DotSizes& n = problem.n;
  const int64_t item = size_of(accumulation(problem.dtype)), row[4] = {n.B, n.H, n.L, 1};
  Checks checks;
  task->dlse = {};
  task->dq = task->dk = task->dv = task->dkey_bias = task->dbias = task->dslopes = {};
  checks.array("out", arrays.out, item, {n.B, n.H, n.L, n.E}, kPlain, &task->out);
  checks.array("top", arrays.top, item, row, kPlain, &task->top);
  checks.array("inverse", arrays.inverse, item, row, kPlain, &task->inverse);
  checks.array("dout", arrays.dout, item, {n.B, n.H, n.L, n.E}, kPlain, &task->dout);
  checks.array("dlse", arrays.dlse, item, row, kPlain, &task->dlse);

  checks.array("dq", arrays.dq, item, {n.B, n.H, n.L, n.D}, kRows | kWritten, &task->dq);
  checks.array("dk", arrays.dk, item, {n.B, n.G, n.S, n.D}, kRows | kWritten, &task->dk);
  checks.expect(arrays.dq.given == arrays.dk.given, "dk", presence(arrays.dk.given),
                presence(arrays.dq.given) + ": it goes with dq");
  checks.array("dv", arrays.dv, item, {n.B, n.G, n.S, n.E}, kRows | kWritten, &task->dv);
  checks.array("dkey_bias", arrays.dkey_bias, item, {n.B, n.H, 1, n.S}, kRows | kWritten, &task->dkey_bias);
  checks.array("dslopes", arrays.dslopes, item, row, kWritten, &task->dslopes);

  // Where nobody is there to have a gradient, the addresses may be null.
  const bool nobody = n.B == 0 || n.H == 0 || n.L == 0 || n.S == 0;
  const bool one_row = problem.bias.data != nullptr && problem.bias.stride[2] == 0;
  checks.expect(nobody || !arrays.dkey_bias.given || problem.key_bias.data != nullptr ||
                    (one_row && problem.softcap == 0),
                "dkey_bias", "one", "none: there is no key_bias, nor a bias of one row without softcap");
  checks.expect(nobody || !arrays.dslopes.given || problem.slopes.data != nullptr, "dslopes", "one",
                "none: there are no slopes");
  if (!arrays.dbias.given) return checks.error;
  checks.expect(nobody || problem.bias.data != nullptr, "dbias", "one", "none: there is no bias");
  checks.expect(n.L <= 1 || !one_row, "dbias", "one", "none: the bias is one row for all queries");
  // Batch elements and heads that share a bias share its gradient; queries never do.
  const int64_t(&given)[4] = arrays.dbias.array.shape;
  const int64_t needed[4] = {given[0] == 1 ? 1 : n.B, given[1] == 1 ? 1 : n.H, n.L, n.S};
  checks.array("dbias", arrays.dbias, item, needed, kRows | kWritten, &task->dbias);
  const bool shared = (given[0] == n.B || problem.bias.stride[0] == 0) &&
                      (given[1] == n.H || problem.bias.stride[1] == 0);
  checks.expect(shared, "dbias", "shape " + show(given), "the shape of bias");
  return checks.error;
}

}  // namespace attnspan
