// Random arrays with random strides, each in a buffer of exactly what it reaches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

#include "../core/types.h"

struct Random {
  std::mt19937_64 engine;
  explicit Random(uint64_t seed) : engine(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine() % static_cast<uint64_t>(n)); }
  bool chance(int percent) { return below(100) < percent; }
  double normal() { return std::normal_distribution<double>()(engine); }
};

// T is the type of an element. `Owned` keeps the memory, `array` is what a function is given.
template <class T>
struct Owned {
  std::vector<T> memory;
  attnspan::Array array{};

  // Axes in a random order, some backwards, with gaps; `shared` axes may get stride 0. With `rows` the
  // last axis has stride 1.
  Owned(Random& random, const int64_t (&shape)[4], bool shared, bool rows = false) {
    int order[4] = {3, 2, 1, 0};
    std::shuffle(order + (rows ? 1 : 0), order + 4, random.engine);
    int64_t step = 1, lowest = 0, highest = 0;
    bool empty = false;
    for (const int i : order) {
      const bool plain = rows && i == 3;
      array.shape[i] = shape[i];
      step += !plain && random.chance(25) ? random.below(3) : 0;
      const bool zero = shared && !plain && random.chance(15);
      array.stride[i] = zero ? 0 : !plain && random.chance(25) ? -step : step;
      if (shape[i] == 0) empty = true;
      const int64_t reach = array.stride[i] * std::max<int64_t>(shape[i] - 1, 0);
      (reach < 0 ? lowest : highest) += reach;
      if (!zero) step *= std::max<int64_t>(shape[i], 1);
    }
    memory.resize(empty ? 0 : static_cast<size_t>(highest - lowest + 1));
    array.data = empty ? nullptr : memory.data() - lowest;
  }

  T& at(int64_t b, int64_t h, int64_t l, int64_t j) const {
    const int64_t index[4] = {b, h, l, j};
    int64_t offset = 0;
    for (int i = 0; i < 4; ++i) offset += (array.shape[i] == 1 ? 0 : index[i]) * array.stride[i];
    return static_cast<T*>(array.data)[offset];
  }
};
