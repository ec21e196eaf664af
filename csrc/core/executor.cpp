#include "executor.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <cfenv>
#include <deque>
#include <memory>
#include <new>
#include <system_error>
#include <thread>

namespace attnspan {
namespace {

// XLA's threads flush subnormals to zero and the caller's may round otherwise: for its time each
// thread works in the default environment, so that bits depend on no thread.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&before_); }

 private:
  std::fenv_t before_;
};

std::atomic<bool> in_child{false};
const int registered = pthread_atfork(nullptr, nullptr, [] { in_child.store(true); });

// Helpers that wait for jobs. Never destroyed: its detached threads may outlive main().
class Helpers {
 public:
  static Helpers& shared() {
    static Helpers* const helpers = new Helpers;
    return *helpers;
  }

  void offer(const std::shared_ptr<Job>& job, int64_t count) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (threads_ < count && start()) ++threads_;
      count = std::min(count, threads_);
      for (int64_t i = 0; i < count; ++i) jobs_.push_back(job);
    }
    for (int64_t i = 0; i < count; ++i) offered_.notify_one();
  }

 private:
  bool start() {
    try {
      std::thread([this] { serve(); }).detach();
      return true;
    } catch (const std::system_error&) {  // the system has no more threads: fewer will do
      return false;
    }
  }

  [[noreturn]] void serve() {
    for (;;) {
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        offered_.wait(lock, [this] { return !jobs_.empty(); });
        job = std::move(jobs_.front());
        jobs_.pop_front();
      }
      job->help();
    }
  }

  std::mutex mutex_;
  std::condition_variable offered_;
  std::deque<std::shared_ptr<Job>> jobs_;
  int64_t threads_ = 0;
};

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

GompParallel gomp_parallel() {
  static std::atomic<GompParallel> found{nullptr};  // once loaded it stays
  GompParallel parallel = found.load(std::memory_order_acquire);
  if (parallel == nullptr) {
    if (void* library = dlopen("libgomp.so.1", RTLD_NOLOAD | RTLD_LAZY)) {
      parallel = reinterpret_cast<GompParallel>(dlsym(library, "GOMP_parallel"));
      found.store(parallel, std::memory_order_release);
    }
  }
  return parallel;
}

}  // namespace

bool forked() { return in_child.load(); }

void Job::work() {
  const DefaultFloats floats;
  for (int64_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items_;) {
    fn_(context_, item);
  }
}

void Job::help() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return;
    ++active_;
  }
  work();
  const std::lock_guard<std::mutex> lock(mutex_);
  if (--active_ == 0) all_left_.notify_one();
}

void Job::finish() {
  work();
  std::unique_lock<std::mutex> lock(mutex_);
  closed_ = true;
  all_left_.wait(lock, [this] { return active_ == 0; });
}

void Serial::run(void* context, int64_t items, Item fn) { Job(context, items, fn).finish(); }

void Pool::run(void* context, int64_t items, Item fn) {
  const int64_t helpers = std::min({threads_, items, kMostThreads}) - 1;
  if (helpers <= 0 || forked()) return Serial().run(context, items, fn);
  const auto job = std::make_shared<Job>(context, items, fn);
  try {
    Helpers::shared().offer(job, helpers);
  } catch (const std::bad_alloc&) {  // those already offered may have started: finish() waits for them
  }
  job->finish();
}

bool OpenMp::loaded() { return gomp_parallel() != nullptr; }

void OpenMp::run(void* context, int64_t items, Item fn) {
  const int64_t threads = std::min({threads_, items, kMostThreads});
  const GompParallel parallel = gomp_parallel();
  if (threads <= 1 || forked() || parallel == nullptr) return Serial().run(context, items, fn);
  Job job(context, items, fn);  // OpenMP waits for its threads itself
  parallel([](void* shared) { static_cast<Job*>(shared)->help(); }, &job, static_cast<unsigned>(threads), 0);
}

}  // namespace attnspan
