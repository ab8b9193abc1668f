"""Ways to get rows through the CPU wrong, one at a time, and the case of `staging` that sees it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from threads.program import ASAN, TSAN

BY_CPU = "ops/pairs_by_cpu.cc"
STAGE = "[&](const auto index_at) { stage_rows(index_at, number, work, begin, end); });"


@dataclass(frozen=True)
class Mutant:
    """``old``, which is once in ``file``, becomes ``new``."""

    case: str
    file: str
    old: str
    new: str = ""
    flags: tuple[str, ...] = ASAN

    def apply(self, csrc: Path) -> None:
        text = (path := csrc / self.file).read_text()
        assert text.count(self.old) == 1, f"{path.name}: {text.count(self.old)} of {self.old!r}"
        path.write_text(text.replace(self.old, self.new))


MUTANTS = (
    # A chunk is filled before the GPU is done with it.
    Mutant("chunks", BY_CPU, "if (!is_done(chunks_[number].done)) return false;"),
    Mutant("first_use", "host/staging.cc", "wait_for(copies, start);"),
    # Rows are placed before they have arrived, or before the stream comes to the call.
    Mutant("in_a_row", BY_CPU, "wait_for(staging_.places, chunk.copied);"),
    Mutant("in_order", "host/staging.cc", "wait_for(staging_.places, staging_.start);"),
    # The stream does not wait for the last rows.
    Mutant("ways", BY_CPU, "wait_for(scope_.stream(), staging_.end);"),
    # A part counts as done before it is copied.
    Mutant(
        *("ways", BY_CPU, "    args_.pairs.with_index(\n        " + STAGE),
        f"work.num_left.fetch_sub(1);\n    args_.pairs.with_index(\n{STAGE}\n    return;",
        flags=TSAN,
    ),
    # Pairs that SMs read are overwritten.
    Mutant("uploads", "ops/common.h", "staging.uploads.mark(scope.stream());"),
    # A row that another thread wrote is believed.
    Mutant(
        *("rewritten_late", BY_CPU, "const bool inside = pair.is_inside(p);"),
        "const bool inside = !pair.is_padding();",
    ),
    # Blocks are queued before all pairs are checked.
    Mutant("out_of_range", BY_CPU, "if (num_pairs > kBlockPairs) {", "if (false) {"),
    # What a failed call queued is forgotten.
    Mutant("failing", "host/staging.cc", "if (!has_begun_) return;", "return;"),
    # Calls of two devices wait for each other.
    Mutant(
        *("apart", "host/workers.cc", "pool_ = take_pool();"),
        "static auto* const only = new ThreadPool(); while (only->work != nullptr) sched_yield(); "
        "pool_ = only;",
    ),
    # Threads do not sleep.
    Mutant(
        *("asleep", "host/workers.cc", "if (waited_ns_ < kSpinNs) return pause_core();"),
        "return pause_core();",
    ),
)
