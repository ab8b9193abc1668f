"""PNG plots of a run: % of the ceiling by size, the h2d ladder, pools, decode steps, a summary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

from bench.cases import NAMES, module
from jitkern.bench.report import Payload

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RowData = dict[str, Any]

GREY = "#8a919b"  # of text, axes and ceilings: in the middle between a white and a black page
OURS = "#2ea650"
_LIBRARIES = {
    **dict.fromkeys(("jitkern", "auto", "sm", "cpu", "both", "SMs in order"), OURS),
    "triton": "#5b8def",
    "vLLM": "#d4a72c",
    "FlashInfer": "#b07be0",
    "torch.compile": "#f0883e",
    "torch": "#e5534b",
}
_NVCC = "#b5835a"  # kernels of ours for nvcc, as mini-sglang and others write them
_LINES = ("-", "--", ":", "-.", (0, (1, 3)))
_FIRST = ("jitkern", "auto")  # what a user gets who says nothing

plt.rcParams.update(
    {
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY
        ),
        "grid.color": GREY,
        "grid.alpha": 0.25,
        "axes.grid": True,
        "axes.axisbelow": True,
        "legend.framealpha": 0.0,
        "legend.fontsize": 7,
        "axes.titlesize": 9,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
    }
)

# Of the first page: one line of each op, at the size where its users live.
_SUMMARY = {
    "store_cache, 131,072 rows of 1 KB": ("store", "131072 rows of 1024 B"),
    "store_cache, 1 row of 656 B": ("store", "1 rows of 656 B"),
    "indexing, 65,536 rows of 8 KB": ("index", "65536 rows of 8192 B"),
    "h2d_gather, 656 B, distinct rows": ("h2d_gather", "262144 rows of 656 B, distinct"),
    "h2d_gather, 656 B, a third repeated": ("h2d_gather", "262144 rows of 656 B, repeats"),
    "h2d_gather out of a pool of 16 GiB": (
        "pools",
        "gather of 262144 rows of 656 B, pool of 16 GiB, uniform",
    ),
    "swap_rows, 656 B, both ways": ("swap", "262144 rows of 656 B, distinct, pool of 0.4 GiB"),
    "copy_blocks, 32 layers x 16 KB": ("copy_blocks", "h2d, 128 blocks x 32 layers x 16 KB"),
    "unpack, 2,048 pieces of 256 B": ("unpack", "2048 pieces of 256 B"),
    "merge_state, 256 x 32 x 128": ("merge", "256 x 32 x 128 bf16"),
    "merge_state, 16,384 x 32 x 128": ("merge", "16384 x 32 x 128 bf16"),
}


def draw(data: Payload, directory: Path) -> list[Path]:
    """Draw what the data has rows for; return the files written."""
    directory.mkdir(parents=True, exist_ok=True)
    machine = data["machine"]["name"]
    rows = {op: entry["rows"] for op, entry in data["benchmarks"].items()}
    made = _summary(rows, machine, directory)
    for name in NAMES:
        for plot in getattr(module(name), "PLOTS", ()):
            made += _PLOTS[plot](rows.get(name, []), name, machine, directory)
    return made


def _summary(rows: dict[str, list[RowData]], machine: str, directory: Path) -> list[Path]:
    """How much faster than the fastest peer of the same run, peer by name; below 1 it wins."""
    bars = []
    for label, (op, case) in _SUMMARY.items():
        timed = [r for r in rows.get(op, []) if r["case"] == case and r["median_us"]]
        ours = [r for r in timed if r["impl"] == "jitkern"]
        # "jitkern, ..." in a peer's role are our own parts, called one after the other.
        peers = [r for r in timed if r["role"] == "peer" and not r["impl"].startswith("jitkern")]
        if ours and peers:
            best = min(peers, key=lambda r: float(r["median_us"]))
            bars.append((label, best["median_us"] / ours[0]["median_us"], best["impl"]))
    if len(bars) < len(_SUMMARY):
        return []
    figure, axes = plt.subplots(figsize=(8.4, 0.34 * len(bars) + 1.2))
    for at, (_, ratio, peer) in enumerate(bars):
        axes.barh(at, ratio, color=OURS, height=0.62)
        axes.text(ratio, at, f" {ratio:.2f} x  {peer}", va="center", fontsize=7.5)
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=8)
    axes.set_xlim(0, 1.6 * max(ratio for _, ratio, _ in bars))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("speed of jitkern / the fastest other of the same run, which is named")
    axes.set_title(f"{machine}, cold buffers, random rows")
    return save(figure, directory / "summary.png")


def _of_a_copy(rows: Sequence[RowData], op: str, machine: str, directory: Path) -> list[Path]:
    """One panel per row size: % of a copy's bandwidth against the number of rows."""
    timed = [r for r in rows if r["percent_of_ceiling"] and not r["params"].get("vocab_range")]
    timed = [r for r in timed if "v_row_bytes" not in r["params"] and "one cache" not in r["case"]]
    sizes = sorted({r["params"]["row_bytes"] for r in timed})
    sizes = [s for s in sizes if len({r["case"] for r in timed if _size(r) == s}) > 1]
    if not sizes:
        return []
    figure, panels = plt.subplots(
        1, len(sizes), figsize=(3.6 * len(sizes), 3.6), sharey=True, squeeze=False
    )
    for axes, size in zip(panels[0], sizes, strict=True):
        here = [r for r in timed if _size(r) == size]
        lines(axes, here, names_of(here, "ours", "peer"), y="percent_of_ceiling")
        ceiling(axes, 100, "a copy")
        axes.set(title=f"{size} B a row", xlabel="rows", xscale="log", ylim=(0, None))
    panels[0][0].set_ylabel("% of the bandwidth of a copy")
    panels[0][0].legend(loc="upper right")
    figure.suptitle(f"{op} on {machine}, cold buffers, random rows", fontsize=10)
    return save(figure, directory / f"{op}_bandwidth.png")


