"""PNG plots of a run: bandwidth against rows, the h2d ladder, GEMM slowdown against SMs, others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from bench.cases import NAMES, module
from jitkern.bench.report import Payload

RowData = dict[str, Any]

OURS, PEERS, CEILING = "#1a7f37", ("#888888", "#b3661a", "#5b7bb4", "#a05195", "#c9a227"), "#111111"


def draw(data: Payload, directory: Path) -> list[Path]:
    """Draw what the data has rows for; return the files written."""
    directory.mkdir(parents=True, exist_ok=True)
    machine = data["machine"]["name"]
    rows = {op: entry["rows"] for op, entry in data["benchmarks"].items()}
    made: list[Path] = []
    for name in NAMES:
        for plot in getattr(module(name), "PLOTS", ()):
            made += _PLOTS[plot](rows.get(name, []), name, machine, directory)
    return made


def _bandwidth(rows: Sequence[RowData], op: str, machine: str, directory: Path) -> list[Path]:
    """One panel per row size: GB/s of each implementation against the number of rows."""
    timed = [r for r in rows if r["gb_s"] and not r["params"].get("vocab_range")]
    timed = [r for r in timed if "v_row_bytes" not in r["params"]]  # K and V of one size only
    sizes = sorted({r["params"]["row_bytes"] for r in timed})
    sizes = [s for s in sizes if len({r["case"] for r in timed if _size(r) == s}) > 1]
    if not sizes:
        return []
    figure, panels = plt.subplots(
        1, len(sizes), figsize=(4.2 * len(sizes), 3.8), sharey=True, squeeze=False
    )
    peers = list(dict.fromkeys(r["impl"] for r in timed if r["role"] == "peer"))
    ours = list(dict.fromkeys(r["impl"] for r in timed if r["role"] == "ours"))
    for axes, size in zip(panels[0], sizes, strict=True):
        here = [r for r in timed if _size(r) == size]
        for name, color in zip(peers, _cycle(PEERS), strict=False):
            _line(axes, here, name, color=color, marker="o", markersize=3)
        for name in ours:
            _line(axes, here, name, color=OURS, marker="o", linewidth=2)
        ceiling = max(r["gb_s"] for r in here if r["role"] == "ceiling")
        axes.axhline(ceiling, color=CEILING, linestyle="--", linewidth=1)
        axes.annotate(
            f"copy {ceiling:,.0f}",
            (0.02, ceiling),
            xycoords=("axes fraction", "data"),
            fontsize=7,
            va="bottom",
        )
        axes.set(title=f"{size} B rows", xlabel="rows", xscale="log", yscale="log")
        axes.grid(alpha=0.25)
    panels[0][0].set_ylabel("GB/s, read + write")
    panels[0][-1].legend(fontsize=7, loc="lower right")
    figure.suptitle(f"{op} on {machine}, cold buffers, random rows", fontsize=10)
    return [_save(figure, directory / f"{op}_bandwidth.png")]


def _ladder(rows: Sequence[RowData], op: str, machine: str, directory: Path) -> list[Path]:
    """The rungs from the naive kernel to ours, on the usual script's parameters."""
    here = [r for r in rows if r["params"].get("sources") == "repeats" and r["gb_s"]]
    if not here:
        return []
    rungs = [r for r in here if r["role"] == "peer"] + [r for r in here if r["role"] == "ours"]
    names = [r["impl"] for r in rungs]
    values = [r["gb_s"] for r in rungs]
    colors = [OURS if r["role"] == "ours" else PEERS[2] for r in rungs]
    figure, axes = plt.subplots(figsize=(7.5, 0.36 * len(rungs) + 1.4))
    axes.barh(names, values, color=colors)
    for at, value in enumerate(values):
        axes.text(value, at, f" {value:.1f}", va="center", fontsize=8)
    for r in here:
        if r["role"] == "ceiling":
            axes.axvline(r["gb_s"], color=CEILING, linestyle="--", linewidth=1)
            axes.text(r["gb_s"], -0.9, f"{r['impl']} {r['gb_s']:.1f}", fontsize=7, ha="right")
    axes.invert_yaxis()
    axes.set_xlabel("GB/s that arrive")
    axes.set_title(f"{op}, {here[0]['case']}, {machine}", fontsize=9)
    return [_save(figure, directory / "h2d_ladder.png")]


