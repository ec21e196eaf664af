// Random calls of the dot kernel, and what comes of them as contiguous arrays.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "../core/dispatch.h"
#include "../core/dot.h"
#include "../core/half.h"
#include "arrays.h"
#include "check.h"

namespace attnspan {

// Which keys a query sees; `bits` is random bits alone, `spotted` bits within causal spans.
enum class Mask { none, causal, window, documents, two, holes, nothing, bits, spotted };
constexpr Mask kMasks[] = {Mask::none, Mask::causal, Mask::window,  Mask::documents, Mask::two,
                           Mask::holes, Mask::nothing, Mask::bits, Mask::spotted};

struct Wish {
  DotSizes n;
  Mask mask = Mask::none;
  bool key_bias = false, bias = false, slopes = false;
  double scale = 1, softcap = 0, dropout = 0;
  bool shared = false;  // axes of inputs may have stride 0
};

inline std::string text_of(const Wish& w) {
  const DotSizes& n = w.n;
  char text[256];
  std::snprintf(text, sizeof text,
                "B %d H %d G %d L %d S %d D %d E %d, mask %d, key_bias %d bias %d slopes %d scale %g softcap %g "
                "dropout %g shared %d", int(n.B), int(n.H), int(n.G), int(n.L), int(n.S), int(n.D), int(n.E),
                int(w.mask), w.key_bias, w.bias, w.slopes, w.scale, w.softcap, w.dropout, w.shared);
  return text;
}

template <class T>
constexpr Dtype dtype_of() {
  if (std::is_same<T, Half>::value) return Dtype::f16;
  if (std::is_same<T, Bfloat>::value) return Dtype::bf16;
  return std::is_same<T, float>::value ? Dtype::f32 : Dtype::f64;
}

template <class T>
using SumOf = decltype(widen(T{}));

template <class T>
void fill(Random& r, double size, Owned<T>* a) {
  for (T& x : a->memory) narrow(static_cast<SumOf<T>>(size * r.normal()), &x);
}

template <class T>
Given given(const std::optional<Owned<T>>& a) {
  return a ? Given{true, a->array} : Given{false, {}};
}

// Visits all indices of an array's first three axes.
template <class Visit>
void each_row(const int64_t (&shape)[4], Visit visit) {
  for (int64_t b = 0; b < shape[0]; ++b) {
    for (int64_t h = 0; h < shape[1]; ++h) {
      for (int64_t l = 0; l < shape[2]; ++l) visit(b, h, l);
    }
  }
}

template <class T>
struct Inputs {
  using A = SumOf<T>;

  Wish wish;
  Owned<T> q, k, v;
  Owned<A> dout, dlse;
  std::optional<Owned<A>> key_bias, bias, slopes;
  std::optional<Owned<int32_t>> align, start, stop;
  std::optional<Owned<uint8_t>> bits;
  std::optional<Owned<uint32_t>> seed;
  int64_t draws;

  Inputs(Random& r, const Wish& given_wish)
      : wish(given_wish),
        q(r, {wish.n.B, wish.n.H, wish.n.L, wish.n.D}, wish.shared, true),
        k(r, {wish.n.B, wish.n.G, wish.n.S, wish.n.D}, wish.shared, true),
        v(r, {wish.n.B, wish.n.G, wish.n.S, wish.n.E}, wish.shared, true),
        dout(r, {wish.n.B, wish.n.H, wish.n.L, wish.n.E}, wish.shared),
        dlse(r, {wish.n.B, wish.n.H, wish.n.L, 1}, wish.shared),
        draws(1 + r.below(3)) {
    const DotSizes& n = wish.n;
    const auto one = [&](int64_t size) { return r.chance(40) ? 1 : size; };
    fill(r, 1, &q);
    fill(r, 1, &k);
    fill(r, 1, &v);
    fill(r, 1, &dout);
    fill(r, 1, &dlse);
    if (wish.key_bias) fill(r, 1, &key_bias.emplace(r, axes(one(n.B), one(n.H), 1, n.S).of, wish.shared, true));
    if (wish.bias) {
      fill(r, 1, &bias.emplace(r, axes(one(n.B), one(n.H), one(n.L), n.S).of, wish.shared, true));
      for (A& x : bias->memory) {
        if (r.chance(5)) x = -std::numeric_limits<A>::infinity();
      }
    }
    if (wish.slopes) {
      for (A& x : slopes.emplace(r, axes(one(n.B), one(n.H), 1, 1).of, false).memory) {
        x = static_cast<A>(0.3 * r.normal());
      }
      for (int32_t& x : align.emplace(r, axes(one(n.B), one(n.H), 1, 1).of, false).memory) {
        x = static_cast<int32_t>(r.below(41) - 20);
      }
    }
    if (wish.dropout > 0) {
      for (uint32_t& x : seed.emplace(r, axes(one(n.B), 1, 1, 2).of, false).memory) {
        x = static_cast<uint32_t>(r.engine());
      }
    }
    set_mask(r);
  }

