// A tensor argument of a collective call.
#pragma once

#include <jitkern/check.h>

namespace jitkern {

// RuntimeError inside a tracer or a dispatch mode of PyTorch.
inline void refuse_tracers(const char* op) {
  if (!torch_has_to_see_it()) return;
  raise_error("RuntimeError", str(op,
                                  ": cannot run inside torch.jit.trace or a TorchDispatchMode: "
                                  "the call would not be traced"));
}

// A contiguous tensor on the device of `owner`, such as "the communicator".
struct Operand : Tensor {
  char* data;
  i64 count;  // items
  i64 bytes;

  // `owner_ordinal` is the GPU's; -1 means the CPU.
  Operand(const char* op, const char* arg, AnyView value, int owner_ordinal, const char* owner)
      : Tensor(op, arg, value), data(Tensor::data()), count(numel()), bytes(count * item_bytes()) {
    if (ordinal() != owner_ordinal) {
      const auto own = owner_ordinal < 0 ? "cpu" : str("cuda:", owner_ordinal);
      value_error("on " + device_name(), str("on ", own, ", as ", owner));
    }
    contiguous();
  }

  // ValueError unless it has `expected` items.
  void has(i64 expected, const std::string& why) const {
    if (count != expected) value_error(str(count, " items"), str(expected, ", ", why));
  }

  // ValueError unless it has `size` times the items of `part`.
  void has_each_of(const Operand& part, i64 size) const {
    has(part.count * size, str(part.count, " for each of ", size, " ranks"));
  }

  // ValueError if both share memory, unless this tensor begins at `allowed`.
  void apart_from(const Operand& other, const char* allowed, const char* expected) const {
    if (data != allowed && data < other.data + other.bytes && other.data < data + bytes) {
      value_error(str("memory of ", other.arg), expected);
    }
  }
};

}  // namespace jitkern
