// d2h_scatter on the host: checks, CPU implementation, launch.
#include <jitkern/pair_args.h>
#include <tvm/ffi/function.h>

namespace jitkern {

namespace {

constexpr const char* kOp = "d2h_scatter";

void d2h_scatter(AnyView src, AnyView dst, AnyView pairs, AnyView num_sms) {
  PairArgs args(kOp, kHostTarget, src, dst, pairs, num_sms);
  if (!args.src.on_cuda()) {
    args.run_on_cpu();
    return;
  }
  static KernelTable kernels("d2h_scatter", {"d2h_scatter"});
  const LaunchScope scope(args.src);
  args.map_host_rows();
  if (args.empty()) return;
  args.params.fault = scope.device.fault_device;
  const PairLayout layout(args);
  const int in_flight = args.is_small_call() ? kSmallInFlight : kScatterInFlight;
  const Kernel& kernel = *kernels.find(
      scope.device,
      {args.row_bytes, layout.vec_bytes, args.pairs.index_bytes, layout.line_aligned, in_flight});
  launch_pair_copy(scope, args, layout, kernel, in_flight);
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(d2h_scatter, d2h_scatter);

}  // namespace

}  // namespace jitkern
