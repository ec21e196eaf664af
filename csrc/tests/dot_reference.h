// What csrc/core/dot.h means: plain loops in double over whole rows, from the definition alone. Shares
// nothing with the kernel but the structs it is asked with, its own random numbers included.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "../core/dot.h"
#include "../core/half.h"

namespace reference {

using namespace attnspan;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

using Numbers = std::vector<double>;  // contiguous, in the order of the axes

inline size_t at(int64_t i) { return static_cast<size_t>(i); }

inline double read(Dtype dtype, const View<const void>& view, int64_t b, int64_t h, int64_t l, int64_t j) {
  const int64_t i = view.offset(b, h, l) + j * view.stride[3];
  switch (dtype) {
    case Dtype::f16: return widen(static_cast<const Half*>(view.data)[i]);
    case Dtype::bf16: return widen(static_cast<const Bfloat*>(view.data)[i]);
    case Dtype::f32: return static_cast<const float*>(view.data)[i];
    default: return static_cast<const double*>(view.data)[i];
  }
}

inline Numbers read_row(Dtype dtype, const View<const void>& view, int64_t b, int64_t h, int64_t l, int64_t n) {
  Numbers row;
  for (int64_t j = 0; j < n; ++j) row.push_back(read(dtype, view, b, h, l, j));
  return row;
}

inline bool finite(const Numbers& row) {
  return std::all_of(row.begin(), row.end(), [](double x) { return std::isfinite(x); });
}

inline double dot(const Numbers& x, const Numbers& y) {
  double sum = 0;
  for (size_t i = 0; i < x.size(); ++i) sum += x[i] * y[i];
  return sum;
}

// Philox4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011: the first two words.
inline void philox(uint64_t c0, uint64_t c1, uint64_t k0, uint64_t k1, uint64_t (&words)[2]) {
  constexpr uint64_t mask = 0xFFFFFFFF;
  uint64_t c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint64_t x = 0xD2511F53 * c0, y = 0xCD9E8D57 * c2;
    c0 = (y >> 32) ^ c1 ^ k0;
    c1 = y & mask;
    c2 = (x >> 32) ^ c3 ^ k1;
    c3 = x & mask;
    k0 = (k0 + 0x9E3779B9) & mask;
    k1 = (k1 + 0xBB67AE85) & mask;
  }
  words[0] = c0;
  words[1] = c1;
}

inline bool stays(const uint64_t (&words)[2], int64_t key, double dropout) {
  constexpr uint64_t mask = 0xFFFFFFFF;
  uint64_t x = words[0] ^ (static_cast<uint64_t>(key) * 0x9E3779B9 & mask);
  x = (x ^ (x >> 16)) * 0x7FEB352D & mask;
  x = ((x ^ (x >> 15)) ^ words[1]) * 0x846CA68B & mask;
  return static_cast<double>(x ^ (x >> 16)) >= std::floor(dropout * 4294967296.0);
}

inline bool sees(const Dot& d, int64_t b, int64_t h, int64_t l, int64_t j) {
  if (d.bits.data != nullptr && (d.bits.row(b, h, l)[j / 8 * d.bits.stride[3]] >> (j % 8) & 1) == 0) return false;
  if (d.bias.data != nullptr && read(accumulation(d.dtype), d.bias, b, h, l, j) == -kInf) return false;
  if (d.spans.start.data == nullptr) return true;
  for (int64_t r = 0; r < d.spans.R; ++r) {
    const int64_t start = d.spans.start.row(b, h, l)[r * d.spans.start.stride[3]];
    const int64_t stop = d.spans.stop.row(b, h, l)[r * d.spans.stop.stride[3]];
    if (start <= j && j < stop) return true;
  }
  return false;
}

// One query and the keys it sees; the vectors speak of those, in order.
struct Row {
  std::vector<int64_t> keys;
  Numbers q;
  std::vector<Numbers> k, v;
  Numbers score;   // natural
  Numbers slope;   // of the softcap
  Numbers far;     // |i + align - j|
  Numbers weight;  // before dropout
  Numbers kept;    // 0, or 1 / (1 - dropout)
  double top = 0, inverse = 0, lse = -kInf;
  double entropy = 0;
  bool values_finite = true;
};

