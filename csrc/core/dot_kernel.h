// The dot kernel, for one instruction set: see vec.h. Lanes are queries: a tile of scores is S^T[key][P],
// P queries of one panel side by side, so that the softmax is vertical, keys and values are read where
// they lie, and a row's bits depend on no neighbour and no vector width [1, 2].
//
// [1] Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, algorithm 3.
// [2] Dao et al., "FlashAttention", 2022, algorithms 1 and 4.
#pragma once

#include "dot_tiles.h"
#include "vec.h"

namespace attnspan {
namespace ATTNSPAN_SET {

template <class T>
constexpr int kPanel = 3 * kLanes<T>;  // queries side by side: 3 vectors and 4 rows fill 16 registers
template <class T>
constexpr int kColumns = 2 * kLanes<T>;  // of a block of 6 keys in the products that give dk and dv
template <class T>
constexpr int kPanels = kQueryTile / kPanel<T>;

ATTNSPAN_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
ATTNSPAN_INLINE int64_t up_to(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// c[r][0..W) (+)= sum_n a(r, n) * b[n][0..W), W vectors wide, in ascending n: one chain of fused
// multiply-adds an element, whatever the blocking.
template <class T, int R, int W, bool kAdd>
ATTNSPAN_INLINE void block(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_step, int64_t n,
                           T* c, int64_t c_row) {
  constexpr int N = kLanes<T>;
  VecOf<T> sum[R][W];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int w = 0; w < W; ++w) sum[r][w] = kAdd ? load(c + r * c_row + w * N) : VecOf<T>{};
  }
  for (int64_t i = 0; i < n; ++i) {
    VecOf<T> x[W];
#pragma GCC unroll 16
    for (int w = 0; w < W; ++w) x[w] = load(b + i * b_step + w * N);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const VecOf<T> y = broadcast(a + r * a_row + i * a_step);
#pragma GCC unroll 16
      for (int w = 0; w < W; ++w) sum[r][w] = fma(y, x[w], sum[r][w]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 16
    for (int w = 0; w < W; ++w) store(c + r * c_row + w * N, sum[r][w]);
  }
}

// S^T[k] = rows[k] . panel, for n keys.
template <class T>
void score_product(const T* rows, int64_t row, const T* panel, int64_t width, int64_t n, T* s) {
  constexpr int P = kPanel<T>;
  int64_t k = 0;
  for (; k + 4 <= n; k += 4) block<T, 4, 3, false>(rows + k * row, row, 1, panel, P, width, s + k * P, P);
  for (; k < n; ++k) block<T, 1, 3, false>(rows + k * row, row, 1, panel, P, width, s + k * P, P);
}

// o^T[e] += sum_k rows[k][e] * p[k], for n keys.
template <class T>
void value_product(const T* rows, int64_t row, const T* p, int64_t width, int64_t n, T* o) {
  constexpr int P = kPanel<T>;
  int64_t e = 0;
  for (; e + 4 <= width; e += 4) block<T, 4, 3, true>(rows + e, 1, row, p, P, n, o + e * P, P);
  for (; e < width; ++e) block<T, 1, 3, true>(rows + e, 1, row, p, P, n, o + e * P, P);
}

// The same where some row is not finite: what a lane does not see leaves no trace in it, and a row
// marked bad makes NaN of those that see it. Without `bad` no row is marked.
template <class T>
void careful_product(const T* rows, int64_t row, const T* p, int64_t width, Range keys, const uint64_t* masks,
                     const uint8_t* bad, T* o) {
  constexpr int P = kPanel<T>, N = kLanes<T>;
  for (int64_t e = 0; e < width; ++e) {
    for (int w = 0; w < 3; ++w) {
      VecOf<T> sum = load(o + e * P + w * N);
      for (int64_t k = keys.first; k < keys.last; ++k) {
        const T x = bad != nullptr && bad[k] ? T(__builtin_nan("")) : rows[k * row + e];
        const VecOf<T> more = fma(splat(x), load(p + k * P + w * N), sum);
        sum = mask_of<T>(masks[k] >> (w * N)) ? more : sum;
      }
      store(o + e * P + w * N, sum);
    }
  }
}

// Rows of keys or values in the dtype of the sums: where they lie, or widened into `space`.
template <class T>
struct Rows {
  const T* data;
  int64_t row;
};
template <class T, class X>
ATTNSPAN_INLINE Rows<T> rows_of(const View<const void>& view, int64_t b, int64_t g, int64_t start, int64_t count,
                                int64_t width, T* space) {
  const X* from = static_cast<const X*>(view.data) + view.offset(b, g, start);
  if constexpr (sizeof(X) == sizeof(T)) {
    return {from, view.stride[2]};
  } else {
    for (int64_t i = 0; i < count; ++i) widen_row(from + i * view.stride[2], width, space + i * width);
    return {space, width};
  }
}
template <class T, class X>
ATTNSPAN_INLINE const T* widened(const X* from, int64_t n, T* space) {
  if constexpr (sizeof(X) == sizeof(T)) {
    return from;
  } else {
    widen_row(from, n, space);
    return space;
  }
}

template <class T>
ATTNSPAN_INLINE bool is_finite(const T* x, int64_t n) {  // x * 0 is NaN where x is not
  constexpr int N = kLanes<T>;
  VecOf<T> sum{};
  int64_t i = 0;
  for (; i + N <= n; i += N) sum += load(x + i) * T(0);
  bool finite = !any(sum != sum);
  for (; i < n; ++i) finite = finite && x[i] * T(0) == T(0);
  return finite;
}

template <class T>
bool all_finite(const T* rows, int64_t row, int64_t count, int64_t width) {
  for (int64_t i = 0; i < count; ++i) {
    if (!is_finite(rows + i * row, width)) return false;
  }
  return true;
}

// Work that all tiles of one work item share: the tile of keys, and what the scores pass through.
template <class T, class X>
struct Tile {
  static constexpr int P = kPanel<T>, N = kLanes<T>;
  using V = VecOf<T>;
  using M = typename Types<T>::M;

