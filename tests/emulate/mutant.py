"""Kernels made wrong, one line of source at a time: MUTANTS of the other modules here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from emulate.runner import Sweep

# Vectors of 1, 4 and 8 bytes, both index types, rows for part of a warp and rows cut into splits.
ROWS = ("SWEEP_ROWS=3,40,300,301",)

ALL_CHUNKS = "for (int c = 0; c < Rows::kChunks; ++c) {"


@dataclass(frozen=True)
class Mutant:
    """``old`` in ``file`` becomes ``new``, at its occurrence number ``nth`` of ``of``."""

    mistake: str
    sweep: Sweep
    file: str
    old: str
    new: str
    nth: int = 0
    of: int = 1

    def apply(self, csrc: Path) -> None:
        path = csrc / self.file
        parts = path.read_text().split(self.old)
        found = len(parts) - 1
        assert found == self.of, f"{self.file}: {found} of {self.old!r}, expected {self.of}"
        head = self.old.join(parts[: self.nth + 1])
        path.write_text(head + self.new + self.old.join(parts[self.nth + 1 :]))


def mutants_of(sweep: Sweep, file: str, *changes: tuple[str | int, ...]) -> Iterable[Mutant]:
    for mistake, old, new, *occurrence in changes:
        yield Mutant(str(mistake), sweep, file, str(old), str(new), *map(int, occurrence))
