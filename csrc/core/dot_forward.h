// The dot kernel's forward pass, for one instruction set: an online softmax over tiles of keys [1, 2].
//
// [1] Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
// [2] Dao et al., "FlashAttention", 2022, algorithm 1.
#pragma once

#include "dot_tile.h"

namespace attnspan {
namespace ATTNSPAN_SET {

// The running statistics of a panel: RowSums, lanes side by side.
template <class T, int W>
struct Looking {
  using V = VecOf<T>;
  static constexpr int P = kPanel<T, W>, N = kLanes<T>;
  V count[W], reference[W], second[W], r1[W], r2[W], r3[W], a[W];

  void start() {
    for (int w = 0; w < W; ++w) {
      count[w] = r1[w] = r2[w] = r3[w] = a[w] = V{};
      reference[w] = second[w] = splat(Types<T>::kLowest);
    }
  }

  // Before the weights of a tile are made: s still holds the scores, those not seen the lowest number.
  // When a new maximum arrives the old one joins the others. `old` is the largest score before.
  void prepare(const T* s, Range keys, const V* old, const V* top) {
    for (int w = 0; w < W; ++w) {
      const V lowest = splat(Types<T>::kLowest);
      const auto joins = (old[w] < top[w]) & (count[w] > T(0));
      V most = larger(second[w], joins ? old[w] : lowest);
      for (int64_t j = keys.first; j < keys.last; ++j) {
        const V x = load(s + j * P + w * N);
        most = larger(x < top[w] ? x : lowest, most);
      }
      second[w] = most;
      // Relative to the maximum the others' sums would vanish in a saturated row.
      const V now = top[w] - most <= T(14) ? top[w] : most;
      const V shift = reference[w] - now, g = where(r1[w] != T(0), exp<T>(shift)), g2 = g * g;
      const V to_others = where(joins, old[w] - now), e = where(joins, count[w] * exp<T>(to_others));
      const V once = where(joins, exp<T>(to_others));
      a[w] = g * (a[w] + where(r1[w] != T(0), shift * r1[w])) + to_others * e;
      r1[w] = g * r1[w] + e;
      r2[w] = g2 * r2[w] + e * once;
      r3[w] = g2 * g * r3[w] + e * once * once;
      count[w] = where(old[w] == top[w], count[w]);
      reference[w] = now;
    }
  }

  // One key: x is its score, p its weight relative to the maximum, in lanes where it is seen.
  ATTNSPAN_INLINE void add(int w, V x, V p, V top, bool same, typename Types<T>::M seen) {
    const auto is_top = (x == top) & seen;
    const auto other = ~is_top & seen;
    const V d = x - reference[w];
    const V e = where(other, same ? p : exp<T>(d));
    const V e2 = e * e;
    count[w] -= __builtin_convertvector(is_top, V);  // a mask is -1
    r1[w] += e;
    r2[w] += e2;
    r3[w] = fma(e2, e, r3[w]);
    a[w] += where(other, d * e);
  }
};

template <class T, class X, int W>
struct Forward {
  static constexpr int P = kPanel<T, W>, N = kLanes<T>, NB = kPanels<T, W>;
  using V = VecOf<T>;
  const DotForward& task;
  Tile<T, X, W> tile;
  uint8_t* states;
  T *queries, *s, *o, *top, *sum, *times, *row_space;
  Drops<T, W>* drops;
  Looking<T, W>* looking;

  ATTNSPAN_INLINE explicit Forward(const ForwardJob& job) : task(*job.task), tile(job.task->problem, *job.flags) {
    Cutter cutter{nullptr};
    cut(cutter);
    Cutter real{workspace(cutter.used)};
    cut(real);
  }
  ATTNSPAN_INLINE void cut(Cutter& cutter) {
    const DotSizes& n = task.problem.n;
    tile.cut(cutter);
    states = cutter.take<uint8_t>((n.S + kKeyTile - 1) / kKeyTile);
    queries = cutter.take<T>(NB * P * n.D);
    s = cutter.take<T>(kKeyTile * P);
    o = cutter.take<T>(NB * P * n.E);
    top = cutter.take<T>(NB * P);
    sum = cutter.take<T>(NB * P);
    times = cutter.take<T>(P);
    row_space = cutter.take<T>(N * n.D);
    drops = cutter.take<Drops<T, W>>(NB);
    looking = cutter.take<Looking<T, W>>(NB);
  }

