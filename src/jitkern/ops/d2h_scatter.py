"""``d2h_scatter``: write scattered rows of a GPU cache to pinned host memory."""

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

LARGE_IN_FLIGHT = 4  # vectors per thread; PCIe writes are posted, so few need to be in flight
kernel = cache(partial(pair_kernels, "d2h_scatter", "D2HScatter", LARGE_IN_FLIGHT))
host.builds("d2h_scatter", kernel)


def kernels(row_bytes: int) -> list[DeviceModule]:
    """Return the kernels for contiguous rows of ``row_bytes``."""
    of_size = [kernel(*spec) for spec in specialisations(row_bytes)]
    return of_size + list_kernels(host_target=1)


_scatter = host.Function("d2h_scatter")


def _through_torch(src: Any, dst: Any, pairs: Any, **options: Any) -> None:
    dispatch.through_torch("d2h_scatter", src=src, dst=dst, pairs=pairs, **options)


@dispatch.traced_as(_through_torch)
def d2h_scatter(
    src: torch.Tensor,
    dst: torch.Tensor,
    pairs: torch.Tensor,
    *,
    num_sms: int | None = None,
    order: Literal["auto", "given", "sorted"] = "auto",
    method: Literal["auto", "sm"] = "auto",
) -> None:
    """Copy row ``pairs[i, 0]`` of ``src`` to row ``pairs[i, 1]`` of ``dst`` for every ``i``.

    The reverse of ``h2d_gather``: a persistent kernel on a few SMs writes ``dst`` over the link.
    Asynchronous on the current stream. Keep ``dst`` allocated, and read it only after the stream
    has passed the call: PyTorch reuses freed pinned memory at once. Calls that sort their pairs
    allocate scratch memory from PyTorch's caching allocator. With ``pairs`` on the GPU a CUDA graph
    can capture the call.

    Parameters
    ----------
    src : Tensor
        ``[num_src_rows, ...]``, on a GPU or the CPU. Rows are contiguous, of 1 byte or more; the
        row stride is free.
    dst : Tensor
        ``[num_dst_rows, ...]`` in host memory, pinned if ``src`` is on a GPU. Same dtype and bytes
        per row as ``src``. Its rows must not overlap each other or ``src``.
    pairs : Tensor
        ``[..., 2]`` of (source row, destination row), int32 or int64, contiguous, on the device of
        ``src`` or on the CPU, where they are checked before anything is queued. A pair with a
        negative number is skipped. If a destination repeats, its content is undefined.
    num_sms : int, optional
        As in ``h2d_gather``. Default: 2 with "auto"; with "sm" as many as saturate the link.
    order : {"auto", "given", "sorted"}
        The order in which rows are written. "sorted": in the order of ``dst``. See ``h2d_gather``.
    method : {"auto", "sm"}
        "auto" uses 2 SMs, so that a concurrent model is slowed little. "sm" uses as many SMs as
        saturate the link.

    Raises
    ------
    TypeError, ValueError, RuntimeError, IndexError
        As ``h2d_gather``.

    Examples
    --------
    >>> cache = torch.randn(4096, 328, device="cuda")
    >>> host_cache = torch.empty(300_000, 328, pin_memory=True)
    >>> pairs = torch.tensor([[0, 7], [1, 299_999]], device="cuda")
    >>> jitkern.d2h_scatter(cache, host_cache, pairs)
    """
    call = _scatter.call
    if inference_mode.is_enabled() or dispatch.is_plain((dst,), (src,)):
        sort, way = None if order is AUTO else order, None if method is AUTO else method
        try:
            if not call(src, dst, pairs, num_sms, sort, way):
                dispatch.bump_versions((dst,))
                return
        except dispatch.UNREADABLE as error:
            dispatch.require_wrapper(error, "d2h_scatter", src=src, dst=dst, pairs=pairs)
    _through_torch(src, dst, pairs, num_sms=num_sms, order=order, method=method)


OVERLOADS = (
    TorchOverload(
        "d2h_scatter(Tensor src, Tensor(a!) dst, Tensor pairs, *, SymInt? num_sms=None, "
        'str order="auto", str method="auto") -> ()',
        run=host.Function("d2h_scatter_now"),
        fake=no_result,
    ),
)
