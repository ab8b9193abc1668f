// d2h_scatter on the host: checks, CPU implementation, launch.
#include "pairs_host.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "d2h_scatter";
const PairSites kSites(kOp);

void d2h_scatter(AnyView src, AnyView dst, AnyView pairs, AnyView num_sms, AnyView order,
                 AnyView method) {
  PairArgs args(kOp, kSites, kHostTarget, src, dst, pairs, num_sms);
  args.lists.ordered = order_arg(kOp, order, args.traffic());
  args.take_method(method);
  if (!args.src.on_cuda()) return args.run_on_cpu();
  const LaunchScope scope(args.src);
  static KernelTable table = pair_kernels(kOp);
  args.table = &table;
  run_pairs(scope, args);
}

JITKERN_EXPORT_OP(d2h_scatter, d2h_scatter);

}  // namespace

}  // namespace jitkern
