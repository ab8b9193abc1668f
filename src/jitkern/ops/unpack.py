"""``unpack``: pieces of any size, put into their places as descriptors ask."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from jitkern.host import module as host
from jitkern.jit.device import DeviceModule, load_own, rows_hint
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops import dispatch
from jitkern.ops.pairs import load_entries
from jitkern.ops.register import op

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = KernelConfig(num_threads=256, max_occupancy=3, use_pdl=True)
PIECE_IN_FLIGHT = 2
IN_FLIGHT = 4
PARTS_IN_FLIGHT = 2
# Segments, 512 bytes each: what a warp copies at most of a piece that it copies in the short way;
# of any descriptor that has no rest; of one that has; what is dealt of that at a time.
SHORT_SEGMENTS = 16
OWN_SEGMENTS = 140
FIRST_SEGMENTS = 8
UNIT_SEGMENTS = 16

_FORMATS = {3: "i64x3", 6: "i64x6"}  # DescriptorFormat of csrc/ops/unpack.h


@cache
def kernel(descriptor_format: int) -> DeviceModule:
    """Return the device module for descriptors of so many int64 each."""
    in_flight = (PIECE_IN_FLIGHT, IN_FLIGHT, PARTS_IN_FLIGHT)
    segments = (SHORT_SEGMENTS, OWN_SEGMENTS, FIRST_SEGMENTS, UNIT_SEGMENTS)
    args = make_cpp_args(descriptor_format, *CONFIG, *in_flight, *segments)
    module = load_own(
        "unpack",
        *args,
        device_files=["ops/unpack.cu"],
        device_wrappers=[
            (f"jitkern_unpack_v16_{_FORMATS[descriptor_format]}", f"jitkern::Unpack<{args}>")
        ],
    )
    return module.launched_with(CONFIG, in_flight=IN_FLIGHT, splits=OWN_SEGMENTS)


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments of all formats: pieces of any size have the same."""
    return [(one,) for one in _FORMATS]


# What consumes a DescriptorRing: a block an SM, by which 128 descriptors come in one trip.
RING_CONFIG = KernelConfig(num_threads=512, max_occupancy=1, use_pdl=True)
RING_PIECE_IN_FLIGHT = 2
SERVE_CONFIG = KernelConfig(num_threads=512, max_occupancy=1, use_pdl=False)
RING_IN_FLIGHT = 8
SERVE_PIECE_IN_FLIGHT = 4  # it has few SMs
SERVE_IN_FLIGHT = 4


@cache
def ring_kernel() -> DeviceModule:
    """Return the device module that consumes a ring, in a call or as a server."""
    both = (PARTS_IN_FLIGHT, OWN_SEGMENTS)
    consume = make_cpp_args(*RING_CONFIG, RING_PIECE_IN_FLIGHT, RING_IN_FLIGHT, *both)
    serve = make_cpp_args(*SERVE_CONFIG, SERVE_PIECE_IN_FLIGHT, SERVE_IN_FLIGHT, *both)
    entries = [
        ("jitkern_unpack_ring", f"ConsumeRing<{consume}>", RING_CONFIG),
        ("jitkern_unpack_ring_serve", f"ServeRing<{serve}>", SERVE_CONFIG),
    ]
    module = load_entries("unpack_ring", "unpack_ring.cu", entries, consume, RING_IN_FLIGHT)
    module.hint = rows_hint
    return module


host.builds("unpack", kernel)  # a ring may ask for it first
host.builds("unpack_ring", ring_kernel)


def shared_kernels() -> list[DeviceModule]:
    """Return the kernels of rings."""
    return [ring_kernel()]


class Ring(Protocol):
    """What there is of a :class:`jitkern.offload.DescriptorRing`, which is of a level above."""

    def _unpack(self, dst: Tensor, src: Tensor, slot: int | None, num_slots: int) -> None: ...


_ring_type: type | None = None  # DescriptorRing, once it is imported


def set_ring_type(ring_type: type) -> None:
    """Have :func:`unpack` take instances of `ring_type`, by their `_unpack(...)`."""
    global _ring_type
    _ring_type = ring_type


def _slots_without_ring(slot: int | None) -> ValueError:
    name = "num_slots" if slot is None else "slot"
    return ValueError(f"unpack: {name}: given, expected a DescriptorRing as descriptors")


