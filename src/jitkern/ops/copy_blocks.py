"""``copy_blocks``: blocks of all layers of a cache, in one call."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any, Literal

from jitkern.host import library as host
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.lazy import torch
from jitkern.ops import dispatch
from jitkern.ops._ops import TorchOverload, no_result
from jitkern.ops.block_buffers import BlockBuffers, LayerSignals
from jitkern.ops.common import INDEX_BYTES, RowShape, load_entries, widest_vec_bytes
from jitkern.ops.dispatch import AUTO, inference_mode

# A few full blocks; each lane has this many vectors in flight.
CONFIG = KernelConfig(num_threads=1024, max_occupancy=1, use_pdl=False)
READ_IN_FLIGHT = 8
WRITE_IN_FLIGHT = 8


@cache
def kernel(vec_bytes: int, index_bytes: int, to_host: int) -> DeviceModule:
    """Return the device module of one vector width, index type and direction.

    ``index_bytes``: 0 if the pairs are in the parameters of the launch. ``to_host``: segments
    begin at lines of the destination, which is in host memory or on the same GPU.
    """
    in_flight = WRITE_IN_FLIGHT if to_host else READ_IN_FLIGHT
    values = (vec_bytes, index_bytes, *CONFIG[:2], in_flight)
    lines, direction = ("kHostTarget", "write") if to_host else ("kHostSource", "read")
    pairs = f"i{8 * index_bytes}" if index_bytes else "inline"
    name = f"jitkern_copy_blocks_v{vec_bytes}_{pairs}_{direction}"
    entry = (name, f"CopyBlocks<{make_cpp_args(*values)}, jitkern::{lines}>", CONFIG)
    args = make_cpp_args(*values, bool(to_host))
    return load_entries("copy_blocks", "ops/copy_blocks.cu", [entry], args, RowShape(in_flight))


host.builds("copy_blocks", kernel)


def kernels(row_bytes: int) -> list[DeviceModule]:
    """Return the kernels for pieces of ``row_bytes``."""
    vec_bytes = widest_vec_bytes(row_bytes)
    return [kernel(vec_bytes, *rest) for rest in product((0, *INDEX_BYTES), (0, 1))]


_copy = host.Function("copy_blocks")


def _through_torch(
    src: torch.Tensor | BlockBuffers,
    dst: torch.Tensor | BlockBuffers,
    pairs: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    *,
    signals: LayerSignals | None = None,
    **options: Any,
) -> None:
    if signals is not None:  # no operator of PyTorch takes them
        raise RuntimeError(
            f"copy_blocks: signals: {type(signals).__name__} while PyTorch traces or "
            "differentiates, expected None"
        )
    dispatch.through_torch("copy_blocks", src=src, dst=dst, pairs=pairs, **options)


@dispatch.traced_as(_through_torch)
def copy_blocks(
    src: torch.Tensor | BlockBuffers,
    dst: torch.Tensor | BlockBuffers,
    pairs: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    *,
    src_block_dim: int = 1,
    dst_block_dim: int = 1,
    method: Literal["auto", "sm", "engine"] = "auto",
    count: torch.Tensor | None = None,
    num_sms: int | None = None,
    signals: LayerSignals | None = None,
) -> None:
    """Copy block ``pairs[i, 0]`` of ``src`` to block ``pairs[i, 1]`` of ``dst``, in all layers.

    One call copies N blocks of L layers: between a pool in host memory and a cache on a GPU, in
    either direction, within one GPU, or within one cache. Asynchronous on the current stream. Keep
    host memory allocated until the stream has passed the call. With ``pairs`` on the GPU the call
    allocates nothing, and a CUDA graph can capture it. By default a concurrent decode step takes 1
    to 3 % longer during copies to the host, and 2 to 5 % longer during copies to the GPU.

    Block tables of an engine are often on the GPU: one vector of source blocks, one of destination
    blocks, and a number of valid entries that only the GPU knows. So this op alone, of those that
    take pairs, accepts ``pairs`` as two vectors, and ``count``.

    Parameters
    ----------
    src, dst : Tensor or BlockBuffers
        ``[num_layers, num_blocks, ...]``; ``[num_blocks, num_layers, ...]`` if the block dimension
        is 0; or ``BlockBuffers``, one buffer per layer. Both have the same dtype, number of layers
        and bytes per block in one layer. Blocks of a tensor are contiguous in each layer; the
        strides of its first two dimensions are free. A cache of one layer is ``[num_blocks, ...]``
        with block dimension 0 on both sides. One side is in pinned host memory and the other on a
        GPU, or both are on one GPU, or both on the CPU. Blocks of ``dst`` must not overlap each
        other or ``src``. Exception: both may be the same cache if no block is both a source and a
        destination.
    pairs : Tensor or tuple of two Tensors
        ``[..., 2]`` of (source block, destination block), or a vector of each. int32 or int64,
        contiguous, on the GPU, or on the CPU, where they are read before the call returns. A pair
        with a negative number is skipped. If a destination repeats, its content is undefined.
    src_block_dim, dst_block_dim : int
        The dimension of a tensor that counts blocks, 0 or 1. The other one counts layers. A side
        that is ``BlockBuffers`` takes none.
    method : {"auto", "sm", "engine"}
        "auto": a kernel on one SM, so that a concurrent model is slowed little. Exception: with
        ``pairs`` on the CPU and a current stream other than the default stream, the copy engine
        copies pieces of 64 KiB or more. "sm": a kernel on 4 SMs, at the speed of the link.
        "engine", only with ``pairs`` on the CPU: the copy engine, with one copy per run of blocks
        that are consecutive on both sides. A captured graph copies the same blocks in each replay.
    count : Tensor, optional
        One int32 or int64 on the device of ``pairs``: only the first ``count`` pairs are copied.
        Clamped to the range from 0 to the number of pairs.
    num_sms : int, optional
        SMs that copy at full speed, each with a block of 1024 threads; "auto" is then "sm".
        "engine" ignores it. Within one GPU the default is all SMs.
    signals : LayerSignals, optional
        Copies layers in order, and signals each one when it has arrived. Not with "engine".

    Raises
    ------
    TypeError, ValueError, RuntimeError, IndexError
        As ``h2d_gather``, except that "engine" can be captured with ``pairs`` on the CPU. While
        PyTorch traces the call, ``BlockBuffers``, ``signals`` and a tuple of pairs are refused.

    Examples
    --------
    >>> pool = torch.zeros(1000, 32, 4096, dtype=torch.uint8, pin_memory=True)  # block-first
    >>> cache = torch.zeros(32, 200, 4096, dtype=torch.uint8, device="cuda")
    >>> pairs = torch.tensor([[7, 0], [999, 5]], device="cuda")
    >>> jitkern.copy_blocks(pool, cache, pairs, src_block_dim=0)
    """
    call = _copy.call
    if inference_mode.is_enabled() or dispatch.is_plain((dst,), (src,)):
        way = None if method is AUTO else method
        try:
            if not call(
                src, dst, pairs, src_block_dim, dst_block_dim, way, count, num_sms, signals
            ):
                if type(dst) is not BlockBuffers:  # 80 tensors would take 10 us
                    dispatch.bump_versions((dst,))
                return
        except dispatch.UNREADABLE as error:
            tensors = {"src": src, "dst": dst, "pairs": pairs, "count": count}
            dispatch.require_wrapper(error, "copy_blocks", **tensors)
    _through_torch(
        src,
        dst,
        pairs,
        src_block_dim=src_block_dim,
        dst_block_dim=dst_block_dim,
        method=method,
        count=count,
        num_sms=num_sms,
        signals=signals,
    )


_copy_now = host.Function("copy_blocks_now")


def _run(*arguments: Any) -> None:
    _copy_now(*arguments, None)  # no signals


OVERLOADS = (
    TorchOverload(
        "copy_blocks(Tensor src, Tensor(a!) dst, Tensor pairs, *, SymInt src_block_dim=1, "
        'SymInt dst_block_dim=1, str method="auto", Tensor? count=None, SymInt? num_sms=None) '
        "-> ()",
        run=_run,
        fake=no_result,
    ),
)
