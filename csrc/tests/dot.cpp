// The dot kernel against its definition: random shapes, strides, masks and scores.
#include "../core/dot.h"

#include "dot_case.h"
#include "dot_reference.h"

using namespace attnspan;
using reference::kInf;
using reference::kNan;
using reference::Numbers;

namespace {

template <class A>
bool near(const char* name, const Wish& wish, const std::vector<A>& got, const Numbers& wanted, double least) {
  const double error = reference::error_of(got, wanted, least), most = sizeof(A) == 8 ? 1e-12 : 2e-5;
  if (error > most) std::fprintf(stderr, "%s is off by %g at %s\n", name, error, text_of(wish).c_str());
  return error <= most;
}

// What the backward pass is given says the same as lse: top is the largest score up to rounding.
template <class A>
void check_saved(const Wish& wish, const Results<A>& got, const reference::Forward& wanted) {
  Numbers lse, inverse;
  for (size_t i = 0; i < wanted.lse.size(); ++i) {
    const double saved = static_cast<double>(got.inverse[i]), top = static_cast<double>(got.top[i]);
    if (wanted.inverse[i] == 0) CHECK(saved == 0 && std::isfinite(top));
    lse.push_back(saved == 0 ? -kInf : top - std::log(saved));
  }
  CHECK(near("top and inverse", wish, std::vector<A>(lse.begin(), lse.end()), wanted.lse, 1));
  CHECK(near("inverse", wish, got.inverse, wanted.inverse, 1));
}

template <class A>
void check_forward(const Wish& wish, const Dot& problem, const Results<A>& got) {
  const reference::Forward wanted = reference::reference_forward(problem);
  CHECK(near("out", wish, got.out, wanted.out, 0.1));
  CHECK(near("lse", wish, got.lse, wanted.lse, 1));
  check_saved(wish, got, wanted);
  if (got.entropy.empty()) return;
  CHECK(near("entropy", wish, got.entropy, wanted.entropy, 1));
  CHECK(near("max_weight", wish, got.max_weight, wanted.max_weight, 0.1));
  CHECK(near("jacobian_norm", wish, got.jacobian_norm, wanted.jacobian_norm, 0.1));
}

template <class T>
void check_backward(const Inputs<T>& in, const Dot& problem, const Results<SumOf<T>>& got) {
  const Wish& wish = in.wish;
  const DotSizes& n = wish.n;
  DotBackward task{};
  task.problem = problem;
  const auto view = [](const Array& a) {
    View<const void> v{a.data, {}};
    for (int i = 0; i < 4; ++i) v.stride[i] = a.shape[i] == 1 ? 0 : a.stride[i];
    return v;
  };
  task.dout = view(in.dout.array);
  task.dlse = view(in.dlse.array);
  const reference::Backward wanted = reference::reference_backward(task);
  // The slope of a score is a difference of sums of E products, and may be all rounding.
  const double slope = 0.1 * std::sqrt(static_cast<double>(std::max<int64_t>(n.E, 1))) / (1 - wish.dropout);
  const double scaled = slope * std::abs(wish.scale);
  CHECK(near("dv", wish, got.dv, wanted.dv, 0.1));
  CHECK(near("dq", wish, got.dq, wanted.dq, scaled));
  CHECK(near("dk", wish, got.dk, wanted.dk, scaled));
  if (!got.dkey_bias.empty()) CHECK(near("dkey_bias", wish, got.dkey_bias, wanted.dkey_bias, slope));
  const double far = static_cast<double>(n.L + n.S);
  if (wish.slopes) CHECK(near("dslopes", wish, got.dslopes, wanted.dslopes, slope * far));
  if (got.dbias.empty()) return;
  CHECK(near("dbias", wish, got.dbias, reference::summed(wanted.dbias, n, got.dbias_shape), slope));
}

template <class T>
void check_all(const Inputs<T>& in) {
  const Dot problem = in.checked();
  Serial serial;
  const auto got = run(in, serial);
  check_forward(in.wish, problem, got);
  check_backward(in, problem, got);
}

template <class T>
void check_all(uint64_t seed, const Wish& wish) {
  Random r(seed);
  check_all(Inputs<T>(r, wish));
}

double scale_of(int64_t D) { return 1 / std::sqrt(static_cast<double>(std::max<int64_t>(D, 1))); }

// Sizes on both sides of what the kernel works in, and few enough pairs to be done soon.
DotSizes sizes_of(Random& r) {
  constexpr int64_t many[] = {0, 1, 2, 3, 5, 7, 8, 23, 24, 25, 64, 95, 96, 97, 130, 191, 192, 193, 400};
  const auto pick = [&] { return many[r.below(static_cast<int64_t>(std::size(many)))]; };
  for (;;) {
    const int64_t G = r.chance(5) ? 0 : 1 + r.below(2);
    const DotSizes n{r.chance(5) ? 0 : 1 + r.below(3), G * (1 + r.below(3)), G, pick(), pick(), pick(), pick()};
    if (n.B * n.H * n.L * n.S * (n.D + n.E + 8) <= 1000000) return n;
  }
}

Wish wish_of(Random& r) {
  Wish wish{sizes_of(r)};
  wish.mask = kMasks[r.below(static_cast<int64_t>(std::size(kMasks)))];
  wish.key_bias = r.chance(30);
  wish.bias = r.chance(30);
  wish.slopes = r.chance(25);
  wish.scale = scale_of(wish.n.D) * (r.chance(70) ? 1 : r.chance(20) ? 0 : r.normal());
  wish.softcap = r.chance(30) ? 0.5 + 5 * std::abs(r.normal()) : 0;
  wish.dropout = r.chance(30) ? 0.01 * static_cast<double>(r.below(100)) : 0;
  wish.shared = r.chance(30);
  return wish;
}

template <class T>
void check_random(uint64_t from, uint64_t to) {
  for (uint64_t seed = from; seed < to; ++seed) {
    Random r(seed);
    const Wish wish = wish_of(r);
    check_all(Inputs<T>(r, wish));
  }
}

}  // namespace

