// A tile of the dot kernel, for one instruction set: see vec.h. What both passes share: the products, the
// scores of a tile and what they pass through, dropout.
//
// Lanes are queries: a tile of scores is S^T[key][P], P queries of one panel side by side, so that the
// softmax is vertical, keys and values are read where they lie, and a row's bits depend on no neighbour and
// no vector width.
#pragma once

#include "dot_tiles.h"
#include "vec.h"

namespace attnspan {
namespace ATTNSPAN_SET {

// Queries side by side: W vectors of them. 3 vectors and 4 rows fill 16 registers; for a few queries, as in
// decoding, 1 vector and 8 rows. No bit depends on it.
template <class T, int W>
constexpr int kPanel = W * kLanes<T>;
template <int W>
constexpr int kRows = W == 1 ? 8 : 4;
template <class T, int W>
constexpr int kPanels = kQueryTile / kPanel<T, W>;

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
template <int W, class T>
void score_product(const T* rows, int64_t row, const T* panel, int64_t width, int64_t n, T* s) {
  constexpr int P = kPanel<T, W>, R = kRows<W>;
  int64_t k = 0;
  for (; k + R <= n; k += R) block<T, R, W, false>(rows + k * row, row, 1, panel, P, width, s + k * P, P);
  for (; k < n; ++k) block<T, 1, W, false>(rows + k * row, row, 1, panel, P, width, s + k * P, P);
}

// o^T[e] += sum_k rows[k][e] * p[k], for n keys.
template <int W, class T>
void value_product(const T* rows, int64_t row, const T* p, int64_t width, int64_t n, T* o) {
  constexpr int P = kPanel<T, W>, R = kRows<W>;
  int64_t e = 0;
  for (; e + R <= width; e += R) block<T, R, W, true>(rows + e, 1, row, p, P, n, o + e * P, P);
  for (; e < width; ++e) block<T, 1, W, true>(rows + e, 1, row, p, P, n, o + e * P, P);
}

// The same where some row is not finite: what a lane does not see leaves no trace in it, and a row
// marked bad makes NaN of those that see it. Without `bad` no row is marked.
template <int W, class T>
void careful_product(const T* rows, int64_t row, const T* p, int64_t width, Range keys, const uint64_t* masks,
                     const uint8_t* bad, T* o) {
  constexpr int P = kPanel<T, W>, N = kLanes<T>;
  for (int64_t e = 0; e < width; ++e) {
    for (int w = 0; w < W; ++w) {
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

// What overflowed stops at the largest number. NaN stays.
template <class T>
ATTNSPAN_INLINE T bounded(T x) {
  return x > -Types<T>::kLowest ? -Types<T>::kLowest : x < Types<T>::kLowest ? Types<T>::kLowest : x;
}
template <class T>
ATTNSPAN_INLINE VecOf<T> bounded(VecOf<T> x) {
  const VecOf<T> lowest = splat(Types<T>::kLowest);
  return x > -lowest ? -lowest : x < lowest ? lowest : x;
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
  constexpr int N = kLanes<T>;
  VecOf<T> sums[4] = {};  // so that additions need not wait for each other
  bool finite = true;
  for (int64_t i = 0; i < count; ++i) {
    const T* x = rows + i * row;
    int64_t d = 0;
    for (; d + 4 * N <= width; d += 4 * N) {
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) sums[n] += load(x + d + n * N) * T(0);
    }
    finite = finite && (d == width || is_finite(x + d, width - d));
  }
  const VecOf<T> sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  return finite && !any(sum != sum);
}

// Work that all tiles of one work item share: the tile of keys, and what the scores pass through.
template <class T, class X, int W>
struct Tile {
  static constexpr int P = kPanel<T, W>, N = kLanes<T>;
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
    score_product<W>(k.data + keys.first * k.row, k.row, queries + panel * P * dot.n.D, dot.n.D,
                  keys.last - keys.first, s + keys.first * P);
    if (bad) {
      for (int64_t j = keys.first; j < keys.last; ++j) {
        if (!bad_keys[j]) continue;
        for (int w = 0; w < W; ++w) store(s + j * P + w * N, splat(T(__builtin_nan(""))));
      }
    }
    if (passes_through()) pass_through(first, lanes(panel), keys, s, softened);
    return found;
  }

  // Key bias, softcap, bias, ALiBi; a bias of -inf goes to the masks.
  void pass_through(int64_t first, int64_t n, Range keys, T* s, T* softened) {
    const bool capped = dot.softcap != 0, dense = dot.bias.data != nullptr;
    const bool bounds = !capped && (dense || dot.slopes.data != nullptr);  // what is added comes to a finite score
    const T cap = static_cast<T>(dot.softcap), inverse = static_cast<T>(1 / dot.softcap);
    const T* added = nullptr;
    if (dot.key_bias.data != nullptr) {
      added = static_cast<const T*>(dot.key_bias.data) + dot.key_bias.offset(q.b, q.h, 0) + start;
    }
    const bool one_row = dense && dot.bias.stride[2] == 0;
    const T* row = nullptr;  // of a bias that is the same for all queries
    if (one_row) row = static_cast<const T*>(dot.bias.data) + dot.bias.offset(q.b, q.h, 0) + start;
    if (dense && !one_row) copy_bias(first, n, keys);
    T slope = 0;
    int32_t align = 0;
    if (dot.slopes.data != nullptr) {
      slope = -static_cast<const T*>(dot.slopes.data)[dot.slopes.offset(q.b, q.h, 0)];
      align = *dot.align.row(q.b, q.h, 0);
    }
    for (int64_t j = keys.first; j < keys.last; ++j) {
      for (int w = 0; w < W; ++w) {
        V x = load(s + j * P + w * N);
        if (added != nullptr) x += added[j];
        if (bounds) x = bounded<T>(x);
        if (capped) {
          const V t = tanh<T>(x * inverse);
          if (softened != nullptr) store(softened + j * P + w * N, (T(1) - t) * (T(1) + t));
          x = t * cap;
        }
        if (dense) {
          const V b = one_row ? splat(row[j]) : load(bias_space + j * P + w * N);
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
    const int64_t step = dot.bias.stride[2];
    int64_t i = 0;
    for (; i + N <= n; i += N) {
      lay_across(from + i * step + keys.first, step, keys.last - keys.first, bias_space + keys.first * P + i, P);
    }
    for (; i < P; ++i) {
      const T* row = i < n ? from + i * step : nullptr;
      for (int64_t j = keys.first; j < keys.last; ++j) bias_space[j * P + i] = row == nullptr ? 0 : row[j];
    }
  }

  ATTNSPAN_INLINE bool sees_all(const uint64_t* seen, int64_t j) const {
    return seen == nullptr || seen[j] == (~uint64_t{0} >> (64 - P));
  }
};

// Which weights stay, for one key and w-th vector of a panel.
template <class T, int W>
struct Drops {
  typename Types<T>::U r1[W], r2[W];
  uint32_t threshold;

  void draw(const Dot& dot, const QueryTile& q, int64_t panel) {
    threshold = static_cast<uint32_t>(dot.dropout * 4294967296.0);
    for (int64_t i = 0; i < kPanel<T, W>; ++i) {
      uint32_t a, b;
      row_words(dot, q.b, q.h, q.first + panel * kPanel<T, W> + i, &a, &b);
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

// to[d] = x[d] * factor; what overflows stops at the largest number. NaN stays.
template <class T>
ATTNSPAN_INLINE void scale_row(const T* x, int64_t width, T factor, T* to) {
  constexpr int N = kLanes<T>;
  const bool shrinks = factor >= T(-1) && factor <= T(1);  // cannot overflow: nothing to look for
  int64_t d = 0;
  for (; d + N <= width; d += N) {
    const VecOf<T> y = load(x + d) * factor;
    store(to + d, shrinks ? y : bounded<T>(y));
  }
  for (; d < width; ++d) {
    to[d] = shrinks ? x[d] * factor : bounded(x[d] * factor);
  }
}

// A query row times a factor. One that is not finite becomes NaN. `x` may be in `to`.
template <class T, class X>
ATTNSPAN_INLINE void query_row(const X* from, int64_t width, T factor, T* to) {
  const T* x = widened(from, width, to);
  scale_row(x, width, is_finite(x, width) ? factor : T(__builtin_nan("")), to);
}

template <class T>
ATTNSPAN_INLINE void zero(T* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = 0;
}

// A panel of n rows with queries side by side: panel[d][i] = row i [d] * factor, 0 past the last.
// `space` takes as many rows as a vector has lanes.
template <int W, class T, class X>
void pack_panel(const X* from, int64_t row, int64_t n, int64_t width, T factor, T* space, T* panel) {
  constexpr int P = kPanel<T, W>, N = kLanes<T>;
  for (int64_t first = 0; first < P; first += N) {
    for (int64_t i = 0; i < N; ++i) {
      if (first + i < n) {
        query_row(from + (first + i) * row, width, factor, space + i * width);
      } else {
        zero(space + i * width, width);
      }
    }
    lay_across(space, width, width, panel + first, P);
  }
}

// The other way: row i [e] = panel[e][i] * times[i], for n rows whose elements lie `step` apart.
template <int W, class T>
void unpack_panel(const T* panel, int64_t n, int64_t width, const T* times, T* to, int64_t row, int64_t step) {
  constexpr int P = kPanel<T, W>, N = kLanes<T>;
  for (int64_t first = 0; first < n; first += N) {
    const int64_t rows = least(N, n - first);
    int64_t e = 0;
    for (; step == 1 && e + N <= width; e += N) {
      VecOf<T> square[N];
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) square[i] = load(panel + (e + i) * P + first);
      transpose<N / 2>(square);
      VecOf<T> out[N];  // what registers hold can't be counted through
#pragma GCC unroll 16
      for (int i = 0; i < N; ++i) out[i] = square[i];
      for (int64_t i = 0; i < rows; ++i) store(to + (first + i) * row + e, out[i] * times[first + i]);
    }
    for (; e < width; ++e) {
      for (int64_t i = 0; i < rows; ++i) to[(first + i) * row + e * step] = panel[e * P + first + i] * times[first + i];
    }
  }
}

// Scores of finite inputs are finite: what overflowed stops at the largest number. NaN stays.
template <int W, class T>
void clamp(T* s, Range keys) {
  constexpr int P = kPanel<T, W>, N = kLanes<T>;
  for (int64_t i = keys.first * P; i < keys.last * P; i += N) store(s + i, bounded<T>(load(s + i)));
}

}  // namespace ATTNSPAN_SET
}  // namespace attnspan
