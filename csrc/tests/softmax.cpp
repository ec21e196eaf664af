// Masked softmax: random shapes, strides, spans and bits against the definition, on 1, 2 and 5 threads.
#include "../core/softmax.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "../core/half.h"
#include "../core/validate.h"
#include "arrays.h"
#include "check.h"

using namespace attnspan;

namespace {

constexpr double inf = std::numeric_limits<double>::infinity();

template <class T>
struct Problem {
  using A = decltype(widen(T{}));

  Sizes n;
  Owned<T> scores, weights;
  Owned<A> lse;
  Owned<int32_t> start, stop;
  Owned<uint8_t> bits;
  bool has_bits;

  Problem(Random& r, const Sizes& n, int64_t R)
      : n(n),
        scores(r, {n.B, n.H, n.L, n.S}, true),
        weights(r, {n.B, n.H, n.L, n.S}, false),
        lse(r, {n.B, n.H, n.L, 1}, false),
        start(r, {or_one(r, n.B), or_one(r, n.H), or_one(r, n.L), R}, false),
        stop(r, {start.array.shape[0], start.array.shape[1], start.array.shape[2], R}, false),
        bits(r, {or_one(r, n.B), or_one(r, n.H), or_one(r, n.L), (n.S + 7) / 8}, true),
        has_bits(r.chance(50)) {
    const bool poisoned = r.chance(30);
    for (T& x : scores.memory) {
      const int64_t kind = poisoned ? r.below(40) : 40;
      narrow(static_cast<A>(kind == 0 ? NAN : kind == 1 ? inf : kind < 8 ? -inf : 3 * r.normal()), &x);
    }
    for (uint8_t& word : bits.memory) word = static_cast<uint8_t>(r.chance(20) ? 0 : r.below(256));
    const int64_t(&shape)[4] = start.array.shape;
    for (int64_t b = 0; b < shape[0]; ++b) {
      for (int64_t h = 0; h < shape[1]; ++h) {
        for (int64_t l = 0; l < shape[2]; ++l) set_spans(r, b, h, l, R);
      }
    }
  }

  static int64_t or_one(Random& r, int64_t size) { return r.chance(40) ? 1 : size; }

  void set_spans(Random& r, int64_t b, int64_t h, int64_t l, int64_t R) {
    std::vector<int64_t> ends(static_cast<size_t>(2 * R));
    for (int64_t& end : ends) end = r.chance(20) ? n.S : r.below(n.S + 1);
    std::sort(ends.begin(), ends.end());
    for (int64_t i = 0; i < R; ++i) {
      start.at(b, h, l, i) = static_cast<int32_t>(ends[static_cast<size_t>(2 * i)]);
      stop.at(b, h, l, i) = static_cast<int32_t>(ends[static_cast<size_t>(2 * i + 1)]);
    }
  }

  bool sees(int64_t b, int64_t h, int64_t l, int64_t j) const {
    if (has_bits && !((bits.at(b, h, l, j / 8) >> (j % 8)) & 1)) return false;
    for (int64_t r = 0; r < start.array.shape[3]; ++r) {
      if (start.at(b, h, l, r) <= j && j < stop.at(b, h, l, r)) return true;
    }
    return false;
  }

  static Dtype dtype() {
    if (sizeof(T) == 8) return Dtype::f64;
    if (sizeof(T) == 4) return Dtype::f32;
    return std::is_same<T, Half>::value ? Dtype::f16 : Dtype::bf16;
  }

  void run(Executor& executor) {
    const SoftmaxArrays arrays{scores.array,  start.array,   stop.array, has_bits ? &bits.array : nullptr,
                               weights.array, lse.array};
    Softmax task;
    const std::string error = check_softmax(dtype(), arrays, &task);
    if (!error.empty()) std::fprintf(stderr, "%s\n", error.c_str());
    CHECK(error.empty());
    softmax(task, executor);
  }

  void check_row(int64_t b, int64_t h, int64_t l) const {
    const double eps = sizeof(T) == 8 ? 1e-12 : 1e-5;
    const double coarse = sizeof(T) > 2 ? eps : dtype() == Dtype::f16 ? 1e-3 : 8e-3;
    std::vector<bool> seen;
    bool finite = true;
    double top = -inf, total = 0;
    for (int64_t j = 0; j < n.S; ++j) {
      const double s = widen(scores.at(b, h, l, j));
      seen.push_back(sees(b, h, l, j) && s != -inf);
      if (!seen.back()) continue;
      finite = finite && s < inf;
      top = std::max(top, s);
    }
    for (int64_t j = 0; j < n.S; ++j) {
      if (seen[static_cast<size_t>(j)]) total += std::exp(widen(scores.at(b, h, l, j)) - top);
    }
    const double got = lse.at(b, h, l, 0);
    if (!finite) {
      CHECK(std::isnan(got));
    } else if (total == 0) {
      CHECK(got == -inf);
    } else {
      CHECK(std::abs(got - (top + std::log(total))) <= eps * (1 + std::abs(got)));
    }
    for (int64_t j = 0; j < n.S; ++j) {
      const double w = widen(weights.at(b, h, l, j));
      if (!seen[static_cast<size_t>(j)]) {
        CHECK(w == 0);
      } else if (!finite) {
        CHECK(std::isnan(w));
      } else {
        CHECK(std::abs(w - std::exp(widen(scores.at(b, h, l, j)) - top) / total) <= coarse);
      }
    }
  }
};

template <class T>
void fuzz(uint64_t seed) {
  Random r(seed);
  const auto size = [&](int64_t most) { return r.chance(8) ? 0 : 1 + r.below(most); };
  const bool large = r.chance(10);  // enough for several items
  const Sizes n{size(3), size(3), size(large ? 90 : 9), size(large ? 700 : 40)};
  Problem<T> problem(r, n, 1 + r.below(4));
  Serial serial;
  problem.run(serial);
  for (int64_t b = 0; b < n.B; ++b) {
    for (int64_t h = 0; h < n.H; ++h) {
      for (int64_t l = 0; l < n.L; ++l) problem.check_row(b, h, l);
    }
  }
  const std::vector<T> weights = problem.weights.memory;
  const auto lse = problem.lse.memory;
  for (const int threads : {1, 2, 5}) {
    Pool pool(threads);
    problem.run(pool);
    CHECK(weights.empty() ||
          std::memcmp(weights.data(), problem.weights.memory.data(), weights.size() * sizeof(T)) == 0);
    CHECK(lse.empty() || std::memcmp(lse.data(), problem.lse.memory.data(), lse.size() * sizeof lse[0]) == 0);
  }
}

}  // namespace

TEST(softmax_is_its_definition) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    fuzz<float>(seed);
    fuzz<double>(seed);
    fuzz<Half>(seed);
    fuzz<Bfloat>(seed);
  }
}
