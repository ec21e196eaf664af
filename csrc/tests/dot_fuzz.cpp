// Random calls, right and wrong, at the checks; what they accept is run. The sanitizers judge: each array
// lies in memory of exactly what it reaches.
#include <cstring>

#include "../core/dot.h"
#include "arrays.h"
#include "check.h"

using namespace attnspan;

namespace {

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max(), kTiny = std::numeric_limits<int64_t>::min();

struct Fuzz {
  Random r;
  DotSizes n{};
  std::vector<std::vector<int64_t>> memory;  // of words, so that elements are aligned

  explicit Fuzz(uint64_t seed) : r(seed) {
    const auto size = [&](int64_t most) { return r.chance(6) ? 0 : 1 + r.below(r.chance(80) ? 1 + most / 8 : most); };
    const int64_t G = size(3);
    n = {size(3), G * size(3), G, size(200), size(420), size(70), size(70)};
  }

  // A size or a stride that may be all wrong.
  int64_t odd(int64_t right) {
    const int64_t many[] = {0, 1, -1, 2, right + 1, right - 1, -right, 2 * right, int64_t{1} << 31, kHuge, kTiny,
                            int64_t{1} << 61};
    return many[r.below(static_cast<int64_t>(std::size(many)))];
  }

  // Usually right: a random layout. Sometimes spoiled, in a size, a stride or the address.
  Array array(std::vector<int64_t> shape, int64_t item, bool rows, int spoiled = 2) {
    Array a{};
    int order[4] = {3, 2, 1, 0};
    std::shuffle(order + (rows ? 1 : 0), order + 4, r.engine);
    int64_t step = 1;
    for (const int i : order) {
      a.shape[i] = shape[static_cast<size_t>(i)];
      const bool free = !(rows && i == 3);
      if (free && r.chance(20)) ++step;
      a.stride[i] = free && r.chance(25) ? -step : step;
      step *= std::max<int64_t>(a.shape[i], 1);
    }
    if (r.chance(spoiled)) {
      int64_t& one = a.shape[r.below(4)];
      one = odd(one);
    }
    if (r.chance(spoiled)) {
      int64_t& one = a.stride[r.below(4)];
      one = odd(one);
    }
    place(&a, item);
    if (r.chance(spoiled) && item > 1 && a.data != nullptr) a.data = static_cast<char*>(a.data) + 1;
    if (r.chance(spoiled)) a.data = nullptr;
    return a;
  }

  // Memory of random bits; what reaches too far for that gets no address.
  void place(Array* a, int64_t item) {
    __int128 low = 0, high = 0;
    for (int i = 0; i < 4; ++i) {
      if (a->shape[i] <= 0) return;
      const __int128 reach = static_cast<__int128>(a->stride[i]) * (a->shape[i] - 1);
      (reach < 0 ? low : high) += reach;
    }
    const __int128 bytes = (high - low + 1) * item;
    if (bytes > (1 << 22)) return;
    // The end of the array is the end of the memory.
    const size_t words = static_cast<size_t>(bytes + 7) / 8, gap = words * 8 - static_cast<size_t>(bytes);
    std::vector<int64_t>& space = memory.emplace_back(words);
    const bool numbers = r.chance(80);  // or any bits at all, NaN and infinities among them
    for (int64_t& word : space) word = numbers ? 0 : static_cast<int64_t>(r.engine());
    char* const data = reinterpret_cast<char*>(space.data()) + gap / static_cast<size_t>(item) * static_cast<size_t>(item);
    for (int64_t i = 0; numbers && i < static_cast<int64_t>(bytes) / item; ++i) {
      const float x = static_cast<float>(r.normal());
      if (item == 2) std::memcpy(data + i * 2, reinterpret_cast<const char*>(&x) + 2, 2);
      if (item == 4) std::memcpy(data + i * 4, &x, 4);
      const double y = x;
      if (item == 8) std::memcpy(data + i * 8, &y, 8);
    }
    a->data = data - static_cast<int64_t>(low) * item;
  }

  Given maybe(int percent, std::vector<int64_t> shape, int64_t item, bool rows) {
    if (!r.chance(percent)) return {false, {}};
    return {true, array(std::move(shape), item, rows)};
  }

  std::vector<int64_t> shared(int64_t b, int64_t h, int64_t l, int64_t j) {
    const auto one = [&](int64_t size) { return r.chance(30) ? 1 : size; };
    return {one(b), one(h), one(l), j};
  }