def _ladder(rows: Sequence[RowData], op: str, machine: str, directory: Path) -> list[Path]:
    """The rungs from the naive kernel to ours, on the usual script's parameters."""
    here = [r for r in rows if r["params"].get("sources") == "repeats" and r["gb_s"]]
    if not here:
        return []
    rungs = [r for r in here if r["role"] == "peer"] + [r for r in here if r["role"] == "ours"]
    figure, axes = plt.subplots(figsize=(7.5, 0.36 * len(rungs) + 1.4))
    axes.barh([r["impl"] for r in rungs], [r["gb_s"] for r in rungs])
    for at, (bar, r) in enumerate(zip(axes.patches, rungs, strict=True)):
        bar.set_color(color(r["impl"]))
        axes.text(r["gb_s"], at, f" {r['gb_s']:.1f}", va="center", fontsize=8)
    for r in here:
        if r["role"] == "ceiling":
            axes.axvline(r["gb_s"], color=GREY, linestyle="--", linewidth=1)
            axes.text(r["gb_s"], -0.9, f"{r['impl']} {r['gb_s']:.1f}", fontsize=7, ha="right")
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("GB/s that arrive")
    axes.set_title(f"{op}, {here[0]['case']}, {machine}")
    return save(figure, directory / "h2d_ladder.png")


def _row_sizes(rows: Sequence[RowData], op: str, machine: str, directory: Path) -> list[Path]:
    """% of the copy engine against the row size, at a constant number of bytes."""
    here = [
        r
        for r in rows
        if r["percent_of_ceiling"]
        and r["params"].get("sources") == "distinct"
        and r["bytes_moved"] > 100e6
    ]
    if len({r["case"] for r in here}) < 2:
        return []
    figure, axes = plt.subplots(figsize=(6, 4))
    names = [n for n in names_of(here, "ours", "peer") if "num_sms" not in n and "dedup" not in n]
    names = [n for n in names if sum(r["impl"] == n for r in here) > 2]
    lines(axes, here, names, x="row_bytes", y="percent_of_ceiling")
    ceiling(axes, 100, "copy engine, in one piece")
    axes.set(xlabel="row bytes", ylabel="% of the copy engine", ylim=(0, 109))
    axes.set_xscale("log", base=2)
    axes.legend(loc="lower right")
    axes.set_title(f"{op} by row size, distinct rows, {machine}")
    return save(figure, directory / "h2d_row_sizes.png")


