"""``unpack``: copy pieces of any size to the places that descriptors name."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Protocol, cast

from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.lazy import torch
from jitkern.ops import dispatch
from jitkern.ops._ops import TorchOverload, no_result
from jitkern.ops.common import RowShape, load_entries
from jitkern.ops.dispatch import inference_mode

CONFIG = KernelConfig(num_threads=256, max_occupancy=3, use_pdl=True)
PIECE_IN_FLIGHT = 2
IN_FLIGHT = 4
PARTS_IN_FLIGHT = 2
# The most segments of 512 bytes that a warp copies:
SHORT_SEGMENTS = 16  # per piece, in the loop for short pieces
OWN_SEGMENTS = 140  # per descriptor, if no other warp helps
FIRST_SEGMENTS = 8  # per descriptor, if the rest is split among other warps
UNIT_SEGMENTS = 16  # per turn of a helping warp

_FORMATS = {3: "i64x3", 6: "i64x6"}  # DescriptorFormat of csrc/ops/unpack.h


class UnpackShape(NamedTuple):
    """The ints that the launch in csrc/ops/unpack.cc takes from here."""

    in_flight: int  # vectors that a thread has in flight
    own_segments: int


@cache
def kernel(descriptor_format: int) -> DeviceModule:
    """Return the device module for descriptors of `descriptor_format` int64 each."""
    in_flight = (PIECE_IN_FLIGHT, IN_FLIGHT, PARTS_IN_FLIGHT)
    segments = (SHORT_SEGMENTS, OWN_SEGMENTS, FIRST_SEGMENTS, UNIT_SEGMENTS)
    args = make_cpp_args(descriptor_format, *CONFIG, *in_flight, *segments)
    name = f"jitkern_unpack_v16_{_FORMATS[descriptor_format]}"
    entry = (name, f"Unpack<{args}>", CONFIG)
    shape = UnpackShape(IN_FLIGHT, OWN_SEGMENTS)
    return load_entries("unpack", "ops/unpack.cu", [entry], args, shape)


# The consumers of a DescriptorRing: one block per SM, which reads 128 descriptors in one trip.
RING_CONFIG = KernelConfig(num_threads=512, max_occupancy=1, use_pdl=True)
RING_PIECE_IN_FLIGHT = 2
SERVE_CONFIG = KernelConfig(num_threads=512, max_occupancy=1, use_pdl=False)
RING_IN_FLIGHT = 8
SERVE_PIECE_IN_FLIGHT = 4  # a server runs on few SMs
SERVE_IN_FLIGHT = 4


@cache
def ring_kernel() -> DeviceModule:
    """Return the device module that consumes a ring, in a call or as a server."""
    rest = (PARTS_IN_FLIGHT, OWN_SEGMENTS)
    consume = make_cpp_args(*RING_CONFIG, RING_PIECE_IN_FLIGHT, RING_IN_FLIGHT, *rest)
    serve = make_cpp_args(*SERVE_CONFIG, SERVE_PIECE_IN_FLIGHT, SERVE_IN_FLIGHT, *rest)
    entries = [
        ("jitkern_unpack_ring", f"ConsumeRing<{consume}>", RING_CONFIG),
        ("jitkern_unpack_ring_serve", f"ServeRing<{serve}>", SERVE_CONFIG),
    ]
    file, shape = "ops/unpack_ring.cu", RowShape(RING_IN_FLIGHT)
    return load_entries("unpack_ring", file, entries, consume, shape)


host.builds("unpack", kernel)
host.builds("unpack_ring", ring_kernel)


def kernels(row_bytes: int) -> list[DeviceModule]:
    """Return all kernels: they serve pieces of any size."""
    return [*map(kernel, _FORMATS), ring_kernel()]


_unpack = host.Function("unpack")


class Ring(Protocol):
    """The part of ``offload.DescriptorRing`` that ``unpack`` calls; ops do not import offload."""

    def _unpack(self, src: torch.Tensor, dst: torch.Tensor, max_pushes: int) -> None: ...


_ring_type: type | None = None  # DescriptorRing, once it is imported


def set_ring_type(ring_type: type) -> None:
    """Make ``unpack`` accept instances of `ring_type`, and call their `_unpack(...)`."""
    global _ring_type
    _ring_type = ring_type


def _through_torch(
    src: torch.Tensor,
    dst: torch.Tensor,
    descriptors: torch.Tensor | Ring,
    *,
    count: torch.Tensor | None = None,
    max_pushes: int = 1,
) -> None:
    if type(descriptors) is _ring_type:
        # torch.compile breaks the graph and calls unpack itself, unless fullgraph=True.
        raise TypeError(
            "unpack: descriptors: DescriptorRing, expected a tensor inside of a graph of "
            "torch.compile; call it outside, or compile without fullgraph=True"
        )
    _check_no_pushes(max_pushes)
    dispatch.through_torch("unpack", src=src, dst=dst, descriptors=descriptors, count=count)


def _check_no_pushes(max_pushes: Any) -> None:
    if type(max_pushes) is not int or max_pushes != 1:
        raise ValueError("unpack: max_pushes: given, expected a DescriptorRing as descriptors")


@dispatch.traced_as(_through_torch)
def unpack(
    src: torch.Tensor,
    dst: torch.Tensor,
    descriptors: torch.Tensor | Ring,
    *,
    count: torch.Tensor | None = None,
    max_pushes: int = 1,
) -> None:
    """Copy pieces of ``src`` to the places in ``dst`` that descriptors name.

    One call copies any number of pieces of any size and alignment. Asynchronous on the current
    stream. With ``descriptors`` on the GPU the call allocates nothing, and a CUDA graph can capture
    it; each replay reads the descriptors again. Keep host memory allocated until the stream has
    passed the call.

    With a ring, a call consumes the pushes that are complete when the GPU reaches it, in order, up
    to ``max_pushes``. It never waits for a push. After its copies, the slots are free and
    ``offload.DescriptorRing.wait`` returns. Each replay of a captured call consumes the pushes made
    until then. If two calls on one ring run at the same time, the GPU refuses the second, and a
    later call raises RuntimeError.

    Parameters
    ----------
    src, dst : Tensor
        Contiguous, of any dtype and shape; only their bytes matter. Both on one GPU, one on a GPU
        and one in pinned host memory, or both on the CPU. They must not overlap.
    descriptors : Tensor or DescriptorRing
        int64, contiguous, on the GPU, or on the CPU, where they are read before the call returns.
        ``[n, 3]`` of (src_off, dst_off, len) in bytes, or ``[n, 6]`` of (src_off, dst_off, len,
        count, src_stride, dst_stride): ``count`` pieces of ``len`` bytes, strides of either sign. A
        ``len`` or ``count`` of 0 copies nothing. If several pieces write a byte of ``dst``, its
        value is undefined. Or an ``offload.DescriptorRing``.
    count : Tensor, optional
        One int32 or int64 on the device of ``descriptors``: only the first ``count`` are used.
        Clamped to the range from 0 to the number of descriptors.
    max_pushes : int, optional
        With a ring: the maximum number of pushes that the call consumes.

    Raises
    ------
    TypeError, ValueError
        A wrong dtype, device, shape or stride; pageable memory; memory that overlaps;
        ``descriptors`` on the CPU during graph capture; ``max_pushes`` without a ring, ``count``
        with a ring. Nothing was written.
    RuntimeError
        An argument requires grad, or an output is an inference tensor outside of inference mode.
    IndexError
        A descriptor reaches outside of ``src`` or ``dst``, or has a negative ``len`` or ``count``.
        For ``descriptors`` on the CPU, at once, with nothing written. Otherwise it is skipped, and
        the next jitkern call on the device or ``check`` raises. If a call with a ring raises the
        error of an earlier call, its own kernel has been queued: do not repeat the call.
    """
    if type(descriptors) is _ring_type:
        if count is not None:
            raise ValueError("unpack: count: given, expected None: a push of a ring has its own")
        cast("Ring", descriptors)._unpack(src, dst, max_pushes)
        return
    _check_no_pushes(max_pushes)
    call = _unpack.call
    if inference_mode.is_enabled() or dispatch.is_plain((dst,), (src,)):
        try:
            if not call(src, dst, descriptors, count):
                dispatch.bump_versions((dst,))
                return
        except dispatch.UNREADABLE as error:
            tensors = {"src": src, "dst": dst, "descriptors": descriptors, "count": count}
            dispatch.require_wrapper(error, "unpack", **tensors)
    _through_torch(src, dst, descriptors, count=count)


OVERLOADS = (
    TorchOverload(
        "unpack(Tensor src, Tensor(a!) dst, Tensor descriptors, *, Tensor? count=None) -> ()",
        run=host.Function("unpack_now"),
        fake=no_result,
    ),
)
