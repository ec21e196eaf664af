// Each thing that the dot kernel's checks refuse, by its name; what is not refused runs in the other tests.
#include <limits>

#include "../core/dot.h"
#include "check.h"

using namespace attnspan;

namespace {

// Good calls for B 2, H 4, G 2, L 3, S 10, D 5, E 6 in float32, one part of which a test spoils.
struct Call {
  alignas(8) char memory[240 * 8] = {};
  int32_t starts[6] = {0, 2, 0, 10, 1, 5}, stops[6] = {1, 4, 10, 10, 5, 9}, aligns[2] = {};
  uint32_t words[2] = {};
  DotArrays in{Dtype::f32, at(2, 4, 3, 5), at(2, 2, 10, 5), at(2, 2, 10, 6), 0.5, 2,
               {true, at(2, 4, 1, 10)}, {true, at(1, 4, 3, 10)}, {true, at(1, 4, 1, 1)}, {true, at(2, 1, 1, 1)},
               {true, {starts, {1, 1, 3, 2}, {0, 0, 2, 1}}}, {true, {stops, {1, 1, 3, 2}, {0, 0, 2, 1}}},
               {true, at(1, 1, 1, 2)}, 0.1, {true, {words, {1, 1, 1, 2}, {2, 2, 2, 1}}}, 1};
  DotForwardArrays forward{at(2, 4, 3, 6), one(), one(), one(), one(), one(), one()};
  DotBackwardArrays backward{at(2, 4, 3, 6), at(2, 4, 3, 1), at(2, 4, 3, 1), at(2, 4, 3, 6), one(),
                             {true, at(2, 4, 3, 5)}, {true, at(2, 2, 10, 5)}, {true, at(2, 2, 10, 6)},
                             {true, at(2, 4, 1, 10)}, {true, at(1, 4, 3, 10)}, one()};

  Call() { in.align.array.data = aligns; }
  Call(const Call&) = delete;  // its arrays point into itself

  Array at(int64_t b, int64_t h, int64_t l, int64_t j) {
    return {memory, {b, h, l, j}, {h * l * j, l * j, j, 1}};
  }
  Given one() { return {true, at(2, 4, 3, 1)}; }

  std::string check() const {
    Dot problem;
    std::string error = check_dot(in, &problem);
    if (!error.empty()) return error;
    DotForward f{};
    f.problem = problem;
    error = check_dot_forward(forward, &f);
    if (!error.empty()) return error;
    DotBackward b{};
    b.problem = problem;
    return check_dot_backward(backward, &b);
  }
};

template <class Spoil>
bool refused(const char* said, Spoil spoil) {
  Call call;
  spoil(call);
  const std::string error = call.check();
  const bool right = *said == '\0' ? error.empty() : error.rfind(said, 0) == 0;
  if (!right) std::fprintf(stderr, "said: %s\n", error.c_str());
  return right;
}

template <class Spoil>
bool accepted(Spoil spoil) {
  return refused("", spoil);
}

constexpr int64_t huge = std::numeric_limits<int64_t>::max(), tiny = std::numeric_limits<int64_t>::min();
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// Where each array of a call is, by the name that a refusal gives it.
struct Place {
  const char* name;
  Array& (*find)(Call&);
  bool rows, written;
};
const Place kPlaces[] = {
    {"q", [](Call& c) -> Array& { return c.in.q; }, true, false},
    {"k", [](Call& c) -> Array& { return c.in.k; }, true, false},
    {"v", [](Call& c) -> Array& { return c.in.v; }, true, false},
    {"key_bias", [](Call& c) -> Array& { return c.in.key_bias.array; }, true, false},
    {"bias", [](Call& c) -> Array& { return c.in.bias.array; }, true, false},
    {"slopes", [](Call& c) -> Array& { return c.in.slopes.array; }, false, false},
    {"align", [](Call& c) -> Array& { return c.in.align.array; }, false, false},
    {"start", [](Call& c) -> Array& { return c.in.start.array; }, false, false},
    {"stop", [](Call& c) -> Array& { return c.in.stop.array; }, false, false},
    {"bits", [](Call& c) -> Array& { return c.in.bits.array; }, false, false},
    {"seed", [](Call& c) -> Array& { return c.in.seed.array; }, false, false},
    {"out", [](Call& c) -> Array& { return c.forward.out; }, false, true},
    {"lse", [](Call& c) -> Array& { return c.forward.lse.array; }, false, true},
    {"top", [](Call& c) -> Array& { return c.forward.top.array; }, false, true},
    {"inverse", [](Call& c) -> Array& { return c.forward.inverse.array; }, false, true},
    {"entropy", [](Call& c) -> Array& { return c.forward.entropy.array; }, false, true},
    {"max_weight", [](Call& c) -> Array& { return c.forward.max_weight.array; }, false, true},
    {"jacobian_norm", [](Call& c) -> Array& { return c.forward.jacobian_norm.array; }, false, true},
    {"out", [](Call& c) -> Array& { return c.backward.out; }, false, false},
    {"top", [](Call& c) -> Array& { return c.backward.top; }, false, false},
    {"inverse", [](Call& c) -> Array& { return c.backward.inverse; }, false, false},
    {"dout", [](Call& c) -> Array& { return c.backward.dout; }, false, false},
    {"dlse", [](Call& c) -> Array& { return c.backward.dlse.array; }, false, false},
    {"dq", [](Call& c) -> Array& { return c.backward.dq.array; }, true, true},
    {"dk", [](Call& c) -> Array& { return c.backward.dk.array; }, true, true},
    {"dv", [](Call& c) -> Array& { return c.backward.dv.array; }, true, true},
    {"dkey_bias", [](Call& c) -> Array& { return c.backward.dkey_bias.array; }, true, true},
    {"dbias", [](Call& c) -> Array& { return c.backward.dbias.array; }, true, true},
    {"dslopes", [](Call& c) -> Array& { return c.backward.dslopes.array; }, false, true},
};

int widest(const Array& a) {  // an axis of more than one entry that is not the last
  int axis = 0;
  for (int i = 0; i < 3; ++i) axis = a.shape[i] > a.shape[axis] ? i : axis;
  return axis;
}

}  // namespace

