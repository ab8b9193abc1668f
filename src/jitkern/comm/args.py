"""Arguments of communicators and of their calls: checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from jitkern.comm.protocol import REDUCE_OPS, Communicator
from jitkern.errors import CommError, name_unreadable
from jitkern.host.faults import is_of_earlier_call
from jitkern.ops import dispatch
from jitkern.ops.common import type_text

# What both gloo and NCCL reduce. Any dtype can be moved.
REDUCED_DTYPES = "float16, bfloat16, float32, float64, uint8, int8, int32, int64"
MAX_TIMEOUT_S = 1e6  # twelve days; poll() takes no more than 24


def communicator_arg(call: str, value: Any) -> Communicator:
    """Return `value` if it has a rank, a size and a sum."""
    lacking = [name for name in ("rank", "size", "all_reduce") if not hasattr(value, name)]
    if lacking:
        given = f"{type_text(value)} without {', '.join(lacking)}"
        raise TypeError(f"{call}: comm: {given}, expected a Communicator")
    if not 0 <= value.rank < value.size:
        given = f"rank {value.rank} of {value.size}"
        raise ValueError(f"{call}: comm: {given}, expected a rank of 0 to size - 1")
    return cast(Communicator, value)


def int_arg(
    call: str, name: str, value: Any, least: int, most: int | None = None, error: Any = ValueError
) -> int:
    """Return an int of `least` to `most`; NumPy's ints count as ints, bools and tensors do not."""
    try:
        if isinstance(value, bool) or hasattr(value, "untyped_storage"):
            raise TypeError  # a tensor on the GPU would be waited for
        number = index(value)
    except TypeError:
        raise TypeError(f"{call}: {name}: {type_text(value)}, expected an int") from None
    if number < least or (most is not None and number > most):
        expected = f"at least {least}" if most is None else f"{least} to {most}"
        raise error(f"{call}: {name}: {number}, expected {expected}")
    return number


def rank_arg(call: str, name: str, value: Any, size: int, other_than: int = -1) -> None:
    """Raise unless `value` is a rank, and not `other_than`."""
    if int_arg(call, name, value, 0, size - 1) == other_than:
        raise ValueError(f"{call}: {name}: {value}, expected another rank than this one")


def seconds_arg(
    call: str, value: Any, name: str = "timeout_s", most: float = MAX_TIMEOUT_S
) -> float:
    """Return seconds; ``most=math.inf`` allows no deadline."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{call}: {name}: {type_text(value)}, expected seconds")
    if not 0 < value <= most:
        expected = "above 0" if math.isinf(most) else f"above 0 and at most {most:g} s"
        raise ValueError(f"{call}: {name}: {value}, expected {expected}")
    return float(value)


def choice_arg(call: str, name: str, value: Any, choices: Sequence[str]) -> str:
    """Return one of `choices`."""
    if value not in choices:
        raise ValueError(f"{call}: {name}: {value!r}, expected one of {', '.join(choices)}")
    return cast(str, value)


def device_arg(call: str, name: str, device: Any) -> torch.device:
    """Return a GPU with its number, or the CPU. None is the current GPU, if there is one."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = torch.device("meta")
    if found.type not in ("cuda", "cpu"):
        raise ValueError(f"{call}: {name}: {device}, expected a GPU or the CPU")
    if found.type == "cpu":
        return torch.device("cpu")
    number = torch.cuda.current_device() if found.index is None else found.index
    return torch.device("cuda", number)


def store_of(call: str, group: Any, rank: Any, size: Any) -> tuple[c10d.Store, int, int]:
    """Return the store of a group, or the given one, and this process's rank and size."""
    if isinstance(group, c10d.Store):
        size = int_arg(call, "size", size, 1)
        return group, int_arg(call, "rank", rank, 0, size - 1), size
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{call}: group: this process is not in it, expected one of its ranks")
    if not isinstance(group, dist.ProcessGroup | None):
        expected = "a ProcessGroup, a Store or None"
        raise TypeError(f"{call}: group: {type_text(group)}, expected {expected}")
    if not dist.is_initialized():
        what_to_do = "call torch.distributed.init_process_group() first"
        raise CommError(f"{call}: group: torch.distributed is not initialised; {what_to_do}")
    own = dist.get_rank(group), dist.get_world_size(group)
    if (given := (own[0] if rank is None else rank, own[1] if size is None else size)) != own:
        expected = f"rank {own[0]} of size {own[1]} as in the group"
        raise ValueError(f"{call}: rank {given[0]} of size {given[1]}, expected {expected}")
    return c10d._get_process_group_store(group or c10d._get_default_group()), *own


