"""``copy_blocks``: blocks of all layers of a cache, in one call."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Literal

from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops.common import INDEX_BYTES, widest_vec_bytes
from jitkern.ops.pairs import load_entries, threads_of
from jitkern.ops.register import op

if TYPE_CHECKING:
    from torch import Tensor

# Few full blocks, each warp with as many vectors a lane on their way.
CONFIG = KernelConfig(num_threads=1024, max_occupancy=1, use_pdl=False)
READ_IN_FLIGHT = 8
WRITE_IN_FLIGHT = 8


@cache
def kernel(vec_bytes: int, index_bytes: int, to_host: int) -> DeviceModule:
    """Return the device module of one vector width, index type and direction.

    ``index_bytes``: 0 for pairs that are parameters of the launch. ``to_host``: lines are those of
    the destination, which is in host memory or on the same GPU.
    """
    in_flight = WRITE_IN_FLIGHT if to_host else READ_IN_FLIGHT
    values = (vec_bytes, index_bytes, *threads_of(CONFIG), in_flight)
    lines, what = ("kHostTarget", "write") if to_host else ("kHostSource", "read")
    pairs = f"i{8 * index_bytes}" if index_bytes else "inline"
    name = f"jitkern_copy_blocks_v{vec_bytes}_{pairs}_{what}"
    entry = (name, f"CopyBlocks<{make_cpp_args(*values)}, jitkern::{lines}>", CONFIG)
    args = make_cpp_args(*values, bool(to_host))
    return load_entries("copy_blocks", "copy_blocks.cu", [entry], args, in_flight)


def specialisations(row_bytes: int) -> list[tuple[int, ...]]:
    """Return the template arguments that pieces of ``row_bytes`` need."""
    vec_bytes = widest_vec_bytes(row_bytes)
    pairs = (0, *INDEX_BYTES)
    return [(vec_bytes, index_bytes, to_host) for index_bytes in pairs for to_host in (0, 1)]


@op(kernel, writes=("dst",), reads=("src",))
def copy_blocks(
    dst: Tensor,
    src: Tensor,
    pairs: Tensor,
    *,
    dst_block_dim: int = 1,
    src_block_dim: int = 1,
    method: Literal["auto", "sm", "engine"] = "auto",
    count: Tensor | None = None,
    num_sms: int | None = None,
) -> None:
    """Copy block ``pairs[i, 0]`` of ``src`` to block ``pairs[i, 1]`` of ``dst``, in all layers.

    One call moves N blocks of L layers between a pool in host memory and a cache on a GPU, either
    way, or within one GPU or one cache, on the current stream and without a synchronisation. Host
    memory must stay allocated until the stream has come past the call; what was written to it may
    be read then. With ``pairs`` on the GPU nothing is allocated, and a CUDA graph can capture any
    call. By default a decode step beside it is 2 to 5 % longer to the host, 3 to 7 % to the GPU.

    Parameters
    ----------
    dst, src : Tensor
        Both ``[num_layers, num_blocks, ...]``, or ``[num_blocks, num_layers, ...]`` where its block
        dimension is 0; of the same dtype, number of layers and bytes of a block in one layer. These
        bytes are contiguous, any number from 1 up; the first two strides are free. A cache of one
        layer, ``[num_blocks, ...]``, is one whose block dimension is 0 on both sides. One of them
        in pinned host memory and one on a GPU, or both on one GPU, or both on the CPU. Blocks of
        ``dst`` share no memory with each other or with those of ``src``, unless both are the same
        cache, in which no block is the source of one pair and the destination of another.
    pairs : Tensor
        ``[..., 2]`` of (source block, destination block), int32 or int64, contiguous, on the GPU or
        on the CPU, in memory of their own. A pair with a negative member is skipped. Destinations
        should be distinct: of one that appears twice the content is undefined. Pairs on the CPU are
        read before the call returns.
    dst_block_dim, src_block_dim : int
        Which dimension counts blocks, 0 or 1; the other of the two counts layers.
    method : {"auto", "sm", "engine"}
        "auto" leaves the GPU to a model that runs beside the copy. With ``pairs`` on the CPU, and
        on a stream that is not the default one: pieces of 64 KiB or more, or what ``jitkern
        calibrate`` has found, go by the copy engine; so do blocks of 64 KiB to 64 MiB that are
        contiguous on the host and not on the GPU, by way of scratch memory of 64 MiB at most. Else
        a kernel on 2 SMs copies, and writes to the host at 32 GB/s. A piece is a block's part of
        one layer, or all of it where that is contiguous on both sides. Not captured with ``pairs``
        on the CPU.
        "sm", for when nothing runs beside it: a kernel on 4 SMs, at the speed of the link. Beside
        it a decode step takes 1.3 to 3 times as long on the way to the host.
        "engine", with ``pairs`` on the CPU: one copy of the copy engine for each run of blocks that
        follow each other on both sides, on no SM and with nothing compiled; a graph that captures
        it copies these very blocks at each replay. On the CPU all are the same.
    count : Tensor, optional
        One int32 or int64 on the device of ``pairs``: only so many of them count. Below 0 it means
        0, above their number all.
    num_sms : int, optional
        Blocks of 1024 threads that copy, at most one an SM, clamped to the GPU's SMs, and at their
        full speed; makes "auto" the same as "sm". By default as ``method`` says, more for pieces
        that are short or badly aligned (8 at most), and all of them within one GPU. Means nothing
        to "engine".

    Raises
    ------
    TypeError, ValueError
        Wrong dtype, device, shape or stride, pageable host memory, memory that the call would write
        twice, or write and read, a ``method`` that the other arguments forbid, or ``pairs`` on the
        CPU while a graph is captured, but by "engine". Nothing was queued or written.
    RuntimeError
        With gradients enabled: an argument requires one. Outside of inference mode: what is written
        to was made in it. Nothing was written.
    IndexError
        A block number past the end of ``src`` or ``dst``. For ``pairs`` on the CPU at once, and
        nothing was queued or written. Else the pair is skipped, and the next jitkern call on the
        device or :func:`jitkern.check` raises.

    Examples
    --------
    >>> pool = torch.zeros(1000, 32, 4096, dtype=torch.uint8, pin_memory=True)  # block-first
    >>> cache = torch.zeros(32, 200, 4096, dtype=torch.uint8, device="cuda")
    >>> pairs = torch.tensor([[7, 0], [999, 5]], device="cuda")
    >>> jitkern.copy_blocks(cache, pool, pairs, src_block_dim=0)
    """
