"""Arguments of communicators and of their calls: checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from jitkern.comm.protocol import REDUCE_OPS
from jitkern.ops.common import type_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jitkern.comm.protocol import Communicator

# What both gloo and NCCL reduce. Any dtype can be moved.
REDUCED_DTYPES = "float16, bfloat16, float32, float64, uint8, int8, int32, int64"
MAX_TIMEOUT_S = 1e6  # twelve days; poll() takes no more than 24


def communicator_arg(call: str, value: Any) -> Communicator:
    """Return what has a rank, a size and a sum."""
    lacking = [name for name in ("rank", "size", "all_reduce") if not hasattr(value, name)]
    if lacking:
        came = f"{type_text(value)} without {', '.join(lacking)}"
        raise TypeError(f"{call}: comm: {came}, expected a Communicator")
    if not 0 <= value.rank < value.size:
        came = f"rank {value.rank} of {value.size}"
        raise ValueError(f"{call}: comm: {came}, expected a rank of 0 to size - 1")
    return cast("Communicator", value)


def seconds_arg(call: str, timeout_s: Any) -> float:
    """Return a deadline that poll() can wait for."""
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise TypeError(f"{call}: timeout_s: {type_text(timeout_s)}, expected seconds")
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        expected = f"above 0 and at most {MAX_TIMEOUT_S:g} s"
        raise ValueError(f"{call}: timeout_s: {timeout_s}, expected {expected}")
    return float(timeout_s)


def deadline_arg(call: str, name: str, limit_s: Any) -> float:
    """Return a deadline that may be ``math.inf``: none."""
    if isinstance(limit_s, bool) or not isinstance(limit_s, int | float):
        raise TypeError(f"{call}: {name}: {type_text(limit_s)}, expected seconds")
    if not limit_s > 0:
        raise ValueError(f"{call}: {name}: {limit_s!r}, expected more than 0")
    return float(limit_s)


def device_arg(call: str, name: str, device: Any) -> torch.device:
    """Return a GPU with its number, or the CPU."""
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(device, str):
        try:
            device = torch.device(device)
        except RuntimeError:
            raise ValueError(f'{call}: {name}: {device!r}, expected "cuda" or "cpu"') from None
    if not isinstance(device, torch.device):
        raise TypeError(f"{call}: {name}: {type_text(device)}, expected a torch.device")
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"{call}: {name}: {device}, expected a GPU or the CPU")
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device


# -- of a call -------------------------------------------------------------------------------------


def tensor_arg(call: str, name: str, value: Any, devices: Sequence[torch.device]) -> None:
    """Raise for what is no dense, contiguous tensor on one of `devices`."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{call}: {name}: {type(value).__name__}, expected a tensor")
    if value.device not in devices:
        expected = " or ".join(str(device) for device in devices)
        raise ValueError(f"{call}: {name}: on {value.device}, expected on {expected}")
    if value.layout != torch.strided:
        raise ValueError(f"{call}: {name}: {value.layout}, expected a dense tensor")
    if not value.is_contiguous():
        what_to_do = "call .contiguous()"
        raise ValueError(f"{call}: {name}: not contiguous, expected contiguous; {what_to_do}")


def reduction_args(call: str, x: Tensor, op: Any) -> None:
    """Raise for an unknown op, and for a dtype that is not reduced."""
    if op not in REDUCE_OPS:
        raise ValueError(f"{call}: op: {op!r}, expected one of {', '.join(REDUCE_OPS)}")
    if str(x.dtype).removeprefix("torch.") not in REDUCED_DTYPES.split(", "):
        raise TypeError(f"{call}: x: {x.dtype}, expected one of {REDUCED_DTYPES}")


def rank_arg(call: str, name: str, value: Any, size: int, other_than: int = -1) -> None:
    """Raise for what is no rank, or is `other_than`, this one."""
    if type(value) is not int:  # not a bool
        raise TypeError(f"{call}: {name}: {type(value).__name__}, expected int")
    if not 0 <= value < size:
        raise ValueError(f"{call}: {name}: {value}, expected 0 to {size - 1}, a rank")
    if value == other_than:
        raise ValueError(f"{call}: {name}: {value}, expected another rank than this one")


def pair_args(call: str, output: Tensor, x: Tensor) -> None:
    """Raise if the two differ in dtype or device."""
    if output.dtype != x.dtype:
        raise TypeError(f"{call}: output: {output.dtype}, expected {x.dtype} as x")
    if output.device != x.device:
        raise ValueError(f"{call}: output: on {output.device}, expected on {x.device} as x")


def gather_args(call: str, whole: Tensor, part: Tensor, rank: int, size: int, name: str) -> None:
    """Raise unless `whole`, which is called `name`, has room for one `part` of each rank.

    They may share memory only if `part` is this rank's place in it.
    """
    if whole.numel() != part.numel() * size:
        expected = f"{part.numel() * size}, {part.numel()} for each of {size} ranks"
        raise ValueError(f"{call}: {name}: {whole.numel()} items, expected {expected}")
    if part.data_ptr() != whole.data_ptr() + rank * part.nbytes:
        apart_args(call, whole, part, f"no memory in common, or part {rank} of {name}")


def apart_args(call: str, one: Tensor, other: Tensor, expected: str) -> None:
    """Raise if the two share memory."""
    start, other_start = one.data_ptr(), other.data_ptr()
    if max(start, other_start) < min(start + one.nbytes, other_start + other.nbytes):
        raise ValueError(f"{call}: x and output overlap, expected {expected}")


def rows_arg(call: str, name: str, splits: Any) -> list[int]:
    """Return numbers of rows."""
    if isinstance(splits, str | bytes) or not isinstance(splits, Sequence):
        raise TypeError(f"{call}: {name}: {type(splits).__name__}, expected a list of int")
    for split in splits:
        if type(split) is not int:
            raise TypeError(f"{call}: {name}: {type(split).__name__} in it, expected int")
        if split < 0:
            raise ValueError(f"{call}: {name}: {split} in it, expected 0 or more")
    return list(splits)


def splits_arg(call: str, name: str, splits: Any, x: Tensor, size: int) -> list[int]:
    """Return how many rows of `x` are each rank's part; None: equal parts."""
    num_rows = x.shape[0] if x.dim() else 1
    if splits is None:
        if num_rows % size:
            raise ValueError(f"{call}: {num_rows} rows, expected a multiple of {size}, or {name}")
        return [num_rows // size] * size
    rows = rows_arg(call, name, splits)
    if len(rows) != size or sum(rows) != num_rows:
        came = f"{len(rows)} numbers, {sum(rows)} rows in all"
        expected = f"{size}, one for each rank, and {num_rows} rows"
        raise ValueError(f"{call}: {name}: {came}, expected {expected}")
    return rows