  const Dot& dot;
  Flags& flags;
  QueryTile q;
  int64_t start, count;   // keys of the tile
  bool full, bad;         // every query sees every key; some key or value is not finite
  Rows<T> k, v;
  T *k_space, *v_space, *bias_space;
  uint64_t* masks;
  uint8_t *bad_keys, *bad_values;

  ATTNSPAN_INLINE Tile(const Dot& given, Flags& found) : dot(given), flags(found) {}

  ATTNSPAN_INLINE void cut(Cutter& cutter) {
    const bool narrow = sizeof(X) < sizeof(T);
    k_space = cutter.take<T>(narrow ? kKeyTile * dot.n.D : 0);
    v_space = cutter.take<T>(narrow ? kKeyTile * dot.n.E : 0);
    bias_space = cutter.take<T>(dot.bias.data != nullptr ? kKeyTile * P : 0);
    masks = cutter.take<uint64_t>(kKeyTile);
    bad_keys = cutter.take<uint8_t>(kKeyTile);
    bad_values = cutter.take<uint8_t>(kKeyTile);
  }

  void open(int64_t tile) {
    start = tile * kKeyTile;
    count = least(kKeyTile, dot.n.S - start);
    full = q.state[tile - q.tiles_first] == kFull;
    k = rows_of<T, X>(dot.k, q.b, q.g, start, count, dot.n.D, k_space);
    v = rows_of<T, X>(dot.v, q.b, q.g, start, count, dot.n.E, v_space);
    int known = flags.get(q.b, q.g, tile);
    if (known < 0) {
      known = !(all_finite(k.data, k.row, count, dot.n.D) && all_finite(v.data, v.row, count, dot.n.E));
      flags.set(q.b, q.g, tile, known != 0);
    }
    bad = known != 0;
    if (!bad) return;
    for (int64_t i = 0; i < count; ++i) {
      bad_keys[i] = !is_finite(k.data + i * k.row, dot.n.D);
      bad_values[i] = !is_finite(v.data + i * v.row, dot.n.E);
    }
  }

  ATTNSPAN_INLINE int64_t lanes(int64_t panel) const { return least(P, q.rows - panel * P); }
  ATTNSPAN_INLINE bool passes_through() const {  // the scores are more than products
    return dot.key_bias.data != nullptr || dot.softcap != 0 || dot.bias.data != nullptr ||
           dot.slopes.data != nullptr;
  }

  // Scores of a panel, for the keys some query may see; masks are null where all do.
  // `softened`, if not null, takes 1 - tanh^2, the derivative of the softcap.
  struct Scored {
    Range keys;
    const uint64_t* masks;
  };
  Scored score(int64_t panel, const T* queries, T* s, T* softened) {
    const int64_t first = q.first + panel * P;
    Scored found{{0, count}, nullptr};
    if (!full || bad || lanes(panel) < P || dot.bias.data != nullptr) {
      const Range seen = lane_masks(dot, q.b, q.h, first, lanes(panel), start, count, masks);
      found = {{seen.first / 4 * 4, least(count, up_to(seen.last, 4))}, masks};
      if (seen.first >= seen.last) return {{0, 0}, masks};
    }
    const Range keys = found.keys;
    score_product(k.data + keys.first * k.row, k.row, queries + panel * P * dot.n.D, dot.n.D,
                  keys.last - keys.first, s + keys.first * P);
    if (bad) {
      for (int64_t j = keys.first; j < keys.last; ++j) {
        if (!bad_keys[j]) continue;
        for (int w = 0; w < 3; ++w) store(s + j * P + w * N, splat(T(__builtin_nan(""))));
      }
    }
    if (passes_through()) pass_through(first, lanes(panel), keys, s, softened);
    return found;
  }