inline Row row_of(const Dot& d, int64_t b, int64_t h, int64_t l) {
  const Dtype sums = accumulation(d.dtype);
  const int64_t g = h / (d.n.H / d.n.G);
  // What overflows stops at the largest number.
  const double largest = (sums == Dtype::f64 ? std::numeric_limits<double>::max()
                                             : static_cast<double>(std::numeric_limits<float>::max()));
  uint64_t words[2] = {0, 0};
  if (d.dropout > 0) {
    const uint32_t* seed = d.seed.row(b, 0, 0);
    philox(static_cast<uint64_t>(l), static_cast<uint64_t>(b % d.draws * d.n.H + h), seed[0],
           seed[d.seed.stride[3]], words);
  }
  Row row;
  for (int64_t j = 0; j < d.n.S; ++j) {
    if (sees(d, b, h, l, j)) row.keys.push_back(j);
  }
  if (row.keys.empty()) return row;
  row.q = read_row(d.dtype, d.q, b, h, l, d.n.D);
  for (const int64_t j : row.keys) {
    row.k.push_back(read_row(d.dtype, d.k, b, g, j, d.n.D));
    row.v.push_back(read_row(d.dtype, d.v, b, g, j, d.n.E));
    row.values_finite = row.values_finite && finite(row.v.back());
    double x = d.scale * dot(row.q, row.k.back());
    if (d.key_bias.data != nullptr) x += read(sums, d.key_bias, b, h, 0, j);
    double slope = 1;
    if (d.softcap != 0) {
      const double t = std::tanh(x / d.softcap);
      x = d.softcap * t;
      slope = (1 - t) * (1 + t);
    }
    if (d.bias.data != nullptr) x += read(sums, d.bias, b, h, l, j);
    double far = 0;
    if (d.slopes.data != nullptr) {
      far = static_cast<double>(std::abs(l + *d.align.row(b, h, 0) - j));
      x -= read(sums, d.slopes, b, h, 0, 0) * far;
    }
    const bool is_number = finite(row.q) && finite(row.k.back()) && !std::isnan(x);
    row.score.push_back(is_number ? std::clamp(x, -largest, largest) : kNan);
    row.slope.push_back(slope);
    row.far.push_back(far);
    row.kept.push_back(d.dropout > 0 && !stays(words, j, d.dropout) ? 0 : 1 / (1 - d.dropout));
  }
  if (std::any_of(row.score.begin(), row.score.end(), [](double s) { return std::isnan(s); })) {
    row.weight.assign(row.keys.size(), kNan);
    row.top = row.inverse = row.lse = row.entropy = kNan;
    return row;
  }
  // The sum of the exponentials is 1 + others: a saturated row keeps its digits.
  const auto most = std::max_element(row.score.begin(), row.score.end());
  const double top = *most;
  double others = 0;
  for (auto s = row.score.begin(); s != row.score.end(); ++s) others += s == most ? 0 : std::exp(*s - top);
  for (const double s : row.score) row.weight.push_back(std::exp(s - top) / (1 + others));
  row.top = top;
  row.inverse = 1 / (1 + others);
  row.lse = top + std::log1p(others);
  row.entropy = std::log1p(others);
  for (size_t i = 0; i < row.keys.size(); ++i) {
    if (row.weight[i] > 0) row.entropy += row.weight[i] * (top - row.score[i]);
  }
  return row;
}

struct Forward {
  Numbers out;                                         // (B, H, L, E)
  Numbers lse, top, inverse;                           // (B, H, L)
  Numbers entropy, max_weight, jacobian_norm;          // (B, H, L)
};

// The Frobenius norm of diag(p) - p p^T, whose entries are p_i * (sum of the others) and -p_i p_j. Sums
// from both ends, so that nothing cancels; long double, so that squares don't underflow.
inline double jacobian_norm(const Numbers& p) {
  using Wide = long double;
  std::vector<Wide> others(p.size()), squares(p.size());
  Wide sum = 0, sum2 = 0;
  const auto pass = [&](size_t i) {
    others[i] += sum;
    squares[i] += sum2;
    sum += p[i];
    sum2 += static_cast<Wide>(p[i]) * p[i];
  };
  for (size_t i = 0; i < p.size(); ++i) pass(i);
  sum = sum2 = 0;
  for (size_t i = p.size(); i-- > 0;) pass(i);
  Wide norm = 0;
  for (size_t i = 0; i < p.size(); ++i) norm += static_cast<Wide>(p[i]) * p[i] * (others[i] * others[i] + squares[i]);
  return static_cast<double>(std::sqrt(norm));
}

inline Forward reference_forward(const Dot& d) {
  Forward f;
  for (int64_t b = 0; b < d.n.B; ++b) {
    for (int64_t h = 0; h < d.n.H; ++h) {
      for (int64_t l = 0; l < d.n.L; ++l) {
        const Row row = row_of(d, b, h, l);
        for (int64_t e = 0; e < d.n.E; ++e) {
          double sum = row.values_finite ? 0 : kNan;
          for (size_t i = 0; i < row.keys.size(); ++i) sum += row.weight[i] * row.kept[i] * row.v[i][at(e)];
          f.out.push_back(sum);
        }
        f.lse.push_back(row.lse);
        f.top.push_back(row.top);
        f.inverse.push_back(row.inverse);
        f.entropy.push_back(row.entropy);
        f.max_weight.push_back(row.keys.empty() ? 0 : *std::max_element(row.weight.begin(), row.weight.end()));
        f.jacobian_norm.push_back(jacobian_norm(row.weight));
      }
    }
  }
  return f;
}

