// C++ objects for Python: their methods as functions, their memory as tensors.
#pragma once

#include <jitkern/types.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <memory>
#include <utility>

namespace jitkern {

// A function that calls a method of the object, which it keeps alive.
template <class T, class Base, class R, class... Args>
tvm::ffi::Function method(const std::shared_ptr<T>& object, R (Base::*call)(Args...)) {
  return tvm::ffi::Function::FromTyped(
      [object, call](Args... args) -> R { return (object.get()->*call)(std::move(args)...); });
}

// Keeps the owner of a tensor's memory.
struct KeptMemory {
  std::shared_ptr<void> owner;

  void AllocData(DLTensor* tensor, char* memory) { tensor->data = memory; }
  void FreeData(DLTensor*) { owner.reset(); }
};

// A tensor of bytes at `memory`, which the owner has.
inline tvm::ffi::Tensor tensor_of(std::shared_ptr<void> owner, char* memory, i64 bytes,
                                  DLDevice device) {
  return tvm::ffi::Tensor::FromNDAlloc(KeptMemory{std::move(owner)}, {bytes},
                                       DLDataType{kDLUInt, 8, 1}, device, memory);
}

}  // namespace jitkern
