"""Loading the kernels of jitkern's own ops."""

from __future__ import annotations

from collections.abc import Sequence

from jitkern import hints
from jitkern.compilers.sources import CSRC
from jitkern.jit.device import DeviceModule, Wrapper
from jitkern.jit.record import Specialisation


def load_jit(
    name: str, *args: str, device_files: Sequence[str], device_wrappers: Sequence[Wrapper]
) -> DeviceModule:
    """As :func:`jitkern.load_jit`; its FrozenError names the ``jitkern warm`` that was missing.

    The first of `args` is the size of a row, as the command line takes it.
    """
    options = {"device_files": list(device_files), "device_wrappers": [*map(list, device_wrappers)]}
    return DeviceModule(
        name,
        args,
        files=[CSRC / file for file in device_files],
        wrappers=device_wrappers,
        recorded=Specialisation("load_jit", (name, *args), options, ""),
        hint=lambda arch: hints.warm_op(name, args[0], arch),
    )
