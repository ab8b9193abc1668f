// swap_rows on the host: checks, CPU implementation, launch.
#include <algorithm>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "host/cpu_copy.h"
#include "host/tuning.h"
#include "pairs_host.h"

namespace jitkern {

namespace {

constexpr const char* kOp = "swap_rows";
constexpr const char* kFetchArg = "triples[..., 0]";
constexpr const char* kSlotArg = "triples[..., 1]";
constexpr const char* kBackArg = "triples[..., 2]";
const FaultSite kFetchSite = fault_site(kOp, kFetchArg);
const FaultSite kSlotSite = fault_site(kOp, kSlotArg);
const FaultSite kBackSite = fault_site(kOp, kBackArg);

struct SwapArgs {
  Rows host;
  Rows gpu;
  Indices triples;
  std::optional<i64> num_sms;

  SwapArgs(AnyView host_arg, AnyView device_arg, AnyView triples_arg, AnyView num_sms_value)
      : host(kOp, "host", host_arg),
        gpu(kOp, "device", device_arg),
        triples(kOp, "triples", triples_arg),
        num_sms(num_sms_arg(kOp, num_sms_value)) {
    require_host_memory(host, gpu, "(host, device, triples)");
    host.same_dtype(gpu);
    triples.same_device(gpu);
    require_last_dim(triples, 3, "host row to fetch, slot, host row to write back to");
    host.same_row_bytes(gpu);
    host.distinct_rows();
    gpu.distinct_rows();
    host.apart_from(gpu);
    triples.apart_from(host);
    triples.apart_from(gpu);
  }