TEST(a_good_dot_call_passes) {
  CHECK(accepted([](Call&) {}));
  CHECK(accepted([](Call& c) { c.in.scale = 0; }));
  CHECK(accepted([](Call& c) { c.in.scale = -3, c.in.softcap = 0; }));
  CHECK(accepted([](Call& c) { c.in.dropout = 0, c.in.seed.given = false, c.in.draws = 0; }));
  CHECK(accepted([](Call& c) { c.in.start.given = c.in.stop.given = false; }));
  CHECK(accepted([](Call& c) { c.forward.top.given = c.forward.inverse.given = false; }));
  CHECK(accepted([](Call& c) {
    c.forward.entropy.given = c.forward.max_weight.given = c.forward.jacobian_norm.given = false;
  }));
  CHECK(accepted([](Call& c) { c.backward.dq.given = c.backward.dk.given = false; }));
}

TEST(every_array_of_dot_is_checked) {
  for (const Place& place : kPlaces) {
    const auto says = [&](const std::string& given) { return std::string(place.name) + ": given " + given; };
    CHECK(refused(says("a null pointer, needed the address of its elements").c_str(),
                  [&](Call& c) { place.find(c).data = nullptr; }));
    if (std::string(place.name) != "bits") {
      CHECK(refused(says("an address that is no multiple of 4, needed aligned elements").c_str(), [&](Call& c) {
        Array& a = place.find(c);
        a.data = static_cast<char*>(a.data) + 2;
      }));
    }
    CHECK(refused(says("shape ").c_str(), [&](Call& c) { place.find(c).shape[1] = -1; }));
    if (std::string(place.name) != "q") {  // the others follow its shape
      CHECK(refused(says("shape ").c_str(), [&](Call& c) { place.find(c).shape[0] = 7; }));
    }
    for (const int64_t stride : {huge, tiny, huge / 2, -huge / 2}) {
      Call probe;
      if (place.find(probe).shape[widest(place.find(probe))] == 1) continue;
      CHECK(refused(says("shape ").c_str(), [&](Call& c) {
        Array& a = place.find(c);
        a.stride[widest(a)] = stride;
      }));
    }
    if (place.rows) {
      CHECK(refused(says("shape ").c_str(), [&](Call& c) { place.find(c).stride[3] = 2; }));
      CHECK(refused(says("shape ").c_str(), [&](Call& c) { place.find(c).stride[3] = 0; }));
      CHECK(refused(says("shape ").c_str(), [&](Call& c) { place.find(c).stride[3] = -1; }));
    }
    if (place.written) {
      CHECK(refused(says("shape ").c_str(), [&](Call& c) {
        Array& a = place.find(c);
        a.stride[widest(a)] = 0;
      }));
    }
  }
}

