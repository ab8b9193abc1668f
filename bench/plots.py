"""The plots of the docs, of what a result has rows for: ``python -m bench.plots RESULT FOLDER``."""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

from bench import report

matplotlib.use("Agg")
import matplotlib.pyplot as plt

RowData = dict[str, Any]

GREY = "#8a919b"  # of text, axes and ceilings: in the middle between a white and a black page
OURS = "#2ea650"
_LIBRARIES = {
    "jitkern": OURS,
    "triton": "#5b8def",
    "vLLM": "#d4a72c",
    "FlashInfer": "#b07be0",
    "torch": "#e5534b",
    "": "#b5835a",  # kernels for nvcc, as mini-sglang and others write them
}
_LINES = ("-", "--", ":", "-.", (0, (1, 3)))
_GREY_PARTS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
plt.rcParams.update(dict.fromkeys((*_GREY_PARTS, "grid.color"), GREY))
plt.rcParams.update(dict.fromkeys(("figure.facecolor", "axes.facecolor"), "none"))
plt.rcParams.update({"grid.alpha": 0.25, "axes.grid": True, "axes.axisbelow": True})
plt.rcParams.update({"legend.framealpha": 0.0, "legend.fontsize": 7, "axes.titlesize": 9})

# Peers by names that a reader knows; a name that is not here stands as it is.
_PLAIN = {
    "nvcc, mini-sglang style": "a warp a row (nvcc)",
    "triton": "Triton",
    "torch cache[idx] = x, twice": "PyTorch, cache[idx] = x",
    "torch index_select(out=)": "PyTorch, index_select",
    "torch F.embedding": "PyTorch, F.embedding",
    "torch copy_, block by block": "PyTorch, copy_ per block",
    "loop of cuMemcpy2DAsync in C++": "cuMemcpy2DAsync in a loop",
    "line-aligned, 2 SMs": "aligned loads (nvcc)",
    "line-aligned, 4 SMs": "aligned loads (nvcc)",
    "loads before stores, all SMs": "loads before stores (nvcc)",
    "torch.argsort, then line-aligned, 4 SMs": "torch.argsort, then aligned loads",
    "both on two streams, by a staging buffer": "two streams and staging",
    "a block a descriptor": "one block per descriptor",
}

_POOL_CASE = "gather of 262144 rows of 656 B, pool of 16 GiB"
# Of the first page: one line of each op, at the size where its users live.
_SUMMARY = {
    "store_cache, 131,072 rows of 1 KB": ("store", "131072 rows of 1024 B"),
    "store_cache, 1 row of 656 B": ("store", "1 rows of 656 B"),
    "indexing, 65,536 rows of 8 KB": ("index", "65536 rows of 8192 B"),
    "h2d_gather, 656 B, distinct rows": ("h2d_gather", "262144 rows of 656 B, distinct"),
    "h2d_gather, 656 B, a third repeated": ("h2d_gather", "262144 rows of 656 B, repeats"),
    "h2d_gather out of a pool of 16 GiB": ("pools", _POOL_CASE),
    "swap_rows, 656 B, both ways": ("swap", "262144 rows of 656 B, distinct, pool of 0.4 GiB"),
    "copy_blocks, 32 layers x 16 KB": ("copy_blocks", "h2d, 128 blocks x 32 layers x 16 KB"),
    "unpack, 2,048 pieces of 256 B": ("unpack", "2048 pieces of 256 B"),
    "merge_state, 256 x 32 x 128": ("merge", "256 x 32 x 128 bf16"),
    "merge_state, 16,384 x 32 x 128": ("merge", "16384 x 32 x 128 bf16"),
}


