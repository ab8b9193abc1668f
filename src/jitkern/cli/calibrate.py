"""``jitkern calibrate``: measure this machine for what "auto" decides."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern.cli import ui
from jitkern.errors import UnsupportedError

if TYPE_CHECKING:
    from jitkern.calibration import Calibration

SUMMARY = "measure this machine for what the ops decide by themselves"
DESCRIPTION = """\
Measure in under a minute how this machine moves rows between host memory and the GPU, and keep the
figures beside the cache, for this model of GPU, driver and processor. Wants an idle machine, and a
quarter of its free memory: 4 GiB at least, 32 at most. Without it the figures of an H200 are
used."""
EXAMPLE = "jitkern calibrate --plot calibration.png"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw what was measured (needs matplotlib)"
    )
    ui.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print the figures."""
    ui.require_torch()
    if args.plot is not None:
        _check_plot(args.plot)
    from jitkern.calibration import calibrate

    console = ui.console(stderr=True)
    with console.status("calibrating") as status:
        found = calibrate(status.update)
    if args.plot is not None:
        _draw(found, args.plot)
    if args.json:
        ui.say_json(**{**asdict(found), "file": str(found.file)})
        return 0
    rows = [(name, _figure_text(name, value)) for name, value in found.figures.items()]
    ui.console().print(ui.table(("figure", "of this machine"), rows))
    ui.say(f"measured in {found.took_s:.0f} s, kept in {found.file}")
    return 0


def _figure_text(name: str, value: int) -> str:
    if "_bytes" not in name:
        return str(value)
    from jitkern.offload.memory import size_text  # not for the help of all

    return "beyond any" if value >= 1 << 50 else size_text(value)


def _check_plot(file: Path) -> None:
    """Refuse what could not be drawn, before anything is measured."""
    try:
        canvas = import_module("matplotlib.backends.backend_agg").FigureCanvasAgg
    except ImportError:
        raise UnsupportedError("--plot: needs matplotlib; pip install matplotlib") from None
    if file.suffix[1:].lower() not in canvas.get_supported_filetypes():
        raise ui.UsageError(f"calibrate: --plot: {file}, expected a name such as {file.stem}.png")
    ui.require_writable(file.parent, "give a path that can be written", mode=0o755)


def _draw(found: Calibration, file: Path) -> None:
    import_module("matplotlib").use("Agg")
    pyplot = import_module("matplotlib.pyplot")

    spans = ("as they come", "in order", "scatter, in order", "scatter by the CPU")
    counts = ("both ways, of threads", "scatter by the CPU, of threads")
    blocks = tuple(name for name in found.curves if name.startswith("blocks"))
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), constrained_layout=True)
    parts = (
        (spans, "GiB of pinned memory", "GB/s"),
        (counts, "threads of the CPU", "GB/s"),
        (("small", "large"), "MiB of a call", "us"),
        (blocks, "KiB of a block in each of 32 layers", "GB/s"),
    )
    for plot, (names, x, y) in zip(axes.flat, parts, strict=True):
        for name in names:
            plot.plot(*zip(*found.curves[name], strict=True), marker="o", label=name)
        plot.set(xlabel=x, ylabel=y)
        plot.set_xscale("log", base=2)
        plot.set_ylim(bottom=0)
        plot.legend(fontsize=8)
        plot.grid(alpha=0.3)
    figure.suptitle(f"random rows of 656 bytes: {found.machine}", fontsize=9)
    figure.savefig(file, dpi=120)
