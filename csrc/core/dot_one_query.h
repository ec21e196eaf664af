// The dot kernel's forward pass for one query, as in decoding, for one instruction set: see vec.h.
//
// There is nothing to put side by side with the query, so lanes are keys while there are scores, and the
// columns of a value in the output. Each sum is the chain that it is in the other kernels: which of them
// ran shows in no bit.
#pragma once

#include "dot_tile.h"

namespace attnspan {
namespace ATTNSPAN_SET {

template <class T, class X>
struct OneQuery {
  static constexpr int N = kLanes<T>;
  using V = VecOf<T>;
  const DotForward& task;
  const Dot& dot;
  Tile<T, X, 1> tile;
  uint8_t* states;
  T *query, *s, *o;
  T top, sum;

  ATTNSPAN_INLINE explicit OneQuery(const ForwardJob& job)
      : task(*job.task), dot(job.task->problem), tile(job.task->problem, *job.flags) {
    Cutter cutter{nullptr};
    cut(cutter);
    Cutter real{workspace(cutter.used)};
    cut(real);
  }
  ATTNSPAN_INLINE void cut(Cutter& cutter) {
    const DotSizes& n = dot.n;
    tile.cut(cutter);
    states = cutter.take<uint8_t>((n.S + kKeyTile - 1) / kKeyTile);
    query = cutter.take<T>(n.D);
    s = cutter.take<T>(kKeyTile + N);
    o = cutter.take<T>(n.E);
  }

  // Writes out, lse, top and inverse.
  void run(int64_t item) {
    const QueryTile& q = tile.q = describe(dot, item, states);
    query_row(static_cast<const X*>(dot.q.data) + dot.q.offset(q.b, q.h, 0), dot.n.D, static_cast<T>(dot.scale),
              query);
    top = Types<T>::kLowest;
    sum = 0;
    zero(o, dot.n.E);
    for (int64_t t = q.tiles_first; t < q.tiles_last; ++t) {
      if (q.state[t - q.tiles_first] == kSkip) continue;
      tile.open(t);
      const Range keys = lane_masks(dot, q.b, q.h, 0, 1, tile.start, tile.count, tile.masks);
      if (keys.first >= keys.last) continue;
      score(keys);
      pass_through(keys);
      soften(keys);
      add_values(keys);
    }
    write();
  }

  // s[j] = key j . query
  void score(Range keys) {
    const int64_t D = dot.n.D, row = tile.k.row;
    int64_t j = keys.first;
    for (; j + N <= keys.last; j += N) {
      const T* from = tile.k.data + j * row;
      V sums{};
      int64_t d = 0;
      for (; d + N <= D; d += N) {
        V square[N];
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) square[i] = load(from + i * row + d);
        transpose<N / 2>(square);
#pragma GCC unroll 16
        for (int i = 0; i < N; ++i) sums = fma(square[i], broadcast(query + d + i), sums);
      }
      for (; d < D; ++d) {
        V column;
        for (int i = 0; i < N; ++i) column[i] = from[i * row + d];
        sums = fma(column, broadcast(query + d), sums);
      }
      store(s + j, sums);
    }
    for (; j < keys.last; ++j) {
      T one = 0;
      for (int64_t d = 0; d < D; ++d) one = fma(tile.k.data[j * row + d], query[d], one);
      s[j] = one;
    }
    for (j = keys.first; tile.bad && j < keys.last; ++j) {
      if (tile.bad_keys[j]) s[j] = T(__builtin_nan(""));
    }
  }