@dataclass(frozen=True)
class Lines:
    """Panels of one benchmark, a line an implementation, over a number in the rows' params."""

    op: str
    title: str
    panel: Callable[[RowData, Mapping[str, Any]], object]
    """The title of the panel that a row, with these params, stands in; empty for none."""
    x: str
    x_label: str
    y_label: str = "% of the bandwidth of a copy"
    y: str = "percent_of_ceiling"
    ceiling: str = "a copy of as many bytes"
    base: int = 2

    def draw(self, rows: Sequence[RowData], machine: str, path: Path) -> list[Path]:
        """Draw the panels that have more than one point on their lines."""
        panels: dict[Any, list[RowData]] = {}
        for row in rows:
            if row[self.y] and (title := self.panel(row, row["params"])):
                panels.setdefault(title, []).append(row)
        drawn = {
            t: rows for t, rows in panels.items() if len({r["params"][self.x] for r in rows}) > 1
        }
        if not drawn:
            return []
        columns = min(len(drawn), 2)  # more would be unreadable on a phone
        lines = -(-len(drawn) // columns)
        size = (max(6.4, 4.2 * columns), 3.0 * lines + 1.4)
        figure, grid = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False)
        legend: dict[str, Any] = {}
        for axes in grid.flat[len(drawn) :]:
            axes.remove()
        for axes, (title, here) in zip(grid.flat, drawn.items(), strict=False):
            legend |= self._lines(axes, here)
            speed = max((r[self.y] for r in here if r["role"] == "ceiling"), default=100)
            axes.axhline(speed, color=GREY, linestyle="--", linewidth=1)
            at = {"xy": (0.02, speed), "xycoords": ("axes fraction", "data")}
            axes.annotate(self.ceiling, **at, fontsize=7, va="bottom")
            axes.set(title=title, xlabel=self.x_label)
            axes.tick_params(labelsize=8)
            axes.set_xscale("log", base=self.base)
            axes.xaxis.set_major_formatter("{x:,g}")
        for axes in grid[:, 0]:
            axes.set_ylabel(self.y_label)
        top = max(row[self.y] for here in drawn.values() for row in here)
        grid.flat[0].set_ylim(0, min(1.1 * top, 180))
        figure.suptitle(f"{self.op}, {self.title}, {machine}", fontsize=10)
        figure.legend(legend.values(), legend.keys(), loc="lower center", ncols=3)
        return save(figure, path, bottom=0.14 * 4.4 / size[1])

    def _lines(self, axes: Any, rows: Sequence[RowData]) -> dict[str, Any]:
        """Draw a line for each name, those of one library told apart by dashes; return them."""
        points: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            if row["role"] in ("ours", "peer"):
                points.setdefault(row["impl"], []).append((row["params"][self.x], row[self.y]))
        drawn, of_library = {}, Counter[str]()
        for name, line in points.items():
            if len(line) > 1:
                library = max((one for one in _LIBRARIES if name.startswith(one)), key=len)
                style = {"linestyle": _LINES[of_library[library] % len(_LINES)], "marker": "o"}
                style |= {"linewidth": 2.2 if name == "jitkern" else 1.3, "markersize": 3}
                at = zip(*sorted(line), strict=True)
                (made,) = axes.plot(*at, color=_LIBRARIES[library], **style)
                drawn[_PLAIN.get(name, name)] = made
                of_library[library] += 1
        return drawn


def _of_rows(row: RowData, p: Mapping[str, Any]) -> str:
    is_other = p.get("vocab_range") or "v_row_bytes" in p or "one cache" in row["case"]
    return "" if is_other else f"{p['row_bytes']} B a row"


def _of_sizes(row: RowData, p: Mapping[str, Any]) -> str:
    is_large = p["sources"] == "distinct" and row["bytes_moved"] > 1e8
    return "distinct rows" if is_large else ""


def _of_pools(row: RowData, p: Mapping[str, Any]) -> str:
    is_other = "Zipf" in row["case"] or row["impl"].startswith("jitkern, by")
    return p["kind"] if (p["rows"], p["row_bytes"]) == (262_144, 656) and not is_other else ""


def _of_merge(row: RowData, p: Mapping[str, Any]) -> str:
    return f"{p['partials']} partials" if row["case"].endswith("x 32 x 128 bf16") else ""


_OF_ROWS = ("cold buffers, random rows", _of_rows, "rows", "rows")
_SIZES = ("as many bytes in rows of each size", _of_sizes, "row_bytes", "bytes of a row")
_POOLS = ("262,144 random rows of 656 B", _of_pools, "pool_gib", "GiB of the pool")
_MERGE = ("32 heads x 128, bf16, cold buffers", _of_merge, "tokens", "tokens")
_ENGINE = "copy engine, in one piece"
PLOTS = {
    "store_bandwidth": Lines("store", *_OF_ROWS, base=10),
    "index_bandwidth": Lines("index", *_OF_ROWS, base=10),
    "h2d_row_sizes": Lines("h2d_gather", *_SIZES, "% of the copy engine", ceiling=_ENGINE),
    "pools": Lines("pools", *_POOLS, "GB/s that arrive", "gb_s", _ENGINE),
    "merge": Lines("merge", *_MERGE),
}


