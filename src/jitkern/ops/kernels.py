"""Loading the kernels of jitkern's own ops."""

from __future__ import annotations

from collections.abc import Sequence

from jitkern import hints
from jitkern.jit.loader import DeviceModule, load_device
from jitkern.jit.record import Specialisation


def load_jit(
    name: str,
    *args: str,
    device_files: Sequence[str],
    device_wrappers: Sequence[tuple[str, str]],
) -> DeviceModule:
    """As :func:`jitkern.load_jit`; a FrozenError names the ``jitkern warm`` that was missing.

    The first of `args` is the size of a row, as the command line takes it.
    """
    options = {
        "device_files": list(device_files),
        "device_wrappers": list(map(list, device_wrappers)),
    }
    used = Specialisation("load_jit", (name, *args), options, "")
    return load_device(used, lambda arch: hints.warm_op(name, args[0], arch))
