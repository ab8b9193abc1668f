"""The tables of the docs, made from ``bench/results/*.json``: ``python -m bench.tables``.

A page has ``<!-- table: NAME -->`` before one and ``<!-- end -->`` after it; what is between is
written here, and a test holds the pages to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"

_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """Figures of one benchmark: an implementation a line and a case a column, or `turned` round."""

    op: str
    case: str
    """Name of a case, with ``{}`` where a key of `cases` goes."""
    cases: Mapping[str, str]
    """What ``{}`` is, and the heading of its figures."""
    impls: Mapping[str, str]
    """Implementations, several with `` / `` between them in one cell, and their headings."""
    corner: str = ""
    value: str = "gb_s"
    turned: bool = False
    file: str = "nvidia-h200"

    def lines(self) -> list[str]:
        """Return the table as lines of Markdown."""
        figures = {case: self._figures(case) for case in self.cases}
        if self.turned:
            heads = list(self.impls.values())
            body = [[self.cases[case], *figures[case].values()] for case in self.cases]
        else:
            heads = list(self.cases.values())
            body = [[self.impls[i], *(figures[case][i] for case in self.cases)] for i in self.impls]
        rows = [[self.corner, *heads], ["---"] * (len(heads) + 1), *body]
        return ["|".join(["", *(f" {cell} " if cell else " " for cell in row), ""]) for row in rows]

    def _figures(self, key: str) -> dict[str, str]:
        rows = _rows(self.file, self.op, self.case.format(key))
        if not rows:
            raise ValueError(f"tables: {self.op}: no case {self.case.format(key)!r}")
        texts = {}
        for names in self.impls:
            cells = [self._text(rows.get(name)) for name in names.split(" / ")]
            texts[names] = " / ".join(cell for cell in cells if cell)
        return texts

    def _text(self, row: Mapping[str, Any] | None) -> str:
        if row is None or row["median_us"] is None:
            return "" if row is None else "does not compile"
        if self.value == "gb_s":
            return three_digits(row["gb_s"])
        return three_digits(row["median_us"] / (1e3 if self.value == "ms" else 1))


def beside() -> list[str]:
    """Return what movers and a decode step cost each other, figures of all batches in a cell."""
    cases = [_rows("beside", "beside", f"decode step, batch {batch}") for batch in (1, 32, 128)]
    made = ["| | step, times as long | its p99 | GB/s beside (alone) | ms lost per GB |"]
    made.append("| --- | --- | --- | --- | --- |")
    for way, shown in BESIDE.items():
        rows = [case[way] for case in cases]
        params = [row["params"] for row in rows]
        cells = [
            " / ".join(f"{one[key]:.2f}" for one in params) for key in ("slowdown", "p99_slowdown")
        ]
        alone = f" ({params[0]['gb_s_alone']:.0f})"
        cells.append(" / ".join(f"{row['gb_s']:.0f}" for row in rows) + alone)
        cells.append(" / ".join(f"{one['lost_ms_per_gb']:.1f}" for one in params))
        made.append("| " + " | ".join([shown, *cells]) + " |")
    return made


@cache
def read(file: str) -> Any:
    """Return a file of ``bench/results``."""
    return json.loads((RESULTS / f"{file}.json").read_text())


def three_digits(value: float) -> str:
    """Return ``4,015``, ``48.5``, ``1.30`` or ``0.28``.

    Examples
    --------
    >>> three_digits(4015.2), three_digits(48.51), three_digits(0.277)
    ('4,015', '48.5', '0.28')
    """
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


_COPY = "copy kernel, same bytes"
_TWICE = "torch cache[idx] = x, twice"
_ORDERED, _GIVEN = "jitkern", "jitkern, as they come"
_FULL, _LINES = "4 loads before stores, full grid", "6 line-aligned, 4 SMs"
_ARGSORT = "torch.argsort, then 6 line-aligned, 4 SMs"
_ENGINE = "cudaMemcpyAsync, contiguous"
_OTHERS = f"{_ORDERED} / {_GIVEN} / {_ARGSORT}"
_TABLES_PEERS = "jitkern / triton, rows where they lie / torch: index_select on the CPU, copy"


def _gib(*sizes: str) -> dict[str, str]:
    return {size: f"{size} GiB" if size == sizes[0] else size for size in sizes}


TABLES: dict[str, Table] = {
    "store": Table(
        "store",
        "131072 rows of {} B",
        {"256": "256 B", "656": "656 B", "1024": "1 KB", "2048": "2 KB"},
        {
            "jitkern": "jitkern",
            "nvcc, mini-sglang style": "warp a row (nvcc)",
            "triton": "Triton",
            _TWICE: "torch `cache[idx] = x`, twice",
            _COPY: "copy",
        },
        corner="131,072 rows of",
        turned=True,
    ),
    "store-one": Table(
        "store",
        "{} rows of 656 B, one cache",
        {"1": "1 row", "1024": "1,024 rows", "131072": "131,072 rows"},
        {
            "jitkern": "one cache, 656 B",
            "torch cache[idx] = x": "PyTorch, `cache[idx] = x`",
            _COPY: "copy of the same bytes",
        },
        value="us",
    ),
    "store-two": Table(
        "store",
        "{} rows of 1536 B and 1024 B",
        {"1": "1 row", "1024": "1,024 rows", "131072": "131,072 rows"},
        {
            "jitkern": "K of 1,536 B and V of 1,024 B, one call",
            "jitkern, twice": "two calls, of one cache each",
            _TWICE: "PyTorch, `cache[idx] = x`, twice",
            _COPY: "copy of the same bytes",
        },
        value="us",
    ),
    "index": Table(
        "index",
        "65536 rows of {} B",
        {"656": "656 B", "7168": "7 KB", "8192": "8 KB"},
        {
            "jitkern": "jitkern",
            "nvcc, mini-sglang style": "warp a row (nvcc)",
            "triton": "Triton",
            "torch index_select(out=)": "index_select",
            "torch F.embedding": "F.embedding",
            "copy kernel": "copy",
        },
        corner="65,536 rows of",
        turned=True,
    ),
    "ladder": Table(
        "h2d_gather",
        "262144 rows of 656 B, {}",
        {"distinct": "distinct rows", "repeats": "random rows with repeats"},
        {
            "1 thread a row, byte loads": "one thread a row, byte loads",
            "2 thread a row, 16-byte loads": "one thread a row, 16-byte loads",
            "3 warp a row": "a warp a row",
            "4 loads before stores": "loads before stores",
            "5 persistent, 4 SMs": "the same on 4 SMs",
            "6 line-aligned, 2 SMs": "lanes start at the line, 2 SMs",
            "triton": "Triton",
            "jitkern, num_sms=2, dedup=False": "jitkern, 2 SMs, `dedup=False`",
            "jitkern": "jitkern",
            _ENGINE: "`cudaMemcpyAsync`, as many bytes in one piece",
            "zero-copy kernel, contiguous, 132 SMs": "132 SMs, contiguous memory",
        },
    ),
    "pools-gather": Table(
        "pools",
        "gather of 262144 rows of 656 B, pool of {} GiB, uniform",
        _gib("0.2", "1", "4", "8", "16", "32", "64"),
        {
            _ORDERED: 'jitkern (`order="auto"`)',
            _GIVEN: "jitkern, as they come",
            _LINES: "lanes start at the line, as they come",
            _FULL: "loads before stores, as they come",
            _ARGSORT: "`torch.argsort`, then lanes start at the line",
            _ENGINE: "copy engine, in one piece",
        },
        corner="`h2d_gather`",
    ),
    "pools-scatter": Table(
        "pools",
        "scatter of 262144 rows of 656 B, pool of {} GiB, uniform",
        _gib("0.2", "1", "4", "16", "64"),
        {
            _ORDERED: 'jitkern (`order="auto"`)',
            _GIVEN: "jitkern, as they come",
            _LINES: "lanes start at the line, as they come",
            _FULL: "loads before stores, as they come",
            _ENGINE: "copy engine, in one piece",
        },
        corner="`d2h_scatter`",
    ),
    "swap": Table(
        "swap",
        "262144 rows of 656 B, distinct, pool of {} GiB",
        _gib("0.4", "4", "16", "64"),
        {
            "jitkern": 'jitkern (`order="auto"`)',
            'jitkern, order="given"': 'jitkern, `order="given"`',
            "d2h_scatter, then h2d_gather": "`d2h_scatter`, then `h2d_gather`",
            "both on two streams, by a staging buffer": "both on two streams, a staging buffer",
            "cudaMemcpyAsync both ways, contiguous": "both copy engines, in one piece",
        },
    ),
    **{
        f"pools-{name}": Table(
            "pools",
            f"gather of {case}, pool of {{}} GiB, {law}",
            _gib("0.2", "4", "16", "64"),
            {_OTHERS: shown},
        )
        for name, case, law, shown in (
            ("few", "32768 rows of 656 B", "uniform", "32,768 rows of 656 B"),
            ("zipf", "262144 rows of 656 B", "Zipf(1.1)", "262,144 of 656 B, Zipf(1.1)"),
            ("short", "524288 rows of 256 B", "uniform", "524,288 of 256 B"),
            ("tiny", "524288 rows of 8 B", "uniform", "524,288 of 8 B"),
        )
    },
    **{
        f"host-tables-{name}": Table(
            "pools",
            f"table of {count} rows of 256 B, pool of {{}} GiB, {law}",
            _gib("0.2", "4", "16", "64"),
            {_TABLES_PEERS: shown},
            value="us",
        )
        for name, count, law, shown in (
            ("few", "24576", "uniform", "24,576, distinct"),
            ("few-zipf", "24576", "Zipf(1.1)", "24,576, Zipf(1.1)"),
            ("many", "524288", "uniform", "524,288, distinct"),
            ("many-zipf", "524288", "Zipf(1.1)", "524,288, Zipf(1.1)"),
        )
    },
    "first-call": Table(
        "first_call",
        "{}",
        {
            "first kernel of a process": "first kernel of a process",
            "store": "store",
            "index": "indexing",
            "h2d_gather": "h2d_gather",
            "h2d_gather, large call": "h2d_gather, large call",
        },
        {
            "jitkern: NVRTC, cold": "cold, NVRTC",
            "load_inline with nvcc, cold": "cold, nvcc through `load_inline`",
            "jitkern: warm, new process": "another process",
            "load_module of it, new process": "the same, `tvm_ffi.load_module` of what nvcc made",
        },
        corner="ms",
        value="ms",
    ),
    **{
        f"process-{run}": Table(
            "first_call",
            "{}",
            {"first call of a process, imports included": shown},
            {
                "jitkern: warm": "jitkern",
                "load_inline of what is built": "`load_inline` of what is built",
                "jitkern: warm, no bytecode": "jitkern, no bytecode files",
                "load_inline of what is built, no bytecode": "`load_inline`, no bytecode files",
            },
            corner="ms",
            value="ms",
            turned=True,
            file=f"first_call_{run}",
        )
        for run, shown in (("a", "one host"), ("b", "another"), ("c", "a third"))
    },
    "peer-sums": Table(
        "peer",
        "all_reduce, {} bf16, 2 GPUs",
        {size: size for size in ("8 KB", "128 KB", "1 MB", "2 MB", "4 MB")},
        {
            "jitkern": "`PeerCommunicator`",
            "jitkern, one behind the other": "the same, nothing between two calls",
            "torch.distributed": "torch.distributed (NCCL 2.28.9)",
            "torch symmetric memory, one shot / torch symmetric memory, two shots": (
                "torch symmetric memory, one shot / two"
            ),
        },
        value="us",
        file="nvidia-h100-x2",
    ),
    "cpu-store": Table(
        "store",
        "8192 rows of {} B",
        {"256": "256 B", "656": "656 B", "2048": "2 KB", "8192": "8 KB"},
        {
            "jitkern": "jitkern",
            _TWICE: "`cache[idx] = x`, twice",
            "copy_ of the same bytes": "copy",
        },
        corner="`store_cache`",
        value="us",
        turned=True,
        file="intel-xeon-16-cores",
    ),
    "cpu-index": Table(
        "index",
        "8192 rows of {} B",
        {"656": "656 B", "2048": "2 KB", "8192": "8 KB"},
        {
            "jitkern": "jitkern",
            "torch index_select(out=)": "`index_select(out=)`",
            "torch F.embedding": "`F.embedding`",
            "copy_ of as many rows": "copy",
        },
        corner="`indexing`",
        value="us",
        turned=True,
        file="intel-xeon-16-cores",
    ),
}


BESIDE = {
    "engine, contiguous, h2d": "copy engine, one piece, to the GPU",
    "engine, contiguous, d2h": "to the host",
    "engine, contiguous, both": "both ways at once",
    "copy_blocks h2d": "`copy_blocks`, layer first, to the GPU",
    "copy_blocks d2h": "to the host",
    "copy_blocks both": "both ways at once",
    "copy_blocks d2h, 4 SMs": "`num_sms=4`, to the host",
    "host page first, h2d": "`copy_blocks`, host page first, to the GPU",
    "host page first, d2h": "to the host",
    "host page first, both": "both ways at once",
    "pages, h2d": "`copy_blocks`, pages of 512 KiB on both sides, to the GPU",
    "pages, d2h": "to the host",
    "h2d_gather": "`h2d_gather`, rows of 656 B",
    "d2h_scatter": "`d2h_scatter`, the same rows",
    "swap_rows": "`swap_rows`, rows of 656 B",
}

MADE: dict[str, Callable[[], list[str]]] = {
    **{name: table.lines for name, table in TABLES.items()},
    "beside": beside,
}


def _rows(file: str, op: str, case: str) -> dict[str, dict[str, Any]]:
    rows = read(file)["benchmarks"][op]["rows"]
    return {row["impl"]: row for row in rows if row["case"] == case}


def made(text: str) -> str:
    """Return a page with its tables made anew; names joined by ``+`` are tables under one head."""

    def table(match: re.Match[str]) -> str:
        first, *others = match[2].split("+")
        lines = MADE[first]()
        for name in others:
            lines += MADE[name]()[2:]
        return "\n".join([match[1].rstrip("\n"), *lines, match[3]])

    return _MARKED.sub(table, text)


def main() -> None:
    """Write the tables of every page anew."""
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page = path.read_text()
        if (anew := made(page)) != page:
            path.write_text(anew)
            print(f"tables: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
