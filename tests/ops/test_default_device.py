"""Tensors that jitkern makes name their device: engines set a default one to load a model."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from paths import SRC
from torch.distributed import HashStore

import jitkern
from jitkern.comm import PeerMemory, init_pynccl
from jitkern.offload import DescriptorRing, OffloadEngine, SlotPipeline

FACTORIES = {
    *("empty", "zeros", "ones", "full", "arange", "tensor", "as_tensor", "scalar_tensor", "eye"),
    *("rand", "randn", "randint", "randperm", "linspace", "empty_strided", "asarray"),
}


@pytest.fixture(autouse=True)
def meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


def test_signals_and_lists() -> None:
    cpu = {"device": "cpu"}
    near, far = ([torch.zeros(4, 8, **cpu) for _ in range(2)] for _ in "nf")
    signals = jitkern.LayerSignals(2, device="cpu")
    pairs = torch.tensor([[0, 1]], **cpu)
    jitkern.copy_blocks(*map(jitkern.BlockBuffers, (far, near)), pairs, signals=signals)
    assert signals.is_done(1) and signals.device.type == "cpu"
    outs, lses = torch.ones(3, 5, 2, 8, **cpu), torch.zeros(3, 5, 2, **cpu)
    assert jitkern.merge_states(outs, lses)[1].device.type == "cpu"
    assert jitkern.indexing(far[0], pairs).device.type == "cpu"


NO_DEVICE: dict[str, Callable[..., Any]] = {
    "LayerSignals": partial(jitkern.LayerSignals, 4),
    "SlotPipeline": partial(SlotPipeline, num_slots=2, slot_shape=[8], dtype=torch.int8),
    "DescriptorRing": DescriptorRing,
    "OffloadEngine": partial(
        OffloadEngine,
        **dict.fromkeys(("num_layers", "num_cpu_blocks", "num_slots", "block_size"), 2),
        token_shape=[8],
        dtype=torch.int8,
    ),
    "PeerMemory": partial(PeerMemory, 1, HashStore(), rank=0, world_size=1),
}


@pytest.mark.parametrize("name", NO_DEVICE)
def test_the_current_gpu_or_the_cpu(name: str) -> None:
    made = NO_DEVICE[name]()
    if torch.cuda.is_available():
        assert made.device == torch.device("cuda", torch.cuda.current_device())
        return
    assert made.device == torch.device("cpu")
    for device in ("cuda", "cuda:9", 0):
        text = f"{name}: device: {device}, expected the CPU: PyTorch sees no GPU"
        with pytest.raises(ValueError, match=f"^{text}$"):
            NO_DEVICE[name](device=device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_says_that_there_is_none() -> None:
    text = "init_pynccl: device: none was given, and PyTorch sees no GPU, expected a GPU"
    with pytest.raises(ValueError, match=f"^{text}$"):
        init_pynccl(tp_rank=0, tp_size=1, tp_cpu_group=HashStore())


def test_every_new_tensor_names_its_device() -> None:
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if ast.unparse(node.func.value) != "torch" or node.func.attr not in FACTORIES:
                continue
            named = {keyword.arg for keyword in node.keywords}
            assert named & {"device", None}, f"{path}:{node.lineno}"  # None: **options
