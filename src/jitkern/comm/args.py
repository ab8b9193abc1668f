"""Arguments of communicators, and of their calls: checked before anything is sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from jitkern.comm.protocol import REDUCE_OPS
from jitkern.ops.common import type_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jitkern.comm.protocol import Communicator

# What both gloo and NCCL reduce; what is only moved may be of any dtype.
REDUCED_DTYPES = (
    *("float16", "bfloat16", "float32", "float64"),
    *("uint8", "int8", "int32", "int64"),
)

MAX_TIMEOUT_S = 1e6  # twelve days; poll() takes no more than 24


# -- of a communicator -----------------------------------------------------------------------------


def communicator_arg(call: str, value: Any) -> Communicator:
    """Return what has a rank, a size and a sum."""
    lacking = [name for name in ("rank", "size", "all_reduce") if not hasattr(value, name)]
    if lacking:
        without = ", ".join(lacking)
        raise TypeError(
            f"{call}: comm: {type_text(value)} without {without}, expected a Communicator"
        )
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
    """Raise for what cannot be sent or written to: not contiguous, or on none of `devices`."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{call}: {name}: {type(value).__name__}, expected a tensor")
    if value.device not in devices:
        expected = " or ".join(str(device) for device in devices)
        raise ValueError(f"{call}: {name}: on {value.device}, expected on {expected}")
    if value.layout != torch.strided or value.is_quantized:
        raise ValueError(f"{call}: {name}: {value.layout}, expected a dense tensor")
    if not value.is_contiguous():
        what_to_do = "call .contiguous()"
        raise ValueError(f"{call}: {name}: not contiguous, expected contiguous; {what_to_do}")


def reduction_args(call: str, x: Tensor, op: Any) -> None:
    """Raise for an op that there is not, and a dtype that is not reduced."""
    if op not in REDUCE_OPS:
        raise ValueError(f"{call}: op: {op!r}, expected one of {', '.join(REDUCE_OPS)}")
    if str(x.dtype).removeprefix("torch.") not in REDUCED_DTYPES:
        expected = f"one of {', '.join(REDUCED_DTYPES)}"
        raise TypeError(f"{call}: x: {x.dtype}, expected {expected}")


def rank_arg(call: str, name: str, value: Any, size: int, other_than: int = -1) -> None:
    """Raise for what is no rank, or `other_than`, this one."""
    if type(value) is not int:  # True is none
        raise TypeError(f"{call}: {name}: {type(value).__name__}, expected int")
    if not 0 <= value < size:
        raise ValueError(f"{call}: {name}: {value}, expected 0 to {size - 1}, a rank")
    if value == other_than:
        raise ValueError(f"{call}: {name}: {value}, expected another rank than this one")


def pair_args(call: str, output: Tensor, x: Tensor) -> None:
    """Raise where the two differ in dtype or device."""
    if output.dtype != x.dtype:
        raise TypeError(f"{call}: output: {output.dtype}, expected {x.dtype} as x")
    if output.device != x.device:
        raise ValueError(f"{call}: output: on {output.device}, expected on {x.device} as x")


def gather_args(call: str, whole: Tensor, part: Tensor, rank: int, size: int, names: str) -> None:
    """Raise unless `whole` has room for one `part` of each rank; `names` are theirs, in order.

    They may share memory where `part` is that of this rank, at its place, and nowhere else.
    """
    of_whole, of_part = names.split()
    expected = part.numel() * size
    if whole.numel() != expected:
        raise ValueError(
            f"{call}: {of_whole}: {_items(whole.numel())}, expected {expected}, {part.numel()} "
            f"{'of' if of_whole == 'output' else 'for'} each of {size} ranks"
        )
    part_bytes = part.numel() * part.element_size()
    is_in_place = part.data_ptr() == whole.data_ptr() + rank * part_bytes
    if not is_in_place:
        apart_args(call, whole, part, f"{of_part} apart from {of_whole}, or part {rank} of it")


def apart_args(call: str, one: Tensor, other: Tensor, expected: str) -> None:
    """Raise where the two share memory."""
    start, stop = _range(one)
    other_start, other_stop = _range(other)
    if max(start, other_start) < min(stop, other_stop):
        raise ValueError(f"{call}: x and output overlap, expected {expected}")


def splits_args(
    call: str, output: Tensor, x: Tensor, output_splits: Any, input_splits: Any, size: int
) -> tuple[list[int], list[int]]:
    """Return how many rows of output come from each rank, and of x go to each; None: as many."""
    if output.shape[1:] != x.shape[1:]:
        came, expected = list(output.shape[1:]), list(x.shape[1:])
        raise ValueError(f"{call}: output: rows of {came}, expected {expected} as x")
    if output_splits is None and input_splits is None and output.numel() != x.numel():
        raise ValueError(f"{call}: output: {_items(output.numel())}, expected {x.numel()} as x")
    outs = _splits_arg(call, "output", output, output_splits, size)
    return outs, _splits_arg(call, "x", x, input_splits, size)


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


def _splits_arg(call: str, of: str, tensor: Tensor, splits: Any, size: int) -> list[int]:
    name = "input_splits" if of == "x" else "output_splits"
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None:
        if num_rows % size:
            expected = f"a multiple of {size}, the number of ranks"
            raise ValueError(f"{call}: {of}: {num_rows} rows, expected {expected}")
        return [num_rows // size] * size
    rows = rows_arg(call, name, splits)
    if len(rows) != size:
        raise ValueError(f"{call}: {name}: {len(rows)} numbers, expected {size}, one of a rank")
    if sum(rows) != num_rows:
        expected = f"{num_rows}, the rows of {of}"
        raise ValueError(f"{call}: {name}: {sum(rows)} in all, expected {expected}")
    return rows


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count} items"


def _range(x: Tensor) -> tuple[int, int]:
    start = x.data_ptr()
    return start, start + x.numel() * x.element_size()