@op(kernel, writes=("dst",), reads=("src",), name="unpack")
def _unpack_tensors(
    dst: Tensor, src: Tensor, descriptors: Tensor, *, count: Tensor | None = None
) -> None: ...


def _traced(
    dst: Tensor,
    src: Tensor,
    descriptors: Tensor | Ring,
    *,
    count: Tensor | None = None,
    slot: int | None = None,
    num_slots: int = 1,
) -> None:
    if type(descriptors) is _ring_type:
        # torch.compile calls unpack itself then, between two graphs, where it may.
        raise TypeError(
            "unpack: descriptors: DescriptorRing, expected a tensor inside of a graph of "
            "torch.compile; call it outside, or compile without fullgraph=True"
        )
    if slot is not None or num_slots != 1:
        raise _slots_without_ring(slot)
    _unpack_tensors(dst, src, descriptors, count=count)  # type: ignore[arg-type]


@dispatch.traced_as(_traced)
def unpack(
    dst: Tensor,
    src: Tensor,
    descriptors: Tensor | Ring,
    *,
    count: Tensor | None = None,
    slot: int | None = None,
    num_slots: int = 1,
) -> None:
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
    descriptors : Tensor or DescriptorRing
        int64, contiguous, in memory of their own. ``[n, 3]`` of (src_off, dst_off, len), in bytes:
        ``len`` bytes go from there to there. ``[n, 6]`` of (src_off, dst_off, len, count,
        src_stride, dst_stride): ``count`` pieces of ``len`` bytes, so many bytes apart, upwards or
        downwards. Where ``len`` or ``count`` is 0 there is nothing to do. Pieces should not overlap
        in ``dst``: what several write there is undefined. On the GPU or on the CPU; those on the
        CPU are read before the call returns. Or a :class:`jitkern.offload.DescriptorRing`, see
        below.
    count : Tensor, optional
        One int32 or int64 on the device of ``descriptors``: only so many of them count. Below 0 it
        means 0, above their number all.
    slot, num_slots : int, optional
        Of a ring: the slot to begin with, by default that of the push that is next in turn, and how
        many are looked at.

    Notes
    -----
    Of a ring a call takes the pushes that are there by the time the GPU comes to it, up to
    `num_slots` of them, one after the other until one is not there yet; where there is none it does
    nothing. Each push is taken once, by whichever call comes first. Behind the copies it is
    completed: :meth:`~jitkern.offload.DescriptorRing.wait` returns, and the slot is free. Nothing
    is allocated and no host memory is read before the GPU does, so that a graph that has captured
    the call takes at each replay what was pushed by then. Calls of one ring follow each other: two
    at the same time are refused by the GPU, with a RuntimeError of a later call. On the CPU the
    same is done before the call returns.

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, device, shape or stride, pageable host memory, memory that the call would write
        and read, or ``descriptors`` on the CPU while a graph is captured. Nothing was queued or
        written. ``slot`` or ``num_slots`` without a ring, or ``count`` with one.
    RuntimeError
        With gradients enabled: an argument requires one. Outside of inference mode: what is written
        to was made in it. Nothing was written.
    IndexError
        A descriptor whose pieces reach out of ``src`` or ``dst``, or with a negative ``len`` or
        ``count``. For ``descriptors`` on the CPU at once, and nothing was queued or written. Else
        all of that descriptor is skipped, and the next jitkern call on the device or
        :func:`jitkern.check` raises. Of a ring on the CPU nothing of that slot is copied. A call
        with a ring that raises what an earlier one has left, this or another error, was made all
        the same: it is not to be made again for the same pushes.

    Examples
    --------
    >>> staging = torch.arange(64, dtype=torch.uint8)
    >>> slab = torch.zeros(64, dtype=torch.uint8)
    >>> jitkern.unpack(slab, staging, torch.tensor([[0, 7, 3], [10, 1, 2]]))
    >>> slab[:12].tolist()
    [0, 10, 11, 0, 0, 0, 0, 0, 1, 2, 0, 0]
    """
    if type(descriptors) is _ring_type:
        if count is not None:
            raise ValueError("unpack: count: given, expected None: a push of a ring has its own")
        cast("Ring", descriptors)._unpack(dst, src, slot, num_slots)
        return
    if slot is not None or num_slots != 1:
        raise _slots_without_ring(slot)
    _unpack_tensors(dst, src, descriptors, count=count)  # type: ignore[arg-type]
