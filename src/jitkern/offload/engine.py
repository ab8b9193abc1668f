"""``OffloadEngine``: a KV cache on the CPU, slots for some of its blocks on the GPU."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import index
from typing import Any, Literal, cast

import torch
from torch import Tensor

from jitkern.args import choice_arg, device_arg, dtype_arg, int_arg, optional_arg, shape_arg
from jitkern.host.faults import check
from jitkern.offload import memory
from jitkern.offload.pool import PinnedPool
from jitkern.ops.block_buffers import BlockBuffers, LayerSignals
from jitkern.ops.copy_blocks import copy_blocks

Blocks = int | Sequence[int] | Tensor
"""Numbers of blocks or slots."""

_CALL = "OffloadEngine"
_PARTS = {"kv": 2, "mla": 1}  # caches that move together: K and V, or the latent one
_CACHES = ("cpu_cache", "gpu_cache", "cpu_k", "cpu_v", "gpu_k", "gpu_v")
_STEP_BYTES = 256 << 20  # of load_all: 5 ms of the link, after which the display goes on
_SHOWN_BYTES = 64 << 30  # progress is shown from this size on: more than a second


class OffloadEngine(AbstractContextManager["OffloadEngine"]):
    """A KV cache in pinned host memory, and slots on the GPU that its blocks are copied to.

    A call is one ``copy_blocks`` of K and V, asynchronous on torch's current stream. The caller, or
    a ``SlotPipeline`` (``load_blocks_into``), orders it with other streams that use a slot. An
    engine is for one thread at a time.

    Parameters
    ----------
    num_layers, num_cpu_blocks, num_slots, block_size : int
        Blocks of the CPU cache, blocks that the GPU has room for, and tokens of a block.
    token_shape : sequence of int
        Of a token in one layer: ``(num_heads, head_dim)`` in each of K and V, or ``(latent_dim,)``.
    dtype : torch.dtype
    device : torch.device, str or int
        A GPU; or the CPU, where all is done at once.
    kind : {"kv", "mla"}
        K and V, or a single cache.
    layout : {"layer_first", "block_first"}
        Of the CPU cache: ``[num_layers, num_cpu_blocks, ...]``; or ``[num_cpu_blocks, num_layers,
        ...]``, where a block is contiguous over all layers, K before V.
    pool : PinnedPool, optional
        Gives the memory of the CPU cache, its next part; by default the engine makes a pool.
    method : {"auto", "sm", "engine"}
        As of ``copy_blocks``.

    Attributes
    ----------
    cpu_cache, gpu_cache : Tensor
        ``[2, num_layers, num_cpu_blocks, block_size, *token_shape]``, or block-first
        ``[num_cpu_blocks, 2, num_layers, ...]``; and the same of the slots. No 2 for ``"mla"``.
    cpu_k, cpu_v, gpu_k, gpu_v : Tensor
        K and V of these; not for ``"mla"``.

    Raises
    ------
    TypeError, ValueError
        A wrong argument; a pool that is not pinned, or has not as much left.
    MemoryError, RuntimeError
        No pinned memory of that size; see ``PinnedPool``.
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
    ) -> None:
        self.num_layers: int = int_arg(_CALL, "num_layers", num_layers, 1)
        self.num_cpu_blocks: int = int_arg(_CALL, "num_cpu_blocks", num_cpu_blocks, 1)
        self.num_slots: int = int_arg(_CALL, "num_slots", num_slots, 1)
        self.block_size: int = int_arg(_CALL, "block_size", block_size, 1)
        self.token_shape: tuple[int, ...] = shape_arg(_CALL, "token_shape", token_shape)
        self.dtype: torch.dtype = dtype_arg(_CALL, dtype)
        self.device: torch.device = device_arg(_CALL, "device", device)
        self.kind: str = choice_arg(_CALL, "kind", kind, tuple(_PARTS))
        self.layout: str = choice_arg(_CALL, "layout", layout, ("layer_first", "block_first"))
        self._method: str = choice_arg(_CALL, "method", method, ("auto", "sm", "engine"))
        optional_arg(_CALL, "pool", pool, PinnedPool)
        on_gpu = self.device.type == "cuda"
        if pool is not None and on_gpu and not pool.stats.is_registered:
            text = "pageable memory, expected an open pool, made where CUDA is"
            raise ValueError(f"{_CALL}: pool: {text}")
        heads, block = (_PARTS[self.kind], self.num_layers), (self.block_size, *self.token_shape)
        self._block_dim = 1 if self.layout == "layer_first" else 0
        counts = (self.num_cpu_blocks,)
        shape = (*heads, *counts, *block) if self._block_dim else (*counts, *heads, *block)
        # Tensors made in inference mode, as in a server, could not be written outside of it.
        on_device = torch.cuda.device(self.device) if on_gpu else nullcontext()
        with torch.inference_mode(False), on_device:
            self._gpu = torch.zeros(*heads, self.num_slots, *block, dtype=dtype, device=self.device)
            used = PinnedPool(shape, dtype) if pool is None else pool
            self._cpu = used.tensor(shape, dtype)
            part = 1 - self._block_dim
            if self.kind == "kv":
                self.cpu_cache: Tensor = self._cpu
                self.gpu_cache: Tensor = self._gpu
                self.cpu_k: Tensor = self._cpu.select(part, 0)
                self.cpu_v: Tensor = self._cpu.select(part, 1)
                self.gpu_k: Tensor = self._gpu[0]
                self.gpu_v: Tensor = self._gpu[1]
            else:
                self.cpu_cache, self.gpu_cache = self._cpu.select(part, 0), self._gpu[0]
            if on_gpu:  # loads on other streams come after the zeros
                torch.cuda.current_stream().synchronize()
        self._own_pool = used if pool is None else None
        self._is_open = True
        # A view costs 2 us; there are at most (num_layers + 1) * block_size of them.
        self._views: dict[tuple[int | None, int | None], tuple[Tensor, Tensor]] = {}
        self._buffers: dict[int | None, tuple[BlockBuffers, BlockBuffers]] = {}

    def load(
        self,
        slots: Blocks,
        blocks: Blocks,
        *,
        layer: int | None = None,
        num_tokens: int | None = None,
        signals: LayerSignals | None = None,
    ) -> None:
        """Copy ``blocks[i]`` of the CPU cache to ``slots[i]``, for all i by one call.

        Parameters
        ----------
        slots, blocks : int, sequence of int or Tensor
            As many of each, each number once. Both on the host, checked before anything is queued;
            or int32 or int64 on the GPU, where a pair with a negative number is skipped.
        layer : int, optional
            Only this one; by default all.
        num_tokens : int, optional
            Only the first tokens of each block, as of one that a decode still fills.
        signals : LayerSignals, optional
            Of ``num_layers``: layers are copied in order, and each is signalled when its K and V
            have arrived. Not with ``layer`` or ``method="engine"``.

        Raises
        ------
        IndexError
            A number is no block or slot. On the GPU its pair is skipped, and the next jitkern call
            on the device or ``check`` raises.
        TypeError, ValueError
            A wrong argument; numbers on the GPU with ``method="engine"``, or on the host without it
            while a CUDA graph is captured.
        """
        self._move("load", slots, blocks, layer, num_tokens, signals=signals)

    def store(
        self,
        slots: Blocks,
        blocks: Blocks,
        *,
        layer: int | None = None,
        num_tokens: int | None = None,
        signals: LayerSignals | None = None,
    ) -> None:
        """Copy ``slots[i]`` to ``blocks[i]`` of the CPU cache; else as ``load``."""
        self._move("store", slots, blocks, layer, num_tokens, signals=signals)

    def load_blocks_into(self, tensor: Tensor, blocks: Blocks, *, layer: int | None = None) -> None:
        """Copy blocks to a tensor of the caller's, such as a slot of a ``SlotPipeline``.

        The tensor is on the engine's device, of its dtype: ``[2, n, block_size, *token_shape]`` for
        a layer of K and V, ``[2, num_layers, n, ...]`` for all; without the 2 for a single cache.
        Block i goes to place i of at least as many. The rest is as of ``load``.
        """
        self._move("load_blocks_into", None, blocks, layer, tensor=tensor)

    def store_blocks_from(
        self, tensor: Tensor, blocks: Blocks, *, layer: int | None = None
    ) -> None:
        """Copy a tensor of the caller's to blocks: the other way to ``load_blocks_into``."""
        self._move("store_blocks_from", None, blocks, layer, tensor=tensor)

    def load_all(self, first_block: int = 0, *, progress: bool | None = None) -> None:
        """Copy back what ``store_all`` has written, and wait for it; it raises the same."""
        self._move_all("load_all", first_block, progress)

    def store_all(self, first_block: int = 0, *, progress: bool | None = None) -> None:
        """Copy slot i to block ``first_block + i``, for all slots, and wait for it: before a sleep.

        The copy engine copies, on the current stream, after all earlier work of the device.
        `progress` says whether to show it on standard error; by default from 64 GiB on, on a
        terminal. IndexError, with nothing queued, if there are not as many blocks, or an earlier op
        on this GPU has met an index out of range.
        """
        self._move_all("store_all", first_block, progress)

    # Names that other engines have for these.
    load_to_slot_all_layers = load
    offload_slot_to_cpu = store

    def load_cpu_blocks_to_gpu_slots_all_layers(self, cpu_blocks: Blocks, slots: Blocks) -> None:
        """The same as ``load(slots, cpu_blocks)``."""
        self.load(slots, cpu_blocks)

    def offload_decode_slot(
        self, slot: Blocks, cpu_block: Blocks, num_tokens: int, *, layer: int | None = None
    ) -> None:
        """The same as ``store(slot, cpu_block, num_tokens=num_tokens)``."""
        self.store(slot, cpu_block, num_tokens=num_tokens, layer=layer)

    def close(self) -> None:
        """Wait for the GPU and give the memory back; again: do nothing.

        A pool that was given stays open. Tensors that somebody still holds stay valid on the CPU.
        While a stream is being captured it raises RuntimeError, and the engine stays open.
        """
        if not self._is_open:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self._own_pool is not None:
            self._own_pool.close()
        self._is_open = False
        self._views.clear()
        self._buffers.clear()
        for name in ("_cpu", "_gpu", *_CACHES):
            self.__dict__.pop(name, None)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if not self._is_open:
            return "OffloadEngine(closed)"
        gpu, cpu = (memory.size_text(side.nbytes) for side in (self._gpu, self._cpu))
        return (
            f"OffloadEngine({self.kind}, {self.num_layers} layers of {self.dtype}, "
            f"{self.num_cpu_blocks} blocks of {self.block_size} tokens, {self.layout}, {cpu}; "
            f"{self.num_slots} slots on {self.device}, {gpu})"
        )

    def _begin(self, name: str) -> tuple[str, bool]:
        """Return the call for messages, and whether it loads."""
        if not self._is_open:
            raise RuntimeError(f"{_CALL}.{name}: the engine is closed; make another one")
        return f"{_CALL}.{name}", name.startswith("load")

    def _move(
        self, name: str, slots: Any, blocks: Any, layer: Any = None, num_tokens: Any = None,
        *, tensor: Any = None, signals: LayerSignals | None = None,
    ) -> None:  # fmt: skip
        """Copy between blocks and slots, or a tensor in their place if `slots` is None."""
        call, to_gpu = self._begin(name)
        if signals is not None and layer is not None:
            raise ValueError(f"{call}: signals: with layer={layer}, expected None")
        if layer is not None:
            layer = int_arg(call, "layer", layer, 0, self.num_layers - 1, error=IndexError)
        if num_tokens is not None:
            num_tokens = int_arg(call, "num_tokens", num_tokens, 1, self.block_size)
        gpu, cpu = self._sides(layer, num_tokens)
        if slots is None:
            gpu = self._flat(call, tensor, layer)
        pairs = self._pairs(call, to_gpu, slots, blocks, gpu.shape[1])
        if signals is not None:
            src, dst = self._lists(num_tokens)[:: -1 if to_gpu else 1]
            pairs = torch.empty(0, 2, dtype=torch.int64) if pairs is None else pairs
            copy_blocks(src, dst, pairs, method=cast("Any", self._method), signals=signals)
        elif pairs is not None:
            self._copy(to_gpu, pairs, gpu, cpu, self._method)

    def _move_all(self, name: str, first: Any, progress: bool | None) -> None:
        """Copy all slots step by step; each is waited for once the next one is queued."""
        (call, to_gpu), count = self._begin(name), self.num_slots
        last = self.num_cpu_blocks - count
        first = int_arg(call, "first_block", first, 0, last, error=IndexError)
        on_gpu = self.device.type == "cuda"
        if on_gpu:  # what earlier ops have met is raised before a half of the slots is moved
            torch.cuda.synchronize(self.device)
            check(self.device.index)
        num_bytes = self._gpu.nbytes
        step = max(1, _STEP_BYTES * count // num_bytes)
        what = "loading" if to_gpu else "storing"
        stream = torch.cuda.current_stream(self.device) if on_gpu else None
        before: Any = None
        with memory.display(num_bytes, progress, _CALL, _SHOWN_BYTES) as shown:
            try:
                for begin in range(0, count, step):
                    end = min(begin + step, count)
                    pairs = torch.arange(begin, end, device="cpu").unsqueeze(1).repeat(1, 2)
                    pairs[:, 0 if to_gpu else 1] += first
                    self._copy(to_gpu, pairs, *self._sides(None, None), "engine")
                    if before is not None:
                        before.synchronize()
                    shown(what, begin / count)
                    before = None if stream is None else stream.record_event()
            finally:  # nothing goes on after an exception
                if stream is not None:
                    stream.synchronize()
            shown(what, 1.0)

    def _copy(self, to_gpu: bool, pairs: Tensor, gpu: Tensor, cpu: Tensor, method: Any) -> None:
        if to_gpu:
            copy_blocks(cpu, gpu, pairs, src_block_dim=self._block_dim, method=method)
        else:
            copy_blocks(gpu, cpu, pairs, dst_block_dim=self._block_dim, method=method)

    def _sides(self, layer: int | None, num_tokens: int | None) -> tuple[Tensor, Tensor]:
        """Return what ``copy_blocks`` takes of both caches; K and V are as twice the layers."""
        found = self._views.get((layer, num_tokens))
        if found is None:
            dim = self._block_dim
            found = self._gpu.flatten(0, 1), self._cpu.flatten(1 - dim, 2 - dim)
            if layer is not None:
                found = self._gpu.select(1, layer), self._cpu.select(2 - dim, layer)
            if num_tokens is not None:
                found = found[0].narrow(2, 0, num_tokens), found[1].narrow(2, 0, num_tokens)
            self._views[layer, num_tokens] = found
        return found

    def _lists(self, num_tokens: int | None) -> tuple[BlockBuffers, BlockBuffers]:
        """Return both caches as a buffer per layer, K and V of a layer side by side."""
        found = self._buffers.get(num_tokens)
        if found is None:
            gpu, cpu = self._sides(None, num_tokens)
            sides = ((gpu, 0), (cpu, 1 - self._block_dim))
            made = []
            for side, dim in sides:
                parts = side.chunk(_PARTS[self.kind], dim)  # the layers of K, and those of V
                made.append(BlockBuffers(*(part.unbind(dim) for part in parts)))
            found = self._buffers[num_tokens] = made[0], made[1]
        return found

    def _flat(self, call: str, tensor: Any, layer: int | None) -> torch.Tensor:
        """Return a tensor of the caller's as ``[parts * layers, blocks, ...]``."""
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{call}: tensor: {type(tensor).__name__}, expected a Tensor")
        if tensor.device != self.device:
            raise ValueError(f"{call}: tensor: device {tensor.device}, expected {self.device}")
        if tensor.dtype != self.dtype:
            raise TypeError(f"{call}: tensor: dtype {tensor.dtype}, expected {self.dtype}")
        parts, layers, _, *block = self._gpu.shape
        lead = ([parts] if parts > 1 else []) + ([layers] if layer is None else [])
        shape, at = list(tensor.shape), len(lead)
        if shape[:at] != lead or shape[at + 1 :] != block:
            expected = ", ".join(map(str, [*lead, "n", *block]))
            raise ValueError(f"{call}: tensor: shape {shape}, expected [{expected}]")
        try:
            return tensor.view(math.prod(lead), shape[at], *block)
        except RuntimeError:
            text = f"strides {list(tensor.stride())} of shape {shape}, expected contiguous layers"
            raise ValueError(f"{call}: tensor: {text}") from None

    def _pairs(
        self, call: str, to_gpu: bool, slots: Any, blocks: Any, num_places: int
    ) -> Tensor | None:
        """Return the pairs of (source, target), None if there are none.

        Numbers on the host are checked; for those on the GPU a kernel that makes pairs is queued.
        """
        on_gpu = any(getattr(side, "is_cuda", False) for side in (slots, blocks))

        def numbers(name: str, side: Any, bound: int) -> Any:
            if not on_gpu:
                return _numbers(call, name, side, bound)
            where = getattr(side, "device", "numbers on the host")
            if where != self.device:
                raise ValueError(f"{call}: {name}: {where}, expected a tensor on {self.device}")
            return side

        theirs = numbers("blocks", blocks, self.num_cpu_blocks)
        count = len(theirs)
        if slots is not None:
            ours = numbers("slots", slots, num_places)
            if len(ours) != count:
                text = f"{count} numbers, expected {len(ours)}, as many as slots"
                raise ValueError(f"{call}: blocks: {text}")
        elif count > num_places:
            text = f"{count} numbers, expected at most {num_places}, the blocks of tensor"
            raise ValueError(f"{call}: blocks: {text}")
        else:
            ours = torch.arange(count, device=self.device) if on_gpu else range(count)
        if count == 0:
            return None
        sources, targets = (theirs, ours) if to_gpu else (ours, theirs)
        if on_gpu:
            return torch.stack((sources, targets), 1)
        both = array("q", bytes(16 * count))
        both[0::2], both[1::2] = array("q", sources), array("q", targets)
        return torch.frombuffer(both, dtype=torch.int64).view(-1, 2)


def _numbers(call: str, name: str, values: Any, bound: int) -> Sequence[int]:
    """Return numbers on the host, each below `bound` and once."""
    given = values.tolist() if hasattr(values, "tolist") else values
    given = given if isinstance(given, Sequence) else [given]
    kinds = {int} if isinstance(given, range) else set(map(type, given))
    try:
        if bool in kinds or isinstance(given, str | bytes):
            raise TypeError  # a mask, or text
        numbers = given if kinds <= {int} else list(map(index, given))
    except TypeError:
        found = ", ".join(sorted(kind.__name__ for kind in kinds if kind is not int)) or "bytes"
        expected = "an int, a sequence of ints or a tensor"
        raise TypeError(f"{call}: {name}: {found}, expected {expected}") from None
    if numbers and (min(numbers) < 0 or max(numbers) >= bound):
        at = next(i for i, number in enumerate(numbers) if not 0 <= number < bound)
        text = f"{numbers[at]} at position {at}, expected 0 to {bound - 1}"
        raise IndexError(f"{call}: {name}: {text}")
    if len(set(numbers)) < len(numbers):
        twice = next(number for i, number in enumerate(numbers) if number in numbers[:i])
        raise ValueError(f"{call}: {name}: {twice} twice, expected each number once")
    return numbers
