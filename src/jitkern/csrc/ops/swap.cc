// swap_rows on the host: checks, CPU implementation, launch.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "host/cpu_copy.h"
#include "host/pinned.h"
#include "host/tuning.h"
#include "swap_host.h"

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
    if (triples.dl->ndim < 1 || triples.dl->shape[triples.dl->ndim - 1] != 3) {
      triples.value_error("shape " + triples.shape_text(),
                          "shape [..., 3] of (host row to fetch, slot, host row to write back to)");
    }
    host.same_row_bytes(gpu);
    host.distinct_rows();
    gpu.distinct_rows();
    host.apart_from(gpu);
    triples.apart_from(host);
    triples.apart_from(gpu);
  }

  i64 num_triples() const { return triples.count / 3; }
  i64 bytes() const { return gpu.row_bytes * num_triples(); }
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

// Every triple but padding, each number read once: another thread may write them during the call.
// IndexError for the first that is out of range.
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

// A row, and the position of the triple that names it.
using Use = std::pair<i64, i64>;

// Sorted by row. ValueError where two triples name one: for the first that names it again.
std::vector<Use> distinct_uses(std::vector<Use> uses, const char* arg, const char* expected) {
  std::sort(uses.begin(), uses.end());
  const Use* again = nullptr;
  for (size_t i = 1; i < uses.size(); ++i) {
    const bool repeats = uses[i].first == uses[i - 1].first;
    if (repeats && (again == nullptr || uses[i].second < again->second)) again = &uses[i];
  }
  if (again != nullptr) {
    raise_value_error(kOp, arg,
                      std::to_string(again->first) + " at positions " +
                          std::to_string(again[-1].second) + " and " +
                          std::to_string(again->second),
                      std::string(expected) + "; nothing was written");
  }
  return uses;
}

// ValueError where what ends up in a row would depend on which triple comes first.
void check_order_free(const std::vector<Triple>& triples) {
  std::vector<Use> uses;
  for (const Triple& triple : triples) uses.emplace_back(triple.slot, triple.position);
  distinct_uses(std::move(uses), kSlotArg, "distinct slots");
  uses.clear();
  for (const Triple& triple : triples) {
    if (triple.back >= 0) uses.emplace_back(triple.back, triple.position);
  }
  const std::vector<Use> written =
      distinct_uses(std::move(uses), kBackArg, "distinct rows to write back to");
  for (const Triple& triple : triples) {
    const auto found = std::lower_bound(written.begin(), written.end(), Use(triple.fetch, 0));
    if (found == written.end() || found->first != triple.fetch) continue;
    if (found->second == triple.position) continue;
    raise_value_error(kOp, kFetchArg,
                      std::to_string(triple.fetch) + " at position " +
                          std::to_string(triple.position) + ", written back to at position " +
                          std::to_string(found->second),
                      "rows that no other triple writes; nothing was written");
  }
}

void swap_cpu(const SwapArgs& args) {
  const Rows& host = args.host;
  const Rows& gpu = args.gpu;
  const i64 row_bytes = gpu.row_bytes;
  if (args.bytes() == 0) return;
  std::vector<Triple> moves = read_triples(args);
  check_order_free(moves);
  // What has one row to fetch and to write back to is exchanged in place.
  const auto behind = std::partition(moves.begin(), moves.end(), [](const Triple& triple) {
    return triple.fetch < 0 || triple.fetch != triple.back;
  });
  const std::vector<Triple> exchanges(behind, moves.end());
  moves.erase(behind, moves.end());

  const auto host_row = [&host](i64 row) { return host.data + row * host.stride_bytes; };
  const auto gpu_row = [&gpu](i64 slot) { return gpu.data + slot * gpu.stride_bytes; };
  const i64 count = static_cast<i64>(moves.size());
  copy_rows<kRandomBoth>(count, row_bytes, host.num_rows * row_bytes, [&](i64 i) {
    const Triple& triple = moves[i];
    if (triple.back < 0) return CpuRow{nullptr, nullptr};
    return CpuRow{host_row(triple.back), gpu_row(triple.slot)};
  });
  copy_rows<kRandomBoth>(count, row_bytes, gpu.num_rows * row_bytes, [&](i64 i) {
    const Triple& triple = moves[i];
    if (triple.fetch < 0) return CpuRow{nullptr, nullptr};
    return CpuRow{gpu_row(triple.slot), host_row(triple.fetch)};
  });

  const auto exchange = [&](i64 begin, i64 end) {
    for (i64 i = begin; i < end; ++i) {
      char* row = host_row(exchanges[i].back);
      std::swap_ranges(row, row + row_bytes, gpu_row(exchanges[i].slot));
    }
  };
  const i64 num_exchanges = static_cast<i64>(exchanges.size());
  const i64 threads = threads_for(num_exchanges, 4 * num_exchanges * row_bytes);
  if (threads > 1) return for_parts(num_exchanges, threads, exchange);
  exchange(0, num_exchanges);
}

// -- on a GPU ------------------------------------------------------------------------------------

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
  char* const host = args.host.empty() ? args.host.data : mapped_rows(args.host);
  if (args.bytes() == 0) return;
  SwapCall call{};
  call.traffic = args.traffic();
  call.index_bytes = args.triples.index_bytes;
  call.device = args.gpu.dl->device;
  call.num_sms = args.num_sms.value_or(kMaxSmsBeside);
  SwapParams& params = call.params;
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
      in_order || args.num_sms || args.bytes() > figure(call.traffic.ordinal, kSmallCallBytes);
  const Spec spec(row_bytes, widest_vec(host_bits | gpu_bits | static_cast<u64>(row_bytes)),
                  call.index_bytes, is_line_aligned(host_bits, row_bytes), large, in_order);
  static KernelTable table(
      kOp, {"row_bytes", "vec_bytes", "index_bytes", "line_aligned", "large", "in_order"},
      swap_shape);
  const LoadedKernels& kernels = table.find(scope.device, spec);
  if (in_order) return swap_in_order(scope, call, kernels);
  const i64 blocks = num_copy_blocks(scope, kernels, params.num_triples, call.num_sms);
  scope.launch(kernels.entries[0], blocks, params);
}

JITKERN_EXPORT_OP(swap_rows, swap_rows);

}  // namespace

}  // namespace jitkern