  // Key bias, softcap, bias, ALiBi; a bias of -inf goes to the masks.
  void pass_through(int64_t first, int64_t n, Range keys, T* s, T* softened) {
    const bool capped = dot.softcap != 0, dense = dot.bias.data != nullptr;
    const T cap = static_cast<T>(dot.softcap), inverse = static_cast<T>(1 / dot.softcap);
    const T* added = nullptr;
    if (dot.key_bias.data != nullptr) {
      added = static_cast<const T*>(dot.key_bias.data) + dot.key_bias.offset(q.b, q.h, 0) + start;
    }
    if (dense) copy_bias(first, n, keys);
    T slope = 0;
    int32_t align = 0;
    if (dot.slopes.data != nullptr) {
      slope = -static_cast<const T*>(dot.slopes.data)[dot.slopes.offset(q.b, q.h, 0)];
      align = *dot.align.row(q.b, q.h, 0);
    }
    for (int64_t j = keys.first; j < keys.last; ++j) {
      for (int w = 0; w < 3; ++w) {
        V x = load(s + j * P + w * N);
        if (added != nullptr) x += added[j];
        if (capped) {
          const V t = tanh<T>(x * inverse);
          if (softened != nullptr) store(softened + j * P + w * N, (T(1) - t) * (T(1) + t));
          x = t * cap;
        }
        if (dense) {
          const V b = load(bias_space + j * P + w * N);
          masks[j] &= ~(bits_of(b == splat(T(-__builtin_inf()))) << (w * N));
          x = (x + b) + b * T(0);  // +inf is no number to add
        }
        if (dot.slopes.data != nullptr) x = fma(distance(first, align, j, w), splat(slope), x);
        store(s + j * P + w * N, x);
      }
    }
  }

  ATTNSPAN_INLINE V distance(int64_t first, int32_t align, int64_t j, int w) const {  // |i + align - j|
    V d;
    for (int i = 0; i < N; ++i) {
      const int64_t away = first + w * N + i + align - (start + j);
      d[i] = static_cast<T>(away < 0 ? -away : away);
    }
    return d;
  }

  // The bias of a panel with queries side by side; lanes without a query get 0.
  void copy_bias(int64_t first, int64_t n, Range keys) {
    const T* from = static_cast<const T*>(dot.bias.data) + dot.bias.offset(q.b, q.h, first) + start;
    for (int64_t i = 0; i < P; ++i) {
      const T* row = i < n ? from + i * dot.bias.stride[2] : nullptr;
      for (int64_t j = keys.first; j < keys.last; ++j) bias_space[j * P + i] = row == nullptr ? 0 : row[j];
    }
  }

  ATTNSPAN_INLINE bool sees_all(const uint64_t* seen, int64_t j) const {
    return seen == nullptr || seen[j] == (~uint64_t{0} >> (64 - P));
  }
};

// Which weights stay, for one key and w-th vector of a panel.
template <class T>
struct Drops {
  typename Types<T>::U r1[3], r2[3];
  uint32_t threshold;

  void draw(const Dot& dot, const QueryTile& q, int64_t panel) {
    threshold = static_cast<uint32_t>(dot.dropout * 4294967296.0);
    for (int64_t i = 0; i < kPanel<T>; ++i) {
      uint32_t a, b;
      row_words(dot, q.b, q.h, q.first + panel * kPanel<T> + i, &a, &b);
      r1[i / kLanes<T>][i % kLanes<T>] = a;
      r2[i / kLanes<T>][i % kLanes<T>] = b;
    }
  }
  ATTNSPAN_INLINE typename Types<T>::M keep(int64_t key, int w) const {
    auto x = r1[w] ^ (static_cast<uint32_t>(key) * 0x9E3779B9u);
    x = (x ^ (x >> 16)) * 0x7FEB352Du;
    x = ((x ^ (x >> 15)) ^ r2[w]) * 0x846CA68Bu;
    x ^= x >> 16;
    return widen_mask(x >= threshold, T{});
  }
};

// x * factor; what overflows stops at the largest number. NaN stays.
template <class T>
ATTNSPAN_INLINE T bounded_product(T x, T factor) {
  constexpr T lowest = Types<T>::kLowest;
  const T y = x * factor;
  if (factor >= T(-1) && factor <= T(1)) return y;  // cannot overflow: nothing to look for
  return y > -lowest ? -lowest : y < lowest ? lowest : y;
}

// A panel of rows with queries side by side: panel[d][i] = row i [d] * factor. A row that is not finite
// becomes NaN; a row past the last, or one that `lives` denies, 0.
template <class T, class X>
void pack_panel(const X* from, int64_t row, int64_t n, int64_t width, T factor, const uint8_t* lives, T* space,
                T* panel) {
  constexpr int P = kPanel<T>;
  for (int64_t i = 0; i < P; ++i) {
    if (i >= n || (lives != nullptr && !lives[i])) {
      for (int64_t d = 0; d < width; ++d) panel[d * P + i] = 0;
      continue;
    }
    const T* x = widened(from + i * row, width, space);
    const T times = is_finite(x, width) ? factor : T(__builtin_nan(""));
    for (int64_t d = 0; d < width; ++d) panel[d * P + i] = bounded_product(x[d], times);
  }
}

// The running statistics of a panel: RowSums, lanes side by side.
template <class T>
struct Looking {
  using V = VecOf<T>;
  static constexpr int P = kPanel<T>, N = kLanes<T>;
  V count[3], reference[3], second[3], r1[3], r2[3], r3[3], a[3];

