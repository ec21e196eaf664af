// What is masked does not exist, and nothing but its own keys moves a row: compared bit by bit.

#include "dot_case.h"
#include "dot_reference.h"

using namespace attnspan;

namespace {

// The part of an array that a batch element, or the first entries of an axis, are.
Array from_entry(Array a, int axis, int64_t entry, int64_t item) {
  if (a.shape[axis] == 1) return a;
  a.data = static_cast<char*>(a.data) + entry * a.stride[axis] * item;
  a.shape[axis] = 1;
  return a;
}

Array cut(Array a, int axis, int64_t size) {
  if (a.shape[axis] > 1) a.shape[axis] = size;
  return a;
}

template <class Change>
DotArrays changed(DotArrays arrays, Change change) {
  const int64_t item = size_of(arrays.dtype), wide = size_of(accumulation(arrays.dtype));
  for (Array* a : {&arrays.q, &arrays.k, &arrays.v}) *a = change(*a, a == &arrays.q ? 'q' : 'k', item);
  for (Given* a : {&arrays.key_bias, &arrays.bias, &arrays.slopes}) {
    if (a->given) a->array = change(a->array, a == &arrays.slopes ? 's' : 'b', wide);
  }
  for (Given* a : {&arrays.align, &arrays.start, &arrays.stop, &arrays.seed}) {
    if (a->given) a->array = change(a->array, 'r', int64_t{4});
  }
  if (arrays.bits.given) arrays.bits.array = change(arrays.bits.array, 'w', int64_t{1});
  return arrays;
}

// The rows of the first axis that belong to entry b of B.
template <class A>
std::vector<A> part(const std::vector<A>& x, int64_t b, int64_t B) {
  const int64_t n = static_cast<int64_t>(x.size()) / B;
  return {x.begin() + b * n, x.begin() + (b + 1) * n};
}

// Rows (outer, inner, width) cut to the first `to` of `inner`.
template <class A>
std::vector<A> first_rows(const std::vector<A>& x, int64_t inner, int64_t to, int64_t width) {
  std::vector<A> some;
  for (int64_t i = 0; i < static_cast<int64_t>(x.size()); ++i) {
    if (i / std::max<int64_t>(width, 1) % inner < to) some.push_back(x[static_cast<size_t>(i)]);
  }
  return some;
}

Wish some_wish(Random& r, Mask mask) {
  Wish wish{{1 + r.below(2), 2 * (1 + r.below(2)), 2, 1 + r.below(130), 1 + r.below(420), 1 + r.below(20),
             1 + r.below(20)},
            mask};
  wish.scale = 0.4;
  wish.key_bias = r.chance(30);
  wish.bias = r.chance(30);
  wish.slopes = r.chance(30);
  wish.softcap = r.chance(30) ? 2 : 0;
  wish.dropout = r.chance(30) ? 0.2 : 0;
  return wish;
}

template <class A>
void poison(Random& r, A* x) {
  constexpr double kinds[] = {reference::kNan, reference::kInf, -reference::kInf, 3e38, -3e38};
  narrow(static_cast<float>(kinds[r.below(5)]), x);
}
void poison(Random& r, double* x) { *x = r.chance(50) ? reference::kNan : r.chance(50) ? reference::kInf : 1e308; }

// Overwrites all that nobody sees with what would be noticed.
template <class T>
void poison_unseen(Random& r, Inputs<T>* in) {
  const Dot d = in->checked();
  const DotSizes& n = d.n;
  const auto spoil_row = [&](auto& owned, int64_t b, int64_t h, int64_t l) {
    for (int64_t j = 0; j < owned.array.shape[3]; ++j) poison(r, &owned.at(b, h, l, j));
  };
  std::vector<bool> key_seen(static_cast<size_t>(n.B * n.G * n.S)), column_seen(static_cast<size_t>(n.S));
  for (int64_t b = 0; b < n.B; ++b) {
    for (int64_t h = 0; h < n.H; ++h) {
      for (int64_t l = 0; l < n.L; ++l) {
        bool any = false;
        for (int64_t j = 0; j < n.S; ++j) {
          if (!reference::sees(d, b, h, l, j)) continue;
          any = true;
          key_seen[static_cast<size_t>((b * n.G + h / (n.H / n.G)) * n.S + j)] = true;
          column_seen[static_cast<size_t>(j)] = true;
        }
        if (any) continue;
        spoil_row(in->q, b, h, l);
        spoil_row(in->dout, b, h, l);
        spoil_row(in->dlse, b, h, l);
      }
    }
  }
  for (int64_t b = 0; b < n.B; ++b) {
    for (int64_t g = 0; g < n.G; ++g) {
      for (int64_t j = 0; j < n.S; ++j) {
        if (key_seen[static_cast<size_t>((b * n.G + g) * n.S + j)]) continue;
        spoil_row(in->k, b, g, j);
        spoil_row(in->v, b, g, j);
      }
    }
  }
  for (int64_t j = 0; j < n.S; ++j) {
    if (column_seen[static_cast<size_t>(j)]) continue;
    const auto spoil_column = [&](auto& owned) {
      if (!owned) return;
      each_row(owned->array.shape, [&](int64_t b, int64_t h, int64_t l) {
        if (owned->at(b, h, l, j) != -std::numeric_limits<SumOf<T>>::infinity()) poison(r, &owned->at(b, h, l, j));
      });
    };
    spoil_column(in->key_bias);
    spoil_column(in->bias);
  }
}

template <class T>
void unseen_may_hold_anything(uint64_t from, uint64_t to) {
  Serial serial;
  for (uint64_t seed = from; seed < to; ++seed) {
    Random r(seed);
    const Wish wish = some_wish(r, kMasks[seed % std::size(kMasks)]);
    Inputs<T> in(r, wish);
    const auto clean = run(in, serial);
    poison_unseen(r, &in);
    const auto poisoned = run(in, serial);
    const bool same = same_bits(clean, poisoned);
    if (!same) std::fprintf(stderr, "seed %d: %s\n", int(seed), text_of(wish).c_str());
    CHECK(same);
  }
}

// A key or value that is not finite makes NaN the rows that see it and moves no other.
template <class T>
void what_sees_a_nan_is_nan(uint64_t from, uint64_t to) {
  using A = SumOf<T>;
  Serial serial;
  for (uint64_t seed = from; seed < to; ++seed) {
    Random r(seed);
    const Wish wish = some_wish(r, kMasks[seed % std::size(kMasks)]);
    const DotSizes& n = wish.n;
    Inputs<T> in(r, wish);
    const auto clean = run(in, serial);
    const int64_t b = r.below(n.B), g = r.below(n.G), j = r.below(n.S), l = r.below(n.L), kind = r.below(3);
    const int64_t per = n.H / n.G, head = g * per;
    Owned<T>& spoiled = kind == 0 ? in.k : kind == 1 ? in.v : in.q;
    T& x = kind == 2 ? spoiled.at(b, head, l, r.below(n.D))
                     : spoiled.at(b, g, j, r.below(spoiled.array.shape[3]));
    narrow(static_cast<A>(r.chance(50) ? reference::kNan : r.chance(50) ? reference::kInf : -reference::kInf), &x);
    const auto got = run(in, serial);
    const Dot d = in.checked();
    const auto hit = [&](int64_t bb, int64_t h, int64_t ll) {
      if (bb != b || h / per != g) return false;
      if (kind < 2) return reference::sees(d, bb, h, ll, j);
      bool any = false;
      for (int64_t key = 0; key < n.S; ++key) any = any || reference::sees(d, bb, h, ll, key);
      return h == head && ll == l && any;
    };
    int64_t row = 0;
    each_row({n.B, n.H, n.L, 1}, [&](int64_t bb, int64_t h, int64_t ll) {
      const auto same = [&](const std::vector<A>& p, const std::vector<A>& q, int64_t width) {
        return std::memcmp(p.data() + row * width, q.data() + row * width, static_cast<size_t>(width) * sizeof(A)) == 0;
      };
      const auto at = static_cast<size_t>(row);
      if (hit(bb, h, ll)) {
        for (int64_t e = 0; e < n.E; ++e) CHECK(std::isnan(got.out[static_cast<size_t>(row * n.E + e)]));
      } else {
        CHECK(same(got.out, clean.out, n.E));
      }
      if (hit(bb, h, ll) && kind != 1) {
        CHECK(std::isnan(got.lse[at]) && std::isnan(got.entropy[at]) && std::isnan(got.max_weight[at]) &&
              std::isnan(got.jacobian_norm[at]));
      } else {
        CHECK(same(got.lse, clean.lse, 1) && same(got.entropy, clean.entropy, 1) &&
              same(got.max_weight, clean.max_weight, 1) && same(got.jacobian_norm, clean.jacobian_norm, 1));
      }
      // Gradients are promised where no such key, value or query is seen.
      if (bb != b || h / per != g) CHECK(same(got.dq, clean.dq, n.D));
      ++row;
    });
    for (int64_t i = 0; i < n.B * n.G; ++i) {
      if (i == b * n.G + g) continue;
      CHECK(same_bits(part(got.dk, i, n.B * n.G), part(clean.dk, i, n.B * n.G)));
      CHECK(same_bits(part(got.dv, i, n.B * n.G), part(clean.dv, i, n.B * n.G)));
    }
  }
}

}  // namespace

