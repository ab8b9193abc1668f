// h2d_gather on the host: checks, CPU implementation, launches.
#include "h2d_gather.h"

#include <cstring>
#include <limits>

#include "pairs_host.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "h2d_gather";
const FaultSite kSrcSite = fault_site(kOp, "pairs[..., 0]");
const FaultSite kDstSite = fault_site(kOp, "pairs[..., 1]");
const FaultSite kSlotMapSite = fault_site(kOp, "slot_map");

// From here on a call looks for repeated rows. The search costs about 10 us of the GPU, 2 % of the
// 0.5 ms in which this many rows of 656 bytes come over the bus.
constexpr i64 kMinPairsToDedup = 32768;

// Rows that the slot map says are in device memory come from there.
void gather_resident_on_cpu(const PairArgs& args) {
  if (args.empty()) return;
  args.check_pairs();
  const PairCopyParams& p = args.params;
  args.pairs.with_index([&](const auto index_at) {
    args.slot_map->with_index([&](const auto slot_at) {
      for (i64 i = 0; i < p.num_pairs; ++i) {
        const Pair pair(index_at, i);
        if (!pair.is_inside(p)) continue;
        const i64 slot = slot_at(pair.src_row);
        if (slot < p.num_dst_rows) continue;
        raise_index_error(kOp, "slot_map", pair.src_row, slot, p.num_dst_rows);
      }
      for (i64 i = 0; i < p.num_pairs; ++i) {
        const Pair pair(index_at, i);
        if (!pair.is_inside(p)) continue;
        const i64 slot = slot_at(pair.src_row);
        if (slot >= p.num_dst_rows) continue;  // by now
        const char* source = slot >= 0 ? p.dst + slot * p.dst_stride_bytes
                                       : p.src + pair.src_row * p.src_stride_bytes;
        std::memmove(p.dst + pair.dst_row * p.dst_stride_bytes, source, args.src.row_bytes);
      }
    });
  });
  args.update_slot_map();
}

// Sorts the pairs, fetches each distinct row once, copies the repeats in device memory.
void launch_deduplicated(const LaunchScope& scope, const PairArgs& args,
                         const LoadedKernels& kernels, bool reuse_resident) {
  const PairCopyParams& p = args.params;
  // Scratch memory: the table with three counters behind it, and three lists.
  i64 table_size = 1;
  while (table_size < 2 * p.num_pairs) table_size *= 2;
  const i64 table_bytes = ceil_div(4 * (table_size + 3), 16) * 16;
  const i64 list_bytes = ceil_div(2 * p.num_pairs * args.pairs.index_bytes, 16) * 16;
  const tvm::ffi::Tensor scratch =
      allocate({table_bytes + 3 * list_bytes}, DLDataType{kDLUInt, 8, 1}, args.dst.dl->device);
  char* memory = static_cast<char*>(scratch.data_ptr());
  u32* table = reinterpret_cast<u32*>(memory);
  char* lists = memory + table_bytes;

  ClaimParams claim{p};
  claim.table = table;
  claim.table_mask = static_cast<u32>(table_size - 1);
  claim.last_entries = table + table_size;
  claim.fetches = lists;
  claim.copies = lists + list_bytes;
  claim.copied_rows = lists + 2 * list_bytes;
  if (!reuse_resident) claim.slot_map = nullptr;
  claim.slot_map_site = kSlotMapSite;
  scope.fill_bytes(table, 0xff, table_bytes);
  const Kernel& claim_rows = kernels.entries[1];
  scope.launch(claim_rows, ceil_div(p.num_pairs, claim_rows.num_threads), claim);

  PairCopyParams fetch = p;
  fetch.pairs = claim.fetches;
  fetch.last_pair = claim.last_entries;
  fetch.last_batch = claim.last_entries + 2;
  launch_pair_copy(scope, args, kernels, fetch);

  PairCopyParams copy = p;
  copy.pairs = claim.copies;
  copy.last_pair = claim.last_entries + 1;
  copy.src = p.dst;
  copy.src_stride_bytes = p.dst_stride_bytes;
  copy.num_src_rows = p.num_dst_rows;
  copy.slot_rows = claim.copied_rows;
  scope.launch(kernels.entries[0], scope.device.num_sms, copy);
}

void h2d_gather(AnyView src, AnyView dst, AnyView pairs, AnyView slot_map, AnyView num_sms,
                bool dedup, AnyView reuse_resident_arg) {
  PairArgs args(kOp, kHostSource, src, dst, pairs, num_sms);
  args.take_slot_map(slot_map);
  const bool reuse_resident = bool_arg(kOp, "reuse_resident", reuse_resident_arg);
  if (reuse_resident && is_none(slot_map)) {
    raise_value_error(kOp, "reuse_resident", "True without a slot_map",
                      "a slot_map that says which rows are resident, or False");
  }
  // The rows that a resident row is copied from and to travel in the type of `pairs`.
  if (reuse_resident && args.pairs.index_bytes == 4 &&
      args.dst.num_rows > std::numeric_limits<i32>::max()) {
    args.pairs.type_error("dtype int32",
                          "int64 for reuse_resident with a dst of 2^31 or more rows");
  }
  if (!args.dst.on_cuda()) {
    return reuse_resident ? gather_resident_on_cpu(args) : args.run_on_cpu();
  }
  const LaunchScope scope(args.dst);
  args.map_host_rows();
  if (args.empty()) return;
  args.params.src_site = kSrcSite;
  args.params.dst_site = kDstSite;
  args.params.fault = scope.device.fault_device;
  const i64 num_pairs = args.params.num_pairs;
  // The search numbers pairs by 32 bits.
  const bool search = (reuse_resident || (dedup && num_pairs >= kMinPairsToDedup)) &&
                      num_pairs <= std::numeric_limits<i32>::max();
  static KernelTable table = pair_kernels(kOp);
  const bool large = search || !is_small_call(args);
  const LoadedKernels& kernels = table.find(scope.device, pair_spec(args, large));
  if (search) {
    launch_deduplicated(scope, args, kernels, reuse_resident);
  } else {
    launch_pair_copy(scope, args, kernels, args.params);
  }
}

JITKERN_EXPORT_OP(h2d_gather, h2d_gather);

}  // namespace

}  // namespace jitkern