  void run(int64_t item) {
    const Dot& dot = task.problem;
    const DotSizes& n = dot.n;
    const QueryTile& q = tile.q = describe(dot, item, states);
    const int64_t panels = (q.rows + P - 1) / P;
    const X* from = static_cast<const X*>(dot.q.data) + dot.q.offset(q.b, q.h, q.first);
    for (int64_t i = 0; i < panels; ++i) {
      pack_panel<W>(from + i * P * dot.q.stride[2], dot.q.stride[2], tile.lanes(i), n.D,
                 static_cast<T>(dot.scale), row_space, queries + i * P * n.D);
      if (dot.dropout > 0) drops[i].draw(dot, q, i);
      if (task.entropy.data != nullptr) looking[i].start();
    }
    for (int64_t i = 0; i < panels * P; ++i) {
      top[i] = Types<T>::kLowest;
      sum[i] = 0;
    }
    for (int64_t i = 0; i < panels * P * n.E; ++i) o[i] = 0;
    for (int64_t t = q.tiles_first; t < q.tiles_last; ++t) {
      if (q.state[t - q.tiles_first] == kSkip) continue;
      tile.open(t);
      for (int64_t i = 0; i < panels; ++i) {
        const auto scored = tile.score(i, queries, s, nullptr);
        if (scored.keys.first >= scored.keys.last) continue;
        if (task.entropy.data == nullptr) {
          soften<false>(i, scored);
        } else {
          soften<true>(i, scored);
        }
        const Range keys = scored.keys;
        T* out = o + i * P * n.E;
        if (tile.bad) {
          careful_product<W>(tile.v.data, tile.v.row, s, n.E, keys, scored.masks, tile.bad_values, out);
        } else {
          value_product<W>(tile.v.data + keys.first * tile.v.row, tile.v.row, s + keys.first * P, n.E,
                        keys.last - keys.first, out);
        }
      }
    }
    for (int64_t i = 0; i < panels; ++i) write(i);
  }

  // Scores to weights relative to the largest so far; what was summed before is brought to it.
  template <bool kLook>
  void soften(int64_t panel, const typename Tile<T, X, W>::Scored& scored) {
    const Range keys = scored.keys;
    const uint64_t* masks = scored.masks;
    const V lowest = splat(Types<T>::kLowest);
    V most[W];
    for (int w = 0; w < W; ++w) most[w] = lowest;
    for (int64_t j = keys.first; j < keys.last; ++j) {
      T* row = s + j * P;
      if (tile.sees_all(masks, j)) {
        for (int w = 0; w < W; ++w) most[w] = larger(load(row + w * N), most[w]);
      } else {
        for (int w = 0; w < W; ++w) {
          const V x = mask_of<T>(masks[j] >> (w * N)) ? load(row + w * N) : lowest;
          store(row + w * N, x);
          most[w] = larger(x, most[w]);
        }
      }
    }
    // A lane whose scores all overflowed, one way or the other; or one that sees nothing here.
    typename Types<T>::M odd{};
    for (int w = 0; w < W; ++w) odd |= (most[w] > -Types<T>::kLowest) | (most[w] == lowest);
    if (any(odd)) {
      clamp<W>(s, keys);
      for (int w = 0; w < W; ++w) most[w] = most[w] > -Types<T>::kLowest ? -lowest : most[w];
    }
    V old[W], now[W], total[W];
    for (int w = 0; w < W; ++w) {
      old[w] = load(top + panel * P + w * N);
      now[w] = larger(most[w], old[w]);
      total[w] = load(sum + panel * P + w * N);
    }
    typename Types<T>::M moved{};
    for (int w = 0; w < W; ++w) moved |= now[w] > old[w];
    if (any(moved)) {
      V shrink[W];
      for (int w = 0; w < W; ++w) {
        shrink[w] = exp<T>(old[w] - now[w]);  // exactly 1 where nothing moved
        total[w] *= shrink[w];
        store(top + panel * P + w * N, now[w]);
      }
      T* out = o + panel * P * task.problem.n.E;
      for (int64_t e = 0; e < task.problem.n.E; ++e) {
        for (int w = 0; w < W; ++w) store(out + e * P + w * N, load(out + e * P + w * N) * shrink[w]);
      }
    }
    if (kLook) looking[panel].prepare(s, keys, old, now);
    const bool drop = task.problem.dropout > 0;
    for (int w = 0; w < W; ++w) {
      if (drop) {
        total[w] = weigh<kLook, true, true>(panel, w, keys, masks, now[w], total[w]);
      } else if (masks != nullptr) {
        total[w] = weigh<kLook, true, false>(panel, w, keys, masks, now[w], total[w]);
      } else {
        total[w] = weigh<kLook, false, false>(panel, w, keys, masks, now[w], total[w]);
      }
      store(sum + panel * P + w * N, total[w]);
    }
  }

