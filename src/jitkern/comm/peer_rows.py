"""``peer_gather`` and ``peer_scatter``: rows of one host pool, of which each rank moves a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from jitkern.comm.peer_comm import PeerCommunicator
from jitkern.comm.peer_reduce import PeerReducer, traced_error
from jitkern.errors import name_unreadable
from jitkern.host import module as host
from jitkern.host.faults import is_of_earlier_call
from jitkern.jit.device import DeviceModule, record_hint
from jitkern.ops import dispatch
from jitkern.ops.common import type_text
from jitkern.ops.d2h_scatter import d2h_scatter
from jitkern.ops.h2d_gather import h2d_gather
from jitkern.ops.pairs import load_sort, pair_kernels

if TYPE_CHECKING:
    from torch import Tensor

# Vectors, as of h2d_gather and d2h_scatter, which move the same bytes over each link.
_IN_FLIGHT = {"peer_gather": ("PeerGather", 8), "peer_scatter": ("PeerScatter", 4)}


@cache
def _copy_kernel(
    op: str, row_bytes: int, vec_bytes: int, index_bytes: int, line_aligned: int, large: int
) -> DeviceModule:
    copy, in_flight = _IN_FLIGHT[op]
    spec = (row_bytes, vec_bytes, index_bytes, line_aligned, large)
    module = pair_kernels(op, copy, in_flight, spec, path=("comm", "peer_copy.cu"))
    module.hint = record_hint  # no `jitkern warm` names it: it is no op of one device
    return module


def gather_kernel(
    row_bytes: int, vec_bytes: int, index_bytes: int, line_aligned: int, large: int
) -> DeviceModule:
    """Return the device module that brings rows to all ranks."""
    return _copy_kernel("peer_gather", row_bytes, vec_bytes, index_bytes, line_aligned, large)


def scatter_kernel(
    row_bytes: int, vec_bytes: int, index_bytes: int, line_aligned: int, large: int
) -> DeviceModule:
    """Return the device module that writes rows to the host."""
    return _copy_kernel("peer_scatter", row_bytes, vec_bytes, index_bytes, line_aligned, large)


@cache
def list_kernel(index_bytes: int, host_target: int) -> DeviceModule:
    """Return the device module that finds a rank's part of the pairs."""
    side, what = ("kHostTarget", "targets") if host_target else ("kHostSource", "sources")
    spec, sides = (index_bytes, host_target), f", jitkern::{side}"
    module = load_sort("peer_lists", "PeerPairs", f"peer_{what}", spec, sides, folder="comm")
    module.hint = record_hint
    return module


host.builds("peer_lists", list_kernel)


def peer_gather(
    src: Tensor,
    dsts: Sequence[Tensor],
    pairs: Tensor,
    group: PeerCommunicator | PeerReducer,
    *,
    num_sms: int | None = None,
) -> None:
    """Copy row ``pairs[i, 0]`` of ``src`` to row ``pairs[i, 1]`` of every rank's ``dsts`` member.

    For replicated rows, as those of MLA's latent cache, that all ranks of a host bring out of one
    host pool: each rank fetches its part of them over its own link and writes it to the memory of
    all, so that each link carries a part instead of everything. A row that is asked for several
    times is fetched once, and then copied in each rank's memory. Parts are equal in rows, and lie
    one behind the other in the order of ``src``: what of a large pool misses in the address
    translation of a link is each link's own.

    Collective: all ranks call it with the same pairs, on one stream each. It begins with a barrier
    of their streams, as none may write where another still reads, and ends with one, behind which
    all rows are there; the host waits for neither. Some dozens of microseconds of kernels are
    added to the fetch, so that calls of less than a few MiB are better off with
    :func:`jitkern.h2d_gather` on each rank. May be captured in a CUDA graph. Takes scratch memory
    from PyTorch's caching allocator.

    Parameters
    ----------
    src : Tensor
        ``[num_src_rows, ...]`` in host memory: the same rows on all ranks, such as those of a
        :class:`jitkern.offload.PinnedPool` that they share. Pinned, if ``dsts`` are on GPUs. Rows
        contiguous, row stride free, any row size from 1 byte up.
    dsts : sequence of Tensor
        ``[num_dst_rows, ...]`` of each rank as this one sees it, by rank: ``peers.remote(rank,
        ...)`` of a :class:`PeerMemory`. Alike in shape, strides and dtype, which is that of
        ``src``. Those of one rank share no memory with each other or with ``src``.
    pairs : Tensor
        ``[..., 2]`` of (source row, destination row), int32 or int64, contiguous, on the device of
        ``dsts``: the same on all ranks, at most 2**30. A pair with a negative member is skipped.
        Destinations should be distinct, as of :func:`jitkern.h2d_gather`.
    group : PeerCommunicator or PeerReducer
        The ranks: whose barriers, and deadline, the call uses. Of one rank the call is
        :func:`jitkern.h2d_gather`.
    num_sms : int, optional
        Blocks of 1024 threads that read over the bus, as of :func:`jitkern.h2d_gather`.

    Raises
    ------
    TypeError, ValueError
        A wrong argument. Nothing was sent or written.
    IndexError
        A row number past the end of ``src`` or ``dsts``: on the CPU at once, on every rank, and
        nothing was written. On CUDA the row is skipped on all ranks, and each one's next jitkern
        call on the device or :func:`jitkern.check` raises. If that is such a call of all ranks, it
        raises behind its launches: ranks stay in step.
    CommTimeoutError
        Ranks did not come to an earlier call, or on the CPU to this one, within the group's
        deadline. One that has waited in vain writes nothing, in that call and later ones, until the
        group's ``reset``. See :meth:`PeerReducer.all_reduce`.
    RuntimeError
        PyTorch would have to see the call, for a gradient or a trace.

    Examples
    --------
    >>> peers = PeerMemory(num_rows * 656, group)  # doctest: +SKIP
    >>> caches = [peers.remote(r, (num_rows, 656), torch.uint8) for r in range(peers.size)]
    ... # doctest: +SKIP
    >>> peer_gather(pool, caches, pairs, comm)  # doctest: +SKIP
    """
    reducer = _reducer("peer_gather", group)
    size = 1 if reducer is None else reducer.size
    if isinstance(dsts, (str, bytes)) or not isinstance(dsts, Sequence):
        raise TypeError(f"peer_gather: dsts: {type_text(dsts)}, expected a sequence of tensors")
    if len(dsts) != size:
        raise ValueError(
            f"peer_gather: dsts: {len(dsts)} tensors, expected {size}, one for each rank"
        )
    if reducer is None:
        h2d_gather(src, dsts[0], pairs, num_sms=num_sms)
        return
    written = {f"dsts[{rank}]": dst for rank, dst in enumerate(dsts)}
    args = (src, list(dsts), pairs, num_sms, reducer.rank)
    _run("peer_gather", reducer, args, written, {"src": src, "pairs": pairs})