  i64 num_triples() const { return triples.count / 3; }
  i64 bytes() const { return gpu.row_bytes * num_triples(); }
  i64 max_sms() const { return num_sms.value_or(kMaxSmsBeside); }  // of a large call
  HostTraffic traffic() const {
    return {gpu.ordinal(), num_triples(), gpu.row_bytes, host.num_rows * host.stride_bytes};
  }
};

// -- on the CPU ----------------------------------------------------------------------------------

struct Triple {
  i64 fetch;
  i64 slot;
  i64 back;
  i64 position;
};

// All triples but padding, each number read once, as another thread may write them. IndexError for
// the first that is out of range.
std::vector<Triple> read_triples(const SwapArgs& args) {
  std::vector<Triple> read;
  read.reserve(args.num_triples());
  args.triples.with_index([&](const auto index_at) {
    for (i64 i = 0; i < args.num_triples(); ++i) {
      const Triple triple{index_at(3 * i), index_at(3 * i + 1), index_at(3 * i + 2), i};
      if (triple.slot < 0) continue;
      const auto check = [i](const char* arg, i64 row, const Rows& rows) {
        if (row >= rows.num_rows) raise_index_error(kOp, arg, i, row, rows.num_rows);
      };
      check(kFetchArg, triple.fetch, args.host);
      check(kSlotArg, triple.slot, args.gpu);
      check(kBackArg, triple.back, args.host);
      read.push_back(triple);
    }
  });
  return read;
}

// ValueError if the result depends on the order of the triples: for the first that repeats a slot
// or a row to write back to, or fetches a row that another one writes.
void check_order_free(const std::vector<Triple>& triples) {
  using Positions = std::unordered_map<i64, i64>;  // row to the position of its triple
  const auto add = [](Positions& named, i64 row, i64 position, const char* arg, const char* what) {
    const auto [first, is_new] = named.emplace(row, position);
    if (is_new) return;
    raise_value_error(kOp, arg, str(row, " at positions ", first->second, " and ", position),
                      str("distinct ", what, "; nothing was written"));
  };
  Positions slots, written;
  for (const Triple& triple : triples) {
    add(slots, triple.slot, triple.position, kSlotArg, "slots");
    if (triple.back < 0) continue;
    add(written, triple.back, triple.position, kBackArg, "rows to write back to");
  }
  for (const Triple& triple : triples) {
    const auto found = written.find(triple.fetch);
    if (found == written.end() || found->second == triple.position) continue;
    raise_value_error(kOp, kFetchArg,
                      str(triple.fetch, " at position ", triple.position,
                          ", written back to at position ", found->second),
                      "rows that no other triple writes; nothing was written");
  }
}

void swap_cpu(const SwapArgs& args) {
  const Rows& host = args.host;
  const Rows& gpu = args.gpu;
  const i64 row_bytes = gpu.row_bytes;
  if (args.bytes() == 0) return;
  const std::vector<Triple> triples = read_triples(args);
  check_order_free(triples);
  const auto swap_part = [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      const Triple& triple = triples[i];
      const auto host_row = [&host](i64 row) { return host.data + row * host.stride_bytes; };
      char* const slot = gpu.data + triple.slot * gpu.stride_bytes;
      if (triple.back >= 0 && triple.back == triple.fetch) {
        std::swap_ranges(slot, slot + row_bytes, host_row(triple.back));
        continue;
      }
      if (triple.back >= 0) std::memcpy(host_row(triple.back), slot, row_bytes);
      if (triple.fetch >= 0) std::memcpy(slot, host_row(triple.fetch), row_bytes);
    }
  };
  const auto count = static_cast<i64>(triples.size());
  for_parts(count, threads_for(count, 4 * count * row_bytes), swap_part);
}

// -- on a GPU ------------------------------------------------------------------------------------

// For one part of a sorted call: 750,000 rows of 656 bytes. Larger parts gain nothing.
constexpr i64 kMaxScratchBytes = i64(512) << 20;

// Entry points of the module for sorted calls: see kernel() in ops/swap.py.
enum Entry : int { kSwapStaged, kPlaceStaged };

// Swaps in the order of host memory, part by part: sorts the triples of a part into moves, makes
// these, and copies the fetched rows from staging to their slots.
void swap_in_order(const LaunchScope& scope, const SwapArgs& args, const SwapParams& params,
                   const LoadedKernels& kernels) {
  const i64 index_bytes = args.triples.index_bytes;
  const i64 row_bytes = args.gpu.row_bytes;
  static KernelTable table = sort_kernels("swap_lists", {"index_bytes"});
  const LoadedKernels& sort = table.find(scope.device, Spec(index_bytes));
  const i64 count = params.num_triples;
  const i64 triple_bytes = row_bytes + 5 * index_bytes + 8;
  const i64 most = std::max(i64(1), kMaxScratchBytes / triple_bytes);
  const i64 of_part = ceil_div(count, ceil_div(count, most));
  // One allocation, for the largest part. If a later part ran out of memory, the call would be half
  // done, and a retry would swap the first half back.
  SwapListParams list{params};
  list.regions = cut_regions(args.traffic().span_bytes, kNumMoveKinds);
  constexpr i64 kRegionsBytes = 4 * i64(kNumMoveKinds) * kNumRegions;
  Scratch scratch;
  scratch.add(list.regions.last_ranks, kRegionsBytes);
  scratch.add(list.regions.last_entry, 4 * 2);
  scratch.add(list.moves, 3 * of_part * index_bytes);
  scratch.add(list.places, 2 * of_part * index_bytes);
  const i64 ones_bytes = scratch.bytes();
  scratch.add(list.regions.starts, kRegionsBytes);
  scratch.add(list.ranks, 4 * 2 * of_part);
  scratch.add(list.staging, of_part * row_bytes);
  const tvm::ffi::Tensor memory = scratch.allocate_on(args.gpu.dl->device);
  for (i64 first = 0; first < count; first += of_part) {
    list.triples = static_cast<const char*>(params.triples) + 3 * first * index_bytes;
    list.first_position = first;
    list.num_triples = std::min(of_part, count - first);
    scope.fill_bytes(list.regions.last_ranks, 0xff, ones_bytes);
    launch_sort(scope, sort, list.num_triples, list);

    SwapParams moves = list;
    moves.triples = list.moves;
    moves.last_batch = list.regions.last_entry + 1;
    const i64 blocks = num_copy_blocks(scope, kernels, list.num_triples, args.max_sms());
    scope.launch(kernels.entries[kSwapStaged], blocks, moves);

    PairCopyParams places{};
    places.dst = list.gpu;
    places.src = list.staging;
    places.dst_stride_bytes = list.gpu_stride_bytes;
    places.src_stride_bytes = row_bytes;
    places.pairs = list.places;
    places.num_pairs = places.num_src_rows = list.num_triples;
    places.num_dst_rows = list.num_slots;
    places.src_site = places.dst_site = list.slot_site;
    places.fault = list.fault;
    scope.launch(kernels.entries[kPlaceStaged], scope.device.num_sms, places);
  }
}

GroupShape swap_shape(const Spec& spec, int in_flight, int splits) {
  const i64 window = window_bytes(spec[0], spec[1], spec[3] != 0);
  return group_shape(window, spec[1], swap_in_flight(window, spec[1], in_flight), splits);
}

void swap_rows(AnyView host_arg, AnyView device_arg, AnyView triples_arg, AnyView num_sms,
               AnyView order) {
  const SwapArgs args(host_arg, device_arg, triples_arg, num_sms);
  const bool in_order = order_arg(kOp, order, args.traffic());
  if (!args.gpu.on_cuda()) return swap_cpu(args);
  const LaunchScope scope(args.gpu);
  char* const host = address_on_gpu(args.host);
  if (args.bytes() == 0) return;
  SwapParams params{};
  params.host = host;
  params.gpu = args.gpu.data;
  params.host_stride_bytes = args.host.stride_bytes;
  params.gpu_stride_bytes = args.gpu.stride_bytes;
  params.triples = args.triples.data;
  params.num_triples = args.num_triples();
  params.num_host_rows = args.host.num_rows;
  params.num_slots = args.gpu.num_rows;
  params.fetch_site = kFetchSite;
  params.slot_site = kSlotSite;
  params.back_site = kBackSite;
  params.fault = scope.device.fault_device;
  const u64 host_bits = address(host) | static_cast<u64>(params.host_stride_bytes);
  const u64 gpu_bits = address(params.gpu) | static_cast<u64>(params.gpu_stride_bytes);
  const i64 row_bytes = args.gpu.row_bytes;
  const bool large =
      in_order || args.num_sms || args.bytes() > figure(args.gpu.ordinal(), kSmallCallBytes);
  const Spec spec(row_bytes, widest_vec(host_bits | gpu_bits | static_cast<u64>(row_bytes)),
                  args.triples.index_bytes, is_line_aligned(host_bits, row_bytes), large, in_order);
  static KernelTable table(
      kOp, {"row_bytes", "vec_bytes", "index_bytes", "line_aligned", "large", "in_order"},
      swap_shape);
  const LoadedKernels& kernels = table.find(scope.device, spec);
  if (in_order) return swap_in_order(scope, args, params, kernels);
  const i64 blocks = num_copy_blocks(scope, kernels, params.num_triples, args.max_sms());
  scope.launch(kernels.entries[0], blocks, params);
}

JITKERN_EXPORT_OP(swap_rows, swap_rows);

}  // namespace

}  // namespace jitkern