TEST(what_nobody_sees_may_hold_anything) {
  unseen_may_hold_anything<float>(0, 45);
  unseen_may_hold_anything<double>(100, 118);
  unseen_may_hold_anything<Half>(200, 218);
  unseen_may_hold_anything<Bfloat>(300, 318);
}

TEST(a_nan_reaches_those_that_see_it) {
  what_sees_a_nan_is_nan<float>(0, 45);
  what_sees_a_nan_is_nan<double>(100, 118);
  what_sees_a_nan_is_nan<Half>(200, 218);
}

// A NaN of a bias is seen where its pair is.
TEST(a_nan_bias_reaches_the_rows_that_see_it) {
  Serial serial;
  for (const bool dense : {false, true}) {
    Random r(7);
    Wish wish{{1, 1, 1, 30, 40, 4, 4}, Mask::causal};
    wish.bias = dense;
    wish.key_bias = !dense;
    Inputs<float> in(r, wish);
    const auto clean = run(in, serial, {true, false});
    auto& bias = dense ? in.bias : in.key_bias;
    each_row(bias->array.shape, [&](int64_t b, int64_t h, int64_t l) { bias->at(b, h, l, 9) = NAN; });
    const auto got = run(in, serial, {true, false});
    const Dot d = in.checked();
    for (int64_t l = 0; l < 30; ++l) {
      for (int64_t e = 0; e < 4; ++e) {
        const auto at = static_cast<size_t>(l * 4 + e);
        CHECK(reference::sees(d, 0, 0, l, 9) ? std::isnan(got.out[at]) : got.out[at] == clean.out[at]);
      }
    }
  }
}