  struct Axes {
    int64_t of[4];
  };
  static Axes axes(int64_t b, int64_t h, int64_t l, int64_t j) { return {{b, h, l, j}}; }

  void set_mask(Random& r) {
    const DotSizes& n = wish.n;
    const auto one = [&](int64_t size) { return r.chance(40) ? 1 : size; };
    if (wish.mask == Mask::bits || wish.mask == Mask::spotted) {
      const int dark = static_cast<int>(r.below(60));
      const Axes shape = axes(one(n.B), one(n.H), one(n.L), (n.S + 7) / 8);
      for (uint8_t& x : bits.emplace(r, shape.of, false).memory) {
        x = static_cast<uint8_t>(r.chance(dark) ? 0 : r.below(256));
      }
    }
    if (wish.mask == Mask::none || wish.mask == Mask::bits) return;
    const bool flat = wish.mask == Mask::causal && r.chance(50);  // start is one number
    const int64_t B = one(n.B), H = one(n.H), L = wish.mask == Mask::holes ? one(n.L) : n.L, R = 2 + r.below(2);
    start.emplace(r, axes(flat ? 1 : B, flat ? 1 : H, flat ? 1 : L, R).of, false);
    stop.emplace(r, axes(B, H, L, R).of, false);
    const int64_t align_of_mask = r.below(n.S + 1) - n.S / 3, width = 1 + r.below(n.S + 1);
    each_row(stop->array.shape, [&](int64_t b, int64_t h, int64_t l) {
      std::vector<int64_t> ends = intervals(r, l, l + align_of_mask + b, width);
      ends.resize(static_cast<size_t>(2 * R), n.S);  // unused places are [S, S)
      for (int64_t i = 0; i < R; ++i) {
        // A flat start must be before each row's stop: its other intervals are empty.
        start->at(b, h, l, i) = static_cast<int32_t>(flat && i > 0 ? n.S : ends[static_cast<size_t>(2 * i)]);
        stop->at(b, h, l, i) = static_cast<int32_t>(ends[static_cast<size_t>(2 * i + 1)]);
      }
    });
  }

  // Sorted ends of at most two intervals; `at` is the position of query l among the keys.
  std::vector<int64_t> intervals(Random& r, int64_t l, int64_t at, int64_t width) const {
    const int64_t S = wish.n.S;
    const auto clip = [S](int64_t x) { return std::clamp<int64_t>(x, 0, S); };
    switch (wish.mask) {
      case Mask::window: return {clip(at - width), clip(at + 1)};
      case Mask::documents: return {clip(at / width * width), clip((at / width + 1) * width)};
      case Mask::two: return {0, clip(std::min<int64_t>(3, at - width)), clip(std::max<int64_t>(3, at - width)),
                              clip(std::max<int64_t>(4, at + 1))};
      case Mask::nothing: return {};
      case Mask::holes: {
        if (r.chance(30)) return {};
        std::vector<int64_t> ends(4);
        for (int64_t& end : ends) end = r.below(S + 1);
        std::sort(ends.begin(), ends.end());
        return ends;
      }
      default: return {0, clip(l % 7 == 6 ? 0 : at + 1)};
    }
  }

