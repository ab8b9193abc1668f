// What the ops on pairs of rows (h2d_gather, d2h_scatter) share on the host: checks of their
// arguments, the CPU implementation, and the launch of a pair copy.
#pragma once

#include <jitkern/launch.h>
#include <jitkern/pair_copy.h>

namespace jitkern {

constexpr i64 kSmallCallBytes = 2 << 20;  // 40 us of the bus

struct PairArgs {
  // Checks everything but slot_map. TypeError or ValueError naming `op` and the argument.
  PairArgs(const char* op, HostSide host_side, AnyView src, AnyView dst, AnyView pairs,
           AnyView num_sms);

  // Checks `slot_map` (None or [num_src_rows], int32 or int64) and puts it into `params`.
  void take_slot_map(AnyView slot_map);

  const Tensor& host() const { return host_side == kHostSource ? src : dst; }
  const Tensor& device() const { return host_side == kHostSource ? dst : src; }
  i64 bytes() const { return row_bytes * params.num_pairs; }
  bool empty() const { return bytes() == 0; }
  // A call that is over in microseconds and may be spread over the GPU.
  bool is_small_call() const { return !sms_given && bytes() <= kSmallCallBytes; }

  // On CPU tensors: IndexError for the first pair that is out of range.
  void check_pairs_on_cpu() const;

  // On CPU tensors: raises IndexError before anything is written, else copies.
  void run_on_cpu() const;

  // Replaces the host side's address by the one that the GPU uses. ValueError with the cure where
  // that memory is not pinned.
  void map_host_rows();

  HostSide host_side;
  Tensor src;
  Tensor dst;
  Tensor pairs_tensor;
  Indices pairs;
  Rows src_rows;
  Rows dst_rows;
  i64 row_bytes;
  bool sms_given;
  i64 num_sms;
  PairCopyParams params;
};

// The part of a specialisation that follows from alignment, once the rows are mapped.
struct PairLayout {
  explicit PairLayout(const PairArgs& args);
  int vec_bytes;
  bool line_aligned;
};

// Launches `kernel`, a PairCopy of `in_flight`: a small call over the whole GPU, a large one on
// args.num_sms blocks.
void launch_pair_copy(const LaunchScope& scope, const PairArgs& args, const PairLayout& layout,
                      const Kernel& kernel, int in_flight);

}  // namespace jitkern
