"""Plots of the docs: ``python -m bench.plots RESULT... FOLDER``."""

import sys
from pathlib import Path

import matplotlib

from bench import report

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GREY = "#767d87"  # readable on a white and on a black page
OURS = "#2ea650"
plt.rcParams.update({"font.size": 8, "axes.titlesize": 8, "text.color": GREY})

# Names of peers for readers; other names are shown as they are.
_PLAIN = {
    "nvcc, mini-sglang style": "warp per row (nvcc)",
    "triton": "Triton",
    "torch cache[idx] = x, twice": "PyTorch, cache[idx] = x",
    "torch index_select(out=)": "PyTorch, index_select",
    "torch F.embedding": "PyTorch, F.embedding",
    "line-aligned, 2 SMs": "aligned loads (nvcc)",
    "line-aligned, 4 SMs": "aligned loads (nvcc)",
    "loads before stores, all SMs": "batched loads (nvcc)",
    "torch.argsort, then line-aligned, 4 SMs": "argsort, aligned loads (nvcc)",
    "a block a descriptor": "one block per descriptor (nvcc)",
}

_LISTS_CASE = "1024 blocks x 8 buffers x 8 KiB of 0.5 GiB"
_POOL_CASE = "gather of 262144 rows of 656 B, pool of 16 GiB"
# The bars of the summary: a case per op, at the size of real calls.
_SUMMARY = {
    "store_cache, 131,072 rows of 1 KB": ("store", "131072 rows of 1024 B"),
    "store_cache, 1 row of 656 B": ("store", "1 rows of 656 B"),
    "indexing, 65,536 rows of 8 KB": ("index", "65536 rows of 8192 B"),
    "h2d_gather, 656 B, distinct rows": ("h2d_gather", "262144 rows of 656 B, distinct"),
    "h2d_gather, 656 B, a third repeated": ("h2d_gather", "262144 rows of 656 B, repeats"),
    "h2d_gather from a pool of 16 GiB": ("pools", _POOL_CASE),
    "copy_blocks to the GPU, 8,192 x 8 KiB": ("lists", f"h2d, {_LISTS_CASE}"),
    "copy_blocks to the host, 8,192 x 8 KiB": ("lists", f"d2h, {_LISTS_CASE}"),
    "unpack, 2,048 pieces of 256 B": ("unpack", "2048 pieces of 256 B"),
    "merge_state, 256 x 32 x 128": ("merge", "256 x 32 x 128 bf16"),
    "merge_state, 16,384 x 32 x 128": ("merge", "16384 x 32 x 128 bf16"),
}


def draw(results: list[report.Payload], path: Path) -> None:
    """Draw a bar per case: our speed over the fastest peer's of the same run."""
    benchmarks = {op: data for result in results for op, data in result["benchmarks"].items()}
    bars = []
    for label, (op, case) in _SUMMARY.items():
        rows = benchmarks[op]["rows"]
        timed = [r for r in rows if r["case"] == case and r["median_us"]]
        ours = next(r for r in timed if r["impl"] == "jitkern")
        # Peers named "jitkern, ..." are our own parts, called one after the other.
        peers = [r for r in timed if r["role"] == "peer" and not r["impl"].startswith("jitkern")]
        best = min(peers, key=lambda r: float(r["median_us"]))
        ratio = best["median_us"] / ours["median_us"]
        bars.append((label, ratio, _PLAIN.get(best["impl"], best["impl"])))
    # The labels are above the bars, and the figure is narrow: a phone shows its 4.6 inches in 370
    # pixels, where 8 points are 9 pixels.
    figure, axes = plt.subplots(figsize=(4.6, 0.42 * len(bars) + 0.4))
    for at, (label, ratio, peer) in enumerate(bars):
        axes.text(0, at - 0.4, label, va="center")
        axes.barh(at, ratio, color=OURS, height=0.38)
        # White beside black: seen on a bar, and on a white and on a black page.
        for color, width in (("white", 3), ("black", 1)):
            axes.vlines(1, at - 0.28, at + 0.28, color=color, linewidth=width)
        axes.text(max(ratio, 1), at, f" {ratio:.2f} x  {peer}", va="center")
    axes.set_xlim(0, 1.95 * max(ratio for _, ratio, _ in bars))
    axes.text(1, len(bars) - 0.6, "1.00: the fastest peer", ha="center", va="center")
    axes.set_ylim(len(bars) - 0.4, -0.7)
    axes.axis("off")
    machine = results[0]["machine"]["name"]
    axes.set_title(
        "speed of jitkern / speed of the fastest peer, which is named\n"
        f"{machine}, cold buffers, random rows, method='sm'",
        loc="left",
    )
    figure.tight_layout(pad=0.3)
    figure.savefig(path, dpi=160, transparent=True)
    plt.close(figure)


