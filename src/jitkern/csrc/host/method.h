// Methods of C++ objects as functions for Python.
#pragma once

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

}  // namespace jitkern