def _beside(rows: Sequence[RowData], _: str, machine: str, directory: Path) -> list[Path]:
    """% by which a decode step is longer, against the GB/s that are moved beside it."""
    at = {
        r["impl"]: (r["gb_s"], max(0.8, 100 * r["params"]["slowdown"] - 100))
        for r in rows
        if r["params"]["batch"] == 32 and r["gb_s"]
    }
    if not at:
        return []
    figure, panels = plt.subplots(1, 2, figsize=(9, 4), sharex=True, sharey=True)
    for axes, way, title in zip(panels, ("h2d", "d2h"), ("to the GPU", "to the host"), strict=True):
        # Of each, the text of its points and where that is: points to the right, points up.
        by_sms = {f"copy_blocks {way}, {n} SMs": (str(n), 0, 6) for n in (1, 2, 3, 4, 8)}
        engine = {f"engine, contiguous, {way}": ("", 0, 0)}
        defaults = {
            f"copy_blocks {way}": ("layer first", -28, -14),
            f"host page first, {way}": ("host page first", 40, -14),
            f"pages, {way}": ("pages", 0, 8),
            "h2d_gather" if way == "h2d" else "d2h_scatter": ("rows of 656 B", 0, 9),
        }
        for label, names, style in (
            ("copy_blocks by 1 to 8 SMs", by_sms, {"color": "#5b8def", "marker": "."}),
            ("copy engine, in one piece", engine, {"color": "#f0883e", "marker": "s"}),
            ("defaults", defaults, {"color": OURS, "marker": "o", "ls": "", "markersize": 9}),
        ):
            found = [name for name in names if name in at]
            axes.plot(*zip(*(at[n] for n in found), strict=True), label=label, **style)
            for name in found:
                text, *offset = names[name]
                there = {"xytext": offset, "textcoords": "offset points", "ha": "center"}
                axes.annotate(text, at[name], **there, fontsize=8, color=style["color"])
        axes.set(title=title, xlabel="GB/s moved beside the step", xlim=(0, 58), yscale="log")
        ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500]
        axes.set_yticks(ticks, [f"{percent} %" for percent in ticks])
        axes.minorticks_off()
    panels[0].set_ylabel("a decode step is longer by")
    panels[0].set_ylim(0.7, 700)
    panels[0].legend(loc="upper left", fontsize=8)
    figure.suptitle(f"a decode step of batch 32 beside copies, {machine}", fontsize=10)
    return save(figure, directory / "beside.png")


def _pools(rows: Sequence[RowData], _: str, machine: str, directory: Path) -> list[Path]:
    """GB/s against the size of the pool: as rows come, in its order, and the engine's line."""
    here = [
        r
        for r in rows
        if r["gb_s"] and r["params"]["row_bytes"] == 656 and r["params"]["law"] == "uniform"
    ]
    most = max((r["params"]["rows"] for r in here), default=0)
    here = [r for r in here if r["params"]["rows"] == most]
    if len({r["params"]["pool_gib"] for r in here}) < 2:
        return []
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for axes, kind in zip(panels, ("gather", "scatter"), strict=True):
        points = [r for r in here if r["params"]["kind"] == kind]
        names = [n for n in names_of(points, "ours", "peer") if not n.startswith("jitkern, by")]
        lines(axes, points, names, x="pool_gib")
        engine = [r["gb_s"] for r in points if r["role"] == "ceiling"]
        if engine:
            ceiling(axes, max(engine), "copy engine, in one piece")
        axes.set(title=kind, xlabel="GiB of the pool", ylim=(0, None))
        gib = sorted({r["params"]["pool_gib"] for r in here})
        axes.set_xscale("log", base=2)
        axes.set_xticks(gib, [f"{size:g}" for size in gib])
        axes.legend(loc="lower left")
    panels[0].set_ylabel("GB/s that arrive")
    figure.suptitle(f"{most:,} random rows of 656 B, {machine}", fontsize=10)
    return save(figure, directory / "pools.png")