  DotArrays arrays() const {
    return {dtype_of<T>(), q.array,       k.array,     v.array,      wish.scale,  wish.softcap, given(key_bias),
            given(bias),   given(slopes), given(align), given(start), given(stop), given(bits),  wish.dropout,
            given(seed),   draws};
  }

  Dot checked() const { return check(arrays()); }

  static Dot check(const DotArrays& arrays) {
    Dot problem;
    const std::string error = check_dot(arrays, &problem);
    if (!error.empty()) std::fprintf(stderr, "%s\n", error.c_str());
    CHECK(error.empty());
    return problem;
  }
};

// An output in memory with gaps, which must stay as they were.
template <class A>
struct Output {
  Owned<A> owned;
  static constexpr A kUnwritten = static_cast<A>(-123.25);

  // `zeroed`: what is added to comes as zeros.
  Output(Random& r, const int64_t (&shape)[4], bool rows, bool zeroed) : owned(r, shape, false, rows) {
    std::fill(owned.memory.begin(), owned.memory.end(), kUnwritten);
    if (zeroed) each([](A& x) { x = 0; });
  }

  template <class Visit>
  void each(Visit visit) const {
    const int64_t(&shape)[4] = owned.array.shape;
    each_row(shape, [&](int64_t b, int64_t h, int64_t l) {
      for (int64_t j = 0; j < shape[3]; ++j) visit(owned.at(b, h, l, j));
    });
  }

  std::vector<A> taken() {
    std::vector<A> dense;
    each([&](A& x) {
      dense.push_back(x);
      x = kUnwritten;
    });
    for (const A x : owned.memory) CHECK(x == kUnwritten);
    return dense;
  }
};

// What one call gives. Empty where it was not asked for.
template <class A>
struct Results {
  std::vector<A> out, lse, top, inverse, entropy, max_weight, jacobian_norm;
  std::vector<A> dq, dk, dv, dkey_bias, dbias, dslopes;
  int64_t dbias_shape[4];
};

template <class A>
bool same_bits(const std::vector<A>& x, const std::vector<A>& y) {
  return x.size() == y.size() && (x.empty() || std::memcmp(x.data(), y.data(), x.size() * sizeof(A)) == 0);
}

// Says what differs.
template <class A>
bool same_bits(const Results<A>& x, const Results<A>& y) {
  bool same = true;
  const auto compare = [&](const char* name, const std::vector<A>& one, const std::vector<A>& other) {
    if (same_bits(one, other)) return;
    same = false;
    size_t i = 0;
    while (i < std::min(one.size(), other.size()) && std::memcmp(&one[i], &other[i], sizeof(A)) == 0) ++i;
    if (i == std::min(one.size(), other.size())) return;
    std::fprintf(stderr, "%s differs from entry %d on: %.9g and %.9g\n", name, int(i), double(one[i]), double(other[i]));
  };
  compare("out", x.out, y.out);
  compare("lse", x.lse, y.lse);
  compare("top", x.top, y.top);
  compare("inverse", x.inverse, y.inverse);
  compare("entropy", x.entropy, y.entropy);
  compare("max_weight", x.max_weight, y.max_weight);
  compare("jacobian_norm", x.jacobian_norm, y.jacobian_norm);
  compare("dq", x.dq, y.dq);
  compare("dk", x.dk, y.dk);
  compare("dv", x.dv, y.dv);
  compare("dkey_bias", x.dkey_bias, y.dkey_bias);
  compare("dbias", x.dbias, y.dbias);
  compare("dslopes", x.dslopes, y.dslopes);
  return same;
}

struct Asked {
  bool statistics = true, backward = true;
};

// What does the work.
struct Engine {
  std::function<void(const DotForward&)> forward;
  std::function<void(const DotBackward&)> backward;

  Engine(Executor& executor)
      : forward([&executor](const DotForward& task) { dot_forward(task, executor); }),
        backward([&executor](const DotBackward& task) { dot_backward(task, executor); }) {}