// What overflows stops at the largest number: of scores beyond it all weigh the same.
TEST(scores_of_finite_inputs_are_finite) {
  Serial serial;
  for (const double size : {3e19, 1e30, 3e38}) {
    for (const int sign : {1, -1, 0, -2}) {
      for (const bool capped : {false, true}) {
        Random r(11);
        Wish wish{{1, 1, 1, 30, 250, 3, 4}, Mask::causal};
        wish.softcap = capped ? 5 : 0;
        Inputs<float> in(r, wish);
        for (float& x : in.q.memory) x = static_cast<float>(size);
        each_row(in.k.array.shape, [&](int64_t b, int64_t h, int64_t j) {
          for (int64_t c = 0; c < 3; ++c) {
            const double one = sign == 0 ? (j % 2 ? 1 : -1) : std::max(sign, -1);
            const bool small = j % 3 == 0 && sign != -2;
            in.k.at(b, h, j, c) = static_cast<float>(small ? 0.1 * r.normal() / size : one * size);
          }
        });
        const auto got = run(in, serial);
        const auto wanted = reference::reference_forward(in.checked());
        const double out = reference::error_of(got.out, wanted.out, 1);
        const double lse = reference::error_of(got.lse, wanted.lse, 1);
        if (!(out <= 1e-5 && lse <= 1e-5)) {
          std::fprintf(stderr, "size %g sign %d capped %d: out off by %g, lse by %g\n", size, sign, capped, out, lse);
        }
        CHECK(out <= 1e-5 && lse <= 1e-5);
        for (const float x : got.dq) CHECK(!std::isnan(x));
        for (const float x : got.dk) CHECK(!std::isnan(x));
        for (const float x : got.dv) CHECK(std::isfinite(x));
      }
    }
  }
}

// A scale that takes a query beyond the largest number, and keys that bring it back.
TEST(scaled_queries_may_overflow) {
  Random r(13);
  Wish wish{{1, 1, 1, 30, 250, 3, 4}, Mask::causal};
  wish.scale = 8;
  Inputs<float> in(r, wish);
  for (float& x : in.q.memory) x = 1e38f;
  for (float& x : in.k.memory) x = 0;
  Serial serial;
  const auto got = run(in, serial);
  const auto wanted = reference::reference_forward(in.checked());
  CHECK(reference::error_of(got.out, wanted.out, 1) <= 1e-5);
  for (const float x : got.dq) CHECK(!std::isnan(x));
  for (const float x : got.dk) CHECK(!std::isnan(x));
}

// Products of both signs overflow within one score: no number is right, but NaN is wrong.
TEST(overflow_within_a_score_is_no_nan) {
  Random r(12);
  Inputs<float> in(r, {{1, 1, 1, 30, 250, 6, 4}, Mask::causal});
  for (float& x : in.q.memory) x = static_cast<float>(r.chance(50) ? 1e30 : -1e30);
  for (float& x : in.k.memory) x = static_cast<float>(r.chance(50) ? 1e30 : -1e30);
  Serial serial;
  const auto got = run(in, serial, {true, false});
  for (const float x : got.out) CHECK(!std::isnan(x));
}

