// Shared by the ops between host and device memory: sorting by host address, checks, the CPU
// implementation, launches.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "common.h"
#include "pairs.h"

namespace jitkern {

// -- sorting by host address ---------------------------------------------------------------------

// The rows that a call moves over the link.
struct HostTraffic {
  i64 num_rows;
  i64 row_bytes;
  i64 span_bytes;  // from the first host row to the last; 0 (no rows, or expanded): not sorted
};

// Whether sorting pays: there are many short rows, and they miss in the link's address translation.
bool is_worth_ordering(const HostTraffic& traffic);

// Whether a call sorts its rows. "sorted": yes; "given": no; "auto" or None: if it pays. Never if
// span_bytes is 0.
bool order_arg(const char* op, AnyView order, const HostTraffic& traffic);

// The default of bytes in flight of a sorted call; at least `unsorted`, those of other calls.
i64 ordered_bytes_in_flight(const HostTraffic& traffic, i64 unsorted);

// Entry points of a sort module: see load_sort() in ops/pairs.py.
enum SortEntry : int { kListEntry, kScanEntry, kPlaceEntry };
KernelTable sort_kernels(const char* name, std::vector<const char*> names);

// The regions of a span of host memory. Its pointers are null.
Regions cut_regions(i64 span_bytes);

// The entries of a hash table of source rows: a power of two, at least 2 * num_pairs.
i64 table_size_for(i64 num_pairs);

// Launches one thread per row.
template <class Params>
void launch_list(const LaunchScope& scope, const Kernel& kernel, i64 num_rows,
                 const Params& params) {
  scope.launch(kernel, ceil_div(num_rows, kernel.num_threads), params);
}

// Launches the sort described at Regions.
template <class Params>
void launch_sort(const LaunchScope& scope, const LoadedKernels& kernels, i64 num_rows,
                 const Params& params) {
  launch_list(scope, kernels.entries[kListEntry], num_rows, params);
  scope.launch(kernels.entries[kScanEntry], 1, params.regions);
  launch_list(scope, kernels.entries[kPlaceEntry], num_rows, params);
}

// A call's scratch memory: 16-byte aligned pieces of one allocation.
class Scratch {
 public:
  // allocate_on() sets `pointer`, unless `bytes` is 0.
  template <class T>
  void add(T*& pointer, i64 bytes) {
    if (bytes > 0) pieces_.emplace_back(reinterpret_cast<void**>(&pointer), bytes_);
    bytes_ += ceil_div(bytes, 16) * 16;
  }
  i64 bytes() const { return bytes_; }
  // Allocates from torch's caching allocator.
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

constexpr const char* kSrcArg = "pairs[..., 0]";
constexpr const char* kDstArg = "pairs[..., 1]";

// A copy of a pair: another thread may write the list.
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
  // IndexError if this pair, number i, is out of range. It must not be padding.
  void require_inside(const char* op, i64 i, i64 num_src_rows, i64 num_dst_rows,
                      const char* src_arg = kSrcArg, const char* dst_arg = kDstArg) const {
    if (src_row >= num_src_rows) raise_index_error(op, src_arg, i, src_row, num_src_rows);
    if (dst_row >= num_dst_rows) raise_index_error(op, dst_arg, i, dst_row, num_dst_rows);
  }
};

// A list of pairs, or of single rows, as int32 or int64.
struct PairList {
  void* data;
  int index_bytes;

  static i64 bytes(i64 count, int index_bytes) { return 2 * count * index_bytes; }
  i64 bytes(i64 count) const { return bytes(count, index_bytes); }
  void set(i64 i, i64 src_row, i64 dst_row) const {
    set_item(2 * i, src_row);
    set_item(2 * i + 1, dst_row);
  }
  void set_item(i64 i, i64 value) const {
    if (index_bytes == 4) {
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(value);
    } else {
      static_cast<int64_t*>(data)[i] = value;
    }
  }
};

// The default limit of SMs of a large call. Narrow vectors need all 8 to fill the link.
constexpr i64 kMaxSms = 8;
// The limit with method "auto", so that a concurrent model is slowed little. 2 SMs move 20 GB/s of
// 656-byte rows and a decode step takes 1.06 times as long; 4 SMs 28 and 1.10 (H200, batch 1).
constexpr i64 kMaxSmsBeside = 2;

// The fault sites of `pairs`.
struct PairSites {
  explicit PairSites(const char* op, const char* src_arg = kSrcArg, const char* dst_arg = kDstArg)
      : src(fault_site(op, src_arg)), dst(fault_site(op, dst_arg)) {}
  const FaultSite src, dst;
};

// How a call lists its pairs before the copy: see ListParams.
struct Lists {
  bool search = false;   // each source row crosses the link once, repeats are copied on the GPU
  bool ordered = false;  // rows are sorted by host address
};

// A copy by pairs: the checked arguments of an op.
struct PairArgs {
  // TypeError or ValueError if an argument is wrong. Does not read the pairs.
  PairArgs(const char* op, const PairSites& sites, HostSide host_side, AnyView src, AnyView dst,
           AnyView pairs, AnyView num_sms);