def peer_scatter(
    src: Tensor,
    dst: Tensor,
    pairs: Tensor,
    group: PeerCommunicator | PeerReducer,
    *,
    num_sms: int | None = None,
) -> None:
    """Copy row ``pairs[i, 0]`` of ``src`` to row ``pairs[i, 1]`` of ``dst``, a part by each rank.

    The way back of :func:`peer_gather`: rows that all ranks have go to one host pool, each over
    one link only. The same holds of it; behind the call every rank sees all rows in ``dst``.

    Parameters
    ----------
    src : Tensor
        ``[num_src_rows, ...]``, on this rank's GPU, or the CPU: of the rows that ``pairs`` name all
        ranks have the same content.
    dst : Tensor
        ``[num_dst_rows, ...]`` in host memory that all ranks share, as ``src`` of
        :func:`peer_gather`.
    pairs, group, num_sms
        As of :func:`peer_gather`, at the device of ``src``. Of a destination that appears twice the
        content is undefined.

    Raises
    ------
    TypeError, ValueError, IndexError, CommTimeoutError, RuntimeError
        As of :func:`peer_gather`.
    """
    reducer = _reducer("peer_scatter", group)
    if reducer is None:
        d2h_scatter(src, dst, pairs, num_sms=num_sms)
        return
    args = (src, dst, pairs, num_sms, reducer.rank, reducer.size)
    _run("peer_scatter", reducer, args, {"dst": dst}, {"src": src, "pairs": pairs})


def _reducer(op: str, group: Any) -> PeerReducer | None:
    """Return what the ranks meet by; None where there is one."""
    if isinstance(group, PeerCommunicator):
        if group.size == 1:
            return None
        group = group.reducer
        if group is None:
            raise ValueError(
                f"{op}: group: a PeerCommunicator without peer memory (closed, or of max_bytes 0), "
                "expected one that has it"
            )
    if not isinstance(group, PeerReducer):
        raise TypeError(
            f"{op}: group: {type_text(group)}, expected a PeerCommunicator or a PeerReducer"
        )
    return group


@cache
def _functions() -> dict[str, Callable[..., bool]]:
    kernels = {"peer_gather": gather_kernel, "peer_scatter": scatter_kernel}
    return {op: host.op(op, kernel) for op, kernel in kernels.items()}


def _run(
    op: str,
    reducer: PeerReducer,
    args: tuple[Any, ...],
    written: dict[str, Any],
    read: dict[str, Any],
) -> None:
    into = tuple(written.values())
    if not dispatch.in_inference_mode() and not dispatch.may_write(into, (read["src"],)):
        dispatch.refuse(op, written, read)
    try:
        if _functions()[op](*args, *reducer.barrier_in_cpp):
            raise traced_error(op)
    except Exception as error:
        if is_of_earlier_call(error):  # and this one was made
            dispatch.wrote(*into)
            raise
        name_unreadable(error, op, **read, **written)
    dispatch.wrote(*into)
