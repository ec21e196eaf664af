#include "validate.h"

#include <limits>

#include "checks.h"

namespace attnspan {

std::string check_softmax(Dtype dtype, const SoftmaxArrays& arrays, Softmax* task) {
  const int64_t(&shape)[4] = arrays.scores.shape;
  const Sizes sizes{shape[0], shape[1], shape[2], shape[3]};
  const int64_t item = size_of(dtype);
  *task = {};
  task->dtype = dtype;
  task->sizes = sizes;

  std::string error = check_array("scores", arrays.scores, item, shape, false, task->scores_stride);
  if (!error.empty()) return error;
  if (sizes.S > std::numeric_limits<int32_t>::max()) {
    return wrong("scores", std::to_string(sizes.S) + " keys", "fewer than 2^31: spans are int32");
  }

  error = check_array("weights", arrays.weights, item, shape, false, task->weights_stride);
  if (error.empty()) error = check_writable("weights", arrays.weights);
  if (!error.empty()) return error;

  const int64_t rows[4] = {sizes.B, sizes.H, sizes.L, 1};
  error = check_array("lse", arrays.lse, size_of(accumulation(dtype)), rows, false, task->lse_stride);
  if (error.empty()) error = check_writable("lse", arrays.lse);
  if (!error.empty()) return error;

  error = check_spans(arrays.start, arrays.stop, sizes, &task->spans);
  if (error.empty() && arrays.bits != nullptr) error = check_bits(*arrays.bits, sizes, &task->bits);
  if (!error.empty()) return error;

  task->scores = arrays.scores.data;
  task->weights = arrays.weights.data;
  task->lse = arrays.lse.data;
  return "";
}

}  // namespace attnspan