def _row_sizes(rows: Sequence[RowData], op: str, machine: str, directory: Path) -> list[Path]:
    """GB/s against the row size, at a constant number of bytes."""
    here = [
        r
        for r in rows
        if r["gb_s"] and r["params"].get("sources") == "distinct" and r["bytes_moved"] > 100e6
    ]
    if len({r["case"] for r in here}) < 2:
        return []
    figure, axes = plt.subplots(figsize=(6, 4))
    everywhere = _common([r for r in here if r["role"] != "ours"])
    for name, color in zip(everywhere, _cycle((*PEERS, CEILING)), strict=False):
        _line(axes, here, name, color=color, marker="o", markersize=3, x="row_bytes")
    _line(axes, here, "jitkern", color=OURS, marker="o", linewidth=2, x="row_bytes")
    axes.set(xlabel="row bytes", ylabel="GB/s that arrive", xscale="log", ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(fontsize=7)
    axes.set_title(f"{op} by row size, distinct rows, {machine}", fontsize=9)
    return [_save(figure, directory / "h2d_row_sizes.png")]


def _gemm(rows: Sequence[RowData], _: str, machine: str, directory: Path) -> list[Path]:
    """What the GEMM loses and the gather keeps, against the SMs given to the gather."""
    ours = [r for r in rows if r["role"] == "ours" and r["params"].get("num_sms", -1) > 0]
    ours = sorted((r for r in ours if r["median_us"]), key=lambda r: r["params"]["num_sms"])
    if len(ours) < 2:
        return []
    sms = [r["params"]["num_sms"] for r in ours]
    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(
        sms, [r["params"]["gemm_slowdown"] for r in ours], color=OURS, marker="o", label="jitkern"
    )
    for r in rows:
        if r["role"] == "ceiling" and r["median_us"]:
            slowdown = r["params"]["gemm_slowdown"]
            axes.axhline(slowdown, color=CEILING, linestyle="--", linewidth=1, label="copy engine")
    axes.set(xlabel="SMs of the gather", ylabel="GEMM time / GEMM alone", xscale="log")
    axes.set_xticks(sms, [str(n) for n in sms])
    beside = axes.twinx()
    beside.plot(
        sms,
        [r["params"]["gather_beside_gb_s"] for r in ours],
        color=PEERS[2],
        marker="s",
        markersize=3,
        label="gather beside the GEMM",
    )
    beside.set(ylabel="GB/s of the gather", ylim=(0, None))
    handles = [*axes.get_legend_handles_labels()[0], *beside.get_legend_handles_labels()[0]]
    axes.legend(handles=handles, fontsize=7, loc="center right")
    axes.set_title(f"8192^3 bf16 GEMM beside h2d_gather, {machine}", fontsize=9)
    return [_save(figure, directory / "gemm_slowdown.png")]


def _pools(rows: Sequence[RowData], _: str, machine: str, directory: Path) -> list[Path]:
    """GB/s against the size of the pool: as rows come, in its order, and the engine's line."""
    most = max((r["params"]["rows"] for r in rows if r["params"]["row_bytes"] == 656), default=0)
    here = [r for r in rows if r["gb_s"] and r["params"]["row_bytes"] == 656]
    here = [r for r in here if r["params"]["rows"] == most and r["params"]["law"] == "uniform"]
    if len({r["params"]["pool_gib"] for r in here}) < 2:
        return []
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for axes, kind in zip(panels, ("gather", "scatter"), strict=True):
        points = [r for r in here if r["params"]["kind"] == kind]
        timed_often = _common([r for r in points if r["role"] == "peer"])
        for name, color in zip(timed_often, _cycle(PEERS), strict=False):
            _line(axes, points, name, color=color, marker="o", markersize=3, x="pool_gib")
        as_they_come = {"color": OURS, "marker": "o", "linestyle": ":"}
        _line(axes, points, "jitkern, as they come", x="pool_gib", **as_they_come)
        _line(axes, points, "jitkern", color=OURS, marker="o", linewidth=2, x="pool_gib")
        engine = max((r["gb_s"] for r in points if r["role"] == "ceiling"), default=0.0)
        axes.axhline(engine, color=CEILING, linestyle="--", linewidth=1, label="copy engine")
        axes.set(title=kind, xlabel="GiB of the pool", xscale="log", ylim=(0, None))
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("GB/s that arrive")
    panels[0].legend(fontsize=7, loc="lower left")
    figure.suptitle(f"{most:,} random rows of 656 B, {machine}", fontsize=10)
    return [_save(figure, directory / "pools.png")]


def _ways(rows: Sequence[RowData], _: str, machine: str, directory: Path) -> list[Path]:
    """GB/s against the size of the pool, for each way that rows may take."""
    most = max((r["params"]["rows"] for r in rows if r["params"]["row_bytes"] == 656), default=0)
    here = [r for r in rows if r["gb_s"] and r["params"]["row_bytes"] == 656]
    here = [r for r in here if r["params"]["rows"] == most and "pageable" not in r["case"]]
    if len({r["params"]["pool_gib"] for r in here}) < 2:
        return []
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for axes, kind in zip(panels, ("gather", "scatter"), strict=True):
        points = [r for r in here if r["params"]["kind"] == kind]
        named = [name for name in _common(points) if "threads" not in name and name != "auto"]
        for name, color in zip(named, _cycle(PEERS), strict=False):
            _line(axes, points, name, color=color, marker="o", markersize=3, x="pool_gib")
        _line(axes, points, "auto", color=OURS, linestyle=":", linewidth=3, x="pool_gib")
        axes.set(title=kind, xlabel="GiB of the pool", xscale="log")
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7, loc="lower left")
    panels[0].set_ylim(0, 1.05 * max(r["gb_s"] for r in here))
    panels[0].set_ylabel("GB/s that arrive")
    figure.suptitle(f"{most:,} random rows of 656 B, numbers on the host, {machine}", fontsize=10)
    return [_save(figure, directory / "ways.png")]


