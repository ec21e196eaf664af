// What the dot kernel needs besides arithmetic: which tiles a mask touches, where the workers' memory
// is, whose turn it is. Compiled once, for the baseline; the kernels of all instruction sets call it.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "dot.h"

namespace attnspan {

constexpr uint8_t kSkip = 0, kPartial = 1, kFull = 2;

// Some queries of one head, and what their spans say of each tile of keys.
struct QueryTile {
  int64_t b, h, g, first, rows;  // rows is at most kQueryTile
  int64_t tiles_first, tiles_last;
  const uint8_t* state;  // of the tiles [tiles_first, tiles_last): state[t - tiles_first]
};

// The largest number of bytes `describe` writes states to.
int64_t key_tiles(const Dot& dot);
int64_t query_tiles(const Dot& dot);

// The query tile of a work item; `states` has room for key_tiles(dot) bytes.
QueryTile describe(const Dot& dot, int64_t item, uint8_t* states);

struct Range {
  int64_t first, last;
};

// For each key of [start, start + count): bit i says whether query first + i sees it, i < lanes <= 64.
// Gives the keys that any of them sees, relative to start.
Range lane_masks(const Dot& dot, int64_t b, int64_t h, int64_t first, int64_t lanes, int64_t start,
                 int64_t count, uint64_t* masks);

// The two words that dropout draws for a row.
void row_words(const Dot& dot, int64_t b, int64_t h, int64_t query, uint32_t* r1, uint32_t* r2);

// Memory of the calling thread, aligned to 64 bytes, kept from item to item.
char* workspace(int64_t bytes);

// Cuts a workspace into arrays; without one it only counts.
struct Cutter {
  char* at;
  int64_t used = 0;
  template <class T>
  __attribute__((always_inline)) T* take(int64_t count) {
    char* const here = at == nullptr ? nullptr : at + used;
    used += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return reinterpret_cast<T*>(here);
  }
};

// Which tiles of keys and of values hold something that is not finite: found by whoever comes first.
class Flags {
 public:
  explicit Flags(const Dot& dot)
      : tiles_(key_tiles(dot)), G_(dot.n.G), state_(static_cast<size_t>(dot.n.B * dot.n.G * tiles_)) {}
  // -1 unknown, 0 finite, 1 not.
  int get(int64_t b, int64_t g, int64_t tile) const;
  void set(int64_t b, int64_t g, int64_t tile, bool bad);

 private:
  int64_t tiles_, G_;
  std::vector<std::atomic<int8_t>> state_;  // 0 unknown, 1 finite, 2 not
};

// Gradients are summed in one order whoever computes them: before a worker adds to what several query
// tiles add to, it waits for those before it. Work items are claimed in order, so the lowest that is
// unfinished never waits.
class Turnstile {
 public:
  explicit Turnstile(const Dot& dot, bool bias);
  // The n-th tile of keys that an item touches.
  void wait_keys(int64_t item, int64_t n, int64_t b, int64_t g, int64_t tile);
  void pass_keys(int64_t b, int64_t g, int64_t tile);
  // The bias of a query tile, which heads and batch elements may share.
  void wait_bias(int64_t item);
  void pass_bias(int64_t item);

 private:
  int64_t slot_of_bias(int64_t item) const;

  const Dot& dot_;
  std::vector<int64_t> offset_;   // of an item in rank_
  std::vector<int32_t> rank_;     // of its n-th tile, among the items that touch that tile
  std::vector<int32_t> bias_rank_;
  std::vector<std::atomic<int32_t>> keys_, bias_;
};

struct ForwardJob {
  const DotForward* task;
  Flags* flags;
};

struct BackwardJob {
  const DotBackward* task;
  Flags* flags;
  Turnstile* turnstile;
};

// What a row's statistics are made of: its largest score, how many share it, and sums over the others
// relative to `reference`: of e^(s - reference), its square and cube, and (s - reference) e^(s - reference).
struct RowSums {
  double top, count, reference, r1, r2, r3, a;
};
struct RowStatistics {
  double entropy, max_weight, jacobian_norm;
};
RowStatistics statistics_of(const RowSums& sums);

// top + log(sum); -inf for a sum of 0.
double log_sum_exp(double top, double sum);

}  // namespace attnspan
