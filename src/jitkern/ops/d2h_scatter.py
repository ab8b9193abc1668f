"""``d2h_scatter``: write scattered rows of a GPU cache to pinned host memory."""

from __future__ import annotations

from functools import cache, partial
from typing import TYPE_CHECKING, Literal

from jitkern.ops.pairs import list_kernels, pair_kernels
from jitkern.ops.pairs import specialisations as specialisations
from jitkern.ops.register import op

if TYPE_CHECKING:
    from torch import Tensor

LARGE_IN_FLIGHT = 4  # vectors per thread; PCIe writes are posted, so few need to be in flight
kernel = cache(partial(pair_kernels, "d2h_scatter", "D2HScatter", LARGE_IN_FLIGHT))
shared_kernels = partial(list_kernels, host_target=1)  # independent of the row size


@op(kernel, writes=("dst",), reads=("src",))
def d2h_scatter(
    src: Tensor,
    dst: Tensor,
    pairs: Tensor,
    *,
    num_sms: int | None = None,
    order: Literal["auto", "given", "host"] = "auto",
    method: Literal["auto", "sm"] = "auto",
) -> None:
    """Copy row ``pairs[i, 0]`` of ``src`` to row ``pairs[i, 1]`` of ``dst`` for every ``i``.

    The reverse of ``h2d_gather``: a persistent kernel on a few SMs writes ``dst`` over the link,
    asynchronously on the current stream. The host may read ``dst`` once the stream has passed the
    call. Calls that sort their pairs take scratch memory from PyTorch's caching allocator. With
    ``pairs`` on the GPU a CUDA graph may capture the call.

    Parameters
    ----------
    src : Tensor
        ``[num_src_rows, ...]``, on a GPU or the CPU. Rows contiguous, 1 byte or more, stride free.
    dst : Tensor
        ``[num_dst_rows, ...]`` in host memory, dtype and bytes per row of ``src``, pinned if
        ``src`` is on a GPU. Rows share no memory with each other or with ``src``.
    pairs : Tensor
        ``[..., 2]`` of (source row, destination row), int32 or int64, contiguous, on the device of
        ``src`` or on the CPU, where they are checked before anything is queued. A pair with a
        negative member is skipped. A repeated destination ends undefined.
    num_sms : int, optional
        As in ``h2d_gather``. Default: 2 with "auto", enough to keep the link busy with "sm".
    order : {"auto", "given", "host"}
        Order in which rows are written, "host" by place in ``dst``; see ``h2d_gather``.
    method : {"auto", "sm"}
        "auto" uses 2 SMs, so that a concurrent model is slowed little. "sm" uses as many as keep
        the link busy.

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
