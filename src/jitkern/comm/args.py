"""Arguments of communicators and of their calls: checked before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

from jitkern.args import int_arg, type_text
from jitkern.comm.protocol import Communicator
from jitkern.errors import CommError, EarlierFault, name_unreadable
from jitkern.ops import dispatch


def communicator_arg(call: str, value: Any) -> Communicator:
    """Return `value` if it has a rank, a world size and `all_reduce`."""
    lacking = [name for name in ("rank", "world_size", "all_reduce") if not hasattr(value, name)]
    if lacking:
        came = f"{type_text(value)} without {', '.join(lacking)}"
        raise TypeError(f"{call}: comm: {came}, expected a Communicator")
    if not 0 <= value.rank < value.world_size:
        came = f"rank {value.rank} of {value.world_size}"
        raise ValueError(f"{call}: comm: {came}, expected a rank of 0 to world_size - 1")
    return cast(Communicator, value)


def store_of(call: str, group: Any, rank: Any, world_size: Any) -> tuple[c10d.Store, int, int]:
    """Return the group's store, or `group` if it is one, this process's rank and world size."""
    if isinstance(group, c10d.Store):
        world_size = int_arg(call, "world_size", world_size, 1)
        return group, int_arg(call, "rank", rank, 0, world_size - 1), world_size
    if group == dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{call}: group: this process is not in it, expected one of its ranks")
    if not isinstance(group, dist.ProcessGroup | None):
        expected = "a ProcessGroup, a Store or None"
        raise TypeError(f"{call}: group: {type_text(group)}, expected {expected}")
    if not dist.is_initialized():
        cure = "call torch.distributed.init_process_group() first"
        raise CommError(f"{call}: group: torch.distributed is not initialised; {cure}")
    own = dist.get_rank(group), dist.get_world_size(group)
    came = own[0] if rank is None else rank, own[1] if world_size is None else world_size
    if came != own:
        expected = f"rank {own[0]} of {own[1]} as in the group"
        raise ValueError(f"{call}: rank {came[0]} of {came[1]}, expected {expected}")
    return c10d._get_process_group_store(group or c10d._get_default_group()), *own


def namespace(functions: Any) -> Any:
    """Return a map from C++ as an object with its keys as attributes."""
    return SimpleNamespace(**{str(name): value for name, value in functions.items()})


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

    ``names`` are those of the written, the read and the index tensors. RuntimeError if PyTorch has
    to see the call.
    """
    if not (dispatch.inference_mode.is_enabled() or dispatch.is_plain(written, read)):
        name = iter(names.split())
        parts = [{next(name): tensor for tensor in part} for part in (written, read)]
        dispatch.refuse(op, *parts)
    try:
        result = function(*args)
    except EarlierFault:
        dispatch.bump_versions(written)  # this call was made all the same
        raise
    except Exception as error:
        tensors = (*written, *read, *indices)
        name_unreadable(error, op, **dict(zip(names.split(), tensors, strict=True)))
    if not result:
        dispatch.bump_versions(written)
    return result
