"""What the ops are meant to reach, and what a run got: ratios of figures of that run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from bench.cases import first_call
from bench.cases.checks import CHECKED, UNCHECKED
from bench.cases.h2d_gather import TWO_SMS
from jitkern.bench import Row

NVCC = "nvcc, mini-sglang style"
MEMCPY = "cudaMemcpyAsync, contiguous"


@dataclass(frozen=True)
class Goal:
    """One line: a figure, what it should be, what it is."""

    figure: str
    wanted: str
    got: str
    met: bool


class Figures:
    """Rows by benchmark, case and implementation."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = [row for row in rows if row.median_us]

    def cases(self, op: str) -> list[str]:
        return list(dict.fromkeys(row.case for row in self.rows if row.op == op))

    def all(self, op: str, case: str) -> dict[str, Row]:
        return {row.impl: row for row in self.rows if row.op == op and row.case == case}

    def us(self, op: str, case: str, impl: str) -> float | None:
        row = self.all(op, case).get(impl)
        return row.median_us if row else None

    def speed(self, op: str, case: str, impl: str, other: str) -> float | None:
        """Bandwidth of `impl` over that of `other`; above 1 is faster."""
        rows = self.all(op, case)
        one, two = rows.get(impl), rows.get(other)
        return one.gb_s / two.gb_s if one and two and one.gb_s and two.gb_s else None


def reached(rows: Sequence[Row]) -> list[Goal]:
    """Return a line for each goal that the rows have figures for."""
    figures = Figures(rows)
    return [
        *_store(figures),
        *_index(figures),
        *_checks(figures),
        *_host(figures),
        *_h2d(figures),
        *_d2h(figures),
        *_gemm(figures),
        *_compare_key(figures),
        *_cpu(figures),
        *_first_call(figures),
    ]