  // Usually sorted intervals within the keys, of memory that `place` filled with numbers of no meaning.
  void fill_spans(Array* start, Array* stop) {
    const bool right = r.chance(85);
    const auto set = [&](const Array& a, bool end) {
      if (a.data == nullptr || reinterpret_cast<std::uintptr_t>(a.data) % 4 != 0) return;
      for (int i = 0; i < 4; ++i) {
        if (a.shape[i] <= 0 || a.shape[i] > 1000) return;
      }
      for (int64_t i = 0; i < a.shape[0] * a.shape[1] * a.shape[2] * a.shape[3]; ++i) {
        const int64_t R = a.shape[3], place = i % R, l = i / R % a.shape[2], h = i / R / a.shape[2] % a.shape[1];
        const int64_t b = i / R / a.shape[2] / a.shape[1];
        const int64_t width = n.S / std::max<int64_t>(R, 1);
        int64_t value = place * width + (end ? width - (l + h + b) % (width / 2 + 1) : 0);
        if (!right && r.chance(3)) value = odd(value);
        static_cast<int32_t*>(a.data)[b * a.stride[0] + h * a.stride[1] + l * a.stride[2] + place * a.stride[3]] =
            static_cast<int32_t>(value);
      }
    };
    set(*start, false);
    set(*stop, true);
  }
};

// Whether the checks accepted the call, and the kernel ran.
bool ran(uint64_t seed, Executor& executor) {
  Fuzz f(seed);
  Random& r = f.r;
  const DotSizes& n = f.n;
  DotArrays in{};
  in.dtype = static_cast<Dtype>(r.below(4));
  const int64_t item = size_of(in.dtype), wide = size_of(accumulation(in.dtype));
  in.q = f.array({n.B, n.H, n.L, n.D}, item, true);
  in.k = f.array({n.B, n.G, n.S, n.D}, item, true);
  in.v = f.array({n.B, n.G, n.S, n.E}, item, true);
  in.scale = r.chance(2) ? NAN : r.normal();
  in.softcap = r.chance(60) ? 0 : 3 * r.normal() + 4;
  in.dropout = r.chance(60) ? 0 : static_cast<double>(r.below(105)) * 0.01;
  in.draws = r.chance(2) ? 0 : 1 + r.below(3);
  in.key_bias = f.maybe(30, f.shared(n.B, n.H, 1, n.S), wide, true);
  in.bias = f.maybe(30, f.shared(n.B, n.H, n.L, n.S), wide, true);
  in.slopes = f.maybe(30, f.shared(n.B, n.H, 1, 1), wide, false);
  in.align = f.maybe(in.slopes.given ? 98 : 2, f.shared(n.B, 1, 1, 1), 4, false);
  in.seed = f.maybe(in.dropout > 0 ? 98 : 2, f.shared(n.B, 1, 1, 2), 4, false);
  in.bits = f.maybe(30, f.shared(n.B, n.H, n.L, (n.S + 7) / 8), 1, false);
  const std::vector<int64_t> rows = f.shared(n.B, n.H, n.L, r.chance(2) ? 0 : 1 + r.below(3));
  in.start = f.maybe(60, rows, 4, false);
  in.stop = f.maybe(in.start.given ? 98 : 2, rows, 4, false);
  f.fill_spans(&in.start.array, &in.stop.array);

  DotForward forward{};
  if (!check_dot(in, &forward.problem).empty()) return false;
  const std::vector<int64_t> row = {n.B, n.H, n.L, 1};
  const auto output = [&](std::vector<int64_t> shape, bool last) { return f.array(std::move(shape), wide, last, 1); };
  const bool saved = r.chance(90), statistics = r.chance(40);
  DotForwardArrays out{};
  out.out = output({n.B, n.H, n.L, n.E}, false);
  out.lse = {r.chance(80), output(row, false)};
  out.top = {saved, output(row, false)};
  out.inverse = {saved, output(row, false)};
  for (Given* a : {&out.entropy, &out.max_weight, &out.jacobian_norm}) *a = {statistics, output(row, false)};
  if (!check_dot_forward(out, &forward).empty()) return false;
  dot_forward(forward, executor);
  if (!saved) return true;

  DotBackward backward{};
  backward.problem = forward.problem;
  DotBackwardArrays back{};
  back.out = out.out;
  back.top = out.top.array;
  back.inverse = out.inverse.array;
  back.dout = output({n.B, n.H, n.L, n.E}, false);
  back.dlse = {r.chance(50), output(row, false)};
  const bool both = r.chance(70);
  back.dq = {both, output({n.B, n.H, n.L, n.D}, true)};
  back.dk = {both, output({n.B, n.G, n.S, n.D}, true)};
  back.dv = {r.chance(70), output({n.B, n.G, n.S, n.E}, true)};
  back.dkey_bias = {in.key_bias.given && r.chance(90), output({n.B, n.H, 1, n.S}, true)};
  back.dslopes = {in.slopes.given && r.chance(90), output(row, false)};
  const int64_t(&bias)[4] = in.bias.array.shape;
  back.dbias = {in.bias.given && bias[2] == n.L && r.chance(90), output({bias[0], bias[1], n.L, n.S}, true)};
  if (!check_dot_backward(back, &backward).empty()) return false;
  dot_backward(backward, executor);
  return true;
}

}  // namespace

TEST(whatever_the_checks_accept_runs) {
  Pool pool(2);
  int accepted = 0;
  constexpr int kCalls = 1500;
  for (uint64_t seed = 0; seed < kCalls; ++seed) accepted += ran(seed, pool);
  std::printf("%d of %d calls ran\n", accepted, kCalls);
  CHECK(accepted > kCalls / 4 && accepted < kCalls * 3 / 4);  // of either kind there are enough
}
