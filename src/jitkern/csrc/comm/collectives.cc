// The calls of an NCCL communicator for Python.
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <memory>

#include "comm/communicator.h"
#include "host/objects.h"

namespace jitkern {

namespace {

using tvm::ffi::Function;
using tvm::ffi::Map;
using tvm::ffi::String;

// A tensor on the communicator's GPU.
Operand operand(const NcclCommunicator& comm, const char* op, const char* arg, AnyView value) {
  return Operand(op, arg, value, comm.ordinal, "the communicator");
}

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

// NCCL's number for a dtype that it can reduce, or TypeError.
int reduced_as(const Operand& x) {
  const DLDataType dtype = x.dl->dtype;
  for (const Reducible& known : kReducible) {
    if (dtype.code == known.code && dtype.bits == known.bits && dtype.lanes == 1) {
      return known.nccl;
    }
  }
  x.type_error("dtype " + x.dtype_name(),
               "int8, uint8, int32, int64, float16, float32, float64, bfloat16, float8_e4m3fn or "
               "float8_e5m2");
}

const char* const kOwnPart = "memory of its own, or this rank's part of it";

int64_t reduce_all(NcclCommunicator& comm, const char* name, AnyView x_arg, int op) {
  const Operand x = operand(comm, name, "x", x_arg);
  const int dtype = reduced_as(x);
  if (x.count == 0) return kCallDone;
  return comm.call(name, -1, [=](const Nccl& nccl, auto... rest) {
    return nccl.ncclAllReduce(x.data, x.data, static_cast<size_t>(x.count), dtype, op, rest...);
  });
}

int64_t all_reduce(NcclCommunicator& comm, AnyView x, int op) {
  return reduce_all(comm, "all_reduce", x, op);
}
int64_t barrier(NcclCommunicator& comm, AnyView word) {
  return reduce_all(comm, "barrier", word, 0);
}

int64_t reduce_scatter(NcclCommunicator& comm, AnyView output_arg, AnyView x_arg, int op) {
  const Operand output = operand(comm, "reduce_scatter", "output", output_arg);
  const Operand x = operand(comm, "reduce_scatter", "x", x_arg);
  x.same_dtype(output);
  const int dtype = reduced_as(x);
  x.has_each_of(output, comm.size);
  output.apart_from(x, x.data + comm.rank * output.bytes, kOwnPart);
  if (x.count == 0) return kCallDone;
  return comm.call("reduce_scatter", -1, [=](const Nccl& nccl, auto... rest) {
    return nccl.ncclReduceScatter(x.data, output.data, static_cast<size_t>(output.count), dtype, op,
                                  rest...);
  });
}

// Calls that only copy send bytes: so they take any dtype with any version of NCCL.

int64_t all_gather(NcclCommunicator& comm, AnyView output_arg, AnyView x_arg) {
  const Operand output = operand(comm, "all_gather", "output", output_arg);
  const Operand x = operand(comm, "all_gather", "x", x_arg);
  x.same_dtype(output);
  output.has_each_of(x, comm.size);
  output.apart_from(x, x.data - comm.rank * x.bytes, kOwnPart);
  if (x.count == 0) return kCallDone;
  return comm.call("all_gather", -1, [=](const Nccl& nccl, auto... rest) {
    return nccl.ncclAllGather(x.data, output.data, static_cast<size_t>(x.bytes), kNcclUint8,
                              rest...);
  });
}

// A call with one tensor and one other rank.
template <class Run>
int64_t call_with_peer(NcclCommunicator& comm, const char* op, AnyView x_arg, const char* peer_arg,
                       AnyView peer_value, bool is_of_two, const Run& run) {
  const Operand x = operand(comm, op, "x", x_arg);
  const i64 peer = int_arg(op, peer_arg, peer_value);
  if (!is_below(peer, comm.size)) {
    raise_value_error(op, peer_arg, str(peer), str("a rank from 0 to ", comm.size - 1));
  }
  if (x.count == 0) return kCallDone;
  const int rank = static_cast<int>(peer);
  return comm.call(op, is_of_two ? rank : -1, [&](const Nccl& nccl, auto... rest) {
    return run(nccl, x.data, static_cast<size_t>(x.bytes), rank, rest...);
  });
}

int64_t broadcast(NcclCommunicator& comm, AnyView x, AnyView src) {
  return call_with_peer(comm, "broadcast", x, "src", src, false,
                        [](const Nccl& nccl, char* data, size_t bytes, auto... rest) {
                          return nccl.ncclBroadcast(data, data, bytes, kNcclUint8, rest...);
                        });
}

int64_t send(NcclCommunicator& comm, AnyView x, AnyView dst) {
  return call_with_peer(comm, "send", x, "dst", dst, true,
                        [](const Nccl& nccl, char* data, size_t bytes, auto... rest) {
                          return nccl.ncclSend(data, bytes, kNcclUint8, rest...);
                        });
}

int64_t recv(NcclCommunicator& comm, AnyView x, AnyView src) {
  return call_with_peer(comm, "recv", x, "src", src, true,
                        [](const Nccl& nccl, char* data, size_t bytes, auto... rest) {
                          return nccl.ncclRecv(data, bytes, kNcclUint8, rest...);
                        });
}

// Puts the work on torch's current stream under the deadline.
int64_t watch(NcclCommunicator& comm, AnyView word) {
  operand(comm, "watch", "word", word);
  return comm.call("watch", -1, [](const Nccl&, NcclComm, CUstream) { return kNcclSuccess; });
}

// A function for Python that keeps the communicator alive.
template <class... Args>
Function bound(const std::shared_ptr<NcclCommunicator>& comm,
               int64_t (*function)(NcclCommunicator&, Args...)) {
  return Function::FromTyped(
      [comm, function](Args... args) -> int64_t { return function(*comm, args...); });
}

Map<String, Function> make_nccl_communicator(int ordinal, int rank, int size, double timeout_s) {
  const auto comm = std::make_shared<NcclCommunicator>(ordinal, rank, size, timeout_s);
  return {{"all_reduce", bound(comm, all_reduce)},
          {"all_gather", bound(comm, all_gather)},
          {"reduce_scatter", bound(comm, reduce_scatter)},
          {"broadcast", bound(comm, broadcast)},
          {"send", bound(comm, send)},
          {"recv", bound(comm, recv)},
          {"barrier", bound(comm, barrier)},
          {"watch", bound(comm, watch)},
          {"open", method(comm, &NcclCommunicator::open)},
          {"wait_done", method(comm, &NcclCommunicator::wait_done)},
          {"finish", method(comm, &NcclCommunicator::finish)},
          {"free", method(comm, &NcclCommunicator::free)},
          {"abort", method(comm, &NcclCommunicator::abort)},
          {"register_memory", method(comm, &NcclCommunicator::register_memory)},
          {"progress", method(comm, &NcclCommunicator::progress)}};
}

// GPU memory from NCCL, for a tensor.
struct NcclMemory {
  void AllocData(DLTensor* tensor) {
    const ContextScope scope(Device::get(tensor->device.device_id));
    const Nccl& nccl = Nccl::get();
    nccl.check(nccl.ncclMemAlloc(&tensor->data, static_cast<size_t>(*tensor->shape)),
               "ncclMemAlloc");
  }
  void FreeData(DLTensor* tensor) {
    try {
      const ContextScope scope(Device::get(tensor->device.device_id));
      Nccl::get().ncclMemFree(tensor->data);
    } catch (const tvm::ffi::Error&) {  // at the end of the process the driver may be gone
    }
  }
};

// GPU memory that NCCL can register.
tvm::ffi::Tensor nccl_allocate(int ordinal, int64_t bytes) {
  return tvm::ffi::Tensor::FromNDAlloc(NcclMemory{}, {bytes}, DLDataType{kDLUInt, 8, 1},
                                       DLDevice{kDLCUDA, ordinal});
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(make_nccl_communicator, make_nccl_communicator);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(nccl_allocate, nccl_allocate);

}  // namespace jitkern