def goals_table(goals: Sequence[Goal]) -> Table:
    """Return the goals this run has figures for, with what it got."""
    made = Table(title="goals", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("figure", "goal", "got", ""):
        made.add_column(column, justify="right" if column in ("goal", "got") else "left")
    for goal in goals:
        style = "green" if goal.met else "red"
        made.add_row(
            goal.figure, goal.wanted, goal.got, "met" if goal.met else "short", style=style
        )
    return made


def recorded(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the goals as they go into the JSON."""
    return [asdict(goal) for goal in reached(rows)]


def _at_least(figure: str, got: float | None, wanted: float, unit: str = "x") -> Iterator[Goal]:
    if got is not None:
        yield Goal(figure, f">= {wanted} {unit}", f"{got:.3f} {unit}", got >= wanted)


def _at_most(figure: str, got: float | None, wanted: float, unit: str = "x") -> Iterator[Goal]:
    if got is not None:
        yield Goal(figure, f"<= {wanted} {unit}", f"{got:.3f} {unit}", got <= wanted)


def _store(f: Figures) -> Iterator[Goal]:
    for row_bytes, share in ((256, 0.97), (1024, 0.97), (2048, 0.97), (656, 0.93)):
        case = f"131072 rows of {row_bytes} B"
        name = f"store, {case}"
        for other, wanted in (
            ("copy kernel, same bytes", share),
            (NVCC, 1.0),
            ("torch cache[idx] = x, twice", 4.0),
        ):
            yield from _at_least(
                f"{name}: of {other}", f.speed("store", case, "jitkern", other), wanted
            )
    for case in f.cases("store"):
        ours, floor = f.us("store", case, "jitkern"), f.us("store", case, "empty kernel")
        if ours is None or floor is None:
            continue  # the empty kernel runs beside small calls only
        yield from _at_most(f"store, {case}: above the empty kernel", ours - floor, 0.3, "us")
        yield from _at_least(
            f"store, {case}: of {NVCC}", f.speed("store", case, "jitkern", NVCC), 1.0
        )


def _index(f: Figures) -> Iterator[Goal]:
    for case in f.cases("index"):
        if not case.startswith("65536 "):
            continue
        for other, wanted in (
            ("copy kernel", 0.97),
            ("torch index_select(out=)", 1.05),
            ("torch F.embedding", 1.05),
        ):
            got = f.speed("index", case, "jitkern", other)
            yield from _at_least(f"indexing, {case}: of {other}", got, wanted)


def _checks(f: Figures) -> Iterator[Goal]:
    for case in f.cases("checks"):
        checked, bare = (f.us("checks", case, impl) for impl in (CHECKED, UNCHECKED))
        if checked is None or bare is None:
            continue
        name = f"bounds checks of store, {case}"
        if case.startswith("131072 "):
            yield from _at_most(f"{name}: time", checked / bare, 1.01)
        else:
            yield from _at_most(f"{name}: added", checked - bare, 0.1, "us")


def _host(f: Figures) -> Iterator[Goal]:
    rows = f.all("host_overhead", "store_cache, 1 row of 656 B")
    floors = [r.median_us for r in rows.values() if r.role == "floor" and r.median_us]
    peers = [r.median_us for r in rows.values() if r.role == "peer" and r.median_us]
    ours = rows.get("jitkern")
    if ours and ours.median_us and len(floors) == 2:
        name = "host time of store_cache: of a bare launch + a no-op FFI call"
        yield from _at_most(name, ours.median_us / sum(floors), 1.15)
        yield from _at_most(
            "host time of store_cache: of torch's two", ours.median_us / min(peers), 0.333
        )


def _h2d(f: Figures) -> Iterator[Goal]:
    op, two = "h2d_gather", TWO_SMS
    case = "262144 rows of 656 B, distinct"
    aligned = "6 line-aligned, 2 SMs"
    yield from _at_least(f"h2d, {case}, 2 SMs: of {aligned}", f.speed(op, case, two, aligned), 0.99)
    yield from _at_least(f"h2d, {case}, 2 SMs: of {MEMCPY}", f.speed(op, case, two, MEMCPY), 0.87)
    cost = f.speed(op, case, "jitkern, dedup=False", "jitkern, dedup=True")
    yield from _at_most(f"h2d, {case}: dedup=True, time of dedup=False", cost, 1.02)
    case = "262144 rows of 656 B, repeats"
    yield from _at_least(f"h2d, {case}: of {MEMCPY}", f.speed(op, case, "jitkern", MEMCPY), 1.25)
    for case in f.cases(op):
        rows = f.all(op, case)
        ours = rows.get("jitkern")
        if ours is None or not ours.median_us or not ours.gb_s:
            continue  # it failed, and its row says why
        rungs = [r.median_us for r in rows.values() if r.role == "peer" and r.median_us]
        if rungs and ours.bytes_moved and ours.bytes_moved <= 2048 * 656:
            name = f"h2d, {case}: time of the best rung"
            yield from _at_most(name, ours.median_us / min(rungs), 1.2)
        sm_path = [r.gb_s for r in rows.values() if r.role == "sm ceiling" and r.gb_s]
        if sm_path and ours.params["sources"] == "distinct":
            limit = max(sm_path) * ours.params.get("line_efficiency", 1.0)
            name = f"h2d, {case}: of contiguous zero-copy x line efficiency"
            yield from _at_least(name, ours.gb_s / limit, 0.95)


def _d2h(f: Figures) -> Iterator[Goal]:
    case = "262144 rows of 656 B, distinct"
    got = f.speed("d2h_scatter", case, "jitkern", MEMCPY)
    yield from _at_least(f"d2h, {case}: of {MEMCPY}", got, 0.85)


def _gemm(f: Figures) -> Iterator[Goal]:
    rows = f.all("gemm_beside", "GEMM beside a gather")
    ours, engine = rows.get("jitkern"), rows.get(MEMCPY)
    if ours is None or engine is None:
        return
    more = ours.params["gemm_slowdown"] - engine.params["gemm_slowdown"]
    yield from _at_most("GEMM beside h2d_gather: slowdown above the copy engine's", more, 0.05)

    def kept(row: Row) -> float:
        return float(row.params["gather_beside_gb_s"] / row.params["gather_alone_gb_s"])

    name = "h2d beside the GEMM: bandwidth kept, of what the copy engine keeps"
    yield from _at_least(name, kept(ours) / kept(engine), 0.95)


def _compare_key(f: Figures) -> Iterator[Goal]:
    op, case = "compare_key", "131072 equal int32 tokens"
    got = f.speed(op, case, "jitkern", "std::mismatch -O3")
    yield from _at_least(f"fast_compare_key, {case}: of std::mismatch -O3", got, 4.0)
    slower = f.speed(op, case, "memcmp", "jitkern")
    yield from _at_most(f"fast_compare_key, {case}: time of memcmp", slower, 1.3)
    for tokens in (1, 16):
        case = f"{tokens} equal int32 tokens"
        ours, floor = f.us(op, case, "jitkern"), f.us(op, case, "no-op FFI call")
        if ours and floor:
            name = f"fast_compare_key, {case}: above a no-op FFI call"
            yield from _at_most(name, ours - floor, 0.1, "us")


def _cpu(f: Figures) -> Iterator[Goal]:
    for op, peer, wanted in (("store", "torch cache[idx] = x, twice", 8.0), ("index", "", 0.0)):
        for case in f.cases(op):
            ceiling = [n for n in f.all(op, case) if n.startswith("copy_ of")]
            if not ceiling:
                continue  # a GPU's rows
            name = f"{op} on the CPU, {case}"
            if peer:
                yield from _at_least(
                    f"{name}: of {peer}", f.speed(op, case, "jitkern", peer), wanted
                )
            got = f.speed(op, case, "jitkern", ceiling[0])
            yield from _at_least(f"{name}: of copy_", got, 0.8)


def _first_call(f: Figures) -> Iterator[Goal]:
    def ms(case: str, impl: str) -> float | None:
        us = f.us("first_call", case, impl)
        return us / 1e3 if us else None

    first = first_call.FIRST_KERNEL
    yield from _at_most(f"{first}, loading NVRTC included", ms(first, first_call.COLD), 500, "ms")
    for case in (*first_call.OPS, first_call.LARGE_CALL):
        cold, nvcc = ms(case, first_call.COLD), ms(case, first_call.INLINE_COLD)
        yield from _at_most(f"cold {case}", cold, 150, "ms")
        if cold and nvcc:
            yield from _at_least(f"cold {case}: of load_inline with nvcc", nvcc / cold, 60)
        yield from _at_most(f"warm {case}, new process", ms(case, first_call.WARM), 2, "ms")
    command = first_call.WARM_COMMAND
    yield from _at_most(command, ms(command, "jitkern"), 10_000, "ms")
