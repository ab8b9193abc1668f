"""A call of ``unpack`` on a ``DescriptorRing``: its arguments, and PyTorch's rules of writing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jitkern.errors import name_unreadable
from jitkern.offload.args import count_arg, natural_arg
from jitkern.ops import dispatch

if TYPE_CHECKING:
    import torch


def consume(
    by: Callable[..., None],
    slots_of_ring: int,
    dst: torch.Tensor,
    src: torch.Tensor,
    slot: int | None,
    num_slots: int,
) -> None:
    """Do what :func:`jitkern.unpack` does of a ring, `by` the ring's C++."""
    first = -1
    if slot is not None:
        first = natural_arg("unpack", "slot", slot)
        if first >= slots_of_ring:
            raise ValueError(f"unpack: slot: {first}, expected below {slots_of_ring}")
    if type(num_slots) is not int or num_slots != 1:
        num_slots = count_arg("unpack", "num_slots", num_slots, slots_of_ring)
    require_writable("unpack", dst, src)
    try:
        by(dst, src, first, num_slots)
    except (TypeError, ValueError):
        raise  # nothing was queued
    except Exception as error:
        # What the slots in front asked for; or the kernel is queued, and the error is of another.
        dispatch.wrote(dst)
        name_unreadable(error, "unpack", dst=dst, src=src)
    dispatch.wrote(dst)


def require_writable(call: str, dst: torch.Tensor, src: torch.Tensor) -> None:
    """Raise for a write that PyTorch would have to see, but does not."""
    if not dispatch.in_inference_mode() and not dispatch.may_write((dst,), (src,)):
        dispatch.refuse(call, {"dst": dst}, {"src": src})
    dispatch.refuse_watchers(call)
