"""``check``: raise what kernels have found wrong so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jitkern.host import module as host

if TYPE_CHECKING:
    import torch

_EXPECTED = "a CUDA device or the CPU"


def check(device: int | str | torch.device | None = None) -> None:
    """Raise the IndexError of the first out-of-range index that a kernel met on ``device``.

    Kernels never touch memory outside their tensors: they skip such a row and note the fault in
    pinned memory. Every jitkern call on the device raises what is noted by then, and so does this
    function, which reads one word and does not synchronise: to see the faults of all work that was
    launched, call ``torch.cuda.synchronize(device)`` first. The note is cleared by raising it.

    Parameters
    ----------
    device : int, str or torch.device, optional
        A CUDA device; the current one by default. On the CPU there is never a fault to report,
        because calls raise at once.

    Raises
    ------
    IndexError
        With the op, the argument, the position, the value and the bound.
    """
    import torch

    if device is None:
        device = "cuda"
    if not isinstance(device, int):
        try:
            parsed = torch.device(device)
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


def is_of_earlier_call(error: Exception) -> bool:
    """Tell whether an op has raised only what an earlier one left on its GPU.

    The text says so (csrc/host/fault.cc): the type is what the earlier op raises.
    """
    return "(found by an earlier call on cuda:" in str(error)
