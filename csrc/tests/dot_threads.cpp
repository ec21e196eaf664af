// The dot kernel gives the same bits on any number of threads, from several callers, after a fork, and by
// any instruction set.
#include <sys/wait.h>
#include <unistd.h>

#include <thread>

#include "dot_case.h"

using namespace attnspan;

namespace {

// Enough work for several threads; heads share keys, and batch elements and heads may share the bias.
Wish busy(Mask mask) {
  Wish wish{{2, 4, 2, 200, 220, 9, 10}, mask};
  wish.scale = 0.3;
  wish.key_bias = wish.bias = true;
  wish.dropout = 0.1;
  return wish;
}

template <class T>
bool equal_on_all_threads(uint64_t seed, const Wish& wish) {
  Random r(seed);
  const Inputs<T> in(r, wish);
  Serial serial;
  const auto alone = run(in, serial);
  for (const int threads : {2, 5}) {
    Pool pool(threads);
    for (int again = 0; again < 2; ++again) {
      if (!same_bits(run(in, pool), alone)) {
        std::fprintf(stderr, "mask %d on %d threads\n", int(wish.mask), threads);
        return false;
      }
    }
  }
  return true;
}

}  // namespace

TEST(dot_has_the_same_bits_on_any_number_of_threads) {
  for (const Mask mask : kMasks) CHECK(equal_on_all_threads<float>(1, busy(mask)));
  CHECK(equal_on_all_threads<Half>(2, busy(Mask::spotted)));
  CHECK(equal_on_all_threads<double>(3, busy(Mask::causal)));
  // One head: all that its queries add to its keys goes through one door.
  for (const Mask mask : {Mask::none, Mask::window}) {
    Wish wish{{1, 1, 1, 700, 600, 8, 8}, mask};
    wish.bias = true;
    CHECK(equal_on_all_threads<float>(4, wish));
  }
}

TEST(dot_from_two_callers_at_once) {
  const auto work = [](uint64_t seed) {
    Random r(seed);
    const Inputs<float> in(r, busy(Mask::causal));
    Serial serial;
    Pool pool(3);
    const auto alone = run(in, serial);
    for (int i = 0; i < 4; ++i) CHECK(same_bits(run(in, pool), alone));
  };
  std::thread other(work, 5);
  work(6);
  other.join();
}

TEST(dot_after_a_fork) {
  Random r(7);
  const Inputs<float> in(r, busy(Mask::two));
  Pool pool(4);
  const auto before = run(in, pool);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(60);  // a hang is a failure
    _exit(same_bits(run(in, pool), before) ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(same_bits(run(in, pool), before));
}

namespace {

template <class T>
bool equal_by(Isa isa, uint64_t seed, const Wish& wish) {
  Random r(seed);
  const Inputs<T> in(r, wish);
  const bool same = same_bits(run(in, Engine(kernels_of(isa))), run(in, Engine(kernels_of(Isa::scalar))));
  if (!same) std::fprintf(stderr, "%s: %s\n", name_of(isa), text_of(wish).c_str());
  return same;
}

}  // namespace

TEST(every_instruction_set_gives_the_bits_of_its_scalar_twin) {
  for (const Isa isa : supported()) {
    for (const Mask mask : kMasks) {
      Wish wish{{1, 2, 1, 110, 230, 19, 21}, mask};
      wish.scale = 0.3;
      CHECK(equal_by<float>(isa, 1, wish));
      wish.key_bias = wish.bias = wish.slopes = true;
      wish.softcap = 3;
      wish.dropout = 0.1;
      CHECK(equal_by<float>(isa, 2, wish));
      CHECK(equal_by<double>(isa, 3, wish));
      CHECK(equal_by<Half>(isa, 4, wish));
      CHECK(equal_by<Bfloat>(isa, 5, wish));
    }
  }
}
