"""Out of a call of gloo, which knows no deadline but that of its group."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_TAG = 0x6A6B21  # nothing is ever sent under it
_SOON_S = 0.001  # 0 would mean for ever
_LEFT_S = 1.0


def wait(work: Any, deadline: float) -> None:
    """Wait for torch's work until ``time.monotonic()`` is `deadline`; RuntimeError after that."""
    work.wait(timedelta(seconds=max(deadline - time.monotonic(), _SOON_S)))


def is_timeout(error: RuntimeError) -> bool:
    """Tell whether it is gloo's, or torch's, that a time is over."""
    return "imed out" in str(error)


def break_connections(group: ProcessGroup | None, world_ranks: Iterable[int]) -> None:
    """Have gloo close the connections of a group, which ends what waits on them.

    It closes all of them when a message does not come in time, whoever it was to come from.
    ``Work.wait(timeout)`` only stops to look: gloo's thread goes on for as long as the group's own
    timeout, 30 minutes by default, and the destructor of the group waits for it.
    """
    import torch
    from torch import distributed as dist

    for world_rank in world_ranks:
        nothing = torch.empty(1, dtype=torch.uint8)
        try:
            work = dist.irecv(nothing, world_rank, group=group, tag=_TAG)
            wait(work, time.monotonic())
        except RuntimeError as error:
            if is_timeout(error):
                return


def leave(work: Any) -> None:
    """Return when gloo's thread has left a call whose connections are closed.

    Until then it may write to the tensors; and a process that ends at this moment aborts, since the
    thread then drops tensors of an interpreter that is no more.
    """
    until = time.monotonic() + _LEFT_S
    with suppress(RuntimeError):
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(_SOON_S)
