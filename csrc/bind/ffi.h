// The XLA handlers, as the addresses that a PyCapsule carries to jax.ffi.register_ffi_target.
#pragma once

namespace attnspan {

void* softmax_handler();
void* dot_forward_handler();
void* dot_backward_handler();

}  // namespace attnspan