TEST(dot_is_its_definition_f32) { check_random<float>(0, 120); }
TEST(dot_is_its_definition_f64) { check_random<double>(1000, 1080); }
TEST(dot_is_its_definition_f16) { check_random<Half>(2000, 2060); }
TEST(dot_is_its_definition_bf16) { check_random<Bfloat>(3000, 3060); }

// One thing at a time, where panels, tiles of queries and tiles of keys begin and end.
TEST(every_mask_with_every_part_of_a_score) {
  for (const Mask mask : kMasks) {
    for (int part = 0; part < 7; ++part) {
      Wish wish{{1, 2, 1, 98, 195, 5, 6}, mask};
      wish.scale = part == 6 ? -0.4 : 0.4;
      wish.key_bias = part == 1;
      wish.bias = part == 2;
      wish.slopes = part == 3;
      if (part == 4) wish.softcap = 1.5;
      if (part == 5) wish.dropout = 0.3;
      check_all<float>(static_cast<uint64_t>(part), wish);
      check_all<double>(static_cast<uint64_t>(part), wish);
    }
  }
}

TEST(every_width) {
  for (const int64_t width : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 96, 128, 200}) {
    Wish wish{{1, 1, 1, 30, 40, width, 19}, Mask::causal};
    wish.scale = scale_of(width);
    check_all<float>(1, wish);
    check_all<Half>(1, wish);
    std::swap(wish.n.D, wish.n.E);
    wish.scale = scale_of(19);
    check_all<float>(2, wish);
    check_all<double>(2, wish);
  }
}

TEST(every_number_of_queries_and_keys) {
  for (int64_t L = 1; L <= 50; ++L) check_all<float>(3, {{1, 1, 1, L, 9, 3, 4}, Mask::window, false, false, false, 0.6});
  for (int64_t S = 1; S <= 50; ++S) check_all<float>(4, {{1, 1, 1, 27, S, 3, 4}, Mask::holes, false, false, false, 0.6});
}

// Long ways from one tile of keys to the next: the first tiles may see nothing, or all there is.
TEST(many_tiles_of_keys) {
  for (const Mask mask : kMasks) {
    Wish wish{{1, 1, 1, 50, 1000, 4, 3}, mask};
    wish.scale = 0.5;
    wish.slopes = true;
    check_all<float>(5, wish);
    check_all<double>(6, wish);
  }
}

// Rows that are all but one-hot keep the digits of their statistics.
TEST(statistics_of_saturated_rows) {
  for (int seed = 0; seed < 6; ++seed) {
    Random r(static_cast<uint64_t>(seed));
    Wish wish{{1, 1, 1, 40, 450, 4, 1}, seed % 2 ? Mask::causal : Mask::none};
    wish.scale = 3 + 3 * seed;
    Inputs<float> in(r, wish);
    if (seed == 4) {  // several keys share the maximum
      for (int64_t j = 0; j < 450; j += 50) {
        for (int64_t d = 0; d < 4; ++d) in.k.at(0, 0, j, d) = in.k.at(0, 0, 0, d);
      }
    }
    Serial serial;
    const auto got = run(in, serial);
    const auto wanted = reference::reference_forward(in.checked());
    const auto relative = [&](const char* name, const std::vector<float>& x, const Numbers& y) {
      for (size_t i = 0; i < x.size(); ++i) {
        const double error = std::abs(static_cast<double>(x[i]) - y[i]);
        if (!(error <= 3e-4 * std::abs(y[i]) + 1e-37)) {
          std::fprintf(stderr, "%s: got %g, wanted %g, row %d of seed %d\n", name, double(x[i]), y[i], int(i), seed);
          return false;
        }
      }
      return true;
    };
    CHECK(relative("entropy", got.entropy, wanted.entropy));
    CHECK(relative("max_weight", got.max_weight, wanted.max_weight));
    CHECK(relative("jacobian_norm", got.jacobian_norm, wanted.jacobian_norm));
  }
}
