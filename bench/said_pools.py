"""Figures of pools of real size, in ``docs/performance.md``."""

from __future__ import annotations

from collections.abc import Iterator

from bench.figures import Bench, Said, said, span
from bench.said_names import (
    ARGSORT,
    FULL,
    GIVEN,
    LINES,
    POOLS,
    WAYS,
    misses,
    uniform,
)
from bench.tables import read


def pages(rows: int, gib: float) -> float:
    """Return how many pages of 64 KiB of a pool so many random rows lie in."""
    count = gib * 2**14
    return count * (1 - (1 - 1 / count) ** rows)


def pools() -> Iterator[Said]:
    """What pools of real size do."""
    gather = "gather of 262144 rows of 656 B, pool of {} GiB"
    at = {gib: uniform(262144, 656, gib) for gib in (0.2, 1, 4, 8, 16, 32, 64)}
    yield said(
        "the CPU's cores help: {} GB/s out of 16 GiB and {} out of 64",
        *(WAYS.gb_s(gather.format(gib), "auto") for gib in (16, 64)),
    )
    two = Bench("pools", "pools_96_gib")
    yield said(
        "A pool of 96 GiB beside two GPUs, in order: {}, {} of a small one there"
        " (`bench/results/pools_96_gib.json`).",
        two.gb_s(uniform(262144, 656, 96)),
        two.gb_s(uniform(262144, 656, 96)) / two.gb_s(at[0.2]),
    )
    tied = [POOLS.time(at[gib], ARGSORT, "jitkern") for gib in (4, 8)]
    yield said(
        "From 16 GiB on jitkern is {} to {} times as fast as `torch.argsort` before a gather, as"
        " engines sort. At 4 and 8 GiB the two tie, at 0.2 and 1 GiB the kernel of nvcc whose lanes"
        " start at the line is {:.1f} and {:.1f} % faster than ours.",
        *span(POOLS.time(at[gib], ARGSORT, "jitkern") for gib in (16, 32, 64)),
        *(100 * POOLS.time(at[gib], "jitkern", LINES) - 100 for gib in (0.2, 1)),
        holds=all(0.99 < ratio < 1.01 for ratio in tied),
    )
    yield said(
        "32,768 rows arrive at {} GB/s where lanes start at the line, rows of 256 bytes at {} in a"
        " full grid that loads before it stores.",
        POOLS.gb_s(uniform(32768, 656, 0.2), LINES),
        POOLS.gb_s(uniform(524288, 256, 0.2), FULL),
    )
    yield said(
        "Out of 16 GiB, 8,192 rows arrive at {} GB/s, as they come at {}. What is not sorted runs"
        ' as it comes: 2,048 rows ({} GB/s, and {} with `order="given"`, which does the same and'
        " comes next in turn, on the same rows) and rows of 2,624 bytes ({}).",
        *(POOLS.gb_s(uniform(8192, 656, 16), impl) for impl in ("jitkern", GIVEN)),
        *(POOLS.gb_s(uniform(2048, 656, 16), impl) for impl in ("jitkern", GIVEN)),
        POOLS.gb_s(uniform(65536, 2624, 16)),
    )
    ordered = [(262144, 656, gib) for gib in (16, 32, 64)] + [(8192, 656, 16)]
    ordered += [(32768, 656, gib) for gib in (16, 64)]
    ordered += [(524288, size, gib) for size in (8, 256) for gib in (16, 64)]
    yield said(
        "rows as they come miss in the translation one by one and take, in large calls, {:.0f} to"
        " {:.0f} ns each. In the order of the pool each page of 64 KiB still misses once, {:.0f} to"
        " {:.0f} ns for every page that is touched.",
        *misses(),
        *span(POOLS.us(uniform(*c)) * 1e3 / pages(c[0], c[2]) for c in ordered),
    )
    few = {gib: POOLS.gb_s(uniform(32768, 656, gib)) for gib in (0.2, 16, 64)}
    yield said(
        "so ordered they stay at {} and {} of a small pool.", few[16] / few[0.2], few[64] / few[0.2]
    )
    touched = read("touch_ahead")["rows"]
    call = ("pool_gib", "rows", "row_bytes", "num_sms")
    plain = {tuple(r[k] for k in call): r["us"] for r in touched if not r["touch_blocks"]}
    gains = span(plain[tuple(row[k] for k in call)] / row["us"] for row in touched)
    yield said(
        "by a load or a prefetch, gain at most {:.1f} %, and where the touching does not keep ahead"
        " the call takes about twice as long (`bench/results/touch_ahead.json`).",
        100 * gains[1] - 100,
        holds=1.8 < 1 / gains[0] < 2.3,
    )

    triton = "triton, rows where they lie"
    table = "table of {} rows of 256 B, pool of {} GiB, {}"
    zipf = table.format(24576, 64, "Zipf(1.1)")
    yield said(
        "Triton wins for distinct rows of a small table, and ties for 24,576 rows by Zipf's law"
        " out of 64 GiB. 24 and 1,536 rows of a table of 16 GiB take {} and {} us, in Triton {}"
        " and {}.",
        *POOLS.each([table.format(n, 16, "uniform") for n in (24, 1536)], "jitkern"),
        *POOLS.each([table.format(n, 16, "uniform") for n in (24, 1536)], triton),
        holds=0.99 < POOLS.time(zipf, "jitkern", triton) < 1.01
        and all(
            POOLS.time(table.format(n, 0.2, "uniform"), "jitkern", triton) > 1
            for n in (24576, 524288)
        ),
    )
    tables = "tables of 24576 rows of 256 B and 8 B, pool of {} GiB, uniform"
    pair, after = [tables.format(gib) for gib in (4, 16)], "jitkern, one after the other"
    yield said(
        "24,576 distinct rows take {} us at 4 GiB and {} at 16, and {} and {} one table after the"
        " other, which is {:.1f} and {:.1f} % faster.",
        *POOLS.each(pair, "jitkern"),
        *POOLS.each(pair, after),
        *(100 * POOLS.time(case, "jitkern", after) - 100 for case in pair),
    )
