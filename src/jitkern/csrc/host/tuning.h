// The figures of a machine that "auto" uses: an H200's, or those that `jitkern calibrate` has
// measured.
#pragma once

#include <jitkern/types.h>

namespace jitkern {

// Names and defaults are in tuning.cc.
enum Figure : int {
  kReachBytes,
  kSmallCallBytes,
  kSmPieceBytes,
  kSmPieceBytesToHost,
  kPacedToHostMbS,
  kNumFigures,
};

// A device's figure; the default for ordinal -1.
i64 figure(int ordinal, Figure which);

}  // namespace jitkern
