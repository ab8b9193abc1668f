// Figures of a machine by which "auto" decides: those of an H200, or what `jitkern calibrate` has
// measured here.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

// Names and defaults are in tuning.cc.
enum Figure : int {
  kReachBytes,
  kSmallCallBytes,
  kPageMissBytes,
  kBothThreads,
  kCpuScatterSpanBytes,
  kCpuScatterThreads,
  kSmPieceBytes,
  kSmPieceBytesToHost,
  kPacedToHostMbS,
  kOneShotBytes,
  kNumFigures,
};

// Of the device, which is asked for once; -1: of none.
i64 figure(int ordinal, Figure which);

}  // namespace jitkern
