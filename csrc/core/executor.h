// Who does the work: n independent items, on several threads, with the same result on any number.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace attnspan {

// Does one item. Must not throw.
using Item = void (*)(void* context, int64_t item);

class Executor {
 public:
  virtual ~Executor() = default;
  // Returns when all items are done. May be called from several threads at once.
  virtual void run(void* context, int64_t items, Item fn) = 0;
};

// Items that threads claim from one counter. The caller never waits for a helper that has not
// started: a pool whose threads all wait inside callers would not start it, ever. So helpers share
// ownership of the job, may come at any time, and find it closed if they come late.
class Job {
 public:
  Job(void* context, int64_t items, Item fn) : context_(context), items_(items), fn_(fn) {}

  void help();    // called by helpers
  void finish();  // called once, by the caller: does what nobody claimed, waits for who started

 private:
  void work();

  void* const context_;
  const int64_t items_;
  const Item fn_;
  std::atomic<int64_t> next_{0};
  std::mutex mutex_;
  std::condition_variable all_left_;
  int active_ = 0;
  bool closed_ = false;
};

// The caller alone.
class Serial final : public Executor {
 public:
  void run(void* context, int64_t items, Item fn) override;
};

// More are never used, whatever is asked for.
constexpr int64_t kMostThreads = 256;

// A pool of our own, shared by the process: the caller and up to threads - 1 helpers.
class Pool final : public Executor {
 public:
  explicit Pool(int64_t threads) : threads_(threads) {}
  void run(void* context, int64_t items, Item fn) override;

 private:
  const int64_t threads_;
};

// The OpenMP runtime that PyTorch has loaded (GNU's, found at run time and never linked). A pool of
// our own beside it would share its cores with OpenMP's threads, which spin after every operation.
class OpenMp final : public Executor {
 public:
  explicit OpenMp(int64_t threads) : threads_(threads) {}
  static bool loaded();
  void run(void* context, int64_t items, Item fn) override;

 private:
  const int64_t threads_;
};

// True in a process that was forked after this library was loaded: it has none of the threads that
// the pools count on, so all of the above work on the caller alone.
bool forked();

}  // namespace attnspan
