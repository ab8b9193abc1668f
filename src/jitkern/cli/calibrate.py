"""``jitkern calibrate``: measure this machine for what "auto" decides."""

from __future__ import annotations

import argparse
from dataclasses import asdict

from jitkern.calibration import calibrate
from jitkern.cli import ui

SUMMARY = "measure this machine for what the ops decide by themselves"
DESCRIPTION = """\
Measure in under a minute how this machine moves rows between host memory and the GPU, and keep the
figures beside the cache, for this model of GPU, driver and processor. Needs an idle machine, and a
quarter of its free memory: 4 GiB at least, 32 at most. Without it the figures of an H200 are
used."""
EXAMPLE = "jitkern calibrate"


def configure(parser: argparse.ArgumentParser) -> None:
    ui.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, and print the figures."""
    ui.require_torch()
    with ui.progress() as advance:
        found = calibrate(lambda what: advance(what, 0, 1))
    if args.json:
        ui.say_json(**asdict(found))
        return 0
    rows = [(name, f"{value:,}") for name, value in found.figures.items()]
    ui.say(ui.table(("figure", ">of this machine"), rows))
    ui.say(f"measured in {found.took_s:.0f} s, kept in {found.file}")
    return 0
