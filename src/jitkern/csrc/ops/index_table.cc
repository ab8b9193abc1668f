// indexing of a table in pinned host memory: its launches.
#include <algorithm>
#include <limits>

#include "host/pinned.h"
#include "index_args.h"
#include "pairs_host.h"

namespace jitkern {

namespace {

// Entry point of a module: see kernel() in ops/index.py.
constexpr int kPairsOfIndices = 1;

// By int32 pairs.
constexpr i64 kMaxListedRow = std::numeric_limits<i32>::max();

PairCall fetch_call(const IndexArgs& args) {
  PairCall call;
  call.row_bytes = args.weights.row_bytes;
  call.index_bytes = args.indices.index_bytes;
  call.device = args.indices.dl->device;
  call.span_bytes = args.weights.num_rows * args.weights.stride_bytes;
  const IndexParams& params = args.params;
  PairCopyParams& p = call.params;
  p.dst = params.output;
  p.src = params.weights;
  p.dst_stride_bytes = params.output_stride_bytes;
  p.src_stride_bytes = params.weights_stride_bytes;
  p.num_pairs = params.num_rows;
  p.num_src_rows = std::max(params.vocab_length, params.added_row + params.added_length);
  p.num_dst_rows = params.num_rows;
  p.src_site = p.dst_site = params.indices_site;  // none is reported: the pairs are inside
  p.fault = params.fault;
  return call;
}

bool is_large(const PairCall& call) {
  // A row of a second range may be past what an int32 index reaches: pairs are of its type.
  const bool fits = call.index_bytes == 8 || call.params.num_src_rows - 1 <= kMaxListedRow;
  return (is_worth_ordering(call.traffic()) || !is_small_call(call)) &&
         call.params.num_pairs <= kMaxListedPairs && fits;
}

void launch_large(const LaunchScope& scope, PairCall& call, const IndexParams& params) {
  static KernelTable table = pair_kernels("indexing");
  const i64 num_pairs = call.params.num_pairs;
  const tvm::ffi::Tensor pairs =
      allocate({2 * num_pairs * call.index_bytes}, DLDataType{kDLUInt, 8, 1}, call.device);
  call.params.pairs = pairs.data_ptr();
  // All that may fail to compile, or for want of memory, comes before the first launch.
  list_kernels(scope.device, call);
  const LoadedKernels& kernels = table.find(scope.device, pair_spec(call, true));
  const ListsToMake lists = allocate_lists(call, {true, false, is_worth_ordering(call.traffic())});
  const Kernel& make_pairs = kernels.entries[kPairsOfIndices];
  scope.launch(make_pairs, ceil_div(num_pairs, make_pairs.num_threads),
               IndexPairsParams{params, pairs.data_ptr()});
  copy_by_lists(scope, call, kernels, make_lists(scope, call, lists));
}

}  // namespace

void index_host_table(IndexArgs& args) {
  const LaunchScope scope(args.indices);
  if (!args.weights.empty()) args.params.weights = mapped_rows(args.weights);
  if (args.output.empty()) return;
  args.params.fault = scope.device.fault_device;
  PairCall call = fetch_call(args);
  if (is_large(call)) return launch_large(scope, call, args.params);
  launch_index(scope, args);
}

}  // namespace jitkern
