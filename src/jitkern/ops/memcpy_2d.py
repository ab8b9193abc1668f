"""``memcpy_2d_async``: one strided copy by the copy engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from jitkern.errors import name_unreadable
from jitkern.host import module as host
from jitkern.ops import dispatch
from jitkern.ops.common import type_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_STORAGE_IS_NEEDED = 2  # Outcome of csrc/ops/memcpy_2d.cc
_KINDS = {"h2d": 0, "d2h": 1, "d2d": 2, "h2h": 3}  # CopyKind of csrc/host/copy_2d.h


def _first_call(*arguments: Any) -> Any:
    """Put the C++ function in the place of this one, and call it."""
    global _op
    _op = host.op("memcpy_2d")
    return _op(*arguments)


# A plain name, as in compare_key.py: the driver's own call takes 2 us in all.
_op: Callable[..., Any] = _first_call


# No operator of PyTorch: it may write bytes outside of the view `dst`, which no schema can say.
def memcpy_2d_async(
    dst: Tensor,
    src: Tensor,
    dpitch: int,
    spitch: int,
    width: int,
    height: int,
    kind: Literal["h2d", "d2h", "d2d", "h2h"],
    stream: torch.cuda.Stream | None = None,
    *,
    allow_pageable: bool = False,
) -> None:
    """Copy ``height`` rows of ``width`` bytes between places that are a pitch apart.

    The strided copy of the copy engine (``cuMemcpy2DAsync``): no SM takes part. It begins at the
    first byte of each view, so that one block of a cache ``[num_layers, num_blocks, block_bytes]``
    is ``cache[:, block_id]``, with the layers as rows. Only bytes count: shapes and dtypes of the
    views do not, beyond where they begin. It is queued on ``stream`` and not waited for; both
    tensors must stay allocated, and the host's side as it is, until the stream has come past the
    copy. May be captured in a CUDA graph.

    Parameters
    ----------
    dst, src : Tensor
        On a GPU or the CPU, of any shape, strides and dtype. Host memory is pinned where the other
        side is on a GPU: of a ``PinnedPool``, or by ``pin_memory``. The bytes that are copied lie
        within each tensor's storage and do not overlap.
    dpitch, spitch : int
        Bytes from one row to the next, ``width`` or more; of no meaning where ``height`` is 1.
        Pitches that are larger than the driver's limit of 2 GiB go row by row.
    width, height : int
        Bytes of a row, and rows. Where one of them is 0 nothing is done.
    kind : {"h2d", "d2h", "d2d", "h2h"}
        From where to where; what the tensors' devices say, or it is an error. "d2d" is of one GPU
        or of two. "h2h" is done by the CPU's threads before the call returns.
    stream : torch.cuda.Stream, optional
        A stream of the GPU that takes part, by default the current one; of two GPUs that of
        ``dst``, or one of either. None for "h2h".
    allow_pageable : bool
        Take host memory that is not pinned as well, all of it. The driver then copies through
        memory of its own, slowly, and the call waits; while a graph is captured it is an error.

    Raises
    ------
    TypeError, ValueError
        An argument of the wrong type, a negative size, a pitch below ``width``, rows that end
        behind a storage, sides that overlap, another ``kind`` than that of the devices, a stream of
        another device, or pageable host memory. Nothing was queued or written.
    RuntimeError
        An argument requires a gradient, ``dst`` was made in inference mode, or a tracer or a
        dispatch mode of PyTorch is active, which would see nothing of the copy.

    Examples
    --------
    >>> pool = torch.zeros(32, 1000, 4096, dtype=torch.uint8, pin_memory=True)
    >>> block = torch.empty(32, 4096, dtype=torch.uint8, device="cuda")
    >>> jitkern.memcpy_2d_async(block, pool[:, 7], 4096, 1000 * 4096, 4096, 32, "h2d")
    """
    if not dispatch.in_inference_mode() and not dispatch.may_write((dst,), (src,)):
        dispatch.refuse("memcpy_2d_async", {"dst": dst}, {"src": src})
    code: Any
    try:
        code = _KINDS[kind]  # a string costs 0.13 us on its way to C++
    except (KeyError, TypeError):
        code = (kind,)  # C++ says what is wrong with it
    handle = ordinal = None
    if stream is not None:
        try:
            handle, ordinal = stream.cuda_stream, stream.device_index
        except AttributeError:
            raise TypeError(
                f"memcpy_2d_async: stream: {type_text(stream)}, expected a torch.cuda.Stream or "
                "None"
            ) from None
    try:
        outcome = _op(
            dst, src, dpitch, spitch, width, height, code, handle, ordinal, allow_pageable, None
        )
        if outcome == _STORAGE_IS_NEEDED:
            storages = (*_storage(dst), *_storage(src))
            outcome = _op(
                *(dst, src, dpitch, spitch, width, height, code, handle, ordinal),
                *(allow_pageable, storages),
            )
    except (RuntimeError, ValueError) as error:
        name_unreadable(error, "memcpy_2d_async", dst=dst, src=src)
    if outcome:
        raise dispatch.unseen("memcpy_2d_async")
    dispatch.wrote(dst)


def _storage(tensor: Any) -> tuple[int, int]:
    """Return address and bytes of the tensor's storage; none of one that is not PyTorch's."""
    try:
        storage = tensor.untyped_storage()
    except AttributeError:
        return 0, 0
    return storage.data_ptr(), storage.nbytes()
