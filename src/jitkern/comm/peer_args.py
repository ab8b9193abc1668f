"""What a PeerMemory may be asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

from jitkern.errors import CommError
from jitkern.ops.common import type_text

_MAX_BYTES = 1 << 46  # of a rank: less than the addresses of a process


def bytes_arg(num_bytes: Any) -> int:
    """Return bytes of each rank."""
    if isinstance(num_bytes, bool) or not isinstance(num_bytes, int):
        raise TypeError(f"PeerMemory: num_bytes: {type_text(num_bytes)}, expected an int")
    if not 1 <= num_bytes <= _MAX_BYTES:
        raise ValueError(f"PeerMemory: num_bytes: {num_bytes}, expected 1 to {_MAX_BYTES}")
    return num_bytes


def ranks_arg(group: Any, rank: Any, size: Any) -> tuple[int, int]:
    """Return this rank and how many there are, as given or as in the group."""
    from torch import distributed as dist

    given = {"rank": rank, "size": size}
    if None in (rank, size) and (group is None or isinstance(group, dist.ProcessGroup)):
        if not (dist.is_available() and dist.is_initialized()):
            what_to_do = "call torch.distributed.init_process_group() first"
            raise CommError(
                f"PeerMemory: group: torch.distributed is not initialised; {what_to_do}"
            )
        own = {"rank": dist.get_rank(group), "size": dist.get_world_size(group)}
        given = {name: own[name] if one is None else one for name, one in given.items()}
    for name, one in given.items():
        if isinstance(one, bool) or not isinstance(one, int):
            raise TypeError(
                f"PeerMemory: {name}: {type_text(one)}, expected an int, or a group that has it"
            )
    return given["rank"], given["size"]


def extent(
    call: str, shape: Any, dtype: Any, offset: Any, limit_bytes: int
) -> tuple[list[int], int, int]:
    """Return the sizes of a tensor, where it begins and its bytes."""
    import torch

    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{call}: dtype: {type_text(dtype)}, expected a torch.dtype")
    try:
        if isinstance(shape, bool | str | bytes):
            raise TypeError
        sizes = [index(one) for one in (shape if isinstance(shape, Sequence) else [shape])]
    except TypeError:
        expected = "an int or a sequence of ints"
        raise TypeError(f"{call}: shape: {type_text(shape)}, expected {expected}") from None
    if min(sizes, default=0) < 0:
        raise ValueError(f"{call}: shape: {sizes}, expected no negative size")
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise TypeError(f"{call}: offset: {type_text(offset)}, expected an int")
    if offset < 0 or offset % dtype.itemsize:
        expected = f"a multiple of {dtype.itemsize} bytes, which an item takes"
        raise ValueError(f"{call}: offset: {offset}, expected {expected}")
    num_bytes = math.prod(sizes) * dtype.itemsize
    if offset + num_bytes > limit_bytes:
        came = f"{num_bytes} bytes from {offset} on"
        raise ValueError(f"{call}: shape: {came}, expected at most {limit_bytes} in all")
    return sizes, offset, num_bytes
