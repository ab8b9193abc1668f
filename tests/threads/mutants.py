"""Uploads made wrong, one at a time, and the case of `uploads` that sees it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from threads.program import ASAN


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
    # Pairs that the GPU has not copied yet are overwritten.
    Mutant("uploads", "ops/common.h", "uploads.mark(scope.stream());"),
    # A row number that another thread has written is not checked.
    Mutant(
        *("rewritten_late", "ops/pairs.cc"),
        "list.set(i, inside ? pair.src_row : -1, inside ? pair.dst_row : -1);",
        "list.set(i, pair.src_row, pair.dst_row);",
    ),
)
