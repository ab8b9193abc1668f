"""``OffloadEngine``: a KV cache on the CPU, slots for some of its blocks on the GPU."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from jitkern.args import (
    choice_arg,
    device_arg,
    dtype_arg,
    int_arg,
    optional_arg,
    shape_arg,
    type_text,
)
from jitkern.fs import size_text
from jitkern.offload import memory
from jitkern.offload.pool import PinnedPool
from jitkern.ops.copy_blocks import copy_blocks

Blocks = int | Sequence[int] | Tensor
"""Numbers of blocks or slots."""

_CALL = "OffloadEngine"
_MAX_COUNT = 2**31 - 1
_PLACES: Any = object()  # in place of slots: the blocks of the caller's tensor, in order
_CACHES = ("cpu_cache", "gpu_cache", "cpu_k", "cpu_v", "gpu_k", "gpu_v")


class OffloadEngine(AbstractContextManager["OffloadEngine"]):
    """A KV cache in pinned host memory, and slots for some of its blocks on the GPU.

    Each call is one ``copy_blocks`` of K and V, asynchronous on torch's current stream. If other
    streams use a slot, order them yourself, or use a ``SlotPipeline`` with ``load_blocks_into``.
    Only one thread at a time may use an engine.

    Parameters
    ----------
    num_layers, num_cpu_blocks, num_slots, block_size : int
        Number of layers, of blocks in the CPU cache, of blocks on the GPU, and of tokens per block.
    token_shape : sequence of int
        Shape of one token in one layer: ``(num_heads, head_dim)``, for K and for V; or
        ``(latent_dim,)``.
    dtype : torch.dtype
        Dtype of both caches.
    device : torch.device, str or int, optional
        By default the current GPU, or the CPU if there is none; on the CPU each call copies before
        it returns.
    kind : {"kv", "mla"}
        "kv": K and V. "mla": a single cache.
    layout : {"layer_first", "block_first"}
        Layout of the CPU cache. "layer_first": ``[num_layers, num_cpu_blocks, ...]``.
        "block_first": ``[num_cpu_blocks, num_layers, ...]``; all layers of a block are contiguous,
        K before V.
    pool : PinnedPool, optional
        The CPU cache is the next tensor of this pool. By default the engine makes its own pool.
    method : {"auto", "sm", "engine"}
        How blocks are copied; see ``copy_blocks``.

    Attributes
    ----------
    cpu_cache : Tensor
        ``[2, num_layers, num_cpu_blocks, block_size, *token_shape]``; if block-first,
        ``[num_cpu_blocks, 2, num_layers, ...]``. The 2 stands for K and V; "mla" has no such
        dimension.
    gpu_cache : Tensor
        ``[2, num_layers, num_slots, block_size, *token_shape]``, for "mla" without the 2.
    cpu_k, cpu_v, gpu_k, gpu_v : Tensor
        Views of K and V in the two caches; not for "mla".

    Raises
    ------
    TypeError, ValueError
        An argument is wrong, or the pool is too small.
    MemoryError, RuntimeError
        There is not enough memory, or CUDA does not pin it; see ``PinnedPool``.
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
        device: torch.device | str | int | None = None,
        kind: Literal["kv", "mla"] = "kv",
        layout: Literal["layer_first", "block_first"] = "layer_first",
        pool: PinnedPool | None = None,
        method: Literal["auto", "sm", "engine"] = "auto",
    ) -> None:
        self.num_layers: int = int_arg(_CALL, "num_layers", num_layers, 1, _MAX_COUNT)
        self.num_cpu_blocks: int = int_arg(_CALL, "num_cpu_blocks", num_cpu_blocks, 1, _MAX_COUNT)
        self.num_slots: int = int_arg(_CALL, "num_slots", num_slots, 1, _MAX_COUNT)
        self.block_size: int = int_arg(_CALL, "block_size", block_size, 1, _MAX_COUNT)
        self.token_shape: tuple[int, ...] = shape_arg(_CALL, "token_shape", token_shape)
        self.dtype: torch.dtype = dtype_arg(_CALL, dtype)
        self.device: torch.device = device_arg(_CALL, "device", device)
        self.kind: str = choice_arg(_CALL, "kind", kind, ("kv", "mla"))
        self.layout: str = choice_arg(_CALL, "layout", layout, ("layer_first", "block_first"))
        self._method: Any = choice_arg(_CALL, "method", method, ("auto", "sm", "engine"))
        optional_arg(_CALL, "pool", pool, PinnedPool)
        num_parts = 2 if kind == "kv" else 1
        block = (self.block_size, *self.token_shape)
        gpu_shape = (num_parts, self.num_layers, self.num_slots, *block)
        if layout == "layer_first":
            self._block_dim, part_dim = 1, 0
            cpu_shape = (num_parts, self.num_layers, self.num_cpu_blocks, *block)
        else:
            self._block_dim, part_dim = 0, 1
            cpu_shape = (self.num_cpu_blocks, num_parts, self.num_layers, *block)
        on_gpu = self.device.type == "cuda"
        on_device = torch.cuda.device(self.device) if on_gpu else nullcontext()
        # Inference tensors, as a server would make them, cannot be written outside inference mode.
        with torch.inference_mode(False), on_device:
            self._gpu = torch.zeros(gpu_shape, dtype=dtype, device=self.device)
            self._own_pool: PinnedPool | None = None
            if pool is None:
                pool = self._own_pool = PinnedPool(math.prod(cpu_shape) * dtype.itemsize)
            self._cpu = pool.tensor(cpu_shape, dtype)
            if kind == "kv":
                self.cpu_cache: Tensor = self._cpu
                self.gpu_cache: Tensor = self._gpu
                self.cpu_k: Tensor = self._cpu.select(part_dim, 0)
                self.cpu_v: Tensor = self._cpu.select(part_dim, 1)
                self.gpu_k: Tensor = self._gpu[0]
                self.gpu_v: Tensor = self._gpu[1]
            else:
                self.cpu_cache, self.gpu_cache = self._cpu.select(part_dim, 0), self._gpu[0]
            if on_gpu:  # loads on other streams must come after the zeros
                torch.cuda.current_stream().synchronize()
        self._is_open = True
        # Making a view takes 2 us; there are at most (num_layers + 1) * (block_size + 1).
        self._views: dict[tuple[int | None, int | None], tuple[Tensor, Tensor]] = {}

    def load(
        self,
        slots: Blocks,
        blocks: Blocks,
        *,
        layer: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Copy block ``blocks[i]`` of the CPU cache to slot ``slots[i]``, for all i in one call.

        Both ``load`` and ``store`` take the GPU's side first, then the CPU's.

        Parameters
        ----------
        slots, blocks : int, sequence of int or Tensor
            The same number of each, without repeats. On the host they are checked before the copy
            is queued. Or both are int32 or int64 tensors on the GPU, where a pair with a negative
            number is skipped.
        layer : int, optional
            The layer to copy. Default: all layers.
        num_tokens : int, optional
            Copy only the first tokens of each block, for a block that is not full yet.

        Raises
        ------
        IndexError
            A number is out of range. If it is on the GPU, its pair is skipped, and the next jitkern
            call on the device or ``check`` raises.
        TypeError, ValueError
            An argument is wrong; numbers are on the GPU with ``method="engine"``, or on the host
            with another method while a CUDA graph is captured.
        """
        self._copy("load", True, slots, blocks, layer, num_tokens)

    def store(
        self,
        slots: Blocks,
        blocks: Blocks,
        *,
        layer: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Copy ``slots[i]`` to ``blocks[i]`` of the CPU cache; see ``load``.

        The GPU's side is first here too.
        """
        self._copy("store", False, slots, blocks, layer, num_tokens)

    def load_blocks_into(self, tensor: Tensor, blocks: Blocks, *, layer: int | None = None) -> None:
        """Copy block ``blocks[i]`` to index i of a tensor, such as a slot of a ``SlotPipeline``.

        The tensor has the engine's device and dtype. Its shape is ``[2, n, block_size,
        *token_shape]`` for one layer, ``[2, num_layers, n, ...]`` for all layers, and for "mla"
        without the 2; n is at least the number of blocks. See ``load`` for the rest.
        """
        self._copy("load_blocks_into", True, _PLACES, blocks, layer, tensor=tensor)

    def store_blocks_from(
        self, tensor: Tensor, blocks: Blocks, *, layer: int | None = None
    ) -> None:
        """Copy index i of a tensor to block ``blocks[i]``: the reverse of ``load_blocks_into``."""
        self._copy("store_blocks_from", False, _PLACES, blocks, layer, tensor=tensor)

    load_to_slot_all_layers = load
    """Alias of ``load``."""
    offload_slot_to_cpu = store
    """Alias of ``store``."""

    def load_cpu_blocks_to_gpu_slots_all_layers(self, cpu_blocks: Blocks, slots: Blocks) -> None:
        """Alias of ``load(slots, cpu_blocks)``, with the CPU's side first."""
        self.load(slots, cpu_blocks)

    def offload_decode_slot(
        self, slot: Blocks, cpu_block: Blocks, num_tokens: int, *, layer: int | None = None
    ) -> None:
        """Alias of ``store(slot, cpu_block, num_tokens=num_tokens)``."""
        self.store(slot, cpu_block, num_tokens=num_tokens, layer=layer)

    def close(self) -> None:
        """Wait for the GPU and free the memory; a second call does nothing.

        A pool passed as ``pool`` stays open. Tensors that you still hold stay valid on the CPU.
        RuntimeError while torch's current stream is being captured; the engine then stays open.
        """
        if not self._is_open:
            return
        if self.device.type == "cuda":
            memory.synchronize(self.device)
        if self._own_pool is not None:
            self._own_pool.close()
        self._is_open = False
        self._views.clear()
        for name in ("_cpu", "_gpu", *_CACHES):
            self.__dict__.pop(name, None)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self._is_open:
            return "OffloadEngine(closed)"
        gpu, cpu = (size_text(side.nbytes) for side in (self._gpu, self._cpu))
        return (
            f"OffloadEngine({self.kind}, {self.num_layers} layers of {self.dtype}, "
            f"{self.num_cpu_blocks} blocks of {self.block_size} tokens, {self.layout}, {cpu}; "
            f"{self.num_slots} slots on {self.device}, {gpu})"
        )

    def _copy(
        self,
        name: str,
        to_gpu: bool,
        slots: Any,
        blocks: Any,
        layer: Any,
        num_tokens: Any = None,
        tensor: Any = None,
    ) -> None:
        """Copy between blocks and slots, or places of `tensor`."""
        call = f"{_CALL}.{name}"
        if not self._is_open:
            raise RuntimeError(f"{call}: the engine is closed; make another one")
        if layer is not None:
            layer = int_arg(call, "layer", layer, 0, self.num_layers - 1, error=IndexError)
        if num_tokens is not None:
            num_tokens = int_arg(call, "num_tokens", num_tokens, 1, self.block_size)
        gpu, cpu = self._sides(layer, num_tokens)
        if slots is _PLACES:
            gpu = self._flat(call, tensor, layer)
        slots, blocks = self._numbers(call, slots, blocks, gpu.shape[1])
        dim, method = self._block_dim, self._method
        if to_gpu:
            copy_blocks(cpu, gpu, (blocks, slots), src_block_dim=dim, method=method)
        else:
            copy_blocks(gpu, cpu, (slots, blocks), dst_block_dim=dim, method=method)

    def _sides(self, layer: int | None, num_tokens: int | None) -> tuple[Tensor, Tensor]:
        """Return views of both caches for ``copy_blocks``, with K and V as twice the layers."""
        views = self._views.get((layer, num_tokens))
        if views is None:
            cpu_layer_dim = 2 - self._block_dim
            if layer is None:
                cpu = self._cpu.flatten(cpu_layer_dim - 1, cpu_layer_dim)
                views = self._gpu.flatten(0, 1), cpu
            else:
                views = self._gpu.select(1, layer), self._cpu.select(cpu_layer_dim, layer)
            if num_tokens is not None:
                views = views[0].narrow(2, 0, num_tokens), views[1].narrow(2, 0, num_tokens)
            self._views[layer, num_tokens] = views
        return views

    def _flat(self, call: str, tensor: Any, layer: int | None) -> Tensor:
        """Return the caller's tensor as ``[parts * layers, blocks, ...]``."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{call}: tensor: {type(tensor).__name__}, expected a Tensor")
        num_parts, num_layers, _, *block = self._gpu.shape
        lead = ([num_parts] if num_parts > 1 else []) + ([num_layers] if layer is None else [])
        shape, dim = list(tensor.shape), len(lead)
        fits = shape[:dim] == lead and shape[dim + 1 :] == block
        if not fits or tensor.dtype != self.dtype or tensor.device != self.device:
            sizes = ", ".join(map(str, [*lead, "n", *block]))
            actual = f"{tensor.dtype} {shape} on {tensor.device}"
            expected = f"{self.dtype} [{sizes}] on {self.device}"
            raise ValueError(f"{call}: tensor: {actual}, expected {expected}")
        try:
            return tensor.view(math.prod(lead), shape[dim], *block)
        except RuntimeError:
            text = f"strides {list(tensor.stride())} of shape {shape}, expected contiguous layers"
            raise ValueError(f"{call}: tensor: {text}") from None

    def _numbers(self, call: str, slots: Any, blocks: Any, num_slots: int) -> tuple[Tensor, Tensor]:
        """Return numbers of slots and of blocks as vectors.

        Numbers on the host are checked here, those on the GPU by the kernel.
        """
        if any(getattr(side, "is_cuda", False) for side in (slots, blocks)):
            if slots is _PLACES:
                slots = torch.arange(blocks.numel(), dtype=blocks.dtype, device=blocks.device)
            for name, side in (("slots", slots), ("blocks", blocks)):
                if not getattr(side, "is_cuda", False):
                    text = f"{type_text(side)} on the host, expected both or neither on the GPU"
                    raise TypeError(f"{call}: {name}: {text}")
            return slots, blocks
        block_numbers = _host_numbers(call, "blocks", blocks, self.num_cpu_blocks)
        count = len(block_numbers)
        if slots is _PLACES:
            if count > num_slots:
                text = f"{count} numbers, expected at most {num_slots}, the blocks of tensor"
                raise ValueError(f"{call}: blocks: {text}")
            slot_numbers = array("q", range(count))
        else:
            slot_numbers = _host_numbers(call, "slots", slots, num_slots)
            if len(slot_numbers) != count:
                text = f"{count} numbers, expected {len(slot_numbers)}, as many as slots"
                raise ValueError(f"{call}: blocks: {text}")
        if count == 0:  # torch.frombuffer refuses it
            empty = torch.empty(0, dtype=torch.int64, device="cpu")
            return empty, empty
        return _vector(slot_numbers), _vector(block_numbers)


def _vector(numbers: array[int]) -> Tensor:
    return torch.frombuffer(numbers, dtype=torch.int64)


def _host_numbers(call: str, name: str, values: Any, bound: int) -> array[int]:
    """Return a copy of numbers on the host, each below `bound` and not repeated."""
    expected = "an int, a sequence of ints or a tensor"
    try:
        items = values.tolist() if hasattr(values, "tolist") else values
    except RuntimeError:  # such as a tensor on "meta"
        text = f"a tensor without readable memory, expected {expected}"
        raise TypeError(f"{call}: {name}: {text}") from None
    if not isinstance(items, Sequence) or isinstance(items, str | bytes):
        items = [items]
    try:
        if bool in set(map(type, items)):
            raise TypeError  # a mask
        numbers = array("q", items)
    except TypeError:
        kinds = ", ".join(sorted({type(item).__name__ for item in items} - {"int"}))
        raise TypeError(f"{call}: {name}: {kinds}, expected {expected}") from None
    except OverflowError:
        text = f"{max(items, key=abs)}, expected 0 to {bound - 1}"
        raise IndexError(f"{call}: {name}: {text}") from None
    if numbers and (min(numbers) < 0 or max(numbers) >= bound):
        i = next(i for i, number in enumerate(numbers) if not 0 <= number < bound)
        text = f"{numbers[i]} at position {i}, expected 0 to {bound - 1}"
        raise IndexError(f"{call}: {name}: {text}")
    if len(set(numbers)) < len(numbers):
        repeated = Counter(numbers).most_common(1)[0][0]
        raise ValueError(f"{call}: {name}: {repeated} twice, expected each number once")
    return numbers