TEST(asking_for_statistics_changes_nothing) {
  Serial serial;
  for (uint64_t seed = 0; seed < 18; ++seed) {
    Random r(seed);
    const Inputs<float> in(r, some_wish(r, kMasks[seed % std::size(kMasks)]));
    const auto with = run(in, serial, {true, true}), without = run(in, serial, {false, true}, 2);
    CHECK(same_bits(with.out, without.out) && same_bits(with.lse, without.lse) && same_bits(with.dq, without.dq));
    CHECK(same_bits(with.top, without.top) && same_bits(with.inverse, without.inverse));
  }
}

TEST(a_batch_element_alone_has_the_same_bits) {
  Serial serial;
  for (uint64_t seed = 0; seed < 27; ++seed) {
    Random r(seed);
    Wish wish = some_wish(r, kMasks[seed % std::size(kMasks)]);
    wish.n.B = 3;
    Inputs<float> in(r, wish);
    in.draws = 1;  // so that each element draws as the first
    const auto all = run(in, serial);
    for (int64_t b = 0; b < 3; ++b) {
      const auto entry = [b](const Array& a, char, int64_t item) { return from_entry(a, 0, b, item); };
      const Dot problem = Inputs<float>::check(changed(in.arrays(), entry));
      Random layout(seed);
      const auto alone = run<float>(layout, problem, entry(in.dout.array, 'o', 4), entry(in.dlse.array, 'o', 4), serial);
      const auto same = [&](const std::vector<float>& x, const std::vector<float>& y) {
        return same_bits(part(x, b, 3), y);
      };
      CHECK(same(all.out, alone.out) && same(all.lse, alone.lse) && same(all.entropy, alone.entropy));
      CHECK(same(all.dq, alone.dq) && same(all.dk, alone.dk) && same(all.dv, alone.dv));
      CHECK(same(all.jacobian_norm, alone.jacobian_norm) && same(all.max_weight, alone.max_weight));
      if (!all.dkey_bias.empty()) CHECK(same(all.dkey_bias, alone.dkey_bias));
      if (wish.slopes) CHECK(same(all.dslopes, alone.dslopes));
      if (!all.dbias.empty() && all.dbias_shape[0] == 3) CHECK(same(all.dbias, alone.dbias));
    }
  }
}

// Padding behind the keys, and more queries, move no bit of what was there.
TEST(more_masked_keys_and_more_queries_change_no_bit) {
  Serial serial;
  for (uint64_t seed = 0; seed < 36; ++seed) {
    Random r(seed);
    Wish wish = some_wish(r, seed % 2 ? Mask::holes : Mask::causal);
    const DotSizes& n = wish.n;
    const int64_t S = 1 + r.below(n.S), L = 1 + r.below(n.L);
    Inputs<float> in(r, wish);
    for (auto* ends : {&*in.start, &*in.stop}) {
      for (int32_t& x : ends->memory) x = std::min(x, static_cast<int32_t>(S));
    }
    poison_unseen(r, &in);
    const auto longer = run(in, serial);
    const auto cut_keys = [S](const Array& a, char kind, int64_t) {
      if (kind == 'w') return cut(a, 3, (S + 7) / 8);
      Array b = cut(a, kind == 'k' ? 2 : 3, kind == 'k' || kind == 'b' ? S : a.shape[3]);
      return b;
    };
    Random layout(seed);
    const auto shorter = run<float>(layout, Inputs<float>::check(changed(in.arrays(), cut_keys)), in.dout.array,
                                    in.dlse.array, serial);
    CHECK(same_bits(longer.out, shorter.out) && same_bits(longer.lse, shorter.lse));
    CHECK(same_bits(longer.entropy, shorter.entropy) && same_bits(longer.jacobian_norm, shorter.jacobian_norm));
    CHECK(same_bits(longer.dq, shorter.dq) && same_bits(longer.dslopes, shorter.dslopes));
    CHECK(same_bits(first_rows(longer.dk, n.S, S, n.D), shorter.dk));
    CHECK(same_bits(first_rows(longer.dv, n.S, S, n.E), shorter.dv));

    const auto cut_queries = [L](const Array& a, char kind, int64_t) {
      return kind == 'k' || kind == 's' ? a : cut(a, 2, L);
    };
    const DotArrays fewer_queries = changed(in.arrays(), cut_queries);
    const auto fewer = run<float>(layout, Inputs<float>::check(fewer_queries), cut(in.dout.array, 2, L),
                                  cut(in.dlse.array, 2, L), serial);
    CHECK(same_bits(first_rows(longer.out, n.L, L, n.E), fewer.out));
    CHECK(same_bits(first_rows(longer.lse, n.L, L, 1), fewer.lse));
    CHECK(same_bits(first_rows(longer.dq, n.L, L, n.D), fewer.dq));
    CHECK(same_bits(first_rows(longer.entropy, n.L, L, 1), fewer.entropy));
  }
}