  void start() {
    for (int w = 0; w < 3; ++w) {
      count[w] = r1[w] = r2[w] = r3[w] = a[w] = V{};
      reference[w] = second[w] = splat(Types<T>::kLowest);
    }
  }

  // Before the weights of a tile are made: s still holds the scores, those not seen the lowest number.
  // When a new maximum arrives the old one joins the others. `old` is the largest score before.
  void prepare(const T* s, Range keys, const V* old, const V* top) {
    for (int w = 0; w < 3; ++w) {
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

// Scores of finite inputs are finite: what overflowed stops at the largest number. NaN stays.
template <class T>
void clamp(T* s, Range keys) {
  constexpr int P = kPanel<T>, N = kLanes<T>;
  const VecOf<T> lowest = splat(Types<T>::kLowest);
  for (int64_t i = keys.first * P; i < keys.last * P; i += N) {
    const VecOf<T> x = load(s + i);
    store(s + i, x > -lowest ? -lowest : x < lowest ? lowest : x);
  }
}

template <class T, class X>
struct Forward {
  static constexpr int P = kPanel<T>, N = kLanes<T>, NB = kPanels<T>;
  using V = VecOf<T>;
  const DotForward& task;
  Tile<T, X> tile;
  uint8_t* states;
  T *queries, *s, *o, *top, *sum, *row_space;
  Drops<T>* drops;
  Looking<T>* looking;

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
    row_space = cutter.take<T>(n.D);
    drops = cutter.take<Drops<T>>(NB);
    looking = cutter.take<Looking<T>>(NB);
  }

  void run(int64_t item) {
    const Dot& dot = task.problem;
    const DotSizes& n = dot.n;
    const QueryTile& q = tile.q = describe(dot, item, states);
    const int64_t panels = (q.rows + P - 1) / P;
    const X* from = static_cast<const X*>(dot.q.data) + dot.q.offset(q.b, q.h, q.first);
    for (int64_t i = 0; i < panels; ++i) {
      pack_panel(from + i * P * dot.q.stride[2], dot.q.stride[2], tile.lanes(i), n.D,
                 static_cast<T>(dot.scale), nullptr, row_space, queries + i * P * n.D);
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
          careful_product(tile.v.data, tile.v.row, s, n.E, keys, scored.masks, tile.bad_values, out);
        } else {
          value_product(tile.v.data + keys.first * tile.v.row, tile.v.row, s + keys.first * P, n.E,
                        keys.last - keys.first, out);
        }
      }
    }
    for (int64_t i = 0; i < panels; ++i) write(i);
  }

