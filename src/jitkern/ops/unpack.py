"""``unpack``: pieces of any size, put into their places as descriptors ask."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from jitkern.host import module as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops import dispatch
from jitkern.ops.common import TorchOverload
from jitkern.ops.pairs import load_entries

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = KernelConfig(num_threads=256, max_occupancy=4, use_pdl=True)
IN_FLIGHT = 4
PARTS_IN_FLIGHT = 2
# Segments, 512 bytes each: what a warp copies at most of a descriptor that has no rest; of one that
# has; what is dealt of that at a time.
OWN_SEGMENTS = 72
FIRST_SEGMENTS = 8
UNIT_SEGMENTS = 4

_FORMATS = {0: "structs", 3: "i64x3", 6: "i64x6"}  # DescriptorFormat of csrc/ops/unpack.h


@cache
def kernel(descriptor_format: int) -> DeviceModule:
    """Return the device module for descriptors of one format: structs, or rows of int64."""
    in_flight = (IN_FLIGHT, PARTS_IN_FLIGHT)
    args = make_cpp_args(
        descriptor_format, *CONFIG, *in_flight, OWN_SEGMENTS, FIRST_SEGMENTS, UNIT_SEGMENTS
    )
    name = f"jitkern_unpack_v16_{_FORMATS[descriptor_format]}"
    return load_entries("unpack", "unpack.cu", [(name, f"Unpack<{args}>", CONFIG)], args, IN_FLIGHT)


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments of all formats: pieces of any size have the same."""
    return [(one,) for one in _FORMATS]


@cache
def _op() -> Callable[..., Any]:
    return host.op("unpack", kernel)


def _through_torch(dst: Tensor, src: Tensor, descriptors: Tensor, **options: Any) -> None:
    dispatch.through_torch("unpack", dst=dst, src=src, descriptors=descriptors, **options)


@dispatch.traced_as(_through_torch)
def unpack(dst: Tensor, src: Tensor, descriptors: Tensor, *, count: Tensor | None = None) -> None:
    """Copy pieces of ``src`` to their places in ``dst``, each where a descriptor says.

    One call moves any number of pieces of any size and alignment, on the current stream and without
    a synchronisation. With ``descriptors`` on the GPU nothing is allocated, and a CUDA graph can
    capture the call, which reads them at each replay. Host memory must stay allocated until the
    stream has come past the call; what was written to it may be read then.

    Parameters
    ----------
    dst, src : Tensor
        Contiguous, of any dtypes and shapes: they count as bytes. Both on one GPU, one of them in
        pinned host memory and the other on a GPU, or both on the CPU. They share no memory.
    descriptors : Tensor
        int64, contiguous, in memory of their own. ``[n, 3]`` of (src_off, dst_off, len), in bytes:
        ``len`` bytes go from there to there. ``[n, 6]`` of (src_off, dst_off, len, count,
        src_stride, dst_stride): ``count`` pieces of ``len`` bytes, so many bytes apart, upwards or
        downwards. Where ``len`` or ``count`` is 0 there is nothing to do. Pieces should not overlap
        in ``dst``: what several write there is undefined. On the GPU or on the CPU; those on the
        CPU are read before the call returns.
    count : Tensor, optional
        One int32 or int64 on the device of ``descriptors``: only so many of them count. Below 0 it
        means 0, above their number all.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, device, shape or stride, pageable host memory, memory that the call would write
        and read, or ``descriptors`` on the CPU while a graph is captured. Nothing was queued or
        written.
    RuntimeError
        With gradients enabled: an argument requires one. Outside of inference mode: what is written
        to was made in it. Nothing was written.
    IndexError
        A descriptor whose pieces reach out of ``src`` or ``dst``, or with a negative ``len`` or
        ``count``. For ``descriptors`` on the CPU at once, and nothing was queued or written. Else
        all of that descriptor is skipped, and the next jitkern call on the device or
        :func:`jitkern.check` raises.

    Examples
    --------
    >>> staging = torch.arange(64, dtype=torch.uint8)
    >>> slab = torch.zeros(64, dtype=torch.uint8)
    >>> jitkern.unpack(slab, staging, torch.tensor([[0, 7, 3], [10, 1, 2]]))
    >>> slab[:12].tolist()
    [0, 10, 11, 0, 0, 0, 0, 0, 1, 2, 0, 0]
    """
    if dispatch.in_inference_mode() or dispatch.may_write((dst,), (src,)):
        try:
            if not _op()(dst, src, descriptors, count):
                dispatch.wrote(dst)
                return
        except (RuntimeError, ValueError) as error:
            tensors = {"dst": dst, "src": src, "descriptors": descriptors, "count": count}
            dispatch.require_wrapper(error, "unpack", **tensors)
    _through_torch(dst, src, descriptors, count=count)


def _now(dst: Tensor, src: Tensor, descriptors: Tensor, *, count: Tensor | None = None) -> None:
    host.op_now("unpack", kernel)(dst, src, descriptors, count)


TORCH_OVERLOADS = (
    TorchOverload(
        "unpack(Tensor(a!) dst, Tensor src, Tensor descriptors, *, Tensor? count=None) -> ()",
        _now,
    ),
)
