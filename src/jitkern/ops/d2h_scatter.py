"""``d2h_scatter``: write scattered rows of a GPU cache to pinned host memory."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

from jitkern.jit.device import DeviceModule
from jitkern.ops.pairs import list_kernels, pair_kernels
from jitkern.ops.pairs import specialisations as specialisations
from jitkern.ops.register import op

if TYPE_CHECKING:
    from torch import Tensor

LARGE_IN_FLIGHT = 4  # vectors: writes are posted, nothing waits for their answer


@cache
def kernel(
    row_bytes: int, vec_bytes: int, index_bytes: int, line_aligned: int, large: int
) -> DeviceModule:
    """Return the device module of one row size, vector width, index type, alignment and size."""
    spec = (row_bytes, vec_bytes, index_bytes, line_aligned, large)
    return pair_kernels("d2h_scatter", "D2HScatter", LARGE_IN_FLIGHT, spec)


def shared_kernels() -> list[DeviceModule]:
    """Return what calls of any row size need besides."""
    return list_kernels(host_target=1)


@op(kernel, writes=("dst",), reads=("src",))
def d2h_scatter(
    src: Tensor,
    dst: Tensor,
    pairs: Tensor,
    *,
    num_sms: int | None = None,
    order: Literal["auto", "destination", "given"] = "auto",
    method: Literal["auto", "sm", "cpu"] = "auto",
    num_threads: int | None = None,
) -> None:
    """Copy row ``pairs[i, 0]`` of ``src`` to row ``pairs[i, 1]`` of ``dst`` for every ``i``.

    The way back of :func:`jitkern.h2d_gather`: a persistent kernel of a few blocks writes ``dst``
    over PCIe, on the current stream and without a synchronisation. The host may read ``dst`` once
    the stream has come past the call. A call that sorts its pairs takes scratch memory from
    PyTorch's caching allocator, another allocates nothing. With ``pairs`` on the GPU it may be
    captured in a CUDA graph.

    Parameters
    ----------
    src : Tensor
        ``[num_src_rows, ...]`` on a GPU or the CPU. Rows contiguous, row stride free, any row size
        from 1 byte up.
    dst : Tensor
        ``[num_dst_rows, ...]`` in host memory, dtype and bytes per row as in ``src``, pinned if
        ``pairs`` are on a GPU. Its rows share no memory with each other or with those of ``src``.
    pairs : Tensor
        ``[..., 2]`` of (source row, destination row), int32 or int64, contiguous, on the device of
        ``src`` or on the CPU, in memory of their own. A pair with a negative member is skipped.
        Destinations should be distinct: of one that appears twice the content is undefined. Pairs
        on the CPU are read before the call returns, and all checked before anything is queued.
    num_sms : int, optional
        Blocks of 1024 threads that write over the bus, at most one an SM, clamped to the GPU's SMs;
        as many as keep the bus busy by default, as for :func:`jitkern.h2d_gather`.
    order : {"auto", "destination", "given"}
        In which order rows cross the bus: that of their places in ``dst``, or as they come; what
        ends up in ``dst`` is the same. By default that of ``dst`` where it is larger than what the
        link's address translation reaches and the call is large enough to win by it; see
        :func:`jitkern.h2d_gather`.
    method : {"auto", "sm", "cpu"}
        Which way rows take. "sm": SMs write them over the link. "cpu", with ``pairs`` on the CPU:
        the copy engine brings them in chunks to pinned staging memory, from where the host's cores
        put them into place. ``dst`` may be pageable, and is complete when the call returns: it
        waits for the stream. "auto" is "cpu" where ``dst`` is pageable, or of 12 GiB and more in a
        call of 32,768 rows that 12 threads or more put into place, else "sm".
    num_threads : int, optional
        Of the CPU, as for :func:`jitkern.h2d_gather`.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, device, shape or stride, a pageable destination with ``pairs`` on a GPU, or
        memory that the call would write twice, or write and read; a ``method`` that the other
        arguments forbid; ``pairs`` on the CPU while a graph is captured. Nothing was launched or
        written.
    RuntimeError
        With gradients enabled: an argument requires one. Outside of inference mode: what is written
        to was made in it. Nothing was written.
    IndexError
        A row number past the end of ``src`` or ``dst``. On the CPU at once, and nothing was
        written; so too for ``pairs`` on the CPU. Else, on CUDA, the row is skipped, and the next
        jitkern call on the device or :func:`jitkern.check` raises.

    Examples
    --------
    >>> cache = torch.randn(4096, 328, device="cuda")
    >>> host_cache = torch.empty(300_000, 328, pin_memory=True)
    >>> pairs = torch.tensor([[0, 7], [1, 299_999]], device="cuda")
    >>> jitkern.d2h_scatter(cache, host_cache, pairs)
    """
