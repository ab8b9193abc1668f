"""How plots look: one colour for a library in all of them, readable on a light and a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

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


def save(figure: Any, path: Path) -> Path:
    """Write a plot without a background."""
    figure.tight_layout()
    figure.savefig(path, dpi=140, transparent=True)
    plt.close(figure)
    return path


def names_of(rows: Sequence[RowData], *roles: str) -> list[str]:
    """Return the implementations in these roles, those of one point left out."""
    names = dict.fromkeys(r["impl"] for r in rows if r["role"] in roles)
    return [name for name in names if sum(r["impl"] == name for r in rows) > 1]
