"""What the tests of OffloadEngine have in common: an engine, and the model that it is held to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jitkern.offload import OffloadEngine

LAYERS, BLOCKS, SLOTS, TOKENS = 3, 11, 4, 16
KINDS = [(kind, layout) for kind in ("kv", "mla") for layout in ("layer_first", "block_first")]


def engine_of(device: torch.device, kind: str = "kv", **how: Any) -> OffloadEngine:
    given = {
        "num_layers": LAYERS,
        "num_cpu_blocks": BLOCKS,
        "num_slots": SLOTS,
        "block_size": TOKENS,
        "token_shape": (2, 8) if kind == "kv" else (24,),
        "dtype": torch.bfloat16,
        "device": device,
        "kind": kind,
    }
    return OffloadEngine(**{**given, **how})


def sync(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Model:
    """Both caches as ``[parts, layers, blocks, tokens, ...]``, filled with random numbers."""

    def __init__(self, engine: OffloadEngine, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.engine = engine
        cpu, gpu = engine.cpu_cache, engine.gpu_cache
        cpu.copy_(torch.randn(cpu.shape))
        gpu.copy_(torch.randn(gpu.shape))
        self.cpu, self.gpu = self.now()

    def now(self) -> tuple[Tensor, Tensor]:
        cpu, gpu = self.engine.cpu_cache.clone(), self.engine.gpu_cache.cpu()
        if self.engine.kind == "mla":
            cpu, gpu = cpu.unsqueeze(0 if self.engine.layout == "layer_first" else 1), gpu[None]
        if self.engine.layout == "block_first":
            cpu = cpu.movedim(0, 2)
        return cpu, gpu

    def load(self, slot: int, block: int, layer: int | None = None, tokens: int = TOKENS) -> None:
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        self.gpu[:, layers, slot, :tokens] = self.cpu[:, layers, block, :tokens]

    def offload(
        self, slot: int, block: int, layer: int | None = None, tokens: int = TOKENS
    ) -> None:
        layers = slice(None) if layer is None else slice(layer, layer + 1)
        self.cpu[:, layers, block, :tokens] = self.gpu[:, layers, slot, :tokens]

    def check(self) -> None:
        sync(self.engine.device)
        cpu, gpu = self.now()
        assert torch.equal(cpu, self.cpu)
        assert torch.equal(gpu, self.gpu)