TEST(sizes_of_dot_that_do_not_fit_are_refused) {
  CHECK(refused("k: given shape (1, 2, 10, 5), needed (2, 2, 10, 5)", [](Call& c) { c.in.k.shape[0] = 1; }));
  CHECK(refused("k: given shape (2, 2, 10, 4), needed (2, 2, 10, 5)", [](Call& c) { c.in.k.shape[3] = 4; }));
  CHECK(refused("v: given shape (2, 2, 9, 6), needed (2, 2, 10, 6)", [](Call& c) { c.in.v.shape[2] = 9; }));
  CHECK(refused("k: given 3 heads, needed a number that divides the 4 of q",
                [](Call& c) { c.in.k.shape[1] = c.in.v.shape[1] = 3; }));
  CHECK(refused("k: given 0 heads, needed a number that divides the 4 of q",
                [](Call& c) { c.in.k.shape[1] = c.in.v.shape[1] = 0; }));
  CHECK(refused("q: given 2147483648 queries, needed fewer than 2^31",
                [](Call& c) { c.in.q.shape[2] = int64_t{1} << 31, c.in.q.stride[2] = 0; }));
  CHECK(refused("k: given 2147483648 keys, needed fewer than 2^31", [](Call& c) {
    for (Array* a : {&c.in.k, &c.in.v}) a->shape[2] = int64_t{1} << 31, a->stride[2] = 0;
  }));
  CHECK(refused("q: given 65537 numbers a query, needed at most 65536",
                [](Call& c) { c.in.q.shape[3] = c.in.k.shape[3] = 65537; }));
  CHECK(refused("v: given 65537 numbers a value, needed at most 65536", [](Call& c) { c.in.v.shape[3] = 65537; }));
  for (int axis = 0; axis < 4; ++axis) {
    CHECK(refused("q: given shape", [axis](Call& c) { c.in.q.shape[axis] = huge, c.in.q.stride[axis] = axis == 3; }));
  }
  CHECK(refused("bias: given shape (1, 4, 2, 10), needed (2, 4, 3, 10), or 1 in place",
                [](Call& c) { c.in.bias.array.shape[2] = 2; }));
  CHECK(refused("bits: given shape (1, 1, 1, 1), needed (2, 4, 3, 2)",
                [](Call& c) { c.in.bits.array.shape[3] = 1; }));
  CHECK(refused("seed: given shape (1, 1, 1, 1), needed (2, 1, 1, 2)",
                [](Call& c) { c.in.seed.array.shape[3] = 1; }));
  CHECK(refused("align: given shape (2, 3, 1, 1), needed (2, 4, 1, 1)",
                [](Call& c) { c.in.align.array.shape[1] = 3; }));
  CHECK(refused("out: given shape (2, 4, 3, 5), needed (2, 4, 3, 6)", [](Call& c) { c.forward.out.shape[3] = 5; }));
  CHECK(refused("dkey_bias: given shape (1, 4, 1, 10), needed (2, 4, 1, 10)",
                [](Call& c) { c.backward.dkey_bias.array.shape[0] = 1; }));
}

TEST(numbers_of_dot_out_of_their_range_are_refused) {
  for (const double scale : {kNan, kInf, -kInf, 1e39}) {
    CHECK(refused("scale: given ", [&](Call& c) { c.in.scale = scale; }));
  }
  for (const double softcap : {kNan, kInf, -1.0, -1e-300, 1e-300, 1e39}) {
    CHECK(refused("softcap: given ", [&](Call& c) { c.in.softcap = softcap; }));
  }
  for (const double dropout : {kNan, -0.1, 1.0, 1.5, kInf}) {
    CHECK(refused("dropout: given ", [&](Call& c) { c.in.dropout = dropout; }));
  }
  for (const int64_t draws : {int64_t{0}, int64_t{-1}, tiny}) {
    CHECK(refused("draws: given ", [&](Call& c) { c.in.draws = draws; }));
  }
  CHECK(refused("dropout: given 1, needed a share within [0, 1)", [](Call& c) { c.in.dropout = 1; }));
}

TEST(what_goes_together_comes_together) {
  CHECK(refused("seed: given none, needed two words, for a dropout of 0.1", [](Call& c) { c.in.seed.given = false; }));
  CHECK(refused("align: given none, needed one: it goes with slopes", [](Call& c) { c.in.align.given = false; }));
  CHECK(refused("align: given one, needed none: it goes with slopes", [](Call& c) { c.in.slopes.given = false; }));
  CHECK(refused("stop: given none, needed one: it goes with start", [](Call& c) { c.in.stop.given = false; }));
  CHECK(refused("stop: given one, needed none: it goes with start", [](Call& c) { c.in.start.given = false; }));
  CHECK(refused("inverse: given none, needed one: it goes with top", [](Call& c) { c.forward.inverse.given = false; }));
  CHECK(refused("inverse: given one, needed none: it goes with top", [](Call& c) { c.forward.top.given = false; }));
  CHECK(refused("max_weight: given one, needed none", [](Call& c) { c.forward.entropy.given = false; }));
  CHECK(refused("max_weight: given none, needed one", [](Call& c) { c.forward.max_weight.given = false; }));
  CHECK(refused("jacobian_norm: given none, needed one", [](Call& c) { c.forward.jacobian_norm.given = false; }));
  CHECK(refused("dk: given none, needed one: it goes with dq", [](Call& c) { c.backward.dk.given = false; }));
  CHECK(refused("dk: given one, needed none: it goes with dq", [](Call& c) { c.backward.dq.given = false; }));
}