def serves(store: Any, rank: int) -> bool:
    """Tell whether a TCPStore's server is in this process: rank 0's, unless torchrun has it."""
    while isinstance(store, c10d.PrefixStore):
        store = store.underlying_store
    is_first = (dist.get_rank() if dist.is_initialized() else rank) == 0
    is_tcp = isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]
    return is_tcp and is_first and not dist.is_torchelastic_launched()


def namespace(found: Any) -> Any:
    """Return a map from C++ as an object with its keys as attributes."""
    return SimpleNamespace(**{str(name): value for name, value in found.items()})


def call_cpp(
    op: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    names: str,
    written: tuple[Any, ...],
    read: tuple[Any, ...] = (),
    indices: tuple[Any, ...] = (),
) -> Any:
    """Call C++ and return its result: None or 0 if the call was made.

    ``names`` are of what is written, read, an index. RuntimeError if PyTorch has to see the call.
    """
    if not dispatch.in_inference_mode() and not dispatch.may_write(written, read):
        named = iter(names.split())
        parts = [{next(named): one for one in part} for part in (written, read)]
        dispatch.refuse(op, *parts)
    try:
        result = function(*args)
    except Exception as error:
        if not is_of_earlier_call(error):
            tensors = (*written, *read, *indices)
            name_unreadable(error, op, **dict(zip(names.split(), tensors, strict=True)))
        dispatch.wrote(*written)  # this call was made all the same
        raise
    if not result:
        dispatch.wrote(*written)
    return result


def tensor_arg(call: str, name: str, value: Any, devices: Sequence[torch.device]) -> None:
    """Raise unless `value` is a dense, contiguous tensor on one of `devices`."""
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


def reduced_args(call: str, x: Tensor, op: Any) -> None:
    """Raise for an unknown op, and for a dtype that is not reduced."""
    choice_arg(call, "op", op, REDUCE_OPS)
    if str(x.dtype).removeprefix("torch.") not in REDUCED_DTYPES.split(", "):
        raise TypeError(f"{call}: x: {x.dtype}, expected one of {REDUCED_DTYPES}")


def gather_args(call: str, whole: Tensor, part: Tensor, size: int, name: str) -> None:
    """Raise unless `whole`, which is called `name`, has room for one `part` of each rank."""
    if whole.numel() != part.numel() * size:
        expected = f"{part.numel() * size}, {part.numel()} for each of {size} ranks"
        raise ValueError(f"{call}: {name}: {whole.numel()} items, expected {expected}")


def rows_arg(call: str, name: str, splits: Any) -> list[int]:
    """Return numbers of rows."""
    if isinstance(splits, str | bytes) or not isinstance(splits, Sequence):
        raise TypeError(f"{call}: {name}: {type(splits).__name__}, expected a list of int")
    return [int_arg(call, name, one, 0) for one in splits]


def splits_arg(call: str, name: str, splits: Any, x: Tensor, size: int) -> list[int]:
    """Return how many rows of `x` are each rank's part; None: equal parts."""
    num_rows = x.shape[0] if x.dim() else 1
    if splits is None:
        if num_rows % size:
            raise ValueError(f"{call}: {num_rows} rows, expected a multiple of {size}, or {name}")
        return [num_rows // size] * size
    rows = rows_arg(call, name, splits)
    if len(rows) != size or sum(rows) != num_rows:
        given = f"{len(rows)} numbers, {sum(rows)} rows in all"
        expected = f"{size}, one for each rank, and {num_rows} rows"
        raise ValueError(f"{call}: {name}: {given}, expected {expected}")
    return rows
