"""``memcpy_2d_async``: one strided copy by the copy engine."""

from __future__ import annotations

from typing import Any, Literal

from jitkern.args import refuse_lazy, type_text
from jitkern.errors import UNREADABLE, name_unreadable
from jitkern.host import library as host
from jitkern.lazy import torch
from jitkern.ops import dispatch
from jitkern.ops.dispatch import inference_mode

_STORAGE_IS_NEEDED = 2  # Outcome of csrc/ops/memcpy_2d.cc

_memcpy = host.Function("memcpy_2d")


# No PyTorch operator: it may write outside of the view `dst`, which no schema can express.
@dispatch.untraced
def memcpy_2d_async(
    dst: torch.Tensor,
    src: torch.Tensor,
    dpitch: int,
    spitch: int,
    width: int,
    height: int,
    kind: Literal["h2d", "d2h", "d2d", "h2h"],
    stream: torch.cuda.Stream | None = None,
) -> None:
    """Copy ``height`` rows of ``width`` bytes, ``dpitch`` and ``spitch`` bytes apart.

    One strided copy by the copy engine (``cuMemcpy2DAsync``), which uses no SM. It starts at the
    first byte of each tensor: for one block of a cache ``[num_layers, num_blocks, block_bytes]``,
    pass ``cache[:, block_id]``, with layers as rows. Asynchronous on ``stream``. Keep both tensors
    allocated, and the host's unchanged, until the stream has passed the copy. A CUDA graph can
    capture it.

    Names, ``stream`` and the order of ``dst`` before ``src`` are those of CUDA's
    ``cudaMemcpy2DAsync``, which has each pitch after its pointer. The other copies of jitkern take
    ``src`` before ``dst``, and use PyTorch's current stream.

    Parameters
    ----------
    dst, src : Tensor
        On a GPU or the CPU, of any shape, strides and dtype. Host memory must be pinned if the
        other side is on a GPU. The copied bytes must be within the storage of each tensor and must
        not overlap.
    dpitch, spitch : int
        Bytes from one row of ``dst``, or of ``src``, to the next: ``width`` or more. Ignored if
        ``height`` is 1. With pitches over the driver's limit of 2 GiB, rows are copied one by one.
    width, height : int
        Bytes per row, and number of rows. If either is 0, nothing is copied.
    kind : {"h2d", "d2h", "d2d", "h2h"}
        The direction, which must agree with the tensors' devices. "d2d": within one GPU or between
        two. "h2h": by CPU threads, before the call returns.
    stream : torch.cuda.Stream, optional
        A stream of the GPU (of either GPU for a copy between two). Default: the current stream, for
        two GPUs that of ``dst``. Not for "h2h".

    Raises
    ------
    TypeError, ValueError
        A wrong type, size, pitch, ``kind`` or stream; rows past the end of a storage; memory that
        overlaps; pageable memory. Nothing was written.
    RuntimeError
        An argument requires grad, ``dst`` is an inference tensor, or a tracer or dispatch mode of
        PyTorch is active, since it would not see the copy.
    """
    call = _memcpy.call
    if not (inference_mode.is_enabled() or dispatch.is_plain((dst,), (src,))):
        dispatch.refuse("memcpy_2d_async", {"dst": dst}, {"src": src})
    handle = ordinal = None
    if stream is not None:
        try:
            handle, ordinal = stream.cuda_stream, stream.device_index
        except AttributeError:
            text = f"{type_text(stream)}, expected a torch.cuda.Stream or None"
            raise TypeError(f"memcpy_2d_async: stream: {text}") from None
    try:
        arguments = (dst, src, dpitch, spitch, width, height, kind, handle, ordinal)
        outcome = call(*arguments, None)
        if outcome == _STORAGE_IS_NEEDED:
            refuse_lazy("memcpy_2d_async", dst=dst, src=src)
            outcome = call(*arguments, (*_storage(dst), *_storage(src)))
    except UNREADABLE as error:
        name_unreadable(error, "memcpy_2d_async", dst=dst, src=src)
    if outcome:
        raise dispatch.untraceable("memcpy_2d_async")
    dispatch.bump_versions((dst,))


def _storage(tensor: Any) -> tuple[int, int]:
    """Return address and bytes of the tensor's storage; (0, 0) if it is not PyTorch's."""
    try:
        storage = tensor.untyped_storage()
    except AttributeError:
        return 0, 0
    return storage.data_ptr(), storage.nbytes()
