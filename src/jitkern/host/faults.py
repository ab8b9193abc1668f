"""``check``: raise the faults that kernels have recorded so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.host import library as host

if TYPE_CHECKING:
    import torch

_EXPECTED = "a CUDA device or the CPU"


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
    """
    import torch

    if not isinstance(device, int):
        try:
            parsed = torch.device("cuda" if device is None else device)
        except TypeError:
            kind = type(device).__name__
            raise TypeError(f"check: device: {kind}, expected {_EXPECTED}") from None
        except RuntimeError:
            raise ValueError(f"check: device: {device!r}, expected {_EXPECTED}") from None
        if parsed.type not in ("cpu", "cuda"):
            raise ValueError(f"check: device: {parsed}, expected {_EXPECTED}")
        if parsed.type == "cpu" or not torch.cuda.is_available():
            return
        device = torch.cuda.current_device() if parsed.index is None else parsed.index
    if isinstance(device, bool) or not 0 <= device < host.module()["max_devices"]():
        raise ValueError(f"check: device: {device}, expected {_EXPECTED}")
    host.module()["check_faults"](device)
