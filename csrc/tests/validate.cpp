// Each thing that is refused, by its name; what is not refused runs in the other tests.
#include "../core/validate.h"

#include <limits>

#include "check.h"

using namespace attnspan;

namespace {

// A good call for (2, 3, 4, 10), one part of which a test spoils.
struct Call {
  alignas(8) char scores[240 * 4], weights[240 * 4], lse[24 * 4];
  int32_t start[8] = {0, 2, 0, 10, 1, 5, 10, 10}, stop[8] = {1, 4, 10, 10, 5, 9, 10, 10};
  uint8_t words[2] = {};
  Array bits{words, {1, 1, 1, 2}, {0, 0, 0, 1}};
  SoftmaxArrays arrays{{scores, {2, 3, 4, 10}, {120, 40, 10, 1}},
                       {start, {1, 1, 4, 2}, {99, 99, 2, 1}},
                       {stop, {1, 1, 4, 2}, {99, 99, 2, 1}},
                       &bits,
                       {weights, {2, 3, 4, 10}, {120, 40, 10, 1}},
                       {lse, {2, 3, 4, 1}, {12, 4, 1, 1}}};

  Call() = default;
  Call(const Call&) = delete;  // its arrays point into itself

  std::string check(Dtype dtype = Dtype::f32) const {
    Softmax task;
    return check_softmax(dtype, arrays, &task);
  }
};

template <class Spoil>
std::string spoiled(Spoil spoil) {
  Call call;
  spoil(call);
  return call.check();
}

bool begins(const std::string& text, const std::string& with) {
  if (text.rfind(with, 0) != 0) std::fprintf(stderr, "said: %s\n", text.c_str());
  return text.rfind(with, 0) == 0;
}

template <class Spoil>
bool refused(const char* said, Spoil spoil) {
  return begins(spoiled(spoil), said);
}

constexpr int64_t huge = std::numeric_limits<int64_t>::max(), tiny = std::numeric_limits<int64_t>::min();

}  // namespace

TEST(a_good_call_passes) { CHECK(Call().check() == ""); }

TEST(null_and_crooked_addresses_are_refused) {
  CHECK(refused("scores: given a null pointer, needed the address of its elements",
                [&](Call& call) { call.arrays.scores.data = nullptr; }));
  CHECK(refused("scores: given an address that is no multiple of 4, needed aligned elements",
                [&](Call& call) { call.arrays.scores.data = call.scores + 2; }));
  CHECK(Call().check(Dtype::bf16) == "" && Call().check(Dtype::f64) == "");
  CHECK(refused("bits: given a null pointer",
                [&](Call& call) { call.bits.data = nullptr; }));
}

TEST(wrong_shapes_are_refused) {
  CHECK(refused("scores: given shape (2, -1, 4, 10), needed sizes of 0 or more",
                [&](Call& call) { call.arrays.scores.shape[1] = -1; }));
  CHECK(refused("weights: given shape (1, 3, 4, 10), needed (2, 3, 4, 10)",
                [&](Call& call) { call.arrays.weights.shape[0] = 1; }));
  CHECK(refused("lse: given shape (2, 3, 4, 10), needed (2, 3, 4, 1)",
                [&](Call& call) { call.arrays.lse.shape[3] = 10; }));
  CHECK(refused("start: given shape (1, 1, 3, 2), needed (2, 3, 4, 2), or 1 in place",
                [&](Call& call) { call.arrays.start.shape[2] = 3; }));
  CHECK(refused("stop: given shape (1, 1, 4, 1), needed (2, 3, 4, 2)",
                [&](Call& call) { call.arrays.stop.shape[3] = 1; }));
  CHECK(refused("bits: given shape (1, 1, 1, 1), needed (2, 3, 4, 2)",
                [&](Call& call) { call.bits.shape[3] = 1; }));
}

TEST(sizes_and_strides_that_overflow_are_refused) {
  for (const int64_t stride : {huge, tiny, huge / 4, -huge / 4}) {
    CHECK(refused("scores: given shape (2, 3, 4, 10) with strides",
                  [&](Call& call) { call.arrays.scores.stride[2] = stride; }));
    // of an axis of size 1 a stride means nothing
    CHECK(spoiled([&](Call& call) { call.arrays.start.stride[0] = stride; }) == "");
  }
  for (const int64_t size : {huge, int64_t{1} << 61}) {
    CHECK(refused("scores: given shape",
                  [&](Call& call) { call.arrays.scores.shape[0] = size, call.arrays.scores.stride[0] = 0; }));
  }
  CHECK(refused("scores: given 2147483648 keys, needed fewer than 2^31",
                [&](Call& call) { call.arrays.scores = {nullptr, {0, 1, 1, int64_t{1} << 31}, {0, 0, 0, 0}}; }));
}

TEST(outputs_that_overlap_are_refused) {
  CHECK(refused("weights: given shape (2, 3, 4, 10) with strides (0, 40, 10, 1), needed an output",
                [&](Call& call) { call.arrays.weights.stride[0] = 0; }));
  CHECK(refused("weights: given",
                [&](Call& call) { call.arrays.weights.stride[2] = -9; }));
  CHECK(refused("lse: given",
                [&](Call& call) { call.arrays.lse.stride[1] = 3; }));
}

TEST(spans_outside_the_keys_or_out_of_order_are_refused) {
  const struct {
    int start[2], stop[2];
    const char* said;
  } cases[] = {
      {{-1, 2}, {1, 4}, "spans: given [-1, 1) at (0, 0, 1, 0), needed sorted, disjoint intervals within [0, 10]"},
      {{0, 2}, {1, 11}, "spans: given [2, 11) at (0, 0, 1, 1)"},
      {{3, 5}, {2, 6}, "spans: given [3, 2) at (0, 0, 1, 0)"},
      {{4, 1}, {6, 2}, "spans: given [1, 2) at (0, 0, 1, 1)"},
      {{0, 2}, {3, 4}, "spans: given [2, 4) at (0, 0, 1, 1)"},
  };
  for (const auto& c : cases) {
    Call call;
    for (int r = 0; r < 2; ++r) {
      call.start[2 + r] = c.start[r];
      call.stop[2 + r] = c.stop[r];
    }
    CHECK(begins(call.check(), c.said));
  }
}

TEST(nothing_to_do_reads_nothing) {
  for (int axis = 0; axis < 4; ++axis) {
    Call call;
    for (Array* a : {&call.arrays.scores, &call.arrays.weights}) {
      a->shape[axis] = 0;
      a->data = nullptr;
      for (int64_t& stride : a->stride) stride = 0;  // as NumPy has them
    }
    if (axis < 3) {
      call.arrays.lse.shape[axis] = 0;
      call.arrays.lse.data = nullptr;
    }
    if (axis == 2) call.arrays.start.shape[2] = call.arrays.stop.shape[2] = 0;
    if (axis == 3) {
      call.bits.shape[3] = 0;
      for (int i = 0; i < 8; ++i) call.start[i] = call.stop[i] = 0;
    }
    CHECK(call.check() == "");
  }
}
