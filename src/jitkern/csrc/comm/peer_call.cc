#include "comm/peer_call.h"

#include <algorithm>

namespace jitkern {

namespace {

struct Operand : Tensor {
  char* data;
  i64 count;  // of items
  i64 bytes;

  Operand(const PeerPlan& plan, const char* op, const char* arg, AnyView value)
      : Tensor(op, arg, value), data(Tensor::data()), count(numel()), bytes(count * item_bytes()) {
    if (ordinal() != plan.ordinal) {
      const std::string own = plan.ordinal < 0 ? "cpu" : "cuda:" + std::to_string(plan.ordinal);
      value_error("on " + device_name(), "on " + own + ", as the workspace");
    }
    contiguous();
    if (bytes > kMostBytes) {
      value_error(std::to_string(bytes) + " bytes", "at most " + std::to_string(kMostBytes));
    }
  }

  // ValueError unless it is `part` itself, or shares no memory with `other`.
  void apart_from(const Operand& other, const char* part, const char* expected) const {
    if (data != part && data < other.data + other.bytes && other.data < data + bytes) {
      value_error(std::string("memory of ") + other.arg, expected);
    }
  }

 private:
  static constexpr i64 kMostBytes = i64(1) << 34;  // vectors have numbers of 32 bits
};

int type_of(const Tensor& x) {
  const DLDataType type = x.dl->dtype;
  if (type.lanes == 1 && type.code == kDLFloat && type.bits == 32) return kFloat32;
  if (type.lanes == 1 && type.code == kDLFloat && type.bits == 16) return kFloat16;
  if (type.lanes == 1 && type.code == kDLBfloat && type.bits == 16) return kBFloat16;
  x.type_error("dtype " + x.dtype_name(), "float32, float16 or bfloat16");
}

u32 num_vecs_of(i64 bytes) { return static_cast<u32>((bytes + kPeerVecBytes - 1) / kPeerVecBytes); }

// What both kinds of calls have in common, once the parts are known.
PeerCall cut(const PeerPlan& plan, const Operand& x, const Operand& out, PeerCall call) {
  PeerReduceParams& p = call.params;
  call.type = type_of(x);
  p.x = x.data;
  p.out = out.data;
  p.slots = plan.slots;
  if (call.is_empty()) return call;
  u64 bits = address(x.data) | address(out.data);
  if (call.way == kScatter) bits |= static_cast<u64>(p.part_bytes);
  call.access_bytes = widest_vec(bits);
  if (call.access_bytes < x.item_bytes()) {
    const bool is_x = address(x.data) % static_cast<u64>(x.item_bytes()) != 0;
    (is_x ? x : out).value_error("memory that is not aligned to its elements", "aligned memory");
  }
  const i64 bytes = p.num_vecs * kPeerVecBytes;
  const auto fits = [&](const PeerShape& shape) { return bytes <= shape.most_bytes; };
  const PeerShape& shape = *std::find_if(plan.shapes.begin(), plan.shapes.end() - 1, fits);
  call.num_blocks = std::min(shape.blocks, p.num_vecs);
  call.num_threads = shape.threads;
  p.blocks = PeerShares::of(p.num_vecs, call.num_blocks);
  return call;
}

}  // namespace

PeerCall all_reduce_call(const PeerPlan& plan, AnyView x_arg, AnyView out_arg, i64 way) {
  const char* const op = "all_reduce";
  const Operand x(plan, op, "x", x_arg);
  const Operand out = is_none(out_arg) ? x : Operand(plan, op, "out", out_arg);
  out.same_dtype(x);
  if (out.count != x.count) {
    out.value_error(std::to_string(out.count) + " items", std::to_string(x.count) + ", as in x");
  }
  out.apart_from(x, x.data, "x itself, or memory of its own");
  PeerCall call{};
  PeerReduceParams& p = call.params;
  const u32 num_vecs = num_vecs_of(x.bytes);
  p.tail_bytes = static_cast<u32>(x.bytes % kPeerVecBytes);
  call.way = way >= 0                         ? static_cast<PeerWay>(way)
             : x.bytes <= plan.one_shot_bytes ? kOneShot
                                              : kTwoShot;
  // Each rank has a part, so that each misses in the first stage whoever does not come.
  if (num_vecs < plan.slots.num_ranks) call.way = kOneShot;
  if (call.way == kOneShot) {
    p.part_bytes = x.bytes;
    p.num_vecs = num_vecs;
  } else {
    const PeerShares parts = PeerShares::of(num_vecs, plan.slots.num_ranks);
    p.part_bytes = parts.each * kPeerVecBytes;
    p.longer_parts = parts.longer;
    p.num_vecs = parts.share(0).count;
  }
  return cut(plan, x, out, call);
}

PeerCall reduce_scatter_call(const PeerPlan& plan, AnyView output_arg, AnyView x_arg) {
  const char* const op = "reduce_scatter";
  const Operand output(plan, op, "output", output_arg);
  const Operand x(plan, op, "x", x_arg);
  x.same_dtype(output);
  const i64 size = plan.slots.num_ranks;
  if (x.count != output.count * size) {
    x.value_error(std::to_string(x.count) + " items",
                  std::to_string(output.count * size) + ", " + std::to_string(output.count) +
                      " for each of " + std::to_string(size) + " ranks");
  }
  const i64 own = plan.rank * output.bytes;
  output.apart_from(x, x.data + own, "memory of its own, or this rank's part of it");
  PeerCall call{};
  call.way = kScatter;
  call.params.part_bytes = output.bytes;
  call.params.num_vecs = num_vecs_of(output.bytes);
  call.params.tail_bytes = static_cast<u32>(output.bytes % kPeerVecBytes);
  return cut(plan, x, output, call);
}

PeerCall meet_call(const PeerPlan& plan) {
  PeerCall call{kMeet, kFloat32, 16, 1, 32};
  call.params.num_vecs = 1;
  call.params.blocks = PeerShares::of(1, 1);
  call.params.slots = plan.slots;
  return call;
}

}  // namespace jitkern
