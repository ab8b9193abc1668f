// h2d_gather on the host: checks, CPU implementation, launches.
#include "pairs_host.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "h2d_gather";
const PairSites kSites(kOp);

// The search for repeated rows takes about 10 us, 2 % of the 0.5 ms in which 32,768 rows of 656
// bytes cross the link.
constexpr i64 kMinPairsToDedup = 32768;

void h2d_gather(AnyView src, AnyView dst, AnyView pairs, AnyView slot_map, AnyView dedup_arg,
                AnyView num_sms, AnyView order, AnyView method) {
  PairArgs args(kOp, kSites, kHostSource, src, dst, pairs, num_sms);
  args.take_slot_map(slot_map);
  const bool dedup = bool_arg(kOp, "dedup", dedup_arg);
  args.lists.search = dedup && args.params.num_pairs >= kMinPairsToDedup;
  args.lists.ordered = order_arg(kOp, order, args.traffic());
  args.take_method(method);
  if (!args.dst.on_cuda()) return args.run_on_cpu();
  const LaunchScope scope(args.dst);
  static KernelTable table = pair_kernels(kOp);
  args.table = &table;
  run_pairs(scope, args);
}

JITKERN_EXPORT_OP(h2d_gather, h2d_gather);

}  // namespace

}  // namespace jitkern