  template <bool kLook, bool kMasked, bool kDrop>
  ATTNSPAN_INLINE V weigh(int64_t panel, int w, Range keys, const uint64_t* masks, V now, V total) {
    Looking<T, W>& look = looking[panel];
    const bool same = kLook && !any(look.reference[w] != now);
    T* at = s + keys.first * P + w * N;
    for (int64_t j = keys.first; j < keys.last; ++j, at += P) {
      const V x = load(at);
      V p = exp<T>(x - now);
      typename Types<T>::M seen = ~typename Types<T>::M{};
      if (kMasked && !tile.sees_all(masks, j)) {
        seen = mask_of<T>(masks[j] >> (w * N));
        p = where(seen, p);
      }
      total += p;
      if (kLook) look.add(w, x, p, now, same, seen);
      if (kDrop) p = where(drops[panel].keep(tile.start + j, w), p);
      store(at, p);
    }
    return total;
  }

  void write(int64_t panel) {
    const Dot& dot = task.problem;
    const QueryTile& q = tile.q;
    const T kept = static_cast<T>(1 / (1 - dot.dropout));
    for (int64_t i = 0; i < tile.lanes(panel); ++i) {
      const int64_t l = q.first + panel * P + i;
      const T total = sum[panel * P + i], most = top[panel * P + i];
      const bool empty = total == 0;
      const T inverse = empty ? T(0) : 1 / total;
      times[i] = inverse * kept;
      put(task.lse, l, log_sum_exp(static_cast<double>(most), static_cast<double>(total)));
      put(task.top, l, empty ? 0.0 : static_cast<double>(most));
      put(task.inverse, l, static_cast<double>(inverse));
      if (task.entropy.data == nullptr) continue;
      const Looking<T, W>& look = looking[panel];
      const int64_t w = i / N, lane = i % N;
      RowSums sums{static_cast<double>(most), static_cast<double>(look.count[w][lane]),
                   static_cast<double>(look.reference[w][lane]), static_cast<double>(look.r1[w][lane]),
                   static_cast<double>(look.r2[w][lane]), static_cast<double>(look.r3[w][lane]),
                   static_cast<double>(look.a[w][lane])};
      const RowStatistics found = statistics_of(sums);
      const double poison = total == total ? 0.0 : __builtin_nan("");
      put(task.entropy, l, found.entropy + poison);
      put(task.max_weight, l, found.max_weight + poison);
      put(task.jacobian_norm, l, found.jacobian_norm + poison);
    }
    T* out = static_cast<T*>(task.out.data) + task.out.offset(q.b, q.h, q.first + panel * P);
    unpack_panel<W>(o + panel * P * dot.n.E, tile.lanes(panel), dot.n.E, times, out, task.out.stride[2],
                    task.out.stride[3]);
  }

  ATTNSPAN_INLINE void put(const View<void>& view, int64_t l, double x) {
    if (view.data == nullptr) return;
    static_cast<T*>(view.data)[view.offset(tile.q.b, tile.q.h, l)] = static_cast<T>(x);
  }
};

}  // namespace ATTNSPAN_SET
}  // namespace attnspan
