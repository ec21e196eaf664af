// Threads: every item once, callers at once, helpers that come late or never, a fork.
#include "../core/executor.h"

#include <sys/wait.h>
#include <unistd.h>

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"

using namespace attnspan;

namespace {

struct Marks {
  std::vector<int> seen;
  explicit Marks(int64_t items) : seen(static_cast<size_t>(items)) {}
  bool all_once() const {
    for (const int n : seen) {
      if (n != 1) return false;
    }
    return true;
  }
};

void mark(void* context, int64_t item) { ++static_cast<Marks*>(context)->seen[static_cast<size_t>(item)]; }

bool covers(Executor& executor, int64_t items) {
  Marks marks(items);
  executor.run(&marks, items, mark);
  return marks.all_once();
}

}  // namespace

TEST(every_item_is_done_once) {
  Serial serial;
  for (const int64_t items : {0, 1, 2, 7, 1000}) {
    CHECK(covers(serial, items));
    for (const int threads : {1, 2, 5}) {
      Pool pool(threads);
      CHECK(covers(pool, items));
    }
  }
}

TEST(two_callers_at_once) {
  const auto work = [] {
    Pool pool(3);
    for (int i = 0; i < 300; ++i) CHECK(covers(pool, 1 + i % 40));
  };
  std::thread other(work);
  work();
  other.join();
}

TEST(an_item_may_use_the_pool_itself) {
  Pool pool(3);
  pool.run(nullptr, 50, [](void*, int64_t) {
    Pool inner(3);
    CHECK(covers(inner, 20));
  });
}

// A pool whose threads are all busy: the caller must not wait for it, and what it starts after the
// caller has left must touch nothing.
TEST(helpers_that_come_too_late_do_nothing) {
  std::deque<std::function<void()>> scheduled;
  for (int i = 0; i < 3; ++i) {
    auto marks = std::make_unique<Marks>(10);
    const auto job = std::make_shared<Job>(marks.get(), 10, mark);
    for (int helper = 0; helper < 2; ++helper) scheduled.emplace_back([job] { job->help(); });
    job->finish();
    CHECK(marks->all_once());
  }
  for (const auto& help : scheduled) help();
}

TEST(helpers_may_do_everything) {
  Marks marks(1000);
  const auto job = std::make_shared<Job>(&marks, 1000, mark);
  std::thread first([job] { job->help(); }), second([job] { job->help(); });
  job->finish();
  CHECK(marks.all_once());
  first.join();
  second.join();
}

TEST(a_forked_child_works_alone) {
  Pool pool(4);
  CHECK(covers(pool, 100) && !forked());
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    alarm(20);  // a hang is a failure
    static std::thread::id parent;
    parent = std::this_thread::get_id();
    const bool right = forked() && covers(pool, 100);
    pool.run(nullptr, 100, [](void*, int64_t) {
      if (std::this_thread::get_id() != parent) _exit(2);
    });
    _exit(right ? 0 : 1);
  }
  int status = -1;
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  CHECK(covers(pool, 100) && !forked());
}
