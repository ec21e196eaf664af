// The XLA handler, as the address that a PyCapsule carries to jax.ffi.register_ffi_target.
#pragma once

namespace attnspan {

void* softmax_handler();

}  // namespace attnspan
