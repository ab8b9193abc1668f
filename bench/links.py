"""What the links allow of `peer_gather`, by figures of a run: `python -m bench.links results.json`.

Each link carries a part of the rows, and all GPUs get all of them: as many as all links bring out
of the host together. Over NVLink come all but a GPU's own part. Where figures lack, nothing is
said. What is measured may be more where the pool is large: of `peer_gather` each link reads a part
of it, and misses less in its address translation than the links by whose figures this goes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from bench.cases import comm
from bench.goals import Figures
from bench.peer_rows import ALONE, EACH, OURS, POOL_GIB, ROWS, rows_case
from jitkern.bench import report

SIZES = (2, 4, 8)


def predicted(f: Figures, size: int, gib: float) -> tuple[float, float] | None:
    """Return the least and the most GB/s that each of so many GPUs may get.

    They are one where so many links were timed at once. Else the least is what fewer links brought,
    and the most what all would if each did as alone.
    """
    alone = max(_rows_rate(f, ALONE, n, gib) for n in SIZES)
    at_once = {n: n * _rows_rate(f, EACH, n, gib) for n in SIZES if n <= size}
    # What each GPU gets by NCCL; through a switch the same of any number.
    nvlink = max(_nvlink_rate(f, n) for n in SIZES)
    if not (alone and nvlink and any(at_once.values())):
        return None
    most = at_once[size] or size * alone
    bound = nvlink * size / (size - 1)
    least = at_once[size] or max(at_once.values())
    return min(bound, least), min(bound, most)


def lines(f: Figures) -> Iterator[str]:
    """Say it of each number of GPUs and size of pool, beside what was measured."""
    for size in SIZES:
        for gib in POOL_GIB:
            found, measured = predicted(f, size, gib), _rows_rate(f, OURS, size, gib)
            if found is None:
                continue
            least, most = (f"{rate:.1f}" for rate in found)
            text = least if least == most else f"{least} to {most}"
            got = f"{measured:.1f} measured" if measured else "not measured"
            yield f"{size} GPUs, a pool of {gib:g} GiB: {text} GB/s a GPU predicted, {got}"


def _rows_rate(f: Figures, impl: str, size: int, gib: float) -> float:
    return _rate(f, "peer", rows_case("peer_gather", ROWS, gib, f"{size} GPUs"), impl)


def _nvlink_rate(f: Figures, size: int) -> float:
    return _rate(f, "comm", comm.sum_case(comm.BYTES[-1], f"{size} GPUs"), comm.TORCH)


def _rate(f: Figures, op: str, case: str, impl: str) -> float:
    """Return GB/s, 0.0 where there is no figure."""
    row = f.all(op, case).get(impl)
    return (row.gb_s or 0.0) if row else 0.0


if __name__ == "__main__":
    rows = report.rows_of(report.read(Path(sys.argv[1])))
    print("\n".join(lines(Figures(rows))) or "no figures of peer and comm on several GPUs")