  // One instruction set's kernel, an item after the other.
  explicit Engine(const Kernels& kernels)
      : forward([&kernels](const DotForward& task) {
          Flags flags(task.problem);
          const ForwardJob job{&task, &flags};
          for (int64_t item = 0; item < items(task.problem); ++item) kernels.dot_forward_item(job, item);
        }),
        backward([&kernels](const DotBackward& task) {
          Flags flags(task.problem);
          Turnstile turnstile(task.problem, task.dbias.data != nullptr);
          const BackwardJob job{&task, &flags, &turnstile};
          for (int64_t item = 0; item < items(task.problem); ++item) kernels.dot_backward_item(job, item);
        }) {}

 private:
  static int64_t items(const Dot& problem) { return problem.n.B * problem.n.H * query_tiles(problem); }
};

// Forward, and backward with what the forward pass saved.
template <class A>
Results<A> run(Random& r, const Dot& problem, const Array& dout, const Array& dlse, const Engine& engine,
               Asked asked = {}) {
  const DotSizes& n = problem.n;
  const auto rows = [&](bool zeroed = false) { return Output<A>(r, {n.B, n.H, n.L, 1}, false, zeroed); };
  Output<A> out(r, {n.B, n.H, n.L, n.E}, false, false);
  Output<A> lse = rows(), top = rows(), inverse = rows(), entropy = rows(), largest = rows(), norm = rows();
  const auto wanted = [&](const Output<A>& a) { return Given{asked.statistics, a.owned.array}; };
  DotForward forward{problem, {}, {}, {}, {}, {}, {}, {}};
  CHECK(check_dot_forward({out.owned.array, {true, lse.owned.array}, {true, top.owned.array},
                           {true, inverse.owned.array}, wanted(entropy), wanted(largest), wanted(norm)},
                          &forward) == "");
  engine.forward(forward);
  Results<A> results;
  if (asked.backward) {
    const bool one_row = problem.bias.data != nullptr && problem.bias.stride[2] == 0;
    const bool biased = problem.bias.data != nullptr && (n.L == 1 || !one_row);
    const bool columns = problem.key_bias.data != nullptr || (one_row && problem.softcap == 0);
    int64_t(&shape)[4] = results.dbias_shape;
    shape[0] = problem.bias.stride[0] == 0 ? std::min<int64_t>(1, n.B) : n.B;
    shape[1] = problem.bias.stride[1] == 0 ? std::min<int64_t>(1, n.H) : n.H;
    shape[2] = n.L;
    shape[3] = n.S;
    Output<A> dq(r, {n.B, n.H, n.L, n.D}, true, false), dk(r, {n.B, n.G, n.S, n.D}, true, true);
    Output<A> dv(r, {n.B, n.G, n.S, n.E}, true, true), dkey_bias(r, {n.B, n.H, 1, n.S}, true, true);
    Output<A> dbias(r, shape, true, true), dslopes = rows();
    DotBackward backward{};
    backward.problem = problem;
    const std::string error = check_dot_backward(
        {out.owned.array, top.owned.array, inverse.owned.array, dout, {true, dlse}, {true, dq.owned.array},
         {true, dk.owned.array}, {true, dv.owned.array}, {columns, dkey_bias.owned.array},
         {biased, dbias.owned.array}, {problem.slopes.data != nullptr, dslopes.owned.array}},
        &backward);
    if (!error.empty()) std::fprintf(stderr, "%s\n", error.c_str());
    CHECK(error.empty());
    engine.backward(backward);
    results.dq = dq.taken();
    results.dk = dk.taken();
    results.dv = dv.taken();
    if (columns) results.dkey_bias = dkey_bias.taken();
    if (biased) results.dbias = dbias.taken();
    if (problem.slopes.data != nullptr) results.dslopes = dslopes.taken();
  }
  results.out = out.taken();
  results.lse = lse.taken();
  results.top = top.taken();
  results.inverse = inverse.taken();
  if (asked.statistics) {
    results.entropy = entropy.taken();
    results.max_weight = largest.taken();
    results.jacobian_norm = norm.taken();
  }
  return results;
}

template <class T>
Results<SumOf<T>> run(const Inputs<T>& in, const Engine& engine, Asked asked = {}, uint64_t layout = 1) {
  Random r(layout);
  return run<SumOf<T>>(r, in.checked(), in.dout.array, in.dlse.array, engine, asked);
}

}  // namespace attnspan
