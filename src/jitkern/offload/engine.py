"""``OffloadEngine``: a KV cache on the CPU, slots for some of its blocks on the GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal, Union

from jitkern.offload.args import count_arg, device_arg, dtype_arg, shape_arg
from jitkern.offload.block_pairs import Numbers, single
from jitkern.offload.caches import Caches, choice_arg, pool_arg
from jitkern.offload.mover import BlockMover, Side
from jitkern.offload.pool import PinnedPool

if TYPE_CHECKING:
    import torch

Blocks = Union[int, Sequence[int], "torch.Tensor"]
"""Numbers of blocks or slots."""

_CALL = "OffloadEngine"
_PARTS = {"kv": 2, "mla": 1}  # caches that move together: K and V, or the latent one
_LAYOUTS = ("layer_first", "block_first")
_METHODS = ("auto", "sm", "engine")


class OffloadEngine(Caches):
    """A KV cache in pinned host memory, and slots on the GPU that its blocks are brought to.

    K and V of a block go in one call of :func:`jitkern.copy_blocks`, in all layers or in one, on
    torch's current stream of the device or on ``stream``; nothing waits for it. What is queued
    there afterwards finds it done. Nobody keeps a slot from being overwritten that is still read on
    another stream: order such streams, or let a :class:`SlotPipeline` do so
    (:meth:`load_blocks_into`). Numbers on the host are checked before anything is queued. An engine
    is for one thread at a time.

    Parameters
    ----------
    num_layers, num_cpu_blocks, num_slots : int
        Blocks of the CPU cache, and blocks that the GPU has room for.
    block_size : int
        Tokens of a block.
    token_shape : sequence of int
        What a token has in one layer: ``(num_heads, head_dim)`` in each of K and V, or
        ``(latent_dim,)``.
    dtype : torch.dtype
    device : torch.device, str or int
        A GPU; or the CPU, where all is done at once.
    kind : {"kv", "mla"}
        K and V, or a single cache.
    layout : {"layer_first", "block_first"}
        Of the CPU cache: ``[num_layers, num_cpu_blocks, ...]``, or ``[num_cpu_blocks, num_layers,
        ...]``, in which a block is contiguous over all its layers, K before V, for who stores it
        elsewhere.
    pool : PinnedPool, optional
        Gives the memory of the CPU cache, the next part of it; else the engine makes one.
    method : {"auto", "sm", "engine"}
        As of :func:`jitkern.copy_blocks`.
    num_sms : int, optional
        As there.

    Attributes
    ----------
    num_layers, num_cpu_blocks, num_slots, block_size : int
    token_shape : tuple of int
    dtype : torch.dtype
    device : torch.device
    kind, layout : str

    Raises
    ------
    TypeError, ValueError
        A wrong argument; a pool that is not pinned, or has not as much left.
    MemoryError, RuntimeError
        No pinned memory of that size; see :class:`PinnedPool`.
    torch.OutOfMemoryError
        The slots do not fit.

    Examples
    --------
    >>> import torch
    >>> from jitkern.offload import OffloadEngine
    >>> engine = OffloadEngine(
    ...     num_layers=3, num_cpu_blocks=10, num_slots=4, block_size=16, token_shape=(2, 8),
    ...     dtype=torch.bfloat16, device="cpu",
    ... )
    >>> engine.cpu_k[:, 7] = 1
    >>> engine.load_to_slot_all_layers(slot=2, cpu_block=7)
    >>> engine.gpu_k.shape, engine.gpu_k[:, 2].eq(1).all().item()
    (torch.Size([3, 4, 16, 2, 8]), True)
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_cpu_blocks: int,
        num_slots: int,
        block_size: int,
        token_shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str | int = "cuda",
        kind: Literal["kv", "mla"] = "kv",
        layout: Literal["layer_first", "block_first"] = "layer_first",
        pool: PinnedPool | None = None,
        method: Literal["auto", "sm", "engine"] = "auto",
        num_sms: int | None = None,
    ) -> None:
        import torch

        self.num_layers: int = count_arg(_CALL, "num_layers", num_layers)
        self.num_cpu_blocks: int = count_arg(_CALL, "num_cpu_blocks", num_cpu_blocks)
        self.num_slots: int = count_arg(_CALL, "num_slots", num_slots)
        self.block_size: int = count_arg(_CALL, "block_size", block_size)
        self.token_shape: tuple[int, ...] = shape_arg(_CALL, "token_shape", token_shape)
        self.dtype: torch.dtype = dtype_arg(_CALL, dtype)
        self.device: torch.device = device_arg(_CALL, device)
        self.kind: str = choice_arg("kind", kind, tuple(_PARTS))
        self.layout: str = choice_arg("layout", layout, _LAYOUTS)
        method = choice_arg("method", method, _METHODS)
        num_sms = None if num_sms is None else count_arg(_CALL, "num_sms", num_sms)
        pool_arg(pool, self.device)
        parts, on_gpu = _PARTS[self.kind], self.device.type == "cuda"
        block = (self.block_size, *self.token_shape)
        heads = (parts, self.num_layers)
        block_dim = 1 if self.layout == "layer_first" else 0
        shape = (*heads, self.num_cpu_blocks) if block_dim else (self.num_cpu_blocks, *heads)
        # Tensors of inference mode, in which servers often are, could not be written outside of it.
        on_device = torch.cuda.device(self.device) if on_gpu else nullcontext()
        with torch.inference_mode(False), on_device:
            slots = torch.zeros(*heads, self.num_slots, *block, dtype=dtype, device=self.device)
            used = PinnedPool((*shape, *block), dtype) if pool is None else pool
            host = used.tensor((*shape, *block), dtype)
            if on_gpu:  # loads on other streams come behind the zeros
                torch.cuda.current_stream().synchronize()
        self._own_pool = used if pool is None else None
        self._mover = BlockMover(Side(slots, 1), Side(host, block_dim), method, num_sms)

    # -- one block ---------------------------------------------------------------------------------

    def load_to_slot_all_layers(self, slot: int, cpu_block: int, *, stream: Any = None) -> None:
        """Bring a block of the CPU cache to a slot, in all layers.

        Parameters
        ----------
        slot, cpu_block : int
        stream : torch.cuda.Stream, optional
            Of the engine's device; by default torch's current stream there.

        Raises
        ------
        IndexError
            There is no such slot or block. Nothing was queued.
        TypeError, ValueError
            A wrong argument, a stream of another device; a CUDA graph is captured, and ``method``
            is not "engine". Nothing was queued.
        RuntimeError
            The engine is closed.
        """
        call = "OffloadEngine.load_to_slot_all_layers"
        self._open(call).one(call, True, slot, cpu_block, stream)

    def load_to_slot(self, slot: int, cpu_block: int, *, layer: int, stream: Any = None) -> None:
        """Bring one layer of a block to a slot; else as :meth:`load_to_slot_all_layers`."""
        call = "OffloadEngine.load_to_slot"
        number = self._layer(call, layer)
        self._open(call).one(call, True, slot, cpu_block, stream, number)

    def offload_slot_to_cpu(
        self, slot: int, cpu_block: int, *, layer: int | None = None, stream: Any = None
    ) -> None:
        """Write a slot to a block of the CPU cache, in all layers or in one.

        Arguments and errors are those of :meth:`load_to_slot_all_layers`.
        """
        call = "OffloadEngine.offload_slot_to_cpu"
        number = self._layer_or_all(call, layer)
        self._open(call).one(call, False, slot, cpu_block, stream, number)

    def offload_decode_slot(
        self,
        slot: int,
        cpu_block: int,
        num_tokens: int,
        *,
        layer: int | None = None,
        stream: Any = None,
    ) -> None:
        """Write the first tokens of a slot, as of a block that a decode is still filling.

        The other arguments and errors are those of :meth:`offload_slot_to_cpu`.

        Parameters
        ----------
        num_tokens : int
            1 to `block_size`; what is behind them in the block stays as it is.
        """
        self._decode("offload_decode_slot", False, slot, cpu_block, num_tokens, layer, stream)

    def load_decode_slot(
        self,
        slot: int,
        cpu_block: int,
        num_tokens: int,
        *,
        layer: int | None = None,
        stream: Any = None,
    ) -> None:
        """Bring the first tokens of a block back, for a decode that goes on with it.

        The other way round to :meth:`offload_decode_slot`, with its arguments and errors.
        """
        self._decode("load_decode_slot", True, slot, cpu_block, num_tokens, layer, stream)

    # -- many blocks -------------------------------------------------------------------------------

    def load_cpu_blocks_to_gpu_slots_all_layers(
        self, cpu_blocks: Blocks, slots: Blocks, *, stream: Any = None
    ) -> None:
        """Bring ``cpu_blocks[i]`` to ``slots[i]``, for all i and in all layers, by one call.

        Parameters
        ----------
        cpu_blocks, slots : int, sequence of int or Tensor
            As many of each, each number once; tensors have one dimension and are int32 or int64.
            Both on the host; or both are tensors on the GPU, of which nobody looks at a number
            before the kernel does: there a pair with a negative one is skipped, one past the end
            is skipped and raised later, and of a slot that comes twice the content is undefined.
        stream : torch.cuda.Stream, optional
            Of the engine's device; by default torch's current stream there.

        Raises
        ------
        IndexError
            A number on the host is none of a block or slot. Nothing was queued. For one on the GPU
            the next jitkern call on the device or :func:`jitkern.check` raises.
        TypeError, ValueError
            A wrong argument, lists of different lengths, a number that comes twice, a stream of
            another device; numbers on the GPU where ``method`` is "engine", or on the host where it
            is not while a CUDA graph is captured. Nothing was queued.
        RuntimeError
            The engine is closed.
        """
        call = "OffloadEngine.load_cpu_blocks_to_gpu_slots_all_layers"
        self._open(call).many(call, True, slots, cpu_blocks, stream)

    def load_cpu_blocks_to_gpu_slots(
        self, cpu_blocks: Blocks, slots: Blocks, *, layer: int, stream: Any = None
    ) -> None:
        """Bring one layer of blocks to slots.

        Else as :meth:`load_cpu_blocks_to_gpu_slots_all_layers`.
        """
        call = "OffloadEngine.load_cpu_blocks_to_gpu_slots"
        number = self._layer(call, layer)
        self._open(call).many(call, True, slots, cpu_blocks, stream, number)

    def offload_gpu_slots_to_cpu_blocks_all_layers(
        self, slots: Blocks, cpu_blocks: Blocks, *, stream: Any = None
    ) -> None:
        """Write ``slots[i]`` to ``cpu_blocks[i]``, for all i and in all layers, by one call.

        Arguments and errors are those of :meth:`load_cpu_blocks_to_gpu_slots_all_layers`.
        """
        call = "OffloadEngine.offload_gpu_slots_to_cpu_blocks_all_layers"
        self._open(call).many(call, False, slots, cpu_blocks, stream)

    def offload_gpu_slots_to_cpu_blocks(
        self, slots: Blocks, cpu_blocks: Blocks, *, layer: int, stream: Any = None
    ) -> None:
        """Write one layer of slots to blocks.

        Else as :meth:`offload_gpu_slots_to_cpu_blocks_all_layers`.
        """
        call = "OffloadEngine.offload_gpu_slots_to_cpu_blocks"
        number = self._layer(call, layer)
        self._open(call).many(call, False, slots, cpu_blocks, stream, number)

    # -- blocks and memory of the caller's ---------------------------------------------------------

    def load_blocks_into(
        self,
        tensor: torch.Tensor,
        cpu_blocks: Blocks,
        *,
        layer: int | None = None,
        stream: Any = None,
    ) -> None:
        """Bring blocks to a tensor of the caller's, such as a slot of a :class:`SlotPipeline`.

        The stream and the errors are those of :meth:`load_cpu_blocks_to_gpu_slots_all_layers`.

        Parameters
        ----------
        tensor : Tensor
            On the engine's device, of its dtype: ``[2, n, block_size, *token_shape]`` for a layer
            of K and V, ``[2, num_layers, n, ...]`` for all; ``[n, ...]`` and ``[num_layers, n,
            ...]`` of a single cache. Block i goes to place i of at least as many.
        cpu_blocks : int, sequence of int or Tensor
            On the host or on the GPU; each once.
        layer : int, optional
            The only one to be moved.
        """
        call = "OffloadEngine.load_blocks_into"
        number = self._layer_or_all(call, layer)
        self._open(call).outside(call, True, tensor, cpu_blocks, stream, number)

    def store_blocks_from(
        self,
        tensor: torch.Tensor,
        cpu_blocks: Blocks,
        *,
        layer: int | None = None,
        stream: Any = None,
    ) -> None:
        """Write a tensor of the caller's to blocks: the other way to :meth:`load_blocks_into`."""
        call = "OffloadEngine.store_blocks_from"
        number = self._layer_or_all(call, layer)
        self._open(call).outside(call, False, tensor, cpu_blocks, stream, number)

    # -- all slots ---------------------------------------------------------------------------------

    def offload_all(self, first_cpu_block: int = 0, *, progress: bool | None = None) -> None:
        """Write all slots to blocks that follow each other, and wait for it: before a sleep.

        Slot i goes to block ``first_cpu_block + i``, by the copy engine, on the current stream.

        Parameters
        ----------
        first_cpu_block : int
        progress : bool, optional
            Whether to show on standard error how far it is; by default from 64 GiB on, on a
            terminal.

        Raises
        ------
        TypeError, IndexError
            There are not as many blocks from there on. Nothing was queued.
        IndexError
            Of an earlier op on this GPU, as every call raises it: before anything is queued, or,
            where it is found meanwhile, once all slots are written.
        RuntimeError
            The engine is closed.
        """
        call = "OffloadEngine.offload_all"
        self._open(call).everything(call, False, first_cpu_block, progress)

    def load_all(self, first_cpu_block: int = 0, *, progress: bool | None = None) -> None:
        """Bring back what :meth:`offload_all` has written, and wait for it; it raises the same."""
        call = "OffloadEngine.load_all"
        self._open(call).everything(call, True, first_cpu_block, progress)

    def __enter__(self) -> OffloadEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- arguments ---------------------------------------------------------------------------------

    def _layer(self, call: str, layer: Any) -> int:
        return single(call, Numbers("layer", layer, self.num_layers))

    def _layer_or_all(self, call: str, layer: Any) -> int | None:
        return None if layer is None else self._layer(call, layer)

    def _decode(
        self,
        name: str,
        to_gpu: bool,
        slot: int,
        cpu_block: int,
        num_tokens: int,
        layer: int | None,
        stream: Any,
    ) -> None:
        call = f"OffloadEngine.{name}"
        tokens = count_arg(call, "num_tokens", num_tokens, self.block_size)
        number = self._layer_or_all(call, layer)
        self._open(call).one(call, to_gpu, slot, cpu_block, stream, number, tokens)