struct Backward {
  Numbers dq, dk, dv;  // (B, H, L, D), (B, G, S, D), (B, G, S, E)
  Numbers dkey_bias;   // (B, H, S)
  Numbers dbias;       // (B, H, L, S), summed by `summed` where bias broadcasts
  Numbers dslopes;     // (B, H, L)
};

// Recomputes the weights: what the forward pass saved is not looked at.
inline Backward reference_backward(const DotBackward& task) {
  const Dot& d = task.problem;
  const DotSizes& n = d.n;
  const Dtype sums = accumulation(d.dtype);
  Backward g;
  g.dq.assign(at(n.B * n.H * n.L * n.D), 0);
  g.dk.assign(at(n.B * n.G * n.S * n.D), 0);
  g.dv.assign(at(n.B * n.G * n.S * n.E), 0);
  g.dkey_bias.assign(at(n.B * n.H * n.S), 0);
  g.dbias.assign(at(n.B * n.H * n.L * n.S), 0);
  g.dslopes.assign(at(n.B * n.H * n.L), 0);
  for (int64_t b = 0; b < n.B; ++b) {
    for (int64_t h = 0; h < n.H; ++h) {
      for (int64_t l = 0; l < n.L; ++l) {
        const Row row = row_of(d, b, h, l);
        if (row.keys.empty()) continue;
        const int64_t query = (b * n.H + h) * n.L + l;
        const Numbers dout = read_row(sums, task.dout, b, h, l, n.E);
        Numbers dweight;
        for (size_t i = 0; i < row.keys.size(); ++i) dweight.push_back(row.kept[i] * dot(dout, row.v[i]));
        const double delta = dot(row.weight, dweight);
        const double dlse = task.dlse.data != nullptr ? read(sums, task.dlse, b, h, l, 0) : 0;
        for (size_t i = 0; i < row.keys.size(); ++i) {
          const int64_t j = row.keys[i], key = (b * n.G + h / (n.H / n.G)) * n.S + j;
          const double dscore = row.weight[i] * (dweight[i] - delta + dlse);
          const double dcapped = dscore * row.slope[i], dproduct = dcapped * d.scale;
          g.dbias[at(query * n.S + j)] += dscore;
          g.dslopes[at(query)] -= dscore * row.far[i];
          g.dkey_bias[at((b * n.H + h) * n.S + j)] += dcapped;
          for (int64_t c = 0; c < n.D; ++c) {
            g.dq[at(query * n.D + c)] += dproduct * row.k[i][at(c)];
            g.dk[at(key * n.D + c)] += dproduct * row.q[at(c)];
          }
          for (int64_t e = 0; e < n.E; ++e) g.dv[at(key * n.E + e)] += row.weight[i] * row.kept[i] * dout[at(e)];
        }
      }
    }
  }
  return g;
}

// x (B, H, L, S) with the first two axes summed where they have one entry in `shape`.
inline Numbers summed(const Numbers& x, const DotSizes& n, const int64_t (&shape)[4]) {
  Numbers sum(at(shape[0] * shape[1] * n.L * n.S), 0);
  for (int64_t b = 0; b < n.B; ++b) {
    for (int64_t h = 0; h < n.H; ++h) {
      const int64_t from = (b * n.H + h) * n.L * n.S;
      const int64_t to = ((shape[0] == 1 ? 0 : b) * shape[1] + (shape[1] == 1 ? 0 : h)) * n.L * n.S;
      for (int64_t i = 0; i < n.L * n.S; ++i) sum[at(to + i)] += x[at(from + i)];
    }
  }
  return sum;
}

// The largest error, relative to the largest number of the reference or `least`, whichever is more.
// Infinite where one is NaN, or infinite, and the other is not.
template <class A>
double error_of(const std::vector<A>& got, const Numbers& wanted, double least) {
  if (got.size() != wanted.size()) return kInf;
  double size = least, error = 0;
  for (const double x : wanted) {
    if (std::isfinite(x)) size = std::max(size, std::abs(x));
  }
  for (size_t i = 0; i < got.size(); ++i) {
    const double x = static_cast<double>(got[i]), y = wanted[i];
    if (std::isnan(x) != std::isnan(y) || std::isinf(x) != std::isinf(y) || (std::isinf(x) && x != y)) return kInf;
    if (std::isfinite(y)) error = std::max(error, std::abs(x - y) / size);
  }
  return error;
}

}  // namespace reference