def _blocks(rows: Sequence[RowData], op: str, machine: str, directory: Path) -> list[Path]:
    """% of the copy engine against the bytes of a block in one layer."""
    here = [r for r in rows if r["percent_of_ceiling"] and r["params"]["block_dim"] == 1]
    if len({r["params"]["piece_bytes"] for r in here}) < 2:
        return []
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True)
    for axes, kind in zip(panels, ("h2d", "d2h"), strict=True):
        points = [r for r in here if r["case"].startswith(kind)]
        names = [n for n in names_of(points, "ours", "peer") if "num_sms" not in n]
        lines(axes, points, names, x="piece_bytes", y="percent_of_ceiling")
        ceiling(axes, 100, "copy engine, in one piece")
        axes.set(title=kind, xlabel="bytes of a block in one layer", ylim=(0, 109))
        axes.set_xscale("log", base=2)
    panels[0].set_ylabel("% of the copy engine")
    panels[0].legend(loc="lower right")
    blocks, layers = (here[0]["params"][name] for name in ("blocks", "layers"))
    figure.suptitle(f"{op}, {blocks} random blocks of {layers} layers, {machine}", fontsize=10)
    return save(figure, directory / "copy_blocks.png")


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
        names = [n for n in names_of(here, "ours", "peer") if n != "jitkern, new outputs"]
        lines(axes, here, names, x="tokens", y="percent_of_ceiling")
        ceiling(axes, 100, "a copy of as many bytes")
        axes.set(title=f"{count} partials", xlabel="tokens", ylim=(0, None))
        axes.set_xscale("log", base=2)
        axes.legend()
    panels[0][0].set_ylabel("% of a copy of as many bytes")
    one = next(iter(panels_of.values()))[0]["params"]
    form = f"{one['heads']} heads x {one['dim']}, {one['dtype']}"
    figure.suptitle(f"{op}, {form}, {machine}, cold buffers", fontsize=10)
    return save(figure, directory / f"{op}.png")


_PLOTS = {
    "of a copy": _of_a_copy,
    "of the copy": _of_the_copy,
    "blocks": _blocks,
    "ladder": _ladder,
    "row sizes": _row_sizes,
    "beside": _beside,
    "pools": _pools,
}


def _size(row: RowData) -> int:
    return int(row["params"]["row_bytes"])


# -- how plots look -------------------------------------------------------------------------------


def color(name: str) -> str:
    """Return the colour of the library that an implementation is of."""
    found = [library for library in _LIBRARIES if name.startswith(library)]
    return _LIBRARIES[max(found, key=len)] if found else _NVCC


def lines(
    axes: Any,
    rows: Sequence[RowData],
    names: Sequence[str],
    *,
    x: str = "rows",
    y: str = "gb_s",
) -> None:
    """Draw a line for each name, those of one library told apart by their dashes; ours on top."""
    drawn: dict[str, int] = {}
    for name in sorted(names, key=lambda name: (color(name) == OURS, name not in _FIRST)):
        points = sorted((r["params"][x], r[y]) for r in rows if r["impl"] == name and r[y])
        if not points:
            continue
        number = drawn.get(color(name), 0)
        drawn[color(name)] = number + 1
        axes.plot(
            *zip(*points, strict=True),
            label=name,
            color=color(name),
            linestyle=_LINES[number % len(_LINES)],
            linewidth=2.2 if color(name) == OURS and not number else 1.3,
            marker="o",
            markersize=3,
        )


def ceiling(axes: Any, value: float, text: str) -> None:
    """Draw a ceiling, and say beside it what it is."""
    axes.axhline(value, color=GREY, linestyle="--", linewidth=1)
    axes.annotate(text, (0.02, value), xycoords=("axes fraction", "data"), fontsize=7, va="bottom")


def save(figure: Any, path: Path) -> list[Path]:
    """Write a plot without a background."""
    figure.tight_layout()
    figure.savefig(path, dpi=140, transparent=True)
    plt.close(figure)
    return [path]


def names_of(rows: Sequence[RowData], *roles: str) -> list[str]:
    """Return the implementations in these roles, those of one point left out."""
    names = dict.fromkeys(r["impl"] for r in rows if r["role"] in roles)
    return [name for name in names if sum(r["impl"] == name for r in rows) > 1]
