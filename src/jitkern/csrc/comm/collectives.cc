// The calls of a communicator: checks, and what NCCL is asked for.
#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "comm/communicator.h"

namespace jitkern {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Function;
using tvm::ffi::Map;
using tvm::ffi::String;

// A contiguous tensor on the communicator's GPU.
struct Operand : Tensor {
  char* data;
  i64 count;  // of items
  i64 bytes;

  Operand(const NcclCommunicator& comm, const char* op, const char* arg, AnyView value)
      : Tensor(op, arg, value), data(Tensor::data()), count(numel()), bytes(count * item_bytes()) {
    if (ordinal() != comm.ordinal) {
      value_error("on " + device_name(),
                  "on cuda:" + std::to_string(comm.ordinal) + ", as the communicator");
    }
    contiguous();
  }

  // ValueError unless it has `expected` items.
  void has(i64 expected, const std::string& why) const {
    if (count != expected) {
      value_error(std::to_string(count) + " items", std::to_string(expected) + ", " + why);
    }
  }

  // ValueError where both share memory, but for `x` as the part of `output` at `offset`.
  void apart_from(const Operand& other, i64 offset = -1) const {
    if (offset >= 0 && data + offset == other.data) return;
    if (data < other.data + other.bytes && other.data < data + bytes) {
      value_error(std::string("memory of ") + other.arg,
                  offset < 0 ? std::string(kOwnMemory)
                             : std::string(kOwnMemory) + ", or this rank's part of it");
    }
  }
};

// DLPack's code and bits, and NCCL's number for the dtype.
struct Reducible {
  int code;
  int bits;
  int nccl;
};
constexpr int kNcclUint8 = 1;
constexpr Reducible kReducible[] = {
    {kDLInt, 8, 0},          {kDLUInt, 8, kNcclUint8}, {kDLInt, 32, 2},
    {kDLInt, 64, 4},         {kDLFloat, 16, 6},        {kDLFloat, 32, 7},
    {kDLFloat, 64, 8},       {kDLBfloat, 16, 9},       {kDLFloat8_e4m3fn, 8, 10},
    {kDLFloat8_e5m2, 8, 11},
};

// NCCL's number for the dtype of what is reduced. TypeError if it has none.
int reduced_as(const Operand& x) {
  for (const Reducible& one : kReducible) {
    if (x.dl->dtype.code == one.code && x.dl->dtype.bits == one.bits && x.dl->dtype.lanes == 1) {
      return one.nccl;
    }
  }
  x.type_error("dtype " + x.dtype_name(),
               "int8, uint8, int32, int64, float16, float32, float64, bfloat16, float8_e4m3fn or "
               "float8_e5m2");
}

int peer_of(const NcclCommunicator& comm, const char* op, const char* arg, AnyView value) {
  const i64 peer = int_arg(op, arg, value);
  if (!is_below(peer, comm.size)) {
    raise_value_error(op, arg, std::to_string(peer),
                      "a rank from 0 to " + std::to_string(comm.size - 1));
  }
  return static_cast<int>(peer);
}

std::string of_each(i64 items, int size) {
  return std::to_string(items) + " for each of " + std::to_string(size) + " ranks";
}

int64_t reduce_all(NcclCommunicator& comm, const char* name, AnyView x_arg, int64_t op) {
  const Operand x(comm, name, "x", x_arg);
  const int dtype = reduced_as(x);
  if (x.count == 0) return kCallDone;
  return comm.call(name, -1, [=](const Nccl& nccl, NcclComm handle, CUstream stream) {
    return nccl.ncclAllReduce(x.data, x.data, static_cast<size_t>(x.count), dtype,
                              static_cast<int>(op), handle, stream);
  });
}

int64_t all_reduce(NcclCommunicator& comm, AnyView x, int64_t op) {
  return reduce_all(comm, "all_reduce", x, op);
}

// What the host waits for then.
int64_t barrier(NcclCommunicator& comm, AnyView word) {
  return reduce_all(comm, "barrier", word, 0);
}

// What is only copied goes as bytes: of any dtype, by any version.

int64_t all_gather(NcclCommunicator& comm, AnyView output_arg, AnyView x_arg) {
  const Operand output(comm, "all_gather", "output", output_arg);
  const Operand x(comm, "all_gather", "x", x_arg);
  x.same_dtype(output);
  output.has(x.count * comm.size, of_each(x.count, comm.size));
  output.apart_from(x, comm.rank * x.bytes);
  if (x.count == 0) return kCallDone;
  return comm.call("all_gather", -1, [=](const Nccl& nccl, NcclComm handle, CUstream stream) {
    return nccl.ncclAllGather(x.data, output.data, static_cast<size_t>(x.bytes), kNcclUint8, handle,
                              stream);
  });
}

int64_t reduce_scatter(NcclCommunicator& comm, AnyView output_arg, AnyView x_arg, int64_t op) {
  const Operand output(comm, "reduce_scatter", "output", output_arg);
  const Operand x(comm, "reduce_scatter", "x", x_arg);
  x.same_dtype(output);
  const int dtype = reduced_as(x);
  x.has(output.count * comm.size, of_each(output.count, comm.size));
  x.apart_from(output, comm.rank * output.bytes);
  if (x.count == 0) return kCallDone;
  return comm.call("reduce_scatter", -1, [=](const Nccl& nccl, NcclComm handle, CUstream stream) {
    return nccl.ncclReduceScatter(x.data, output.data, static_cast<size_t>(output.count), dtype,
                                  static_cast<int>(op), handle, stream);
  });
}

int64_t broadcast(NcclCommunicator& comm, AnyView x_arg, AnyView src_arg) {
  const Operand x(comm, "broadcast", "x", x_arg);
  const int src = peer_of(comm, "broadcast", "src", src_arg);
  if (x.count == 0) return kCallDone;
  return comm.call("broadcast", -1, [=](const Nccl& nccl, NcclComm handle, CUstream stream) {
    return nccl.ncclBroadcast(x.data, x.data, static_cast<size_t>(x.bytes), kNcclUint8, src, handle,
                              stream);
  });
}

int64_t send(NcclCommunicator& comm, AnyView x_arg, AnyView dst_arg) {
  const Operand x(comm, "send", "x", x_arg);
  const int dst = peer_of(comm, "send", "dst", dst_arg);
  if (x.count == 0) return kCallDone;
  return comm.call("send", dst, [=](const Nccl& nccl, NcclComm handle, CUstream stream) {
    return nccl.ncclSend(x.data, static_cast<size_t>(x.bytes), kNcclUint8, dst, handle, stream);
  });
}

int64_t recv(NcclCommunicator& comm, AnyView x_arg, AnyView src_arg) {
  const Operand x(comm, "recv", "x", x_arg);
  const int src = peer_of(comm, "recv", "src", src_arg);
  if (x.count == 0) return kCallDone;
  return comm.call("recv", src, [=](const Nccl& nccl, NcclComm handle, CUstream stream) {
    return nccl.ncclRecv(x.data, static_cast<size_t>(x.bytes), kNcclUint8, src, handle, stream);
  });
}

// Bytes of each rank's part.
using Parts = std::vector<i64>;

// By rows of the first dimension, or equal where no splits are given.
Parts parts_of(const NcclCommunicator& comm, const Operand& tensor, const char* splits_arg,
               AnyView splits_given) {
  const i64 size = comm.size;
  const i64 rows = tensor.dl->ndim == 0 ? 1 : tensor.dl->shape[0];
  if (is_none(splits_given)) {
    if (rows % size != 0) {
      tensor.value_error("shape " + tensor.shape_text(), "a first dimension that divides by " +
                                                             std::to_string(size) +
                                                             " ranks; else give " + splits_arg);
    }
    return Parts(static_cast<size_t>(size), tensor.bytes / size);
  }
  const auto splits = splits_given.cast<Array<int64_t>>();  // none is negative: see rows_arg
  Parts parts;
  i64 total = 0;
  for (const int64_t split : splits) {
    parts.push_back(rows == 0 ? 0 : split * (tensor.bytes / rows));
    total += split;
  }
  if (static_cast<i64>(parts.size()) != size || total != rows) {
    raise_value_error(
        "all_to_all", splits_arg,
        std::to_string(parts.size()) + " numbers, " + std::to_string(total) + " rows in all",
        std::to_string(size) + ", one for each rank, and " + std::to_string(rows) + " rows as in " +
            tensor.arg);
  }
  return parts;
}

int64_t all_to_all(NcclCommunicator& comm, AnyView output_arg, AnyView x_arg, AnyView output_splits,
                   AnyView input_splits) {
  const Operand output(comm, "all_to_all", "output", output_arg);
  const Operand x(comm, "all_to_all", "x", x_arg);
  x.same_dtype(output);
  const Parts received = parts_of(comm, output, "output_splits", output_splits);
  const Parts sent = parts_of(comm, x, "input_splits", input_splits);
  const size_t own = static_cast<size_t>(comm.rank);
  if (received[own] != sent[own]) {
    output.value_error(std::to_string(received[own]) + " bytes from this rank itself",
                       std::to_string(sent[own]) + ", as x has for it");
  }
  output.apart_from(x);
  return comm.call("all_to_all", -1, [=](const Nccl& nccl, NcclComm handle, CUstream stream) {
    NcclResult first = nccl.ncclGroupStart();
    if (first != kNcclSuccess) return first;
    const auto note = [&first](NcclResult result) {
      if (first == kNcclSuccess) first = result;
    };
    const char* from = x.data;
    char* to = output.data;
    for (size_t peer = 0; peer < sent.size(); ++peer) {
      const int number = static_cast<int>(peer);
      if (sent[peer] > 0) {
        note(nccl.ncclSend(from, static_cast<size_t>(sent[peer]), kNcclUint8, number, handle,
                           stream));
      }
      if (received[peer] > 0) {
        note(nccl.ncclRecv(to, static_cast<size_t>(received[peer]), kNcclUint8, number, handle,
                           stream));
      }
      from += sent[peer];
      to += received[peer];
    }
    note(nccl.ncclGroupEnd());
    return first;
  });
}

// Puts what is on torch's current stream of the tensor's GPU under the deadline.
int64_t watch(NcclCommunicator& comm, AnyView word) {
  const Operand checked(comm, "watch", "word", word);
  return comm.call("watch", -1, [](const Nccl&, NcclComm, CUstream) { return kNcclSuccess; });
}

Map<String, Any> progress(NcclCommunicator& comm) {
  const auto found = comm.progress();
  Array<String> ops;
  for (const char* const op : found.ops) ops.push_back(op);
  return {{"num_calls", static_cast<int64_t>(found.num_calls)},
          {"last_op", String(found.last_op)},
          {"is_open", found.is_open},
          {"waiting_s", found.waiting_s},
          {"op", String(found.op)},
          {"number", static_cast<int64_t>(found.number)},
          {"ops", ops},
          {"peer", int64_t{found.peer}},
          {"trouble", String(found.trouble)},
          {"num_captured", static_cast<int64_t>(found.num_captured)}};
}

// A function of the communicator for Python, which keeps it alive.
template <class... Args>
Function bound(const std::shared_ptr<NcclCommunicator>& comm,
               int64_t (*function)(NcclCommunicator&, Args...)) {
  return Function::FromTyped(
      [comm, function](Args... args) -> int64_t { return function(*comm, args...); });
}
Function bound(const std::shared_ptr<NcclCommunicator>& comm,
               CallStatus (NcclCommunicator::*method)()) {
  return Function::FromTyped([comm, method]() -> int64_t { return ((*comm).*method)(); });
}

Map<String, Function> make_nccl_communicator(int64_t ordinal, int64_t rank, int64_t size,
                                             double timeout_s) {
  const auto comm = std::make_shared<NcclCommunicator>(
      static_cast<int>(ordinal), static_cast<int>(rank), static_cast<int>(size), timeout_s);
  const auto open = [comm](Bytes bytes) -> int64_t {
    NcclUniqueId id{};
    if (bytes.size() != sizeof(id.bytes)) {
      throw tvm::ffi::Error("ValueError", "nccl: a unique id of another length", "");
    }
    std::copy_n(bytes.data(), sizeof(id.bytes), id.bytes);
    return comm->open(id);
  };
  const auto register_memory = [comm](int64_t address, int64_t bytes) -> int64_t {
    return comm->register_memory(reinterpret_cast<void*>(address), static_cast<size_t>(bytes));
  };
  return {{"all_reduce", bound(comm, all_reduce)},
          {"all_gather", bound(comm, all_gather)},
          {"reduce_scatter", bound(comm, reduce_scatter)},
          {"broadcast", bound(comm, broadcast)},
          {"send", bound(comm, send)},
          {"recv", bound(comm, recv)},
          {"all_to_all", bound(comm, all_to_all)},
          {"barrier", bound(comm, barrier)},
          {"watch", bound(comm, watch)},
          {"open", Function::FromTyped(open)},
          {"wait_done", bound(comm, &NcclCommunicator::wait_done)},
          {"finish", bound(comm, &NcclCommunicator::finish)},
          {"free", Function::FromTyped([comm] { comm->free(); })},
          {"abort", Function::FromTyped([comm] { comm->abort(); })},
          {"mark", Function::FromTyped([comm] { comm->mark(); })},
          {"register_memory", Function::FromTyped(register_memory)},
          {"progress", Function::FromTyped([comm] { return progress(*comm); })}};
}

// Memory on a GPU that NCCL can register.
int64_t nccl_allocate(int64_t ordinal, int64_t bytes) {
  const ContextScope scope(Device::get(static_cast<int>(ordinal)));
  void* memory = nullptr;
  const Nccl& nccl = Nccl::get();
  nccl.check(nccl.ncclMemAlloc(&memory, static_cast<size_t>(bytes)), "ncclMemAlloc");
  return reinterpret_cast<int64_t>(memory);
}

void nccl_free(int64_t ordinal, int64_t address) {
  const ContextScope scope(Device::get(static_cast<int>(ordinal)));
  Nccl::get().check(Nccl::get().ncclMemFree(reinterpret_cast<void*>(address)), "ncclMemFree");
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_nccl_communicator, make_nccl_communicator);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_allocate, nccl_allocate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_free, nccl_free);

}  // namespace jitkern
