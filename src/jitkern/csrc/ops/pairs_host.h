// What the ops between host and device memory share: the order of the host's memory, checks, the
// CPU implementation, launches.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "common.h"
#include "pairs.h"

namespace jitkern {

// -- order of the host's memory -------------------------------------------------------------------

// What a call moves over the link.
struct HostTraffic {
  int ordinal;  // of the GPU, -1: none
  i64 num_rows;
  i64 row_bytes;
  i64 span_bytes;  // of the host's rows, first to last; 0 (none, or expanded): no order
};

// Whether the order pays: for many short rows of more memory than the link's translation reaches.
bool is_worth_ordering(const HostTraffic& traffic);

// Whether a call moves its rows in the order of the host's memory: "host" yes, "given" no, "auto"
// or None if it pays.
bool order_arg(const char* op, AnyView order, const HostTraffic& traffic);

// Bytes that a sorted call has in flight by default, at least `unsorted`, those of another call.
i64 ordered_bytes_in_flight(const HostTraffic& traffic, i64 unsorted);

// Entry points of a module that sorts: see load_sort() in ops/pairs.py.
enum SortEntry : int { kListEntry, kScanEntry, kPlaceEntry };
KernelTable sort_kernels(const char* name, std::vector<const char*> names);

// The regions of a span of host memory, without memory of their own.
Regions cut_regions(i64 span_bytes, u32 num_kinds = 1);

// The least power of two of at least 2 * num_pairs: places of a table of source rows.
i64 table_size_for(i64 num_pairs);

// Launches a kernel with a thread for each row.
template <class Params>
void launch_list(const LaunchScope& scope, const Kernel& kernel, i64 num_rows,
                 const Params& params) {
  scope.launch(kernel, ceil_div(num_rows, kernel.num_threads), params);
}

// Numbers the rows of each region, sums up the regions, places the rows.
template <class Params>
void launch_sort(const LaunchScope& scope, const LoadedKernels& kernels, i64 num_rows,
                 const Params& params) {
  launch_list(scope, kernels.entries[kListEntry], num_rows, params);
  scope.launch(kernels.entries[kScanEntry], 1, params.regions);
  launch_list(scope, kernels.entries[kPlaceEntry], num_rows, params);
}

// Scratch memory of a call, in pieces of whole 16 bytes.
class Scratch {
 public:
  // Points `pointer` to the next piece once there is memory; leaves it alone for 0 bytes.
  template <class T>
  void add(T*& pointer, i64 bytes) {
    if (bytes > 0) pieces_.emplace_back(reinterpret_cast<void**>(&pointer), bytes_);
    bytes_ += ceil_div(bytes, 16) * 16;
  }
  // Of the pieces so far.
  i64 bytes() const { return bytes_; }
  // From torch's caching allocator.
  tvm::ffi::Tensor allocate_on(DLDevice device) const {
    const auto memory = allocate_bytes(bytes_, device);
    for (const auto& [pointer, at] : pieces_) *pointer = static_cast<char*>(memory.data_ptr()) + at;
    return memory;
  }

 private:
  std::vector<std::pair<void**, i64>> pieces_;
  i64 bytes_ = 0;
};

// -- pairs ---------------------------------------------------------------------------------------

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
  // IndexError if this pair, number i and no padding, is out of range.
  void require_inside(const char* op, i64 i, i64 num_src_rows, i64 num_dst_rows) const {
    if (src_row >= num_src_rows) raise_index_error(op, "pairs[..., 0]", i, src_row, num_src_rows);
    if (dst_row >= num_dst_rows) raise_index_error(op, "pairs[..., 1]", i, dst_row, num_dst_rows);
  }
};

// Pairs of the narrowest type that holds the numbers of their rows.
struct PairList {
  void* data;
  int index_bytes;

  static i64 bytes(i64 count, int index_bytes) { return 2 * count * index_bytes; }
  i64 bytes(i64 count) const { return bytes(count, index_bytes); }
  Pair at(i64 i) const { return Pair(item(2 * i), item(2 * i + 1)); }
  void set(i64 i, i64 src_row, i64 dst_row) const {
    set_item(2 * i, src_row);
    set_item(2 * i + 1, dst_row);
  }
  i64 item(i64 i) const {
    return index_bytes == 4 ? i64(static_cast<int32_t*>(data)[i]) : static_cast<int64_t*>(data)[i];
  }
  void set_item(i64 i, i64 value) const {
    if (index_bytes == 4) {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
    } else {
      static_cast<int64_t*>(data)[i] = value;
    }
  }
};

// SMs that keep the link busy where vectors are narrow.
constexpr i64 kMaxSms = 8;
// SMs of a call that may run beside a model. Of 656-byte rows 2 SMs move 20 GB/s at 1.06 of a
// decode step, 4 move 28 at 1.10 (H200, batch 1).
constexpr i64 kMaxSmsBeside = 2;

// Of an op's index arguments.
struct PairSites {
  explicit PairSites(const char* op)
      : src(fault_site(op, "pairs[..., 0]")), dst(fault_site(op, "pairs[..., 1]")) {}
  const FaultSite src, dst;
};

// A copy between host and device memory.
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
  // Rows come from there, or go there, instead.
  void set_source(const char* rows, i64 stride_bytes, i64 count);
  void set_target(char* rows, i64 stride_bytes, i64 count);
};

