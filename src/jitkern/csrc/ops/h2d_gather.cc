// h2d_gather on the host: checks, CPU implementation, launches.
#include "h2d_gather.h"

#include <jitkern/pair_args.h>
#include <tvm/ffi/function.h>

#include <cstring>
#include <limits>
#include <string>

namespace jitkern {

namespace {

constexpr const char* kOp = "h2d_gather";

// The scratch memory of one large call: the table of `claim`, three counters, and its lists.
struct Workspace {
  i64 table_size;
  i64 table_bytes;  // with the counters behind it
  i64 list_bytes;

  Workspace(i64 num_pairs, i64 index_bytes) : table_size(1) {
    while (table_size < 2 * num_pairs) table_size *= 2;
    table_bytes = ceil_div(4 * (table_size + 3), 16) * 16;
    list_bytes = ceil_div(2 * num_pairs * index_bytes, 16) * 16;
  }
  i64 bytes() const { return table_bytes + 3 * list_bytes; }
};

int64_t h2d_gather_workspace_bytes(int64_t num_pairs, int64_t index_bytes) {
  return Workspace(num_pairs, index_bytes).bytes();
}

// Rows that `slot_map` says are in device memory come from there.
template <class Index, class Slot>
void gather_resident_cpu(const PairCopyParams& p, i64 row_bytes) {
  const auto* pairs = static_cast<const Index*>(p.pairs);
  auto* slot_map = static_cast<Slot*>(p.slot_map);
  const auto skipped = [&](i64 i) { return pairs[2 * i] < 0 || pairs[2 * i + 1] < 0; };
  for (i64 i = 0; i < p.num_pairs; ++i) {
    if (!skipped(i) && pairs[2 * i] < p.num_src_rows && slot_map[pairs[2 * i]] >= p.num_dst_rows) {
      raise_index_error(kOp, "slot_map", pairs[2 * i], slot_map[pairs[2 * i]], p.num_dst_rows,
                        "; nothing was written");
    }
  }
  for (i64 i = 0; i < p.num_pairs; ++i) {
    if (skipped(i)) continue;
    const i64 slot = slot_map[pairs[2 * i]];
    const char* source =
        slot >= 0 ? p.dst + slot * p.dst_stride_bytes : p.src + pairs[2 * i] * p.src_stride_bytes;
    std::memmove(p.dst + pairs[2 * i + 1] * p.dst_stride_bytes, source, row_bytes);
  }
  for (i64 i = 0; i < p.num_pairs; ++i) {
    if (!skipped(i)) slot_map[pairs[2 * i]] = static_cast<Slot>(pairs[2 * i + 1]);
  }
}

void gather_resident_cpu(const PairArgs& args) {
  if (args.empty()) return;
  args.check_pairs_on_cpu();
  const auto run = args.pairs.index_bytes == 4
                       ? (args.params.slot_map_bytes == 4 ? gather_resident_cpu<int32_t, int32_t>
                                                          : gather_resident_cpu<int32_t, int64_t>)
                       : (args.params.slot_map_bytes == 4 ? gather_resident_cpu<int64_t, int32_t>
                                                          : gather_resident_cpu<int64_t, int64_t>);
  run(args.params, args.row_bytes);
}

// Claims, fetches each distinct row once, copies the repeats in device memory.
void launch_deduplicated(const LaunchScope& scope, PairArgs& args, const PairLayout& layout,
                         const Kernel* kernels, char* workspace, bool reuse_resident) {
  PairCopyParams& p = args.params;
  const Workspace sizes(p.num_pairs, args.pairs.index_bytes);
  char* lists = workspace + sizes.table_bytes;
  u32* table = reinterpret_cast<u32*>(workspace);
  ClaimParams claim{};
  claim.pairs = p.pairs;
  claim.num_pairs = p.num_pairs;
  claim.num_src_rows = p.num_src_rows;
  claim.num_dst_rows = p.num_dst_rows;
  claim.table = table;
  claim.table_mask = static_cast<u32>(sizes.table_size - 1);
  claim.counts_m1 = table + sizes.table_size;
  claim.fetches = lists;
  claim.copies = lists + sizes.list_bytes;
  claim.copied_rows = lists + 2 * sizes.list_bytes;
  claim.slot_map = reuse_resident ? p.slot_map : nullptr;
  claim.slot_map_bytes = p.slot_map_bytes;
  claim.fault = p.fault;
  scope.fill_bytes(workspace, 0xff, sizes.table_bytes);
  scope.launch(kernels[1], ceil_div(p.num_pairs, kernels[1].num_threads), 1, kernels[1].num_threads,
               claim);

  p.pairs = claim.fetches;
  p.num_pairs_m1 = claim.counts_m1;
  p.next_batch_m1 = claim.counts_m1 + 2;
  launch_pair_copy(scope, args, layout, kernels[0], kLargeInFlight);

  p.pairs = claim.copies;
  p.num_pairs_m1 = claim.counts_m1 + 1;
  p.next_batch_m1 = nullptr;
  p.src = p.dst;
  p.src_stride_bytes = p.dst_stride_bytes;
  p.num_src_rows = p.num_dst_rows;
  p.slot_rows = claim.copied_rows;
  scope.launch(kernels[0], scope.device.num_sms, 1, kernels[0].num_threads, p);
}

// `workspace`: h2d_gather_workspace_bytes of scratch memory on the device for a call that shall
// fetch no row twice, or None.
void h2d_gather(AnyView src, AnyView dst, AnyView pairs, AnyView slot_map, AnyView num_sms,
                AnyView workspace_arg, AnyView reuse_resident_arg) {
  PairArgs args(kOp, kHostSource, src, dst, pairs, num_sms);
  args.take_slot_map(slot_map);
  const bool reuse_resident = bool_arg(kOp, "reuse_resident", reuse_resident_arg);
  if (reuse_resident && slot_map.type_index() == tvm::ffi::TypeIndex::kTVMFFINone) {
    raise_value_error(kOp, "reuse_resident", "True without a slot_map",
                      "a slot_map that says which rows are resident, or False");
  }
  // The rows that a resident row is copied from and to travel in the type of `pairs`.
  if (reuse_resident && args.pairs.index_bytes == 4 &&
      args.dst_rows.num_rows > std::numeric_limits<i32>::max()) {
    args.pairs_tensor.type_error("dtype int32",
                                 "int64 for reuse_resident with a dst of 2^31 or more rows");
  }
  if (!args.dst.on_cuda()) {
    reuse_resident ? gather_resident_cpu(args) : args.run_on_cpu();
    return;
  }
  static KernelTable small_kernels("h2d_gather", {"h2d_gather"});
  static KernelTable large_kernels("h2d_gather", {"h2d_gather", "claim"});
  const LaunchScope scope(args.dst);
  args.map_host_rows();
  if (args.empty()) return;
  args.params.fault = scope.device.fault_device;
  const PairLayout layout(args);
  const bool dedup = workspace_arg.type_index() != tvm::ffi::TypeIndex::kTVMFFINone;
  const bool small = !dedup && args.is_small_call();
  const int in_flight = small ? kSmallInFlight : kLargeInFlight;
  KernelTable& table = small ? small_kernels : large_kernels;
  const Kernel* kernels = table.find(
      scope.device,
      {args.row_bytes, layout.vec_bytes, args.pairs.index_bytes, layout.line_aligned, in_flight});
  if (dedup) {
    const Tensor workspace(kOp, "workspace", workspace_arg);
    launch_deduplicated(scope, args, layout, kernels, workspace.data(), reuse_resident);
  } else {
    launch_pair_copy(scope, args, layout, kernels[0], in_flight);
  }
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(h2d_gather, h2d_gather);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(h2d_gather_workspace_bytes, h2d_gather_workspace_bytes);

}  // namespace

}  // namespace jitkern
