// indexing of tables in pinned host memory: its launches.
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
  // A row of a second range may be behind what an int32 index reaches: pairs are of its type.
  const bool fits = call.index_bytes == 8 || call.params.num_src_rows - 1 <= kMaxListedRow;
  return (is_worth_ordering(call.traffic()) || !is_small_call(call)) &&
         call.params.num_pairs <= kMaxListedPairs && fits;
}

// The pairs and their lists are made once: row numbers are the same in all tables, and so is their
// order. `calls` are not empty.
void launch_large(const LaunchScope& scope, std::vector<PairCall>& calls,
                  const std::vector<IndexArgs>& tables) {
  static KernelTable table = pair_kernels("indexing");
  const i64 num_pairs = calls[0].params.num_pairs;
  const tvm::ffi::Tensor pairs =
      allocate({2 * num_pairs * calls[0].index_bytes}, DLDataType{kDLUInt, 8, 1}, calls[0].device);
  // All that may fail to compile, or for want of memory, comes before the first launch.
  list_kernels(scope.device, calls[0]);
  std::vector<const LoadedKernels*> kernels;
  for (PairCall& call : calls) {
    kernels.push_back(&table.find(scope.device, pair_spec(call, true)));
    call.params.pairs = pairs.data_ptr();
  }
  // The order is that of the table of the longest rows.
  const auto by_span = [](const PairCall& a, const PairCall& b) {
    return a.span_bytes < b.span_bytes;
  };
  const PairCall& widest = *std::max_element(calls.begin(), calls.end(), by_span);
  const bool ordered = std::any_of(calls.begin(), calls.end(), [](const PairCall& call) {
    return is_worth_ordering(call.traffic());
  });
  const ListsToMake lists =
      allocate_lists(widest, {true, false, ordered}, static_cast<int>(calls.size()));
  for (size_t i = 0; i < calls.size(); ++i) {
    // Each writes the same pairs, and the zeros of its own output.
    const Kernel& kernel = kernels[i]->entries[kPairsOfIndices];
    scope.launch(kernel, ceil_div(num_pairs, kernel.num_threads),
                 IndexPairsParams{tables[i].params, pairs.data_ptr()});
  }
  const MadeLists& made = make_lists(scope, widest, lists);
  for (size_t i = 0; i < calls.size(); ++i) {
    copy_by_lists(scope, calls[i], *kernels[i], made, static_cast<int>(i));
  }
}

}  // namespace

void index_host_tables(std::vector<IndexArgs>& tables) {
  const LaunchScope scope(tables[0].indices);
  std::vector<PairCall> calls;
  std::vector<IndexArgs> asked;
  for (IndexArgs& args : tables) {
    if (!args.weights.empty()) args.params.weights = mapped_rows(args.weights);
    if (args.output.empty()) continue;
    args.params.fault = scope.device.fault_device;
    calls.push_back(fetch_call(args));
    asked.push_back(args);
  }
  if (std::any_of(calls.begin(), calls.end(), is_large)) return launch_large(scope, calls, asked);
  launch_index(scope, asked.data(), asked.size());
}

}  // namespace jitkern
