"""Ways to get a SlotPipeline's order wrong, one at a time: a wait or a record less."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from threads.mutants import replace_once

from jitkern.compilers.sources import CSRC

SLOTS = "offload/slots.cc"
WAITS = "if (is_known && chain.lane != &lane && device_ != nullptr) wait_for(lane.stream"
COMPUTE, LOADS, STORES = (f"&lanes_[{access}]" for access in ("kCompute", "kLoad", "kStore"))


@dataclass(frozen=True)
class Mutant:
    """``old``, which is once in ``file``, becomes ``new``."""

    mistake: str
    old: str
    new: str = ""
    file: str = SLOTS

    def apply(self, csrc: Path) -> Path:
        """Make a copy of the sources there, with the mistake; return it."""
        shutil.copytree(CSRC, csrc)
        replace_once(csrc / self.file, self.old, self.new)
        return csrc


def without_wait(mistake: str, access: str, lane: str) -> Mutant:
    condition, call = WAITS.rsplit(") ", 1)
    left_out = f"{condition} && !(access == {access} && chain.lane == {lane})) {call}"
    return Mutant(mistake, WAITS, left_out)


MUTANTS = (
    without_wait("a load overwrites a slot that is still computed on", "kLoad", COMPUTE),
    without_wait("a compute begins before its block is there", "kCompute", LOADS),
    without_wait("a compute overwrites a slot that is still stored", "kCompute", STORES),
    without_wait("a store begins before the compute is over", "kStore", COMPUTE),
    Mutant("a run begins before the caller's work is done", "wait_for(lane.stream, forked_);"),
    Mutant(
        "the caller goes on before the run is over",
        "note(driver.cuStreamWaitEvent(caller_, lane.joined, 0));",
    ),
    Mutant(
        "the caller waits for the compute alone",
        "|| lane.stream == caller_) continue;",
        "|| lane.stream != lanes_[kCompute].stream) continue;",
    ),
    Mutant(
        "transfers do not wait for what fork() is called behind",
        "lanes_[kLoad].is_forked = lanes_[kStore].is_forked = false;",
    ),
    Mutant("a new slot has no owner before", "end_use(slots_[index].eager, lanes_[kCompute]);"),
    Mutant("what a run leaves open has no end", "end_use(*chain, lane);"),
    Mutant(
        "a capture waits for what came before it",
        "Chain& chain = is_capturing_ ? slot.captured : slot.eager;",
        "Chain& chain = slot.eager;",
    ),
    Mutant(
        "a capture waits for the one before it",
        *("(!is_capturing_ || chain.session == session_)", "true"),
    ),
)
