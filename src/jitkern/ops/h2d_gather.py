"""``h2d_gather``: bring scattered rows of pinned host memory into a GPU cache."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

from jitkern.jit.device import DeviceModule
from jitkern.ops.pairs import list_kernels, pair_kernels
from jitkern.ops.pairs import specialisations as specialisations
from jitkern.ops.register import op

if TYPE_CHECKING:
    from torch import Tensor

LARGE_IN_FLIGHT = 8  # vectors: 8 * 16 B * 2,048 threads are 5 us of the bus


@cache
def kernel(
    row_bytes: int, vec_bytes: int, index_bytes: int, line_aligned: int, large: int
) -> DeviceModule:
    """Return the device module of one row size, vector width, index type, alignment and size."""
    spec = (row_bytes, vec_bytes, index_bytes, line_aligned, large)
    return pair_kernels("h2d_gather", "H2DGather", LARGE_IN_FLIGHT, spec)


def shared_kernels() -> list[DeviceModule]:
    """Return what calls of any row size need besides."""
    return list_kernels(host_target=0)


@op(kernel, writes=("dst", "slot_map"), reads=("src",))
def h2d_gather(
    src: Tensor,
    dst: Tensor,
    pairs: Tensor,
    *,
    slot_map: Tensor | None = None,
    dedup: bool = True,
    reuse_resident: bool = False,
    num_sms: int | None = None,
    order: Literal["auto", "source", "given"] = "auto",
    method: Literal["auto", "sm", "cpu", "both"] = "auto",
    num_threads: int | None = None,
) -> None:
    """Copy row ``pairs[i, 0]`` of ``src`` to row ``pairs[i, 1]`` of ``dst`` for every ``i``.

    On a GPU a persistent kernel of a few blocks reads ``src`` over PCIe, on the current stream and
    without a synchronisation; the source must stay allocated and unchanged until the stream has
    come past the call. A small call allocates nothing; one that sorts its pairs, to find repeated
    rows (from 32,768 pairs on) or for their order, takes scratch memory from PyTorch's caching
    allocator. With ``pairs`` on the GPU it may be captured in a CUDA graph.

    Parameters
    ----------
    src : Tensor
        ``[num_src_rows, ...]`` in host memory, pinned if ``pairs`` are on a GPU. Rows
        contiguous, row stride free, any row size from 1 byte up.
    dst : Tensor
        ``[num_dst_rows, ...]``, dtype and bytes per row as in ``src``, on a GPU or the CPU. Its
        rows share no memory with each other or with those of ``src``.
    pairs : Tensor
        ``[..., 2]`` of (source row, destination row), int32 or int64, contiguous, on the device of
        ``dst`` or on the CPU, in memory of their own. A pair with a negative member is skipped.
        Destinations should be distinct: of one that appears twice the content is undefined, and
        with ``dedup`` also that of other destinations of the same source rows. No memory outside
        ``dst`` is ever touched.
    slot_map : Tensor, optional
        ``[num_src_rows]``, int32 or int64, on the device of ``dst``, in memory of its own: where
        each source row now lives. Ends with ``slot_map[source row] == destination row`` for every
        copied pair (one of them for a repeated row); other entries keep their value.
    dedup : bool
        Fetch a source row that a large call asks for several times only once, and copy the repeats
        in device memory. On distinct rows this costs less than 2 %.
    reuse_resident : bool
        Do not fetch rows with ``slot_map[source row] >= 0`` but copy them from that row of ``dst``;
        -1 means absent. The map is believed: a slot must still hold its row, and a slot that is
        copied from must not be a destination of the same call.
    num_sms : int, optional
        Blocks of 1024 threads that read over the bus, at most one an SM, clamped to the GPU's SMs.
        By default as many as keep the bus busy also beside a GEMM: 3 for rows of more than 512
        bytes, 5 for shorter ones, up to 8 where alignment forbids 16-byte loads. On an idle GPU 2
        are enough. A small call is spread over the GPU for its few microseconds.
    order : {"auto", "source", "given"}
        In which order rows are fetched: that of their places in ``src``, or as they come; what ends
        up in ``dst`` is the same. Random rows of a source beyond 0.75 GiB miss in the address
        translation of the link, 36 ns each, which halves the bandwidth of rows of 656 bytes at
        4 GiB; sorted on the GPU, in front of the fetch, they miss once a page. "auto" sorts where
        the source is that large, rows are of 2 KiB or less, and the call has 4,096 pairs or more
        (10,240 at 1 GiB, of which few miss).
    method : {"auto", "sm", "cpu", "both"}
        Which way rows take. "sm": SMs fetch them over the link. "cpu": the host's cores gather them
        into pinned staging memory, the copy engine sends chunks of it, a small kernel puts the rows
        into place: next to no SM, and ``src`` may be pageable. "both": part of them each way at
        once, which is the fastest for sources beyond the reach of the link's address translation.
        The last two need ``pairs`` on the CPU, and no ``reuse_resident``. "auto", with such
        ``pairs``: "cpu" for a pageable source, "both" where SMs would wait for the translation of
        pages longer than for rows (16,384 rows and more of 656 bytes out of 4 GiB, 262,144 out of
        16; fewer: "cpu") and there are 8 threads, else "sm". With ``pairs`` on a GPU always "sm".
        :func:`jitkern.calibrate` finds these limits for another machine.
    num_threads : int, optional
        Of the CPU, the caller's included, 1 to the cores of this process; by default as many as
        ``torch.get_num_threads()``, but one core is left. They sleep where they wait.

    Notes
    -----
    With ``pairs`` on the CPU the call reads them before it returns, and all their row numbers are
    checked before anything is queued. What goes through the CPU has been read from ``src`` by then;
    what SMs fetch has not: but for "cpu" the source must stay as it is until the stream has come
    past. Rows go through six chunks of 4 MiB, so that a call of more waits for the stream to free
    them.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, device, shape or stride, a pageable source with ``pairs`` on a GPU,
        ``reuse_resident`` without ``slot_map``, or memory that the call would write twice, or write
        and read; a ``method`` that the other arguments forbid; ``pairs`` on the CPU while a graph
        is captured. Nothing was launched or written.
    RuntimeError
        With gradients enabled: an argument requires one. Outside of inference mode: what is written
        to was made in it. Nothing was written.
    IndexError
        A row number past the end of ``src`` or ``dst``. On the CPU at once, and nothing was
        written; so too for ``pairs`` on the CPU. Else, on CUDA, the row is skipped, and the next
        jitkern call on the device or :func:`jitkern.check` raises.

    Examples
    --------
    >>> src = torch.randn(300_000, 328).bfloat16().pin_memory()
    >>> dst = torch.empty(300_000, 328, dtype=torch.bfloat16, device="cuda")
    >>> pairs = torch.tensor([[7, 0], [299_999, 1]], device="cuda")
    >>> jitkern.h2d_gather(src, dst, pairs)
    """