  // Scores to weights relative to the largest so far; what was summed before is brought to it.
  template <bool kLook>
  void soften(int64_t panel, const typename Tile<T, X>::Scored& scored) {
    const Range keys = scored.keys;
    const uint64_t* masks = scored.masks;
    const V lowest = splat(Types<T>::kLowest);
    V most[3] = {lowest, lowest, lowest};
    for (int64_t j = keys.first; j < keys.last; ++j) {
      T* row = s + j * P;
      if (tile.sees_all(masks, j)) {
        for (int w = 0; w < 3; ++w) most[w] = larger(load(row + w * N), most[w]);
      } else {
        for (int w = 0; w < 3; ++w) {
          const V x = mask_of<T>(masks[j] >> (w * N)) ? load(row + w * N) : lowest;
          store(row + w * N, x);
          most[w] = larger(x, most[w]);
        }
      }
    }
    // A lane whose scores all overflowed, one way or the other; or one that sees nothing here.
    const auto odd = [&](int w) { return (most[w] > -Types<T>::kLowest) | (most[w] == lowest); };
    if (any(odd(0) | odd(1) | odd(2))) {
      clamp<T>(s, keys);
      for (int w = 0; w < 3; ++w) most[w] = most[w] > -Types<T>::kLowest ? -lowest : most[w];
    }
    V old[3], now[3], total[3];
    for (int w = 0; w < 3; ++w) {
      old[w] = load(top + panel * P + w * N);
      now[w] = larger(most[w], old[w]);
      total[w] = load(sum + panel * P + w * N);
    }
    if (any((now[0] > old[0]) | (now[1] > old[1]) | (now[2] > old[2]))) {
      V shrink[3];
      for (int w = 0; w < 3; ++w) {
        shrink[w] = exp<T>(old[w] - now[w]);  // exactly 1 where nothing moved
        total[w] *= shrink[w];
        store(top + panel * P + w * N, now[w]);
      }
      T* out = o + panel * P * task.problem.n.E;
      for (int64_t e = 0; e < task.problem.n.E; ++e) {
        for (int w = 0; w < 3; ++w) store(out + e * P + w * N, load(out + e * P + w * N) * shrink[w]);
      }
    }
    if (kLook) looking[panel].prepare(s, keys, old, now);
    const bool drop = task.problem.dropout > 0;
    for (int w = 0; w < 3; ++w) {
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
    Looking<T>& look = looking[panel];
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
      const T inverse = empty ? T(0) : 1 / total, times = inverse * kept;
      const T* from = o + panel * P * dot.n.E + i;
      T* out = static_cast<T*>(task.out.data) + task.out.offset(q.b, q.h, l);
      const int64_t step = task.out.stride[3];
      for (int64_t e = 0; e < dot.n.E; ++e) out[e * step] = empty ? T(0) : from[e * P] * times;
      put(task.lse, l, log_sum_exp(static_cast<double>(most), static_cast<double>(total)));
      put(task.top, l, empty ? 0.0 : static_cast<double>(most));
      put(task.inverse, l, static_cast<double>(inverse));
      if (task.entropy.data == nullptr) continue;
      const Looking<T>& look = looking[panel];
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
  }

  ATTNSPAN_INLINE void put(const View<void>& view, int64_t l, double x) {
    if (view.data == nullptr) return;
    static_cast<T*>(view.data)[view.offset(tile.q.b, tile.q.h, l)] = static_cast<T>(x);
  }
};

// c[r][0..kColumns) += sum over panels and their queries of a[panel][r][query] * b[query][0..kColumns), in
// ascending order of queries; panels whose keys lie elsewhere are left out.
template <class T, int R>
ATTNSPAN_INLINE void column_block(const T* a, const T* b, const Range* ranges, int64_t panels, int64_t rows,
                                  int64_t key, T* c, int64_t c_row) {
  constexpr int P = kPanel<T>, N = kLanes<T>, C = kColumns<T>;
  VecOf<T> sum[R][2];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    sum[r][0] = load(c + r * c_row);
    sum[r][1] = load(c + r * c_row + N);
  }
  for (int64_t i = 0; i < panels; ++i) {
    if (ranges[i].first >= key + R || ranges[i].last <= key) continue;
    const T* from = a + (i * kKeyTile + key) * P;
    const T* column = b + i * P * C;
    const int64_t n = least(P, rows - i * P);
    for (int64_t l = 0; l < n; ++l) {
      const VecOf<T> x = load(column + l * C), y = load(column + l * C + N);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const VecOf<T> z = broadcast(from + r * P + l);
        sum[r][0] = fma(z, x, sum[r][0]);
        sum[r][1] = fma(z, y, sum[r][1]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    store(c + r * c_row, sum[r][0]);
    store(c + r * c_row + N, sum[r][1]);
  }
}

template <class T>
ATTNSPAN_INLINE void column_rows(int64_t r, const T* a, const T* b, const Range* ranges, int64_t panels,
                                 int64_t rows, int64_t key, T* c, int64_t c_row) {
  switch (r) {
    case 1: return column_block<T, 1>(a, b, ranges, panels, rows, key, c, c_row);
    case 2: return column_block<T, 2>(a, b, ranges, panels, rows, key, c, c_row);
    case 3: return column_block<T, 3>(a, b, ranges, panels, rows, key, c, c_row);
    case 4: return column_block<T, 4>(a, b, ranges, panels, rows, key, c, c_row);
    case 5: return column_block<T, 5>(a, b, ranges, panels, rows, key, c, c_row);
    default: return column_block<T, 6>(a, b, ranges, panels, rows, key, c, c_row);
  }
}

// rows[k] += sum over queries of a[k][query] * columns[query]; `columns` as Backward packs them. The
// column behind the last, if `extra` is given, goes to extra[k].
template <class T>
void column_product(const T* a, const T* columns, const Range* ranges, int64_t panels, int64_t rows, Range keys,
                    int64_t width, T* to, int64_t to_row, T* extra) {
  constexpr int C = kColumns<T>;
  const int64_t wide = width + (extra != nullptr);
  for (int64_t c = 0; c < wide; c += C) {
    const T* b = columns + c * kQueryTile;
    for (int64_t k = keys.first; k < keys.last; k += 6) {
      const int64_t r = least(6, keys.last - k);
      if (c + C <= width) {
        column_rows(r, a, b, ranges, panels, rows, k, to + k * to_row + c, to_row);
        continue;
      }
      T space[6 * C];
      const int64_t some = width - c;
      for (int64_t i = 0; i < r; ++i) {
        for (int64_t d = 0; d < C; ++d) space[i * C + d] = d < some ? to[(k + i) * to_row + c + d] : T(0);
        if (extra != nullptr && some < C) space[i * C + some] = extra[k + i];
      }
      column_rows(r, a, b, ranges, panels, rows, k, space, C);
      for (int64_t i = 0; i < r; ++i) {
        for (int64_t d = 0; d < some; ++d) to[(k + i) * to_row + c + d] = space[i * C + d];
        if (extra != nullptr && some < C) extra[k + i] = space[i * C + some];
      }
    }
  }
}

// Rows for column_product: columns[c / kColumns][row][c % kColumns] = row[c] * factor.
template <class T>
ATTNSPAN_INLINE void pack_columns(const T* x, int64_t width, T factor, int64_t row, T* columns) {
  constexpr int C = kColumns<T>;
  for (int64_t d = 0; d < width; ++d) columns[(d / C * kQueryTile + row) * C + d % C] = bounded_product(x[d], factor);
}

template <class T, class X>
struct Backward {
  static constexpr int P = kPanel<T>, N = kLanes<T>, NB = kPanels<T>, C = kColumns<T>;
  using V = VecOf<T>;
  const BackwardJob& job;
  const DotBackward& task;
  const Dot& dot;
  Tile<T, X> tile;
  uint8_t *states, *lives;
  T *queries, *query_columns, *outs, *out_columns, *dq, *p, *ds, *softened;
  T *top, *delta, *dslopes, *row_space, *out_space;
  Drops<T>* drops;
  Range ranges[NB];
  bool scores;  // whether a gradient goes through the scores

  ATTNSPAN_INLINE explicit Backward(const BackwardJob& given)
      : job(given), task(*given.task), dot(given.task->problem), tile(dot, *given.flags) {
    Cutter cutter{nullptr};
    cut(cutter);
    Cutter real{workspace(cutter.used)};
    cut(real);
    scores = task.dq.data || task.dkey_bias.data || task.dbias.data || task.dslopes.data;
  }
  ATTNSPAN_INLINE void cut(Cutter& cutter) {
    const DotSizes& n = dot.n;
    tile.cut(cutter);
    states = cutter.take<uint8_t>(key_tiles(dot));
    lives = cutter.take<uint8_t>(NB * P);
    queries = cutter.take<T>(NB * P * n.D);
    query_columns = cutter.take<T>(up_to(n.D + 1, C) * kQueryTile);
    outs = cutter.take<T>(NB * P * n.E);
    out_columns = cutter.take<T>(up_to(n.E, C) * kQueryTile);
    dq = cutter.take<T>(NB * P * n.D);
    p = cutter.take<T>(NB * kKeyTile * P);
    ds = cutter.take<T>(NB * kKeyTile * P);
    softened = cutter.take<T>(dot.softcap != 0 ? kKeyTile * P : 0);
    top = cutter.take<T>(NB * P);
    delta = cutter.take<T>(NB * P);
    dslopes = cutter.take<T>(NB * P);
    row_space = cutter.take<T>(n.D);
    out_space = cutter.take<T>(n.E);
    drops = cutter.take<Drops<T>>(NB);
  }

  void run(int64_t item) {
    const DotSizes& n = dot.n;
    const QueryTile& q = tile.q = describe(dot, item, states);
    const int64_t panels = (q.rows + P - 1) / P;
    for (int64_t i = 0; i < panels; ++i) pack(i);
    for (int64_t i = 0; i < panels * P * n.D; ++i) dq[i] = 0;
    for (int64_t i = 0; i < panels * P; ++i) dslopes[i] = 0;
    if (task.dbias.data != nullptr) job.turnstile->wait_bias(item);
    int64_t touched = 0;
    for (int64_t t = q.tiles_first; t < q.tiles_last; ++t) {
      if (q.state[t - q.tiles_first] == kSkip) continue;
      tile.open(t);
      Range keys{kKeyTile, 0};  // that any panel sees
      for (int64_t i = 0; i < panels; ++i) {
        ranges[i] = differentiate(i);
        if (ranges[i].first >= ranges[i].last) continue;
        keys = {least(keys.first, ranges[i].first), -least(-keys.last, -ranges[i].last)};
      }
      job.turnstile->wait_keys(item, touched++, q.b, q.g, t);
      if (task.dv.data != nullptr) {
        column_product(p, out_columns, ranges, panels, q.rows, keys, n.E, row_of(task.dv), task.dv.stride[2],
                       static_cast<T*>(nullptr));
      }
      if (task.dk.data != nullptr || task.dkey_bias.data != nullptr) {
        T* extra = nullptr;
        if (task.dkey_bias.data != nullptr) {
          extra = static_cast<T*>(task.dkey_bias.data) + task.dkey_bias.offset(q.b, q.h, 0) + tile.start;
        }
        if (task.dk.data != nullptr) {
          column_product(ds, query_columns, ranges, panels, q.rows, keys, n.D, row_of(task.dk),
                         task.dk.stride[2], extra);
        } else {
          column_product(ds, query_columns + n.D / C * C * kQueryTile, ranges, panels, q.rows, keys, 0,
                         static_cast<T*>(nullptr), 0, extra);
        }
      }
      job.turnstile->pass_keys(q.b, q.g, t);
    }
    if (task.dbias.data != nullptr) job.turnstile->pass_bias(item);
    for (int64_t i = 0; i < panels; ++i) write(i);
  }

  ATTNSPAN_INLINE T* row_of(const View<void>& view) {
    return static_cast<T*>(view.data) + view.offset(tile.q.b, tile.q.g, tile.start);
  }

  // Rows that see nothing have no gradient, whatever arrives there: zeros take their place.
  void pack(int64_t panel) {
    const QueryTile& q = tile.q;
    const int64_t n = tile.lanes(panel), base = panel * P;
    const T kept = static_cast<T>(1 / (1 - dot.dropout)), scale = static_cast<T>(dot.scale);
    const X* from = static_cast<const X*>(dot.q.data) + dot.q.offset(q.b, q.h, q.first + base);
    for (int64_t i = 0; i < P; ++i) {
      const int64_t l = q.first + base + i, row = base + i;
      const T inverse = i < n ? value(task.inverse, l) : T(0);
      lives[row] = inverse != T(0);
      top[row] = delta[row] = 0;
      for (int64_t e = 0; e < dot.n.E; ++e) out_space[e] = 0;
      if (lives[row]) {
        top[row] = value(task.top, l);
        const T* out = static_cast<const T*>(task.out.data) + task.out.offset(q.b, q.h, l);
        const T* dout = static_cast<const T*>(task.dout.data) + task.dout.offset(q.b, q.h, l);
        T sums[4] = {0, 0, 0, 0};  // four chains in one order
        for (int64_t e = 0; e < dot.n.E; ++e) {
          const T x = dout[e * task.dout.stride[3]];
          sums[e % 4] = fma(x, out[e * task.out.stride[3]], sums[e % 4]);
          out_space[e] = x * (inverse * kept);
        }
        const T back = task.dlse.data != nullptr ? value(task.dlse, l) : T(0);
        delta[row] = inverse * ((sums[0] + sums[1]) + (sums[2] + sums[3]) - back);
      }
      for (int64_t e = 0; e < dot.n.E; ++e) outs[base * dot.n.E + e * P + i] = out_space[e];
      if (i < n) {
        pack_columns(out_space, dot.n.E, T(1), row, out_columns);
        if (!lives[row]) {
          for (int64_t d = 0; d < dot.n.D; ++d) row_space[d] = 0;
        }
        const T* x = lives[row] ? widened(from + i * dot.q.stride[2], dot.n.D, row_space) : row_space;
        pack_columns(x, dot.n.D, scale, row, query_columns);
        // Sums for the key bias, in the column behind the last, or alone in the first of its block.
        query_columns[(dot.n.D / C * kQueryTile + row) * C + (task.dk.data != nullptr ? dot.n.D % C : 0)] = 1;
      }
    }
    pack_panel(from, dot.q.stride[2], n, dot.n.D, static_cast<T>(dot.scale), lives + base, row_space,
               queries + base * dot.n.D);
    if (dot.dropout > 0) drops[panel].draw(dot, q, panel);
  }

  ATTNSPAN_INLINE T value(const View<const void>& view, int64_t l) const {
    return static_cast<const T*>(view.data)[view.offset(tile.q.b, tile.q.h, l)];
  }

  // The weights of a panel and the gradients of its scores; gives the keys that it sees.
  Range differentiate(int64_t panel) {
    T* weights = p + panel * kKeyTile * P;
    T* slopes = ds + panel * kKeyTile * P;
    const auto scored = tile.score(panel, queries, weights, dot.softcap != 0 ? softened : nullptr);
    const Range keys = scored.keys;
    if (keys.first >= keys.last) return keys;
    if (scores) {
      score_product(tile.v.data + keys.first * tile.v.row, tile.v.row, outs + panel * P * dot.n.E, dot.n.E,
                    keys.last - keys.first, slopes + keys.first * P);
    }
    bool lowest = false;  // some row's scores all overflowed downwards
    for (int64_t i = 0; i < tile.lanes(panel); ++i) lowest |= top[panel * P + i] == Types<T>::kLowest;
    if (lowest) clamp<T>(weights, keys);
    for (int w = 0; w < 3; ++w) {
      if (dot.dropout > 0) {
        weigh<true, true>(panel, w, keys, scored.masks, weights, slopes);
      } else if (scored.masks != nullptr) {
        weigh<true, false>(panel, w, keys, scored.masks, weights, slopes);
      } else {
        weigh<false, false>(panel, w, keys, scored.masks, weights, slopes);
      }
    }
    if (task.dslopes.data != nullptr) add_to_slopes(panel, keys, slopes);
    if (task.dbias.data != nullptr) add_to_bias(panel, keys, slopes);
    if (scores && dot.softcap != 0) {
      for (int64_t j = keys.first * 3; j < keys.last * 3; ++j) {
        const V slope = load(slopes + j * N);  // where it is 0, the score may be of what nobody sees
        store(slopes + j * N, where(slope != T(0), slope * load(softened + j * N)));
      }
    }
    if (task.dq.data != nullptr) {
      T* to = dq + panel * P * dot.n.D;
      if (tile.bad) {
        careful_product(tile.k.data, tile.k.row, slopes, dot.n.D, keys, scored.masks,
                        static_cast<const uint8_t*>(nullptr), to);
      } else {
        value_product(tile.k.data + keys.first * tile.k.row, tile.k.row, slopes + keys.first * P, dot.n.D,
                      keys.last - keys.first, to);
      }
    }
    // Blocks of 6 keys reach up to 5 beyond what this panel sees.
    for (int64_t j = keys.first < 5 ? 0 : keys.first - 5; j < keys.first; ++j) clear(weights, slopes, j);
    for (int64_t j = keys.last; j < least(kKeyTile, keys.last + 5); ++j) clear(weights, slopes, j);
    return keys;
  }

  // Scores to weights, and what comes back to a weight to the slope of its score.
  template <bool kMasked, bool kDrop>
  ATTNSPAN_INLINE void weigh(int64_t panel, int w, Range keys, const uint64_t* masks, T* weights, T* slopes) {
    const V most = load(top + panel * P + w * N), less = load(delta + panel * P + w * N);
    int64_t at = keys.first * P + w * N;
    for (int64_t j = keys.first; j < keys.last; ++j, at += P) {
      V x = load(weights + at) - most;
      x = x > T(0) ? V{} : x;  // what overflowed stopped at the maximum
      V weight = exp<T>(x), back = load(slopes + at), slope;
      if (kDrop) {
        const auto keep = drops[panel].keep(tile.start + j, w);
        slope = weight * (where(keep, back) - less);
        weight = where(keep, weight);
      } else {
        slope = weight * (back - less);
      }
      if (kMasked && !tile.sees_all(masks, j)) {
        const auto seen = mask_of<T>(masks[j] >> (w * N));
        weight = where(seen, weight);
        slope = where(seen, slope);
      }
      store(weights + at, weight);
      store(slopes + at, slope);
    }
  }

  void add_to_slopes(int64_t panel, Range keys, const T* slopes) {
    const int32_t align = *dot.align.row(tile.q.b, tile.q.h, 0);
    for (int w = 0; w < 3; ++w) {
      V along = load(dslopes + panel * P + w * N);
      for (int64_t j = keys.first; j < keys.last; ++j) {
        const V far = tile.distance(tile.q.first + panel * P, align, j, w);
        along = fma(-far, load(slopes + j * P + w * N), along);
      }
      store(dslopes + panel * P + w * N, along);
    }
  }

  ATTNSPAN_INLINE void clear(T* weights, T* slopes, int64_t j) {
    for (int64_t i = j * P; i < (j + 1) * P; ++i) weights[i] = slopes[i] = 0;
  }

  void add_to_bias(int64_t panel, Range keys, const T* slopes) {
    const QueryTile& q = tile.q;
    for (int64_t i = 0; i < tile.lanes(panel); ++i) {
      T* to = static_cast<T*>(task.dbias.data) + task.dbias.offset(q.b, q.h, q.first + panel * P + i) + tile.start;
      for (int64_t j = keys.first; j < keys.last; ++j) to[j] += slopes[j * P + i];
    }
  }

  void write(int64_t panel) {
    const QueryTile& q = tile.q;
    const T scale = static_cast<T>(dot.scale);
    for (int64_t i = 0; i < tile.lanes(panel); ++i) {
      const int64_t l = q.first + panel * P + i;
      if (task.dslopes.data != nullptr) {
        static_cast<T*>(task.dslopes.data)[task.dslopes.offset(q.b, q.h, l)] = dslopes[panel * P + i];
      }
      if (task.dq.data == nullptr) continue;
      T* to = static_cast<T*>(task.dq.data) + task.dq.offset(q.b, q.h, l);
      for (int64_t d = 0; d < dot.n.D; ++d) to[d] = dq[panel * P * dot.n.D + d * P + i] * scale;
    }
  }
};

template <template <class, class> class Pass, class Job>
ATTNSPAN_INLINE void run(const Job& job, int64_t item) {
  switch (job.task->problem.dtype) {
    case Dtype::f16: return Pass<float, Half>(job).run(item);
    case Dtype::bf16: return Pass<float, Bfloat>(job).run(item);
    case Dtype::f32: return Pass<float, float>(job).run(item);
    case Dtype::f64: return Pass<double, double>(job).run(item);
  }
}

void dot_forward_item(const ForwardJob& job, int64_t item) { run<Forward>(job, item); }
void dot_backward_item(const BackwardJob& job, int64_t item) { run<Backward>(job, item); }

}  // namespace ATTNSPAN_SET
}  // namespace attnspan
