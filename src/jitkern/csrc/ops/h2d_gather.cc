// h2d_gather on the host: checks, CPU implementation, launches.
#include <cstring>
#include <limits>
#include <vector>

#include "host/cpu_copy.h"
#include "pairs_host.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "h2d_gather";
const PairSites kSites(kOp);
const FaultSite kSlotMapSite = fault_site(kOp, "slot_map");

// The search for repeated rows takes about 10 us, 2 % of the 0.5 ms in which 32,768 rows of 656
// bytes cross the link.
constexpr i64 kMinPairsToDedup = 32768;

// reuse_resident on the CPU: rows that are in `dst` by `slot_map` are copied from there.
void gather_resident_on_cpu(const PairArgs& args) {
  if (args.empty()) return;
  args.check_pairs();
  const PairCopyParams& p = args.params;
  std::vector<CpuRow> rows;
  args.pairs.with_index([&](const auto index_at) {
    args.slot_map->with_index([&](const auto slot_at) {
      for (i64 i = 0; i < p.num_pairs; ++i) {
        const Pair pair(index_at, i);
        if (!pair.is_inside(p)) continue;
        const i64 slot = slot_at(pair.src_row);
        if (slot >= p.num_dst_rows) {
          raise_index_error(kOp, "slot_map", pair.src_row, slot, p.num_dst_rows);
        }
        rows.push_back({p.dst + pair.dst_row * p.dst_stride_bytes,
                        slot >= 0 ? p.dst + slot * p.dst_stride_bytes
                                  : p.src + pair.src_row * p.src_stride_bytes});
      }
    });
  });
  for (const CpuRow& row : rows) std::memmove(row.dst, row.src, args.row_bytes);
  args.update_slot_map();
}

void h2d_gather(AnyView src, AnyView dst, AnyView pairs, AnyView slot_map, AnyView dedup_arg,
                AnyView reuse_resident_arg, AnyView num_sms, AnyView order, AnyView method) {
  PairArgs args(kOp, kSites, kHostSource, src, dst, pairs, num_sms);
  args.take_slot_map(slot_map);
  const bool dedup = bool_arg(kOp, "dedup", dedup_arg);
  const bool reuse_resident = bool_arg(kOp, "reuse_resident", reuse_resident_arg);
  if (reuse_resident && is_none(slot_map)) {
    raise_value_error(kOp, "reuse_resident", "True without a slot_map",
                      "a slot_map that says which rows are resident, or False");
  }
  // The list of copies holds two rows of dst per entry, in the dtype of `pairs`.
  if (reuse_resident && args.pairs.index_bytes == 4 &&
      args.dst.num_rows > std::numeric_limits<i32>::max()) {
    args.pairs.type_error("dtype int32",
                          "int64 for reuse_resident with a dst of 2^31 or more rows");
  }
  const bool search = reuse_resident || (dedup && args.params.num_pairs >= kMinPairsToDedup);
  const bool ordered = order_arg(kOp, order, args.traffic());
  args.lists = {search, reuse_resident, ordered, kSlotMapSite};
  args.take_method(method);
  if (!args.dst.on_cuda()) {
    return reuse_resident ? gather_resident_on_cpu(args) : args.run_on_cpu();
  }
  const LaunchScope scope(args.dst);
  static KernelTable table = pair_kernels(kOp);
  args.table = &table;
  run_pairs(scope, args);
}

JITKERN_EXPORT_OP(h2d_gather, h2d_gather);

}  // namespace

}  // namespace jitkern