# The parts of a layer: their stream, and their label.
_PARTS = {
    "store the new rows": (0, ""),
    "indexer, top k": (0, "store, indexer, top k"),
    "queries": (0, "queries"),
    "read the rows": (0, "read rows, attend"),
    "attend": (0, ""),
    "write them to the pool": (1, "write new rows to the pool"),
    "find and fetch": (2, "find and fetch (swap_in)"),
}
_WAYS = {
    "h2d_gather of all rows": ("h2d_gather of all rows", "#f58518"),
    "jitkern": ("ResidencyMap", OURS),
    "all rows on the GPU": ("all rows on the GPU", "#4c78a8"),
}


def draw_sparse(result: report.Payload, path: Path, context: int = 131072) -> None:
    """Draw a layer of the step of sparse attention, and the speed of each way."""
    rows = result["benchmarks"]["sparse"]["rows"]
    figure, (spans, speeds) = plt.subplots(2, figsize=(4.6, 4.2), height_ratios=(1, 1.5))
    for row in (r for r in rows if r["case"] == f"one layer, batch 32, context {context}"):
        (lane, label), start = _PARTS[row["impl"]], row["params"]["start_us"]
        color = OURS if lane else GREY
        spans.barh(lane, row["median_us"], left=start, color=color, height=0.34, edgecolor="white")
        spans.text(start, lane - 0.22, label, va="bottom", fontsize=7)
    spans.set_yticks(range(3), ["current", "store", "fetch"])
    spans.set_ylim(2.3, -0.8)
    spans.set_title(f"streams of one layer, us; 32 requests of {context:,} tokens", loc="left")
    batches = (1, 8, 32, 64)
    for impl, (label, color) in _WAYS.items():
        cases = [f"batch {batch}, context {context}, 5 % missing" for batch in batches]
        found = {r["case"]: r["params"] for r in rows if r["impl"] == impl}
        speeds.plot(
            batches,
            [found[case]["tokens_per_s"] for case in cases],
            color=color,
            marker="o",
            label=label,
        )
    speeds.set_xscale("log", base=2)
    speeds.set_xticks(batches, [f"{batch}" for batch in batches])
    speeds.minorticks_off()
    speeds.set_xlabel("requests", color=GREY)
    speeds.set_title("tokens per second, 5 % of the rows missing", loc="left")
    speeds.legend(frameon=False, labelcolor=GREY)
    for axes in (spans, speeds):
        axes.tick_params(colors=GREY)
        for name, side in axes.spines.items():
            side.set_visible(name in ("left", "bottom"))
            side.set_color(GREY)
    figure.tight_layout(pad=0.5, h_pad=2)
    figure.savefig(path, dpi=160, transparent=True)
    plt.close(figure)


if __name__ == "__main__":
    *files, folder = map(Path, sys.argv[1:])
    results = [report.read(file) for file in files]
    draw(results, folder / "summary.png")
    draw_sparse(
        next(r for r in results if "sparse" in r["benchmarks"]), folder / "sparse_decode.png"
    )
