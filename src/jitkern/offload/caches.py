"""The caches of an ``OffloadEngine``: their tensors, and how long they are there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitkern.offload import memory
from jitkern.offload.mover import BlockMover
from jitkern.offload.pool import PinnedPool

if TYPE_CHECKING:
    import torch


class Caches:
    """What an ``OffloadEngine`` has, and gives back."""

    num_layers: int
    num_cpu_blocks: int
    num_slots: int
    block_size: int
    token_shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    kind: str
    layout: str
    _own_pool: PinnedPool | None
    _mover: BlockMover | None  # None: closed

    @property
    def cpu_k(self) -> torch.Tensor:
        """K of the CPU cache, ``[num_layers, num_cpu_blocks, block_size, *token_shape]``.

        Of a block-first one ``[num_cpu_blocks, num_layers, ...]``.
        """
        return self._part("cpu_k").cpu.part(0)

    @property
    def cpu_v(self) -> torch.Tensor:
        """V of the CPU cache, as :attr:`cpu_k`."""
        return self._part("cpu_v").cpu.part(1)

    @property
    def gpu_k(self) -> torch.Tensor:
        """K of the slots, ``[num_layers, num_slots, block_size, *token_shape]``."""
        return self._part("gpu_k").gpu.part(0)

    @property
    def gpu_v(self) -> torch.Tensor:
        """V of the slots, as :attr:`gpu_k`."""
        return self._part("gpu_v").gpu.part(1)

    @property
    def cpu_cache(self) -> torch.Tensor:
        """The whole CPU cache: K and V are dimension 0, of a block-first one dimension 1.

        A single cache has no such dimension: its shape is that of :attr:`cpu_k`.
        """
        cpu = self._open("OffloadEngine.cpu_cache").cpu
        return cpu.tensor if self.kind == "kv" else cpu.part(0)

    @property
    def gpu_cache(self) -> torch.Tensor:
        """All slots: ``[2, num_layers, num_slots, ...]``, or without the 2."""
        gpu = self._open("OffloadEngine.gpu_cache").gpu
        return gpu.tensor if self.kind == "kv" else gpu.part(0)

    def close(self) -> None:
        """Wait for the GPU and give the memory back; again: do nothing.

        A pool that was given stays open. Tensors that somebody still holds stay valid on the CPU.

        Raises
        ------
        RuntimeError
            A stream is being captured: the engine stays open.
        """
        if self._mover is None:
            return
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)
        if self._own_pool is not None:
            self._own_pool.close()
        self._mover = None

    def __repr__(self) -> str:
        if self._mover is None:
            return "OffloadEngine(closed)"
        gpu, cpu = (
            memory.size_text(side.tensor.nbytes) for side in (self._mover.gpu, self._mover.cpu)
        )
        return (
            f"OffloadEngine({self.kind}, {self.num_layers} layers of {self.dtype}, "
            f"{self.num_cpu_blocks} blocks of {self.block_size} tokens, {self.layout}, {cpu}; "
            f"{self.num_slots} slots on {self.device}, {gpu})"
        )

    def _open(self, call: str) -> BlockMover:
        if self._mover is None:
            raise RuntimeError(f"{call}: the engine is closed; make another one")
        return self._mover

    def _part(self, name: str) -> BlockMover:
        if self.kind == "mla":
            raise AttributeError(f"OffloadEngine.{name}: not of kind mla; see {name[:4]}cache")
        return self._open(f"OffloadEngine.{name}")


def choice_arg(name: str, value: Any, choices: tuple[str, ...]) -> Any:
    if not isinstance(value, str):
        raise TypeError(f"OffloadEngine: {name}: {type(value).__name__}, expected a str")
    if value not in choices:
        *most, last = (f'"{choice}"' for choice in choices)
        expected = f"{', '.join(most)} or {last}"
        raise ValueError(f'OffloadEngine: {name}: "{value}", expected {expected}')
    return value


def pool_arg(pool: Any, device: torch.device) -> None:
    if pool is None:
        return
    if not isinstance(pool, PinnedPool):
        what = type(pool).__name__
        raise TypeError(f"OffloadEngine: pool: {what}, expected a PinnedPool or None")
    if device.type == "cuda" and not pool.stats.is_registered:
        text = "pageable memory, expected an open pool, made where CUDA is"
        raise ValueError(f"OffloadEngine: pool: {text}")
