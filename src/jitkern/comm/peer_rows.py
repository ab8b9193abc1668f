"""``peer_gather`` and ``peer_scatter``: rows of one host pool, each rank moving a part."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Literal

from torch import Tensor

from jitkern.args import type_text
from jitkern.comm.args import call_cpp
from jitkern.comm.peer_comm import PeerCommunicator
from jitkern.comm.peer_reduce import MAX_RANKS, PeerReducer
from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.ops.d2h_scatter import d2h_scatter
from jitkern.ops.h2d_gather import h2d_gather
from jitkern.ops.pairs import HOST_SIDES, load_sort, pair_kernels

# Vectors in flight: those of h2d_gather and d2h_scatter, which move the same bytes over each link.
_COPIES = {"peer_gather": ("PeerGather", 8), "peer_scatter": ("PeerScatter", 4)}
_GATHER_NAMES = [
    " ".join([*(f"dsts[{rank}]" for rank in range(world_size)), "src", "pairs"])
    for world_size in range(MAX_RANKS + 1)
]


def copy_kernels(op: str) -> host.Builder:
    """Return the cached builder of an op; see ``pair_kernels`` for its arguments."""
    copy = partial(pair_kernels, op, *_COPIES[op], file="comm/peer_copy.cu")
    return cache(copy)


@cache
def list_kernel(index_bytes: int, host_target: int) -> DeviceModule:
    """Return the device module that lists a rank's part of the pairs."""
    (side, verb), spec = HOST_SIDES[host_target], (index_bytes, host_target)
    kernels = ("peer_lists", "comm/peer_lists.cu", "PeerPairs", f"peer_{verb}")
    return load_sort(*kernels, spec, side)


host.builds("peer_lists", list_kernel)


for _op in _COPIES:
    host.builds(_op, copy_kernels(_op))
_gather, _scatter = host.Function("peer_gather"), host.Function("peer_scatter")


def peer_gather(
    src: Tensor,
    dsts: Sequence[Tensor],
    pairs: Tensor,
    comm: PeerCommunicator | PeerReducer,
    *,
    num_sms: int | None = None,
    order: Literal["auto", "given", "sorted"] = "auto",
) -> None:
    """Copy row ``pairs[i, 0]`` of ``src`` to row ``pairs[i, 1]`` of the tensors of all ranks.

    For rows of a host pool that all ranks of a host need, such as MLA's latent cache. Each rank
    reads an equal part of the distinct rows over its own link, in the order of ``src``, and writes
    it to the memory of all ranks. Repeated rows are read once. On the CPU each rank copies all rows
    to its own memory.

    Collective: all ranks pass the same pairs and order. Asynchronous on the current stream. A call
    starts and ends with a barrier between the ranks' streams, so below a few MiB ``h2d_gather`` on
    each rank is faster. CUDA graphs can capture it. Allocates scratch memory from PyTorch's
    allocator.

    Parameters
    ----------
    src : Tensor
        ``[num_src_rows, ...]`` in host memory that all ranks share, such as a shared
        ``offload.PinnedPool``; pinned if ``dsts`` are on GPUs. Rows are contiguous; the row stride
        is free.
    dsts : sequence of Tensor
        One tensor ``[num_dst_rows, ...]`` per rank: ``peers.remote(rank, ...)`` of a
        ``PeerMemory``. All have the same shape and strides, and the dtype of ``src``. They must not
        overlap each other or ``src``.
    pairs : Tensor
        ``[..., 2]`` of (source row, destination row), int32 or int64, contiguous, on the device of
        ``dsts``, at most 2**30 pairs. A pair with a negative number is skipped. If a destination
        repeats, its content is undefined.
    comm : PeerCommunicator or PeerReducer
        Gives the ranks, their barrier and its timeout. With one rank, ``h2d_gather`` is called.
    num_sms : int, optional
        SMs that read over the link, as in ``h2d_gather``. Default with "given": all.
    order : {"auto", "given", "sorted"}
        "auto" and "sorted": each rank reads a contiguous part of the distinct rows, in the order of
        ``src``, which a sort on the GPU finds. "given": ranks take 4 pairs in turn, as they come,
        and read repeated rows again; each list of ``[lists, n, 2]`` begins with another rank. For
        short calls, such as the misses of a ``ResidencyMap``.

    Raises
    ------
    TypeError, ValueError, RuntimeError, IndexError
        As ``h2d_gather``, on every rank; RuntimeError also if the call is traced.
    CommTimeoutError
        Ranks did not arrive in an earlier call, or on the CPU in this one, within the
        communicator's timeout. A rank that has timed out writes nothing until its ``reset``.
    """
    reducer = _reducer("peer_gather", comm)
    world_size = 1 if reducer is None else reducer.world_size
    if isinstance(dsts, (str, bytes)) or not isinstance(dsts, Sequence):
        raise TypeError(f"peer_gather: dsts: {type_text(dsts)}, expected a sequence of tensors")
    if len(dsts) != world_size:
        expected = f"{world_size}, one for each rank"
        raise ValueError(f"peer_gather: dsts: {len(dsts)} tensors, expected {expected}")
    if reducer is None:
        h2d_gather(src, dsts[0], pairs, num_sms=num_sms, order=order)
        return
    args = (src, list(dsts), pairs, num_sms, order, reducer.rank, *reducer._barrier_in_cpp)
    names = _GATHER_NAMES[world_size]
    call_cpp("peer_gather", _gather.call, args, names, tuple(dsts), (src,), (pairs,))


def peer_scatter(
    src: Tensor,
    dst: Tensor,
    pairs: Tensor,
    comm: PeerCommunicator | PeerReducer,
    *,
    num_sms: int | None = None,
) -> None:
    """Copy row ``pairs[i, 0]`` of ``src`` to row ``pairs[i, 1]`` of ``dst``, a part on each rank.

    The reverse of ``peer_gather``, with its rules and errors. The rows of ``src`` that ``pairs``
    name must have the same content on all ranks; ``dst`` is host memory that all ranks share. After
    the call all ranks see all rows.
    """
    reducer = _reducer("peer_scatter", comm)
    if reducer is None:
        d2h_scatter(src, dst, pairs, num_sms=num_sms)
        return
    args = (src, dst, pairs, num_sms, reducer.rank, reducer.world_size, *reducer._barrier_in_cpp)
    call_cpp("peer_scatter", _scatter.call, args, "dst src pairs", (dst,), (src,), (pairs,))


def _reducer(op: str, comm: Any) -> PeerReducer | None:
    """Return the reducer of the ranks; None if there is one rank."""
    if isinstance(comm, PeerReducer):
        return comm
    if not isinstance(comm, PeerCommunicator):
        expected = "a PeerCommunicator or a PeerReducer"
        raise TypeError(f"{op}: comm: {type_text(comm)}, expected {expected}")
    if comm.world_size > 1 and comm.reducer is None:
        came = "a PeerCommunicator without peer memory (closed, or of max_bytes 0)"
        raise ValueError(f"{op}: comm: {came}, expected one that has it")
    return comm.reducer
