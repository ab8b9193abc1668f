// What the ops on pairs of rows (h2d_gather, d2h_scatter) share on the host: checks of their
// arguments, the CPU implementation, and the launches of a pair copy.
#pragma once

#include <jitkern/launch.h>

#include <limits>
#include <optional>

#include "pair_lists.h"
#include "pairs.h"
#include "regions_host.h"

namespace jitkern {

// A pair, read once.
struct Pair {
  i64 src_row;
  i64 dst_row;

  Pair(i64 src_row, i64 dst_row) : src_row(src_row), dst_row(dst_row) {}
  template <class IndexAt>
  Pair(const IndexAt& index_at, i64 i) : src_row(index_at(2 * i)), dst_row(index_at(2 * i + 1)) {}

  bool is_padding() const { return src_row < 0 || dst_row < 0; }
  // Neither padding nor out of range.
  bool is_inside(const PairCopyParams& p) const {
    return is_below(src_row, p.num_src_rows) && is_below(dst_row, p.num_dst_rows);
  }
};

// SMs that keep the link busy where vectors are narrow.
constexpr i64 kMaxSms = 8;
// SMs of a call that may run beside a model. Of 656-byte rows 2 SMs move 20 GB/s at 1.06 of a
// decode step, 4 move 28 at 1.10 (H200, batch 1).
constexpr i64 kMaxSmsBeside = 2;

// What the launches of a copy between host and device memory are made from.
struct PairCall {
  PairCopyParams params{};
  HostSide host_side = kHostSource;
  i64 row_bytes = 0;
  i64 span_bytes = 0;  // see HostTraffic
  int index_bytes = 8;
  DLDevice device{};
  std::optional<i64> num_sms;  // as the caller says
  i64 max_sms = kMaxSms;       // of a large call without `num_sms`

  i64 bytes() const { return row_bytes * params.num_pairs; }
  int ordinal() const { return device.device_type == kDLCUDA ? device.device_id : -1; }
  HostTraffic traffic() const { return {ordinal(), params.num_pairs, row_bytes, span_bytes}; }
};

// The arguments of an op on pairs.
struct PairArgs : PairCall {
  // Checks everything but slot_map. TypeError or ValueError naming `op` and the argument.
  PairArgs(const char* op, HostSide host_side, AnyView src, AnyView dst, AnyView pairs,
           AnyView num_sms);

  // Checks `slot_map` (None or [num_src_rows], int32 or int64) and puts it into `params`.
  void take_slot_map(AnyView slot_map);

  const Rows& host_rows() const { return host_side == kHostSource ? src : dst; }
  const Rows& device_rows() const { return host_side == kHostSource ? dst : src; }
  bool empty() const { return bytes() == 0; }

  // On CPU tensors: IndexError for the first pair that is out of range.
  void check_pairs() const;

  // On CPU tensors: raises IndexError before anything is written, else copies.
  void run_on_cpu() const;
  // What every copied pair means for the slot map, if there is one. On CPU tensors.
  void update_slot_map() const;

  // Replaces the host side's address by the one that the GPU uses. ValueError with the cure where
  // that memory is not pinned.
  void map_host_rows();

  Rows src;
  Rows dst;
  Indices pairs;
  std::optional<Indices> slot_map;
};

// What a call's pairs are sorted by, in front of its copy.
struct Lists {
  bool search;          // each source row is brought once, repeats are copied in device memory
  bool reuse_resident;  // so are rows that the slot map knows
  bool ordered;         // rows are brought in the order of the host's memory
  FaultSite slot_map_site{};
};

// How many SMs a caller allows, or none. TypeError or ValueError on anything else.
std::optional<i64> num_sms_arg(const char* op, AnyView value);

// ValueError unless `host` is in host memory. It names the right `order` of the arguments if the two
// are swapped.
void require_host_memory(const Rows& host, const Rows& device, const char* order);

// The kernels of `op`, each a PairCopy and what else its Python names.
KernelTable pair_kernels(const char* op);

// Whether a call is so short that it may be spread over the GPU.
bool is_small_call(const PairCall& call);

// Whether lanes may start at the rows: those begin where lines do, or each lies inside of one.
// `host_bits` are those of their address and stride.
bool is_line_aligned(u64 host_bits, i64 row_bytes);

// The specialisation for these rows, once they are mapped; `more_bits` are those of the addresses
// that rows are written to besides.
Spec pair_spec(const PairCall& call, bool large, u64 more_bits = 0);

// What a large call has on its way by default. Rows of 656 bytes have 128 KiB in flight per SM: 2
// SMs saturate an idle bus, but beside a GEMM, where lines take longer to come, they move 33 GB/s
// and 3 SMs 47.
constexpr i64 kBytesInFlight = 320 << 10;

// SMs that have so many bytes in flight, at most kMaxSms.
i64 num_sms_for(const LoadedKernels& kernels, i64 bytes_in_flight);

// How many blocks a copy of so many rows is launched on; spec[4] says whether the call is large.
i64 num_copy_blocks(const LaunchScope& scope, const LoadedKernels& kernels, i64 num_rows,
                    i64 num_sms);

// Launches the first of `kernels`: for a small call over the whole GPU, for a large one on as many
// blocks as the caller says, or as have `bytes_in_flight`. `params` are those of the call, or
// another list of its pairs.
void launch_pair_copy(const LaunchScope& scope, const PairCall& call, const LoadedKernels& kernels,
                      const PairCopyParams& params, i64 bytes_in_flight);

// The kernels that make the lists of a call; loaded, or refused, before it launches anything.
const LoadedKernels& list_kernels(const Device& device, const PairCall& call);

// Lists on their way, which a copy reads on the same stream.
struct MadeLists {
  tvm::ffi::Tensor memory;
  Lists lists;
  u32* last_entries;
  const void* fetches;
  const void* copies;
  const void* copied_rows;
};

constexpr i64 kMaxListedPairs = std::numeric_limits<i32>::max();

// The lists of a large call that are to be made, and their scratch memory.
struct ListsToMake {
  MadeLists made;
  ListParams params;
  i64 ones_bytes;  // which the memory begins with
};

// Takes the memory from torch's caching allocator, which may have none: before the call launches
// what writes.
ListsToMake allocate_lists(const PairCall& call, const Lists& lists);

// Sorts the pairs of the call into the lists.
const MadeLists& make_lists(const LaunchScope& scope, const PairCall& call,
                            const ListsToMake& lists);

void copy_by_lists(const LaunchScope& scope, const PairCall& call, const LoadedKernels& kernels,
                   const MadeLists& made);

// Has the kernels of a call found, or compiled; also those of parts of it, of any size.
void find_pair_kernels(const LaunchScope& scope, const PairCall& call, KernelTable& table,
                       const Lists& lists, bool in_parts = false);

// Launches a call: one copy of its pairs, or by its lists.
void launch_pairs(const LaunchScope& scope, const PairCall& call, KernelTable& table,
                  const Lists& lists);

}  // namespace jitkern