  // Key bias, softcap, bias, ALiBi; a bias of -inf goes to the masks.
  void pass_through(Range keys) {
    if (!tile.passes_through()) return;
    const QueryTile& q = tile.q;
    const T cap = static_cast<T>(dot.softcap), inverse = static_cast<T>(1 / dot.softcap);
    const auto row = [&](const View<const void>& view) {
      return static_cast<const T*>(view.data) + view.offset(q.b, q.h, 0);
    };
    const T* key_bias = dot.key_bias.data == nullptr ? nullptr : row(dot.key_bias) + tile.start;
    const T* bias = dot.bias.data == nullptr ? nullptr : row(dot.bias) + tile.start;
    const T slope = dot.slopes.data == nullptr ? T(0) : -*row(dot.slopes);
    const int64_t align = dot.slopes.data == nullptr ? 0 : *dot.align.row(q.b, q.h, 0);
    const bool bounds = dot.softcap == 0 && (bias != nullptr || dot.slopes.data != nullptr);
    for (int64_t j = keys.first; j < keys.last; ++j) {
      T x = s[j];
      if (key_bias != nullptr) x += key_bias[j];
      if (bounds) x = bounded(x);
      if (dot.softcap != 0) x = tanh<T>(splat(x * inverse))[0] * cap;
      if (bias != nullptr) {
        if (bias[j] == T(-__builtin_inf())) tile.masks[j] = 0;
        x = (x + bias[j]) + bias[j] * T(0);  // +inf is no number to add
      }
      if (dot.slopes.data != nullptr) {
        const int64_t away = align - (tile.start + j);
        x = fma(static_cast<T>(away < 0 ? -away : away), slope, x);
      }
      s[j] = x;
    }
  }

  // Scores to weights relative to the largest so far, 0 where the query does not see.
  void soften(Range keys) {
    T most = Types<T>::kLowest;
    for (int64_t j = keys.first; j < keys.last; ++j) {
      s[j] = tile.masks[j] == 0 ? Types<T>::kLowest : bounded(s[j]);
      most = s[j] > most ? s[j] : most;
    }
    if (most > top) {
      const T shrink = exp<T>(splat(top - most))[0];
      sum *= shrink;
      for (int64_t e = 0; e < dot.n.E; ++e) o[e] *= shrink;
      top = most;
    }
    for (int64_t j = keys.first; j < keys.last; j += N) {  // s has room for the last vector
      store(s + j, exp<T>(load(s + j) - top));
    }
    for (int64_t j = keys.first; j < keys.last; ++j) {
      if (tile.masks[j] == 0) s[j] = 0;
      sum += s[j];
    }
  }

  void add_values(Range keys) {
    const int64_t E = dot.n.E;
    if (tile.bad) {
      for (int64_t j = keys.first; j < keys.last; ++j) {
        if (tile.masks[j] == 0) continue;
        for (int64_t e = 0; e < E; ++e) {
          const T x = tile.bad_values[j] ? T(__builtin_nan("")) : tile.v.data[j * tile.v.row + e];
          o[e] = fma(x, s[j], o[e]);
        }
      }
      return;
    }
    constexpr int B = 64 / N >= 8 ? 8 : 64 / N;  // vectors of the output at once
    int64_t e = 0;
    for (; e + B * N <= E; e += B * N) add_block<B>(keys, e);
    for (; e + N <= E; e += N) add_block<1>(keys, e);
    for (; e < E; ++e) {
      for (int64_t j = keys.first; j < keys.last; ++j) o[e] = fma(s[j], tile.v.data[j * tile.v.row + e], o[e]);
    }
  }

  template <int B>
  ATTNSPAN_INLINE void add_block(Range keys, int64_t e) {
    const T* v = tile.v.data + e;
    V sums[B];
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) sums[b] = load(o + e + b * N);
    for (int64_t j = keys.first; j < keys.last; ++j) {
      const V p = broadcast(s + j);
#pragma GCC unroll 8
      for (int b = 0; b < B; ++b) sums[b] = fma(p, load(v + j * tile.v.row + b * N), sums[b]);
    }
#pragma GCC unroll 8
    for (int b = 0; b < B; ++b) store(o + e + b * N, sums[b]);
  }

  void write() {
    const bool empty = sum == 0;
    const T inverse = empty ? T(0) : 1 / sum;
    const auto put = [&](const View<void>& view, double x) {
      if (view.data != nullptr) static_cast<T*>(view.data)[view.offset(tile.q.b, tile.q.h, 0)] = static_cast<T>(x);
    };
    put(task.lse, log_sum_exp(static_cast<double>(top), static_cast<double>(sum)));
    put(task.top, empty ? 0.0 : static_cast<double>(top));
    put(task.inverse, static_cast<double>(inverse));
    T* out = static_cast<T*>(task.out.data) + task.out.offset(tile.q.b, tile.q.h, 0);
    for (int64_t e = 0; e < dot.n.E; ++e) out[e * task.out.stride[3]] = o[e] * inverse;
  }
};

}  // namespace ATTNSPAN_SET
}  // namespace attnspan
