// How XLA's buffers, dtypes and threads come in.
#pragma once

#include <algorithm>
#include <memory>
#include <new>

#include "../core/executor.h"
#include "../core/types.h"
#include "xla/ffi/api/ffi.h"

namespace attnspan {

namespace xf = xla::ffi;

// XLA's own threads. A handler runs on one of them, and all may be in handlers at once: Job never
// waits for a helper that has not started.
class XlaPool final : public Executor {
 public:
  explicit XlaPool(xf::ThreadPool& pool) : pool_(pool) {}

  void run(void* context, int64_t items, Item fn) override {
    const int64_t helpers = std::min(pool_.num_threads(), items) - 1;
    if (helpers <= 0 || forked()) return Serial().run(context, items, fn);
    const auto job = std::make_shared<Job>(context, items, fn);
    for (int64_t i = 0; i < helpers; ++i) pool_.Schedule([job] { job->help(); });
    job->finish();
  }

 private:
  xf::ThreadPool& pool_;
};

inline bool dtype_of(xf::DataType type, Dtype* dtype) {
  switch (type) {
    case xf::F16: *dtype = Dtype::f16; return true;
    case xf::BF16: *dtype = Dtype::bf16; return true;
    case xf::F32: *dtype = Dtype::f32; return true;
    case xf::F64: *dtype = Dtype::f64; return true;
    default: return false;
  }
}

// What is thrown inside a handler must not leave it.
template <class Run>
xf::Error without_throwing(const Run& run) {
  try {
    return run();
  } catch (const std::bad_alloc&) {
    return xf::Error(xf::ErrorCode::kResourceExhausted, "no memory left for the kernel's own records");
  }
}

// One operand under vmap: axes in front of its own four, each of the call's size or 1.
class Operand {
 public:
  // `own` is 4, or 3 for what has one number a row, which gets a last axis of 1. With `heads_third` a
  // buffer (B, L, H, D) is taken as the array (B, H, L, D).
  template <class Buffer>
  explicit Operand(const Buffer& buffer, size_t own = 4, bool heads_third = false)
      : data_(static_cast<char*>(buffer.untyped_data())),
        shape_(buffer.dimensions()),
        lead_(shape_.size() - own),
        item_(static_cast<int64_t>(xf::ByteWidth(buffer.element_type()))) {
    array_.shape[3] = 1;
    std::copy(shape_.begin() + lead_, shape_.end(), array_.shape);
    int64_t step = 1;
    for (int i = 3; i >= 0; --i) {
      array_.stride[i] = step;
      step *= array_.shape[i];
    }
    if (heads_third) {
      std::swap(array_.shape[1], array_.shape[2]);
      std::swap(array_.stride[1], array_.stride[2]);
    }
  }

  // Whether the leading axes are those of the call, or (of an operand that is read) 1 where it has no such axis.
  bool fits(xf::Span<const int64_t> lead, bool read) const {
    return std::equal(shape_.begin(), shape_.begin() + lead_, lead.begin(), lead.end(),
                      [read](int64_t n, int64_t size) { return n == size || (read && n == 1); });
  }

  int64_t batch() const { return array_.shape[0]; }
  int64_t bytes() const {
    int64_t bytes = item_;
    for (const int64_t n : shape_) bytes *= n;
    return bytes;
  }
  void* data() const { return data_; }

  // The array at a row-major index into the leading axes of the call.
  Array at(int64_t index, xf::Span<const int64_t> lead) const {
    int64_t slice = 0, step = 1;
    for (size_t i = lead_; i-- > 0; index /= lead[i]) {
      slice += (shape_[i] == 1 ? 0 : index % lead[i]) * step;
      step *= shape_[i];
    }
    Array array = array_;
    int64_t bytes = item_;
    for (const int64_t n : array.shape) bytes *= n;
    array.data = data_ + slice * bytes;
    return array;
  }

  // Whether the leading axes can become part of the call's B: all are there beside an own B, or none.
  bool folds(xf::Span<const int64_t> lead, int64_t B) const {
    if (has(lead)) return batch() == B;
    return batch() == 1 && std::all_of(shape_.begin(), shape_.begin() + lead_, [](int64_t n) { return n == 1; });
  }

  // The array with `count` leading entries in B, whose own size is `B`. Where it has none of them one entry
  // stands for all, written out with a step of 0 if `spread`.
  Array folded(int64_t count, xf::Span<const int64_t> lead, int64_t B, bool spread) const {
    Array array = array_;
    array.data = data_;
    if (has(lead)) {
      array.shape[0] *= count;
    } else if (spread) {
      array.shape[0] = count * B;
      array.stride[0] = 0;
    }
    return array;
  }

 private:
  bool has(xf::Span<const int64_t> lead) const {
    return std::equal(shape_.begin(), shape_.begin() + lead_, lead.begin());
  }

  char* data_;
  xf::Span<const int64_t> shape_;
  size_t lead_;
  int64_t item_;
  Array array_;
};

}  // namespace attnspan