// The arguments of an op on pairs.
struct PairArgs : PairCall {
  // Checks everything but slot_map. TypeError or ValueError naming `op` and the argument.
  PairArgs(const char* op, const PairSites& sites, HostSide host_side, AnyView src, AnyView dst,
           AnyView pairs, AnyView num_sms);

  // Checks `slot_map` (None or [num_src_rows], int32 or int64) and puts it into `params`.
  void take_slot_map(AnyView slot_map);

  const Rows& host_rows() const { return host_side == kHostSource ? src : dst; }
  const Rows& device_rows() const { return host_side == kHostSource ? dst : src; }
  bool empty() const { return bytes() == 0; }

  // On CPU tensors: IndexError for the first pair that is out of range.
  void check_pairs() const;

  // On CPU tensors: raises IndexError before anything is written, else copies.
  void run_on_cpu() const;
  // Copies every `step`-th pair from number `first` on.
  void copy_on_cpu(i64 first = 0, i64 step = 1) const;
  // Writes every copied pair to the slot map, if there is one. On CPU tensors.
  void update_slot_map() const;

  // Replaces the host side's address by the GPU's. ValueError if that memory is not pinned.
  void map_host_rows();

  Rows src;
  Rows dst;
  Indices pairs;
  std::optional<Indices> slot_map;
};

// How the pairs of a large call are sorted before its copy.
struct Lists {
  bool search;          // each source row is brought once, repeats are copied in device memory
  bool reuse_resident;  // so are rows that the slot map knows
  bool ordered;         // rows are brought in the order of the host's memory
  FaultSite slot_map_site{};
};

// The kernels of `op`: a PairCopy first.
KernelTable pair_kernels(const char* op);

// Whether a call is so short that it may be spread over the GPU.
bool is_small_call(const PairCall& call);

// Whether every host row starts on a line, or lies inside one. `host_bits`: address and stride.
bool is_line_aligned(u64 host_bits, i64 row_bytes);

// The specialisation for mapped rows; `more_bits`: of further addresses that rows are written to.
Spec pair_spec(const PairCall& call, bool large, u64 more_bits = 0);

// In flight in a large call by default. An SM has 128 KiB of 656-byte rows: 2 SMs saturate an idle
// bus, but beside a GEMM they move 33 GB/s and 3 SMs 47.
constexpr i64 kBytesInFlight = 320 << 10;

// SMs that have so many bytes in flight, at most kMaxSms.
i64 num_sms_for(const LoadedKernels& kernels, i64 bytes_in_flight);

// How many blocks a copy of so many rows is launched on; spec[4] says whether the call is large.
i64 num_copy_blocks(const LaunchScope& scope, const LoadedKernels& kernels, i64 num_rows,
                    i64 num_sms);

// Launches the first of `kernels`: a small call over the whole GPU, a large one on as many blocks
// as the caller says, or as have `bytes_in_flight`. `params`: the call's, or another list of its
// pairs.
void launch_pair_copy(const LaunchScope& scope, const PairCall& call, const LoadedKernels& kernels,
                      const PairCopyParams& params, i64 bytes_in_flight);

constexpr i64 kMaxListedPairs = std::numeric_limits<i32>::max();

// Loads the kernels of a call, with `in_parts` also those of parts of it; before it launches
// anything.
const LoadedKernels& find_pair_kernels(const LaunchScope& scope, const PairCall& call,
                                       KernelTable& table, const Lists& lists,
                                       bool in_parts = false);

// Launches a call: one copy of its pairs, or by its lists.
void launch_pairs(const LaunchScope& scope, const PairCall& call, KernelTable& table,
                  const Lists& lists);

// How rows move: over the link by SMs, by the CPU's cores through pinned chunks, or part of them
// each way at once. kAuto: the fastest.
enum class Method : int { kAuto, kSms, kCpu, kBoth };

struct Way {
  Method method = Method::kAuto;
  i64 num_threads = 0;  // of the CPU, the caller's included; 0: as many as torch
};

// TypeError or ValueError if an argument is wrong, or the call cannot go that way.
Way way_arg(AnyView method, AnyView num_threads, const PairArgs& args, bool reuse_resident = false);

// Runs a call on a GPU: launches it, or has the CPU take part.
void run_pairs(const LaunchScope& scope, PairArgs& args, KernelTable& table, const Lists& lists,
               const Way& way);

// -- pairs in host memory, by the CPU's threads ---------------------------------------------------

// The bytes of an index that holds the call's row numbers.
int narrow_index_bytes(const PairArgs& args);

// Checks pairs [begin, end), and copies them to `list` if it has memory, which begins with pair
// `list_begin`; pairs out of range become padding. Whether there are any of these.
bool copy_pairs(const PairArgs& args, const PairList& list, i64 list_begin, i64 begin, i64 end);

// Copies all pairs of a gather; the host's memory is mapped if SMs take part. Raises IndexError
// before anything is queued; if `args.pairs` changes meanwhile, no other memory is touched. Returns
// once the CPU has read its host rows and the rest is queued on the scope's stream.
void gather_by_cpu(const LaunchScope& scope, const PairArgs& args, KernelTable& table,
                   const Lists& lists, bool with_sms, i64 num_threads);

}  // namespace jitkern