def draw(data: report.Payload, folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    machine = data["machine"]["name"]
    rows = {op: entry["rows"] for op, entry in data["benchmarks"].items()}
    made = _summary(rows, machine, folder / "summary.png")
    for name, plot in PLOTS.items():
        made += plot.draw(rows.get(plot.op, []), machine, folder / f"{name}.png")
    if "beside" in rows:
        made += _beside(rows["beside"], machine, folder / "beside.png")
    return made


def _beside(rows: Sequence[RowData], machine: str, path: Path) -> list[Path]:
    """Draw how much longer a step of batch 32 is, over the GB/s moved beside it."""
    at = {
        r["impl"]: (r["gb_s"], r["params"]["slowdown"]) for r in rows if r["params"]["batch"] == 32
    }
    figure, panels = plt.subplots(1, 2, figsize=(8.4, 4), sharey=True)
    for axes, way, op in zip(panels, ("h2d", "d2h"), ("h2d_gather", "d2h_scatter"), strict=True):
        by_sms = [f"copy_blocks {way}, {sms} SMs" for sms in (1, 2, 3, 4, 8)]
        for label, names in {
            "copy engine, one piece": [f"engine, contiguous, {way}"],
            "copy_blocks, layer first, by 1, 2, 3, 4, 8 SMs": by_sms,
            "by default": [f"copy_blocks {way}"],
            "host page first": [f"host page first, {way}"],
            "pages on both sides": [f"pages, {way}"],
            "rows of 656 B": [op],
        }.items():
            axes.plot(*zip(*(at[name] for name in names), strict=True), label=label, marker="o")
        title = {"h2d": "to the GPU", "d2h": "to the host"}[way]
        axes.set(title=title, xlabel="GB/s beside the step", xlim=(0, None))
    panels[0].set_ylabel("step, times as long")
    figure.legend(*axes.get_legend_handles_labels(), loc="lower center", ncols=3)
    figure.suptitle(f"decode step of batch 32 beside copies, {machine}", fontsize=10)
    return save(figure, path, bottom=0.15)


def _summary(rows: dict[str, list[RowData]], machine: str, path: Path) -> list[Path]:
    """How much faster than the fastest peer of the same run, peer by name; below 1 it wins."""
    bars = []
    for label, (op, case) in _SUMMARY.items():
        timed = [r for r in rows.get(op, []) if r["case"] == case and r["median_us"]]
        ours = [r for r in timed if r["impl"] == "jitkern"]
        # "jitkern, ..." in a peer's role are our own parts, called one after the other.
        peers = [r for r in timed if r["role"] == "peer" and not r["impl"].startswith("jitkern")]
        if not (ours and peers):
            return []
        best = min(peers, key=lambda r: float(r["median_us"]))
        ratio = best["median_us"] / ours[0]["median_us"]
        bars.append((label, ratio, _PLAIN.get(best["impl"], best["impl"])))
    figure, axes = plt.subplots(figsize=(8.4, 0.34 * len(bars) + 1.2))
    for at, (_, ratio, peer) in enumerate(bars):
        axes.barh(at, ratio, color=OURS, height=0.62)
        axes.text(ratio, at, f" {ratio:.2f} x  {peer}", va="center", fontsize=7.5)
    axes.axvline(1, color=GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(bars)), [label for label, *_ in bars], fontsize=8)
    axes.set_xlim(0, 1.8 * max(ratio for _, ratio, _ in bars))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("speed of jitkern / the fastest other of the same run, which is named")
    axes.set_title(f"{machine}, cold buffers, random rows")
    return save(figure, path)


def save(figure: Any, path: Path, bottom: float = 0.0) -> list[Path]:
    """Write a plot without a background; the lowest part of it is for a legend."""
    figure.tight_layout(rect=(0, bottom, 1, 1))
    figure.savefig(path, dpi=140, transparent=True)
    plt.close(figure)
    return [path]


if __name__ == "__main__":
    for written in draw(report.read(Path(sys.argv[1])), Path(sys.argv[2])):
        print(f"wrote {written}")
