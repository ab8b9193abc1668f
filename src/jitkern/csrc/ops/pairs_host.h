// What the ops on pairs of rows (h2d_gather, d2h_scatter) share on the host: checks of their
// arguments, the CPU implementation, and the launch of a pair copy.
#pragma once

#include <jitkern/launch.h>

#include <optional>

#include "pairs.h"

namespace jitkern {

// A pair, read once.
struct Pair {
  i64 src_row;
  i64 dst_row;

  template <class IndexAt>
  Pair(const IndexAt& index_at, i64 i) : src_row(index_at(2 * i)), dst_row(index_at(2 * i + 1)) {}

  bool is_padding() const { return src_row < 0 || dst_row < 0; }
  // Neither padding nor out of range.
  bool is_inside(const PairCopyParams& p) const {
    return is_below(src_row, p.num_src_rows) && is_below(dst_row, p.num_dst_rows);
  }
};

struct PairArgs {
  // Checks everything but slot_map. TypeError or ValueError naming `op` and the argument.
  PairArgs(const char* op, HostSide host_side, AnyView src, AnyView dst, AnyView pairs,
           AnyView num_sms);

  // Checks `slot_map` (None or [num_src_rows], int32 or int64) and puts it into `params`.
  void take_slot_map(AnyView slot_map);

  const Rows& host() const { return host_side == kHostSource ? src : dst; }
  const Rows& device() const { return host_side == kHostSource ? dst : src; }
  i64 bytes() const { return src.row_bytes * params.num_pairs; }
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

  HostSide host_side;
  Rows src;
  Rows dst;
  Indices pairs;
  std::optional<Indices> slot_map;
  bool sms_given;
  i64 num_sms;
  PairCopyParams params;
};

// The kernels of `op`, each a PairCopy and what else its Python names.
KernelTable pair_kernels(const char* op);

// Whether a call is over in microseconds and may be spread over the GPU.
bool is_small_call(const PairArgs& args);

// The specialisation for these rows, once they are mapped.
Spec pair_spec(const PairArgs& args, bool large);

// Launches the first of `kernels`: for a small call over the whole GPU, for a large one on
// args.num_sms blocks. `params` are args.params, or another list of their pairs.
void launch_pair_copy(const LaunchScope& scope, const PairArgs& args, const LoadedKernels& kernels,
                      const PairCopyParams& params);

}  // namespace jitkern
