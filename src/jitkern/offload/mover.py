"""What an ``OffloadEngine`` does once it is open: blocks from one side to the other."""

from __future__ import annotations

import math
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from jitkern.host.faults import check, is_of_earlier_call
from jitkern.offload import memory
from jitkern.offload.block_pairs import Numbers, pair, pairs_of, places_for, run_of, single
from jitkern.ops.copy_blocks import copy_blocks

if TYPE_CHECKING:
    import torch

_STEP_BYTES = 256 << 20  # of `everything`: 5 ms of the link, after which the display goes on
_SHOWN_BYTES = 64 << 30  # from here on it takes more than a second


class Side:
    """Blocks of one side; K and V are as twice the layers, so that one launch moves both."""

    def __init__(self, tensor: torch.Tensor, block_dim: int) -> None:
        """Take ``[parts, layers, blocks, ...]``, or ``[blocks, parts, layers, ...]`` of dim 0."""
        self.tensor = tensor
        self.block_dim = block_dim
        self.num_layers: int = tensor.shape[1 if block_dim else 2]
        self.num_blocks: int = tensor.shape[2 if block_dim else 0]
        self._flat = tensor.flatten(0, 1) if block_dim else tensor.flatten(1, 2)

    def part(self, number: int) -> torch.Tensor:
        """Return the cache of K, of V, or the only one."""
        return self.tensor.select(0 if self.block_dim else 1, number)

    def view(self, layer: int | None, num_tokens: int | None) -> torch.Tensor:
        """Return what ``copy_blocks`` takes: all layers or one, all tokens or the first ones."""
        found = self._flat
        if layer is not None:
            found = self.tensor.select(1 if self.block_dim else 2, layer)
        return found if num_tokens is None else found.narrow(2, 0, num_tokens)


