#include "dot_tiles.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>

namespace attnspan {
namespace {

int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step; }

void wait_for(const std::atomic<int32_t>& turn, int32_t rank) {
  for (int spins = 0; turn.load(std::memory_order_acquire) != rank; ++spins) {
    if (spins > 2000) {
      sched_yield();  // the worker before us may have lost its core
    } else {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }
}

struct Memory {
  char* data = nullptr;
  int64_t bytes = 0;
  ~Memory() { std::free(data); }
};

uint32_t high_word(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

}  // namespace

int64_t key_tiles(const Dot& dot) { return up(dot.n.S, kKeyTile); }
int64_t query_tiles(const Dot& dot) { return up(dot.n.L, kQueryTile); }

QueryTile describe(const Dot& dot, int64_t item, uint8_t* states) {
  const int64_t tiles = query_tiles(dot), keys = key_tiles(dot), S = dot.n.S;
  QueryTile q{};
  q.first = item % tiles * kQueryTile;
  q.h = item / tiles % dot.n.H;
  q.b = item / tiles / dot.n.H;
  q.g = q.h / (dot.n.H / dot.n.G);
  q.rows = std::min(kQueryTile, dot.n.L - q.first);
  q.state = states;
  const Spans& spans = dot.spans;
  if (spans.start.data == nullptr) {
    q.tiles_last = keys;
    std::fill(states, states + keys, dot.bits.data ? kPartial : kFull);
    return q;
  }
  // One row stands for all where the mask says the same of each query.
  const bool alike = spans.start.stride[2] == 0 && spans.stop.stride[2] == 0;
  const int64_t rows = alike ? 1 : q.rows;
  const auto visit = [&](auto&& see) {
    for (int64_t i = 0; i < rows; ++i) {
      const int32_t* start = spans.start.row(q.b, q.h, q.first + i);
      const int32_t* stop = spans.stop.row(q.b, q.h, q.first + i);
      for (int64_t r = 0; r < spans.R; ++r) {
        const int64_t from = start[r * spans.start.stride[3]], to = stop[r * spans.stop.stride[3]];
        if (from < to) see(from, to);
      }
    }
  };
  int64_t low = S, high = 0;
  visit([&](int64_t from, int64_t to) {
    low = std::min(low, from);
    high = std::max(high, to);
  });
  if (low >= high) return q;
  q.tiles_first = low / kKeyTile;
  q.tiles_last = up(high, kKeyTile);
  // How many rows touch a tile, and how many see all of it, from the ends of their intervals.
  thread_local std::vector<int32_t> touched, covered;
  const int64_t n = q.tiles_last - q.tiles_first;
  touched.assign(static_cast<size_t>(n + 1), 0);
  covered.assign(static_cast<size_t>(n + 1), 0);
  visit([&](int64_t from, int64_t to) {
    const auto at = [&](int64_t tile) { return static_cast<size_t>(tile - q.tiles_first); };
    ++touched[at(from / kKeyTile)];
    --touched[at(up(to, kKeyTile))];
    const int64_t whole = up(from, kKeyTile), end = to == S ? keys : to / kKeyTile;
    if (whole < end) {
      ++covered[at(whole)];
      --covered[at(end)];
    }
  });
  int32_t touching = 0, covering = 0;
  for (int64_t t = 0; t < n; ++t) {
    touching += touched[static_cast<size_t>(t)];
    covering += covered[static_cast<size_t>(t)];
    states[t] = touching == 0 ? kSkip : covering == rows && dot.bits.data == nullptr ? kFull : kPartial;
  }
  return q;
}

Range lane_masks(const Dot& dot, int64_t b, int64_t h, int64_t first, int64_t lanes, int64_t start,
                 int64_t count, uint64_t* masks) {
  const uint64_t all = lanes == 64 ? ~uint64_t{0} : (uint64_t{1} << lanes) - 1;
  const Spans& spans = dot.spans;
  const int64_t stop = start + count;
  if (spans.start.data == nullptr) {
    std::fill(masks, masks + count, all);
  } else {
    // An interval flips its lane on and off; the running exclusive or is the mask.
    std::fill(masks, masks + count, 0);
    const bool alike = spans.start.stride[2] == 0 && spans.stop.stride[2] == 0;
    for (int64_t i = 0; i < (alike ? 1 : lanes); ++i) {
      const uint64_t bit = alike ? all : uint64_t{1} << i;
      const int32_t* from = spans.start.row(b, h, first + i);
      const int32_t* to = spans.stop.row(b, h, first + i);
      for (int64_t r = 0; r < spans.R; ++r) {
        const int64_t low = std::max<int64_t>(from[r * spans.start.stride[3]], start);
        const int64_t high = std::min<int64_t>(to[r * spans.stop.stride[3]], stop);
        if (low >= high) continue;
        masks[low - start] ^= bit;
        if (high < stop) masks[high - start] ^= bit;
      }
    }
    uint64_t seen = 0;
    for (int64_t k = 0; k < count; ++k) masks[k] = seen ^= masks[k];
  }
  if (dot.bits.data != nullptr) {
    const int64_t step = dot.bits.stride[3];
    const bool alike = dot.bits.stride[2] == 0;
    for (int64_t i = 0; i < (alike ? 1 : lanes); ++i) {
      const uint64_t bit = alike ? all : uint64_t{1} << i;
      const uint8_t* words = dot.bits.row(b, h, first + i);
      for (int64_t k = 0; k < count; ++k) {  // tiles start at multiples of 8
        if ((words[(start + k) / 8 * step] >> (k % 8) & 1) == 0) masks[k] &= ~bit;
      }
    }
  }
  Range seen{0, count};
  while (seen.first < count && masks[seen.first] == 0) ++seen.first;
  while (seen.last > seen.first && masks[seen.last - 1] == 0) --seen.last;
  return seen;
}

void row_words(const Dot& dot, int64_t b, int64_t h, int64_t query, uint32_t* r1, uint32_t* r2) {
  const uint32_t* seed = dot.seed.row(b, 0, 0);
  uint32_t k0 = seed[0], k1 = seed[dot.seed.stride[3]];
  uint32_t c0 = static_cast<uint32_t>(query), c1 = static_cast<uint32_t>(b % dot.draws * dot.n.H + h);
  uint32_t c2 = 0, c3 = 0;
  for (int round = 0; round < 10; ++round) {
    const uint32_t high0 = high_word(c0, 0xD2511F53), low0 = c0 * 0xD2511F53;
    const uint32_t high1 = high_word(c2, 0xCD9E8D57), low1 = c2 * 0xCD9E8D57;
    c0 = high1 ^ c1 ^ k0;
    c1 = low1;
    c2 = high0 ^ c3 ^ k1;
    c3 = low0;
    k0 += 0x9E3779B9;
    k1 += 0xBB67AE85;
  }
  *r1 = c0;
  *r2 = c1;
}

char* workspace(int64_t bytes) {
  thread_local Memory memory;
  if (memory.bytes < bytes) {
    std::free(memory.data);
    memory.bytes = up(bytes, 4096) * 4096;
    memory.data = static_cast<char*>(std::aligned_alloc(64, static_cast<size_t>(memory.bytes)));
    if (memory.data == nullptr) std::abort();  // an item cannot report; a few hundred KiB are not there
  }
  return memory.data;
}

int Flags::get(int64_t b, int64_t g, int64_t tile) const {
  return state_[static_cast<size_t>((b * G_ + g) * tiles_ + tile)].load(std::memory_order_relaxed) - 1;
}

void Flags::set(int64_t b, int64_t g, int64_t tile, bool bad) {
  state_[static_cast<size_t>((b * G_ + g) * tiles_ + tile)].store(bad ? 2 : 1, std::memory_order_relaxed);
}

Turnstile::Turnstile(const Dot& dot, bool bias)
    : dot_(dot), keys_(static_cast<size_t>(dot.n.B * dot.n.G * key_tiles(dot))) {
  const int64_t tiles = query_tiles(dot), items = dot.n.B * dot.n.H * tiles, keys = key_tiles(dot);
  std::vector<uint8_t> states(static_cast<size_t>(keys));
  std::vector<int32_t> count(static_cast<size_t>(keys));
  offset_.reserve(static_cast<size_t>(items));
  for (int64_t item = 0; item < items; ++item) {
    if (item % (tiles * (dot.n.H / dot.n.G)) == 0) std::fill(count.begin(), count.end(), 0);
    offset_.push_back(static_cast<int64_t>(rank_.size()));
    const QueryTile q = describe(dot, item, states.data());
    for (int64_t t = q.tiles_first; t < q.tiles_last; ++t) {
      if (q.state[t - q.tiles_first] != kSkip) rank_.push_back(count[static_cast<size_t>(t)]++);
    }
  }
  if (!bias) return;
  bias_ = std::vector<std::atomic<int32_t>>(static_cast<size_t>(items));
  std::vector<int32_t> before(static_cast<size_t>(items));
  for (int64_t item = 0; item < items; ++item) {
    bias_rank_.push_back(before[static_cast<size_t>(slot_of_bias(item))]++);
  }
}

int64_t Turnstile::slot_of_bias(int64_t item) const {
  const int64_t tiles = query_tiles(dot_), h = item / tiles % dot_.n.H, b = item / tiles / dot_.n.H;
  const int64_t row = (dot_.bias.stride[0] ? b : 0) * dot_.n.H + (dot_.bias.stride[1] ? h : 0);
  return row * tiles + item % tiles;
}

void Turnstile::wait_keys(int64_t item, int64_t n, int64_t b, int64_t g, int64_t tile) {
  const size_t at = static_cast<size_t>((b * dot_.n.G + g) * key_tiles(dot_) + tile);
  wait_for(keys_[at], rank_[static_cast<size_t>(offset_[static_cast<size_t>(item)] + n)]);
}

void Turnstile::pass_keys(int64_t b, int64_t g, int64_t tile) {
  keys_[static_cast<size_t>((b * dot_.n.G + g) * key_tiles(dot_) + tile)].fetch_add(1, std::memory_order_release);
}

void Turnstile::wait_bias(int64_t item) {
  wait_for(bias_[static_cast<size_t>(slot_of_bias(item))], bias_rank_[static_cast<size_t>(item)]);
}

void Turnstile::pass_bias(int64_t item) {
  bias_[static_cast<size_t>(slot_of_bias(item))].fetch_add(1, std::memory_order_release);
}

RowStatistics statistics_of(const RowSums& row) {
  if (row.count == 0 && row.r1 == 0) return {0, 0, 0};
  const double gap = row.reference - row.top;  // <= 0
  const double share = std::exp(gap), total = row.count + share * row.r1;
  const double p = 1 / total, unit = share / total;  // the others weigh unit * e^(s - reference)
  const double entropy = std::log1p(row.count - 1 + share * row.r1) - unit * (row.a + gap * row.r1);
  const double r2 = unit * unit * row.r2, squares = row.count * p * p + r2;
  const double rest = row.r2 * (1 + squares) - 2 * unit * row.r3;  // in units of unit^2
  double norm;
  if (row.count == 1) {
    norm = unit * std::sqrt(p * p * (row.r1 * row.r1 + row.r2) + rest);
  } else {
    norm = std::sqrt(row.count * p * p * (1 - 2 * p + squares) + unit * unit * rest);
  }
  return {entropy, p, norm};
}

double log_sum_exp(double top, double sum) {
  if (sum == 0) return -std::numeric_limits<double>::infinity();
  return top + std::log(sum);
}

}  // namespace attnspan
