"""The timeline of a pipeline as an image."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from jitkern.errors import UnsupportedError

_LANES = ("load", "compute", "store", "stall")
_COLORS = {"load": "#4477aa", "compute": "#228833", "store": "#ccbb44", "stall": "#ee6677"}


def draw(
    path: Path, name: str, moments: Sequence[Sequence[float]], stalls: Sequence[Sequence[float]]
) -> None:
    """Draw iterations, of each of which begin and end of load, compute and store are given, in ms.

    As well as ends of stalls and their lengths. Raises UnsupportedError without matplotlib,
    ValueError without an iteration.
    """
    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise UnsupportedError(
            "OverlapMonitor.plot: matplotlib is not installed; pip install 'jitkern[bench]'"
        ) from error
    lanes = spans(moments, stalls)
    shown = [lane for lane in _LANES if lanes[lane]]
    if not shown:
        raise ValueError("OverlapMonitor.plot: no iteration, expected one that is over")
    first_ms = min(begin for lane in shown for begin, _ in lanes[lane])
    # Not pyplot: it keeps figures, and chooses a window system.
    figure = figures.Figure(figsize=(12, 0.8 + 0.6 * len(shown)), layout="constrained")
    axes = figure.subplots()
    for row, lane in enumerate(shown):
        bars = [(begin - first_ms, ms) for begin, ms in lanes[lane]]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=_COLORS[lane], linewidth=0)
    axes.set_yticks(range(len(shown)), shown)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"{name}: {len(stalls[0])} iterations")
    figure.savefig(path, dpi=150)


def spans(
    moments: Sequence[Sequence[float]], stalls: Sequence[Sequence[float]]
) -> dict[str, list[tuple[float, float]]]:
    """Return begin and length of what each lane shows, in ms; NaN is nothing."""
    found: dict[str, list[tuple[float, float]]] = {}
    for number, lane in enumerate(_LANES[:3]):
        pairs = zip(moments[2 * number], moments[2 * number + 1], strict=True)
        found[lane] = [(begin, end - begin) for begin, end in pairs if begin == begin]
    found["stall"] = [(end - ms, ms) for end, ms in zip(*stalls, strict=True) if ms > 0]
    return found
