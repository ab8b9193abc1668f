// Copies between host and device memory whose row numbers are on the host: its cores can then
// gather and scatter the host's rows themselves, which the copy engine carries in whole chunks.
#pragma once

#include "pairs_host.h"

namespace jitkern {

// The ways that rows may take: read and written over the link by SMs, by the CPU's cores through
// pinned chunks, or part of them each way at once. kAuto: the fastest.
enum class Method { kAuto, kSms, kCpu, kBoth };

struct Way {
  Method method = Method::kAuto;
  i64 num_threads = 0;  // of the CPU, the caller's included; 0: as many as torch
};

// The way that the arguments ask for; none is the default of each. TypeError or ValueError if one
// is wrong, or the call cannot go that way.
Way way_arg(AnyView method, AnyView num_threads, const PairArgs& args, bool reuse_resident = false);

// Both copy all pairs of the call, in host memory that SMs know already where they take part. They
// raise IndexError before anything is queued; where `args.pairs` changes under way no other memory
// is touched. The first returns once all host rows that the CPU reads are read and the rest is
// queued on the scope's stream, the second once all is written.
void gather_by_cpu(const LaunchScope& scope, const PairArgs& args, KernelTable& table,
                   const Lists& lists, bool with_sms, i64 num_threads);
void scatter_by_cpu(const LaunchScope& scope, const PairArgs& args, KernelTable& table,
                    i64 num_threads);

// Runs a call on a GPU: launches it, or has the CPU take part.
void run_pairs(const LaunchScope& scope, PairArgs& args, KernelTable& table, const Lists& lists,
               const Way& way);

}  // namespace jitkern
