"""The example of a radix tree, loaded as a module, and what holds of each of its trees."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

PATH = Path(__file__).resolve().parents[2] / "examples" / "radix_cache.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("radix_cache", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "radix_cache", module)  # where dataclasses look
        spec.loader.exec_module(module)
        yield module


def check_invariants(tree: Any) -> None:
    """What holds of a tree after whatever was done to it."""
    assert tree.root.parent is None and len(tree.root.key) == 0
    evictable, protected = 0, 0
    slots: list[int] = []
    for node in tree.nodes():
        assert len(node.key) == len(node.slots) > 0
        assert len(node.key) % tree.page_size == 0
        assert node.parent.last_use >= node.last_use or node.parent is tree.root
        slots += node.slots.tolist()
        if node.users:
            protected += len(node.key)
        else:
            evictable += len(node.key)
    for node in [tree.root, *tree.nodes()]:
        assert 0 <= node.locks <= node.users
        assert node.users == node.locks + sum(child.users for child in node.children.values())
        for page, child in node.children.items():
            first = child.key[: tree.page_size].tolist()
            assert page == (first[0] if tree.page_size == 1 else tuple(first))
            assert child.parent is node
    assert (tree.evictable_size, tree.protected_size) == (evictable, protected)
    assert len(set(slots)) == len(slots)


@pytest.fixture(params=[torch.int32, torch.int64], ids=["int32", "int64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param
