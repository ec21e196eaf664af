#include "dot.h"

#include "dispatch.h"
#include "dot_tiles.h"

namespace attnspan {
namespace {

// Fewer multiplications than this are done before another thread has woken up.
constexpr double kWorthThreads = 5e5;

template <class Job>
void run(const Job& job, void (*one)(const Job&, int64_t), Executor& executor) {
  struct Context {
    const Job& job;
    void (*one)(const Job&, int64_t);
  };
  const Dot& dot = job.task->problem;
  const DotSizes& n = dot.n;
  const double work = static_cast<double>(n.B * n.H) * static_cast<double>(n.L) * static_cast<double>(n.S) *
                      static_cast<double>(n.D + n.E);
  Context context{job, one};
  Serial serial;
  (work < kWorthThreads ? serial : executor)
      .run(&context, n.B * n.H * query_tiles(dot), [](void* shared, int64_t item) {
        const Context& c = *static_cast<const Context*>(shared);
        c.one(c.job, item);
      });
}

}  // namespace

void dot_forward(const DotForward& task, Executor& executor) {
  Flags flags(task.problem);
  run(ForwardJob{&task, &flags}, kernels().dot_forward_item, executor);
}

void dot_backward(const DotBackward& task, Executor& executor) {
  Flags flags(task.problem);
  Turnstile turnstile(task.problem, task.dbias.data != nullptr);
  run(BackwardJob{&task, &flags, &turnstile}, kernels().dot_backward_item, executor);
}

}  // namespace attnspan