class BlockMover:
    """Checks and copies. ``call`` is whom an error is from; ``to_gpu``: loads."""

    def __init__(self, gpu: Side, cpu: Side, method: Any, num_sms: int | None) -> None:
        self.gpu: Side = gpu
        self.cpu: Side = cpu
        self._device = gpu.tensor.device
        self._how = {"method": method, "num_sms": num_sms}
        # A view costs 2 us; there are at most (num_layers + 1) * block_size of them.
        self._views: dict[tuple[int | None, int | None], tuple[torch.Tensor, torch.Tensor]] = {}

    def one(
        self,
        call: str,
        to_gpu: bool,
        slot: Any,
        cpu_block: Any,
        stream: Any,
        layer: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Move a block."""
        here = single(call, Numbers("slot", slot, self.gpu.num_blocks))
        there = single(call, Numbers("cpu_block", cpu_block, self.cpu.num_blocks))
        with self._on(call, stream):
            pairs = pair(there, here) if to_gpu else pair(here, there)
            self._copy(to_gpu, pairs, *self._sides(layer, num_tokens), self._how)

    def many(
        self,
        call: str,
        to_gpu: bool,
        slots: Any,
        cpu_blocks: Any,
        stream: Any,
        layer: int | None = None,
    ) -> None:
        """Move blocks by one call."""
        here = Numbers("slots", slots, self.gpu.num_blocks)
        there = Numbers("cpu_blocks", cpu_blocks, self.cpu.num_blocks)
        with self._on(call, stream, slots, cpu_blocks):
            pairs = pairs_of(call, *((there, here) if to_gpu else (here, there)), self._device)
            if pairs is not None:
                self._copy(to_gpu, pairs, *self._sides(layer), self._how)

    def outside(
        self,
        call: str,
        to_gpu: bool,
        tensor: Any,
        cpu_blocks: Any,
        stream: Any,
        layer: int | None,
    ) -> None:
        """Move blocks between the CPU cache and a tensor of the caller's."""
        flat = self._flat_tensor(call, tensor, layer)
        there = Numbers("cpu_blocks", cpu_blocks, self.cpu.num_blocks)
        with self._on(call, stream, tensor, cpu_blocks):
            here = Numbers("tensor", places_for(call, there, flat.shape[1]), flat.shape[1])
            pairs = pairs_of(call, *((there, here) if to_gpu else (here, there)), self._device)
            if pairs is not None:
                self._copy(to_gpu, pairs, flat, self._sides(layer)[1], self._how)

    def everything(self, call: str, to_gpu: bool, first: Any, progress: bool | None) -> None:
        """Move all slots, step by step, and wait for each once the next one is queued.

        What an earlier kernel finds meanwhile is raised once all are moved: half of them would be
        neither here nor there.
        """
        first = single(call, Numbers("first_cpu_block", first, self.cpu.num_blocks))
        count, room = self.gpu.num_blocks, self.cpu.num_blocks - first
        if count > room:
            text = f"{room} blocks from {first} on, expected {count}, as many as slots"
            raise IndexError(f"{call}: first_cpu_block: {text}")
        num_bytes = self.gpu.tensor.nbytes
        step = max(1, _STEP_BYTES * count // num_bytes)
        what = "loading" if to_gpu else "offloading"
        how = {**self._how, "method": "engine"}
        waiting: deque[tuple[Any, int]] = deque()
        fault: Exception | None = None
        if self._device.type == "cuda":
            check(self._device.index)  # of what is known before nothing is queued
        with memory.display(num_bytes, progress, "OffloadEngine", _SHOWN_BYTES) as shown:

            def wait(most: int) -> None:
                while len(waiting) > most:
                    event, end = waiting.popleft()
                    if event is not None:
                        event.synchronize()
                    shown(what, end / count)

            try:
                for begin in range(0, count, step):
                    end = min(begin + step, count)
                    source, target = (first + begin, begin) if to_gpu else (begin, first + begin)
                    pairs = run_of(source, target, end - begin)
                    found = self._copy_despite_faults(to_gpu, pairs, *self._sides(None), how)
                    fault = fault or found
                    waiting.append((self._event(), end))
                    wait(1)
                wait(0)
            finally:  # nothing goes on behind an exception
                last = self._event()
                if last is not None:
                    last.synchronize()
        try:
            if fault is not None:
                raise fault
        finally:
            fault = found = None  # its traceback holds this frame

    def _sides(
        self, layer: int | None, num_tokens: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._views.get((layer, num_tokens))
        if found is None:
            found = self.gpu.view(layer, num_tokens), self.cpu.view(layer, num_tokens)
            self._views[layer, num_tokens] = found
        return found

    def _copy_despite_faults(self, *copy: Any) -> Exception | None:
        """Copy, and return the first of what had been found by then, which is forgotten."""
        fault: Exception | None = None
        while True:
            try:
                self._copy(*copy)
                return fault
            except Exception as error:
                if not is_of_earlier_call(error):
                    raise
                fault = fault or error

    def _copy(
        self,
        to_gpu: bool,
        pairs: torch.Tensor,
        gpu: torch.Tensor,
        cpu: torch.Tensor,
        how: dict[str, Any],
    ) -> None:
        if to_gpu:
            copy_blocks(gpu, cpu, pairs, src_block_dim=self.cpu.block_dim, **how)
        else:
            copy_blocks(cpu, gpu, pairs, dst_block_dim=self.cpu.block_dim, **how)

    def _flat_tensor(self, call: str, tensor: Any, layer: int | None) -> torch.Tensor:
        """Return a tensor of the caller's as ``[parts * layers, blocks, ...]``."""
        import torch

        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{call}: tensor: {type(tensor).__name__}, expected a Tensor")
        whole = self.gpu.tensor
        if tensor.device != whole.device:
            raise ValueError(f"{call}: tensor: device {tensor.device}, expected {whole.device}")
        if tensor.dtype != whole.dtype:
            came, expected = (str(one.dtype).removeprefix("torch.") for one in (tensor, whole))
            raise TypeError(f"{call}: tensor: dtype {came}, expected {expected}")
        parts, layers, _, *block = whole.shape
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

    def _on(self, call: str, stream: Any, *used: Any) -> AbstractContextManager[Any]:
        """Make a stream the current one; torch hands out the memory of what it uses only after."""
        if stream is None:
            return nullcontext()
        import torch

        if not isinstance(stream, torch.cuda.Stream):
            what = type(stream).__name__
            raise TypeError(f"{call}: stream: {what}, expected a torch.cuda.Stream or None")
        if stream.device != self._device:
            expected = "None" if self._device.type == "cpu" else f"one of {self._device}"
            raise ValueError(f"{call}: stream: of {stream.device}, expected {expected}")
        for one in (self.gpu.tensor, *used):
            if isinstance(one, torch.Tensor) and one.is_cuda:
                one.record_stream(stream)
        on_it: AbstractContextManager[Any] = torch.cuda.stream(stream)
        return on_it

    def _event(self) -> Any:
        """Return what tells that all is done that is queued, None where nothing waits."""
        if self._device.type == "cpu":
            return None
        import torch

        return torch.cuda.current_stream(self._device).record_event()
