"""``h2d_gather``: bring scattered rows of pinned host memory into a GPU cache."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, Literal

from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.lazy import torch
from jitkern.ops import dispatch
from jitkern.ops._ops import TorchOverload, no_result
from jitkern.ops.dispatch import AUTO, inference_mode
from jitkern.ops.pairs import list_kernels, pair_kernels, specialisations

LARGE_IN_FLIGHT = 8  # vectors per thread: 8 * 16 B * 2,048 threads are 5 us of the link
kernel = cache(partial(pair_kernels, "h2d_gather", "H2DGather", LARGE_IN_FLIGHT))
host.builds("h2d_gather", kernel)


def kernels(row_bytes: int) -> list[DeviceModule]:
    """Return the kernels for contiguous rows of ``row_bytes``."""
    of_size = [kernel(*spec) for spec in specialisations(row_bytes)]
    return of_size + list_kernels(host_target=0)


_gather = host.Function("h2d_gather")


def _through_torch(src: Any, dst: Any, pairs: Any, **options: Any) -> None:
    dispatch.through_torch("h2d_gather", src=src, dst=dst, pairs=pairs, **options)


@dispatch.traced_as(_through_torch)
def h2d_gather(
    src: torch.Tensor,
    dst: torch.Tensor,
    pairs: torch.Tensor,
    *,
    slot_map: torch.Tensor | None = None,
    dedup: bool = True,
    num_sms: int | None = None,
    order: Literal["auto", "given", "sorted"] = "auto",
    method: Literal["auto", "sm"] = "auto",
) -> None:
    """Copy row ``pairs[i, 0]`` of ``src`` to row ``pairs[i, 1]`` of ``dst`` for every ``i``.

    A persistent kernel on a few SMs reads ``src`` over the link. Asynchronous on the current
    stream. Keep ``src`` allocated and unchanged until the stream has passed the call. Calls that
    search for repeats (``dedup``, from 32,768 pairs on) or sort their pairs (``order``) allocate
    scratch memory from PyTorch's caching allocator. With ``pairs`` on the GPU a CUDA graph can
    capture the call. Pairs on the CPU are checked before anything is queued, and may change when
    the call has returned.

    Parameters
    ----------
    src : Tensor
        ``[num_src_rows, ...]`` in host memory, pinned if ``dst`` is on a GPU. Rows are contiguous,
        of 1 byte or more; the row stride is free.
    dst : Tensor
        ``[num_dst_rows, ...]``, on a GPU or the CPU. Same dtype and bytes per row as ``src``. Its
        rows must not overlap each other or ``src``.
    pairs : Tensor
        ``[..., 2]`` of (source row, destination row), int32 or int64, contiguous, on the device of
        ``dst`` or on the CPU. A pair with a negative number is skipped. If a destination repeats,
        its row is undefined. With ``dedup``, all other rows that the same sources are copied to are
        then undefined too.
    slot_map : Tensor, optional
        ``[num_src_rows]``, int32 or int64, on the device of ``dst``. The kernel sets
        ``slot_map[source] = destination`` for every copied pair and keeps the other entries.
    dedup : bool
        Large calls read a repeated source row over the link once, and copy repeats within the GPU.
        The search takes less than 2 % of the call.
    num_sms : int, optional
        SMs that read over the link, each with a block of 1024 threads. Default: 2 with "auto", 3 to
        8 with "sm". Small calls use the whole GPU for a few microseconds.
    order : {"auto", "given", "sorted"}
        The order in which rows are read; the result is the same. "given": the order of ``pairs``.
        "sorted": the order of ``src``, by a sort on the GPU. "auto" sorts 4,096 pairs or more
        (10,240 for a ``src`` of 1 GiB) of rows of 2 KiB or less, if ``src`` is larger than the 0.75
        GiB that the link's address translation covers.
    method : {"auto", "sm"}
        "auto" uses 2 SMs, and a concurrent decode step takes 5 to 7 % longer. "sm" uses as
        many SMs as saturate the link.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, device, shape, stride or option; pageable memory; memory that overlaps;
        ``pairs`` on the CPU during graph capture. Nothing was written.
    RuntimeError
        An argument requires grad, or an output is an inference tensor outside of inference mode.
    IndexError
        A row number past the end. If ``pairs`` are on the CPU, at once, with nothing written. On
        CUDA the pair is skipped, and the next jitkern call on the device or ``check`` raises.

    Examples
    --------
    >>> src = torch.randn(300_000, 328).bfloat16().pin_memory()
    >>> dst = torch.empty(300_000, 328, dtype=torch.bfloat16, device="cuda")
    >>> jitkern.h2d_gather(src, dst, torch.tensor([[7, 0], [299_999, 1]], device="cuda"))
    """
    call = _gather.call
    written = (dst,) if slot_map is None else (dst, slot_map)
    if inference_mode.is_enabled() or dispatch.is_plain(written, (src,)):
        sort, way = None if order is AUTO else order, None if method is AUTO else method
        try:
            if not call(src, dst, pairs, slot_map, dedup, num_sms, sort, way):
                dispatch.bump_versions(written)
                return
        except dispatch.UNREADABLE as error:
            tensors = {"src": src, "dst": dst, "pairs": pairs, "slot_map": slot_map}
            dispatch.require_wrapper(error, "h2d_gather", **tensors)
    _through_torch(
        src,
        dst,
        pairs,
        slot_map=slot_map,
        dedup=dedup,
        num_sms=num_sms,
        order=order,
        method=method,
    )


OVERLOADS = (
    TorchOverload(
        "h2d_gather(Tensor src, Tensor(a!) dst, Tensor pairs, *, Tensor(b!)? slot_map=None, "
        'bool dedup=True, SymInt? num_sms=None, str order="auto", str method="auto") -> ()',
        run=host.Function("h2d_gather_now"),
        fake=no_result,
    ),
)