TEST(gradients_of_what_was_not_given_are_refused) {
  CHECK(refused("dkey_bias: given one, needed none: there is no key_bias",
                [](Call& c) { c.in.key_bias.given = false; }));
  CHECK(refused("dslopes: given one, needed none: there are no slopes",
                [](Call& c) { c.in.slopes.given = c.in.align.given = false; }));
  CHECK(refused("dbias: given one, needed none: there is no bias", [](Call& c) { c.in.bias.given = false; }));
  CHECK(refused("dbias: given one, needed none: the bias is one row", [](Call& c) {
    c.in.bias.array.shape[2] = 1;
  }));
  CHECK(refused("dbias: given shape (1, 4, 1, 10), needed (1, 4, 3, 10)",
                [](Call& c) { c.backward.dbias.array.shape[2] = 1; }));
  // Two heads with biases of their own, and one gradient for both.
  CHECK(refused("dbias: given shape (1, 1, 3, 10), needed the shape of bias",
                [](Call& c) { c.backward.dbias.array.shape[1] = 1; }));
}

TEST(spans_of_dot_out_of_order_are_refused) {
  CHECK(refused("spans: given [-1, 1) at (0, 0, 0, 0), needed sorted, disjoint intervals within [0, 10]",
                [](Call& c) { c.starts[0] = -1; }));
  CHECK(refused("spans: given [1, 11) at (0, 0, 2, 0)", [](Call& c) { c.stops[4] = 11; }));
  CHECK(refused("spans: given [0, 4) at (0, 0, 0, 1)", [](Call& c) { c.starts[1] = 0; }));
  CHECK(refused("spans: given [5, 4) at (0, 0, 2, 1)", [](Call& c) { c.stops[5] = 4; }));
  CHECK(refused("start: given shape (1, 1, 3, 0), needed one interval or more a query",
                [](Call& c) { c.in.start.array.shape[3] = c.in.stop.array.shape[3] = 0; }));
  // Rows that broadcast are read as such.
  CHECK(refused("spans: given [2, 1) at (0, 0, 1, 0)", [](Call& c) {
    c.in.start.array.shape[2] = 1;
    c.starts[0] = 2, c.starts[1] = 4, c.stops[0] = 3, c.stops[2] = 1;
  }));
}

TEST(no_dot_to_do_reads_nothing) {
  for (int axis = 0; axis < 4; ++axis) {
    Call call;
    const auto empty = [](Array* a, int which) {
      a->shape[which] = 0;
      a->data = nullptr;
      for (int64_t& stride : a->stride) stride = 0;  // as NumPy has them
    };
    DotArrays& in = call.in;
    for (Given* a : {&in.bias, &in.start, &in.stop, &in.bits, &in.key_bias, &in.slopes, &in.align, &in.seed}) {
      a->given = false;
    }
    in.dropout = 0;
    call.backward.dslopes.given = call.backward.dkey_bias.given = call.backward.dbias.given = false;
    if (axis == 0) {
      for (const Place& place : kPlaces) empty(&place.find(call), 0);
    } else if (axis == 1) {  // no heads of any kind
      for (const Place& place : kPlaces) empty(&place.find(call), 1);
    } else if (axis == 2) {  // no queries
      empty(&in.q, 2);
      for (Array* a : {&call.forward.out, &call.backward.out, &call.backward.top, &call.backward.inverse,
                       &call.backward.dout}) {
        empty(a, 2);
      }
      for (Given* a : {&call.forward.lse, &call.forward.top, &call.forward.inverse, &call.forward.entropy,
                       &call.forward.max_weight, &call.forward.jacobian_norm, &call.backward.dlse, &call.backward.dq}) {
        empty(&a->array, 2);
      }
    } else {  // no keys
      for (Array* a : {&in.k, &in.v, &call.backward.dk.array, &call.backward.dv.array}) empty(a, 2);
    }
    const std::string error = call.check();
    if (!error.empty()) std::fprintf(stderr, "axis %d said: %s\n", axis, error.c_str());
    CHECK(error.empty());
  }
}
