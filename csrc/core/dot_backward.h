// The dot kernel's backward pass, for one instruction set: each tile's weights once more, from what the
// forward pass kept of a row [1].
//
// [1] Dao et al., "FlashAttention", 2022, algorithm 4.
#pragma once

#include "dot_tile.h"

namespace attnspan {
namespace ATTNSPAN_SET {

template <class T>
constexpr int kColumns = 2 * kLanes<T>;  // of a block of 6 keys in the products that give dk and dv

// c[r][0..kColumns) += sum over panels and their queries of a[panel][r][query] * b[query][0..kColumns), in
// ascending order of queries; panels whose keys lie elsewhere are left out.
template <class T, int R>
ATTNSPAN_INLINE void column_block(const T* a, const T* b, const Range* ranges, int64_t panels, int64_t rows,
                                  int64_t key, T* c, int64_t c_row) {
  constexpr int P = kPanel<T, 3>, N = kLanes<T>, C = kColumns<T>;
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

// A row for column_product: columns[d / kColumns][row][d % kColumns] = x[d].
template <class T>
ATTNSPAN_INLINE void pack_columns(const T* x, int64_t width, int64_t row, T* columns) {
  constexpr int C = kColumns<T>, N = kLanes<T>;
  int64_t d = 0;
  for (; d + C <= width; d += C) {
    T* to = columns + d * kQueryTile + row * C;
    store(to, load(x + d));
    store(to + N, load(x + d + N));
  }
  for (T* to = columns + d * kQueryTile + row * C - d; d < width; ++d) to[d] = x[d];
}

// The sum of products of two rows: 16 chains whose sums are added in pairs, on every machine.
template <class T>
ATTNSPAN_INLINE T row_product(const T* a, const T* b, int64_t n) {
  constexpr int N = kLanes<T>, K = 16, M = K / N;
  VecOf<T> sums[M] = {};
  int64_t i = 0;
  for (; i + K <= n; i += K) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) sums[m] = fma(load(a + i + m * N), load(b + i + m * N), sums[m]);
  }
  T chain[K];
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) store(chain + m * N, sums[m]);
  for (int64_t c = 0; i + c < n; ++c) chain[c] = fma(a[i + c], b[i + c], chain[c]);
  for (int half = K / 2; half > 0; half /= 2) {
    for (int c = 0; c < half; ++c) chain[c] += chain[c + half];
  }
  return chain[0];
}

template <class T, class X>
struct Backward {
  static constexpr int W = 3, P = kPanel<T, W>, N = kLanes<T>, NB = kPanels<T, W>, C = kColumns<T>;
  using V = VecOf<T>;
  const BackwardJob& job;
  const DotBackward& task;
  const Dot& dot;
  Tile<T, X, W> tile;
  uint8_t* states;
  T *queries, *query_columns, *outs, *out_columns, *dq, *p, *ds, *softened;
  T *top, *delta, *dslopes, *row_space, *out_space, *strided, *scales;
  Drops<T, W>* drops;
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
    row_space = cutter.take<T>(N * n.D);
    out_space = cutter.take<T>(N * n.E);
    strided = cutter.take<T>(task.out.stride[3] == 1 ? 0 : n.E);
    scales = cutter.take<T>(P);
    drops = cutter.take<Drops<T, W>>(NB);
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
    const DotSizes& n = dot.n;
    const int64_t lanes = tile.lanes(panel);
    for (int64_t first = 0; first < P; first += N) {
      for (int64_t i = 0; i < N; ++i) {
        const int64_t row = panel * P + first + i, l = q.first + row;
        T *const query = row_space + i * n.D, *const out = out_space + i * n.E;
        const T inverse = first + i < lanes ? value(task.inverse, l) : T(0);
        if (inverse == T(0)) {
          zero(query, n.D);
          zero(out, n.E);
          top[row] = delta[row] = 0;
        } else {
          query_row(static_cast<const X*>(dot.q.data) + dot.q.offset(q.b, q.h, l), n.D,
                    static_cast<T>(dot.scale), query);
          pack_out(l, inverse, row, out);
        }
        if (first + i >= lanes) continue;
        pack_columns(query, n.D, row, query_columns);
        pack_columns(out, n.E, row, out_columns);
        // Sums for the key bias, in the column behind the last, or alone in the first of its block.
        query_columns[(n.D / C * kQueryTile + row) * C + (task.dk.data != nullptr ? n.D % C : 0)] = 1;
      }
      lay_across(row_space, n.D, n.D, queries + panel * P * n.D + first, P);
      lay_across(out_space, n.E, n.E, outs + panel * P * n.E + first, P);
    }
    if (dot.dropout > 0) drops[panel].draw(dot, q, panel);
  }

  // What arrives at a row's output, relative to its sum; and what all its weights have less of.
  ATTNSPAN_INLINE void pack_out(int64_t l, T inverse, int64_t row, T* to) {
    const QueryTile& q = tile.q;
    const T* out = static_cast<const T*>(task.out.data) + task.out.offset(q.b, q.h, l);
    const T* dout = static_cast<const T*>(task.dout.data) + task.dout.offset(q.b, q.h, l);
    const int64_t E = dot.n.E, step = task.dout.stride[3], out_step = task.out.stride[3];
    if (step != 1) {
      for (int64_t e = 0; e < E; ++e) to[e] = dout[e * step];
      dout = to;
    }
    if (out_step != 1) {
      for (int64_t e = 0; e < E; ++e) strided[e] = out[e * out_step];
      out = strided;
    }
    const T back = task.dlse.data != nullptr ? value(task.dlse, l) : T(0);
    top[row] = value(task.top, l);
    delta[row] = inverse * (row_product(dout, out, E) - back);
    const T times = inverse * static_cast<T>(1 / (1 - dot.dropout));
    for (int64_t e = 0; e < E; ++e) to[e] = dout[e] * times;
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
      score_product<W>(tile.v.data + keys.first * tile.v.row, tile.v.row, outs + panel * P * dot.n.E, dot.n.E,
                    keys.last - keys.first, slopes + keys.first * P);
    }
    bool lowest = false;  // some row's scores all overflowed downwards
    for (int64_t i = 0; i < tile.lanes(panel); ++i) lowest |= top[panel * P + i] == Types<T>::kLowest;
    if (lowest) clamp<W>(weights, keys);
    for (int w = 0; w < W; ++w) {
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
        careful_product<W>(tile.k.data, tile.k.row, slopes, dot.n.D, keys, scored.masks,
                        static_cast<const uint8_t*>(nullptr), to);
      } else {
        value_product<W>(tile.k.data + keys.first * tile.k.row, tile.k.row, slopes + keys.first * P, dot.n.D,
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
    for (int w = 0; w < W; ++w) {
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
    const int64_t n = tile.lanes(panel), first = q.first + panel * P;
    for (int64_t i = 0; i < n; ++i) {
      scales[i] = static_cast<T>(dot.scale);
      if (task.dslopes.data == nullptr) continue;
      static_cast<T*>(task.dslopes.data)[task.dslopes.offset(q.b, q.h, first + i)] = dslopes[panel * P + i];
    }
    if (task.dq.data == nullptr) return;
    T* to = static_cast<T*>(task.dq.data) + task.dq.offset(q.b, q.h, first);
    unpack_panel<W>(dq + panel * P * dot.n.D, n, dot.n.D, scales, to, task.dq.stride[2], 1);
  }
};

}  // namespace ATTNSPAN_SET
}  // namespace attnspan
