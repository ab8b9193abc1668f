"""``check``: raise the faults that kernels have recorded so far."""

from __future__ import annotations

from jitkern.args import device_arg
from jitkern.host import library as host
from jitkern.lazy import torch


def check(device: torch.device | str | int | None = None) -> None:
    """Raise IndexError for the first out-of-range index that a kernel met on ``device``.

    Kernels never touch memory outside their tensors: they skip such a row and record the fault in
    pinned memory. The next jitkern call on the device raises it, and so does this function. It
    reads one word and does not synchronise: to see the faults of all launched work, call
    ``torch.cuda.synchronize(device)`` first. Raising a fault clears it.

    Parameters
    ----------
    device : torch.device, str or int, optional
        By default the current GPU, or the CPU if there is none. On the CPU there is never a fault
        to report, because calls raise at once.

    Raises
    ------
    IndexError
        With the op, the argument, the position, the value and the bound.
    ValueError
        There is no such device.
    """
    checked = device_arg("check", "device", device)
    if checked.type == "cuda":
        host.module()["check_faults"](checked.index)