  // Checks `slot_map`, None or [num_src_rows], and adds it to `params`.
  void take_slot_map(AnyView slot_map);

  // Checks `method` and sets max_sms: kMaxSmsBeside for "auto", kMaxSms for "sm".
  void take_method(AnyView method);

  const Rows& host_rows() const { return host_side == kHostSource ? src : dst; }
  const Rows& device_rows() const { return host_side == kHostSource ? dst : src; }
  DLDevice device() const { return device_rows().dl->device; }
  i64 bytes() const { return row_bytes * params.num_pairs; }
  bool empty() const { return bytes() == 0; }
  HostTraffic traffic() const { return {params.num_pairs, row_bytes, span_bytes}; }

  // IndexError for the first pair that is out of range. `pairs` must be on the CPU.
  void check_pairs() const;

  // CPU tensors only. run_on_cpu() raises IndexError before anything is written. copy_on_cpu()
  // copies pairs [begin, end). update_slot_map() does nothing without a slot map.
  void run_on_cpu() const;
  void copy_on_cpu(i64 begin, i64 end) const;
  void update_slot_map() const;

  // Replaces the host rows' address by the GPU's. ValueError if they are not pinned.
  void map_host_rows();

  HostSide host_side;
  Rows src;
  Rows dst;
  Indices pairs;
  std::optional<Indices> slot_map{};
  PairCopyParams params{};
  i64 row_bytes;
  i64 span_bytes;  // see HostTraffic
  int index_bytes;
  std::optional<i64> num_sms;  // the caller's choice
  i64 max_sms = kMaxSms;       // limit without `num_sms`
  Lists lists{};
  KernelTable* table = nullptr;
};

// The kernels of `op`; the first entry is a PairCopy.
KernelTable pair_kernels(const char* op);

// Whether a call is so short (40 us) that it uses the whole GPU. False with num_sms.
bool is_small_call(const PairArgs& call);

// Whether every host row starts on a line or lies inside one. `host_bits`: address | stride.
bool is_line_aligned(u64 host_bits, i64 row_bytes);

// The template arguments of the copy. `more_bits`: the addresses of further destinations, or-ed.
Spec pair_spec(const PairArgs& call, bool large, u64 more_bits = 0);

// Bytes in flight in an unsorted large call, unless max_sms is lower. One SM has 128 KiB of
// 656-byte rows in flight. 2 SMs saturate an idle link, but beside a GEMM they move 33 GB/s, and 3
// SMs 47.
constexpr i64 kBytesInFlight = 320 << 10;

// The number of SMs that have `bytes_in_flight`, at most kMaxSms.
i64 num_sms_for(const LoadedKernels& kernels, i64 bytes_in_flight);

// The number of blocks of a copy. `num_sms` limits large calls only.
i64 num_copy_blocks(const LaunchScope& scope, const LoadedKernels& kernels, i64 num_rows,
                    i64 num_sms);

// Launches the copy: a small one on the whole GPU; a large one on num_sms blocks, by default enough
// for `bytes_in_flight`, at most max_sms. `params`: those of the call, or with another list of
// pairs.
void launch_pair_copy(const LaunchScope& scope, const PairArgs& call, const LoadedKernels& kernels,
                      const PairCopyParams& params, i64 bytes_in_flight);

constexpr i64 kMaxListedPairs = std::numeric_limits<i32>::max();

// Loads the kernels of a call. Call it before any launch, as it may compile.
const LoadedKernels& find_pair_kernels(const LaunchScope& scope, const PairArgs& call);

// Launches a call: one copy, or a sort and the copies of its lists.
void launch_pairs(const LaunchScope& scope, const PairArgs& call);

// Runs a checked call on a GPU; pairs may be on the CPU.
void run_pairs(const LaunchScope& scope, PairArgs& args);

}  // namespace jitkern