def _blocks(rows: Sequence[RowData], op: str, machine: str, directory: Path) -> list[Path]:
    """GB/s against the bytes of a block in one layer."""
    here = [r for r in rows if r["gb_s"] and r["params"]["block_dim"] == 1]
    if len({r["params"]["piece_bytes"] for r in here}) < 2:
        return []
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for axes, kind in zip(panels, ("h2d", "d2h"), strict=True):
        points = [r for r in here if r["case"].startswith(kind)]
        beside = _common([r for r in points if r["role"] == "peer" or "engine" in r["impl"]])
        for name, color in zip(beside, _cycle(PEERS), strict=False):
            _line(axes, points, name, x="piece_bytes", color=color, marker="o", markersize=3)
        for r in (r for r in points if r["role"] == "ceiling"):
            _line(axes, points, r["impl"], x="piece_bytes", color=CEILING, linestyle="--")
            break
        _line(axes, points, "jitkern", x="piece_bytes", color=OURS, marker="o", linewidth=2)
        axes.set(title=kind, xlabel="bytes of a block in one layer")
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.25)
    panels[0].set(ylabel="GB/s over the link", ylim=(0, None))
    panels[0].legend(fontsize=7, loc="center right")
    blocks, layers = (here[0]["params"][name] for name in ("blocks", "layers"))
    figure.suptitle(f"{op}, {blocks} random blocks of {layers} layers, {machine}", fontsize=10)
    return [_save(figure, directory / "copy_blocks.png")]


def _of_the_copy(rows: Sequence[RowData], op: str, machine: str, directory: Path) -> list[Path]:
    """One panel per number of partials: % of the copy kernel's bandwidth against tokens."""
    timed = [r for r in rows if r["percent_of_ceiling"] and not r["params"]["stacked"]]
    panels_of: dict[int, list[RowData]] = {}
    for count in sorted({r["params"]["partials"] for r in timed}):
        here = [r for r in timed if r["params"]["partials"] == count]
        by_tokens = [r["params"] for r in here if r["params"]["tokens"] == 1]
        usual = {k: v for k, v in by_tokens[0].items() if k != "tokens"} if by_tokens else None
        here = [r for r in here if usual == {k: v for k, v in r["params"].items() if k != "tokens"}]
        if len({r["case"] for r in here}) > 1:
            panels_of[count] = here
    if not panels_of:
        return []
    figure, panels = plt.subplots(
        1, len(panels_of), figsize=(4.8 * len(panels_of), 3.8), sharey=True, squeeze=False
    )
    for axes, (count, here) in zip(panels[0], panels_of.items(), strict=True):
        points = {"x": "tokens", "y": "percent_of_ceiling", "marker": "o"}
        peers = list(dict.fromkeys(r["impl"] for r in here if r["role"] == "peer"))
        for name, color in zip(peers, _cycle(PEERS), strict=False):
            style = ":" if "no graph" in name else "-"
            _line(axes, here, name, color=color, linestyle=style, markersize=3, **points)
        _line(axes, here, "jitkern", color=OURS, linewidth=2, **points)
        axes.axhline(100, color=CEILING, linestyle="--", linewidth=1)
        axes.set(title=f"{count} partials", xlabel="tokens", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.grid(alpha=0.25)
        axes.legend(fontsize=7)
    panels[0][0].set_ylabel("% of a copy of as many bytes")
    one = next(iter(panels_of.values()))[0]["params"]
    form = f"{one['heads']} heads x {one['dim']}, {one['dtype']}"
    figure.suptitle(f"{op}, {form}, {machine}, cold buffers", fontsize=10)
    return [_save(figure, directory / f"{op}_of_the_copy.png")]


_PLOTS = {
    "of the copy": _of_the_copy,
    "blocks": _blocks,
    "bandwidth": _bandwidth,
    "ladder": _ladder,
    "row sizes": _row_sizes,
    "gemm": _gemm,
    "pools": _pools,
    "ways": _ways,
}


def _line(
    axes: Any,
    rows: Sequence[RowData],
    name: str,
    *,
    x: str = "rows",
    y: str = "gb_s",
    **style: Any,
) -> None:
    points = sorted((r["params"][x], r[y]) for r in rows if r["impl"] == name)
    if points:
        axes.plot(*zip(*points, strict=True), label=name, **{"linewidth": 1.2, **style})


def _common(rows: Sequence[RowData]) -> list[str]:
    """Names measured at more than two sizes."""
    names = list(dict.fromkeys(r["impl"] for r in rows))
    return [n for n in names if sum(r["impl"] == n for r in rows) > 2]


def _cycle(colors: Sequence[str]) -> Iterator[str]:
    while True:
        yield from colors


def _size(row: RowData) -> int:
    return int(row["params"]["row_bytes"])


def _save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path
