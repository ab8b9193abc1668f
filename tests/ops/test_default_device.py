"""Tensors that jitkern makes name their device: engines set a default one to load a model."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
import torch
from paths import SRC

import jitkern

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
    signals = jitkern.LayerSignals(2, "cpu")
    pairs = torch.tensor([[0, 1]], **cpu)
    jitkern.copy_blocks(*map(jitkern.BlockBuffers, (far, near)), pairs, signals=signals)
    assert signals.done(1) and signals.device.type == "cpu"
    outs, lses = torch.ones(3, 5, 2, 8, **cpu), torch.zeros(3, 5, 2, **cpu)
    assert jitkern.merge_states(outs, lses)[1].device.type == "cpu"
    assert jitkern.indexing(far[0], pairs).device.type == "cpu"


def test_every_new_tensor_names_its_device() -> None:
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            if ast.unparse(node.func.value) != "torch" or node.func.attr not in FACTORIES:
                continue
            named = {keyword.arg for keyword in node.keywords}
            assert named & {"device", None}, f"{path}:{node.lineno}"  # None: **options
