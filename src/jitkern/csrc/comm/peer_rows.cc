// peer_gather and peer_scatter: checks, the CPU implementation, launches.
#include "comm/peer_rows.h"

#include <tvm/ffi/container/array.h>

#include <algorithm>
#include <vector>

#include "comm/operand.h"
#include "ops/pairs_host.h"

namespace jitkern {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Function;

constexpr i64 kMostPairs = i64(1) << 30;  // 32-bit numbers, in a table of twice the size

// A call of one rank.
struct RowsCall : PairArgs {
  u32 rank;
  u32 num_ranks;
  Function barrier_of_ranks;  // on their streams, or on the CPU
  const u32* intact;
  bool is_listed = true;    // this rank's pairs, sorted, without repeats; else pairs in turn
  std::vector<Rows> all{};  // peer_gather: the memory of each rank

  // On the stream that the FFI has set from this call's tensors.
  void barrier() const { barrier_of_ranks(nullptr); }

  // Whether several pairs may ask for one row of the host.
  bool repeats() const { return host_side == kHostSource; }
};

// Checks the memory of each rank, which must have the shape and strides of this rank's.
void take_targets(RowsCall& call, const Array<Any>& dsts) {
  static const auto& names = *new auto(item_names("dsts", kMostPeers));
  for (size_t r = 0; r < dsts.size(); ++r) {
    const Rows rows(call.src.op, names[r].c_str(), dsts[r]);
    rows.same_dtype(call.dst);
    rows.same_device(call.dst);
    rows.same_num_rows(call.dst);
    rows.same_row_bytes(call.dst);
    if (rows.stride_bytes != call.dst.stride_bytes) {
      rows.value_error(str("rows of every ", rows.stride_bytes, " bytes"),
                       str("every ", call.dst.stride_bytes, ", as in dsts[", call.rank, "]"));
    }
    for (const Rows& other : call.all) rows.apart_from(other);
    rows.apart_from(call.src);
    call.pairs.apart_from(rows);
    call.all.push_back(rows);
  }
}

// In peer_gather each rank copies all rows to its own memory, in peer_scatter its part of the
// pairs.
void run_on_cpu(const RowsCall& call) {
  call.check_pairs();
  call.barrier();
  const i64 count = call.params.num_pairs, rank = call.rank, ranks = call.num_ranks;
  call.repeats() ? call.copy_on_cpu(0, count)
                 : call.copy_on_cpu(count * rank / ranks, count * (rank + 1) / ranks);
  call.barrier();
}

// -- on GPUs -------------------------------------------------------------------------------------

const LoadedKernels& peer_list_kernels(const Device& device, const RowsCall& call) {
  static KernelTable table = sort_kernels("peer_lists", {"index_bytes", "host_target"});
  return table.find(device, Spec(call.index_bytes, call.host_side == kHostTarget));
}

struct PeerLists {
  tvm::ffi::Tensor memory;
  PeerListParams params;
  u32* last_batch;  // see for_batches
};

PeerLists make_peer_lists(const LaunchScope& scope, const LoadedKernels& kernels,
                          const RowsCall& call) {
  PeerListParams list{call.params};
  list.rank = call.rank;
  list.num_ranks = call.num_ranks;
  list.regions = cut_regions(call.span_bytes);
  const i64 table_size = call.repeats() ? table_size_for(list.num_pairs) : 0;
  list.table_mask = static_cast<u32>(table_size - 1);
  const i64 region_bytes = 4 * i64(kNumRegions);
  const i64 list_bytes = 2 * list.num_pairs * call.index_bytes;
  Scratch scratch;
  scratch.add(list.table, 4 * table_size);
  scratch.add(list.last_entries, 4 * 4);
  scratch.add(list.regions.last_ranks, region_bytes);
  scratch.add(list.cursors, region_bytes);
  scratch.add(list.fetches, list_bytes);
  const i64 ones_bytes = scratch.bytes();
  scratch.add(list.regions.starts, region_bytes);
  scratch.add(list.places, 4 * list.num_pairs);
  scratch.add(list.copies, call.repeats() ? list_bytes : 0);
  const tvm::ffi::Tensor memory = scratch.allocate_on(call.device());
  list.regions.last_entry = list.last_entries + 2;
  scope.fill_bytes(memory.data_ptr(), 0xff, ones_bytes);
  launch_sort(scope, kernels, list.num_pairs, list);
  return {memory, list, list.last_entries + 3};
}

void set_lists(PeerCopyParams& params, i64 num_lists, i64 length) {
  constexpr i64 kTurn = PeerCopyParams::kPairsInTurn;
  params.num_lists = static_cast<u32>(num_lists);
  params.list_length = static_cast<u32>(length);
  params.num_pairs = num_lists * ceil_div(length, kTurn) * kTurn;
}

// The fetch of a call: from host memory to all ranks, of all pairs in turn.
PeerCopyParams fetch_params(const RowsCall& call) {
  PeerCopyParams fetch{call.params};
  fetch.intact = call.intact;
  fetch.rank = call.rank;
  fetch.num_ranks = call.num_ranks;
  const DLTensor& pairs = *call.pairs.dl;
  // Lists shorter than a turn are taken as one: each would be filled up to a turn.
  i64 length = pairs.shape[pairs.ndim - 2];
  if (length < PeerCopyParams::kPairsInTurn) length = call.params.num_pairs;
  set_lists(fetch, call.params.num_pairs / length, length);
  fetch.num_shifts = 1;
  // Each rank begins with its own memory and goes on with the next rank's: so they do not all write
  // to the same one.
  for (u32 k = 1; k < call.all.size(); ++k) {
    fetch.shifts[fetch.num_shifts++] =
        call.all[(call.rank + k) % call.num_ranks].data - call.dst.data;
  }
  return fetch;
}

void run_on_gpu(RowsCall& call, KernelTable& table) {
  const CollectiveScope scope(call.device_rows().dl->device.device_id);
  call.map_host_rows();
  call.params.fault = scope.device.fault_device;
  // Everything is compiled before the barrier.
  const LoadedKernels* sorts = call.is_listed ? &peer_list_kernels(scope.device, call) : nullptr;
  u64 bits = 0;  // the bits of all addresses: vectors must be aligned on each rank
  for (const Rows& rows : call.all) bits |= address(rows.data);
  const Spec spec = pair_spec(call, true, bits);
  const LoadedKernels& copies = table.find(scope.device, spec);
  PeerCopyParams fetch = fetch_params(call);
  // Most pairs of a plan are padding, which the whole GPU passes over in a few microseconds.
  i64 num_sms = scope.device.num_sms;
  PeerLists lists;
  if (call.is_listed) {
    lists = make_peer_lists(scope, *sorts, call);
    fetch.pairs = lists.params.fetches;
    fetch.last_pair = lists.params.last_entries;
    fetch.last_batch = lists.last_batch;
    fetch.rank = 0;
    fetch.num_ranks = 1;
    set_lists(fetch, 1, call.params.num_pairs);
    num_sms = num_sms_for(copies, ordered_bytes_in_flight(call.traffic(), kBytesInFlight));
  }
  const i64 blocks =
      num_copy_blocks(scope, copies, fetch.num_pairs, call.num_sms.value_or(num_sms));
  // A list of this rank's pairs has no padding. Else each warp has one batch, or full ones.
  const i64 warps = blocks * copies.entries[0].num_threads / 32, group = copies.shape.rows;
  const i64 share = call.is_listed ? 0 : fetch.num_pairs / warps / group * group;
  fetch.batch_pairs = static_cast<u32>(std::clamp(share, group, i64(32)));
  call.barrier();
  scope.launch(copies.entries[0], blocks, fetch);
  call.barrier();
  if (call.is_listed && call.repeats()) {
    PeerCopyParams copy = fetch;
    copy.pairs = lists.params.copies;
    copy.last_pair = lists.params.last_entries + 1;
    copy.last_batch = nullptr;
    copy.src = call.params.dst;
    copy.src_stride_bytes = call.params.dst_stride_bytes;
    copy.num_src_rows = call.params.num_dst_rows;
    copy.num_shifts = 1;
    scope.launch(copies.entries[0], scope.device.num_sms, copy);
  }
  scope.raise_earlier();
}

// -- calls ---------------------------------------------------------------------------------------

void run(RowsCall& call, KernelTable& table) {
  if (call.params.num_pairs > kMostPairs) {
    call.pairs.value_error(str(call.params.num_pairs, " pairs"), str("at most ", kMostPairs));
  }
  if (call.device_rows().on_cuda()) call.pairs.same_device(call.device_rows());
  if (call.empty()) return;  // on all ranks
  call.device_rows().on_cuda() ? run_on_gpu(call, table) : run_on_cpu(call);
}

void peer_gather(AnyView src, AnyView dsts_arg, AnyView pairs, AnyView num_sms, AnyView order,
                 u32 rank, Function barrier, i64 intact) {
  constexpr const char* kOp = "peer_gather";
  refuse_tracers(kOp);
  static const PairSites sites(kOp);
  static KernelTable table = pair_kernels(kOp);
  const auto dsts = dsts_arg.cast<Array<Any>>();
  RowsCall call{PairArgs(kOp, sites, kHostSource, src, dsts[rank], pairs, num_sms), rank,
                static_cast<u32>(dsts.size()), barrier, reinterpret_cast<const u32*>(intact)};
  call.is_listed = choice_arg(kOp, "order", order, {"auto", "given", "sorted"}) != 1;
  take_targets(call, dsts);
  run(call, table);
}

void peer_scatter(AnyView src, AnyView dst, AnyView pairs, AnyView num_sms, u32 rank, u32 num_ranks,
                  Function barrier, i64 intact) {
  constexpr const char* kOp = "peer_scatter";
  refuse_tracers(kOp);
  static const PairSites sites(kOp);
  static KernelTable table = pair_kernels(kOp);
  RowsCall call{PairArgs(kOp, sites, kHostTarget, src, dst, pairs, num_sms), rank, num_ranks,
                barrier, reinterpret_cast<const u32*>(intact)};
  run(call, table);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_gather, peer_gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(peer_scatter, peer_scatter);

}  // namespace jitkern
