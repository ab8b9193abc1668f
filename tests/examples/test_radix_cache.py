"""The example of a radix tree: against a dict of all prefixes, by hand, and the day it serves."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from processes import example_module
from torch import Tensor


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with example_module("radix_cache.py") as module:
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


Prefix = tuple[int, ...]


class Reference:
    """All cached prefixes of whole pages, each with the slots of its last page and its last use."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.slots: dict[Prefix, list[int]] = {}
        self.last_use: dict[Prefix, int] = {}
        self.locked: list[Prefix] = []
        self.clock = 0

    def prefixes(self, tokens: Prefix) -> list[Prefix]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tokens[:end] for end in ends]

    def match(self, tokens: Prefix) -> Prefix:
        """Return the longest cached prefix, which is used by that."""
        self.clock += 1
        found: Prefix = ()
        for prefix in self.prefixes(tokens):
            if prefix in self.slots:
                found = prefix
                self.last_use[prefix] = self.clock
        return found

    def slots_of(self, tokens: Prefix) -> list[int]:
        return [slot for prefix in self.prefixes(tokens) for slot in self.slots[prefix]]

    def insert(self, tokens: Prefix, slots: list[int]) -> int:
        cached = len(self.match(tokens))
        for prefix in self.prefixes(tokens):
            if prefix not in self.slots:
                self.slots[prefix] = slots[len(prefix) - self.page_size : len(prefix)]
                self.last_use[prefix] = self.clock
        return cached

    @property
    def protected(self) -> set[Prefix]:
        return {prefix for tokens in self.locked for prefix in self.prefixes(tokens)}

    def evict_a_page(self) -> tuple[list[int], int]:
        """Return the slots and the last use of the page that goes first."""
        inner = {prefix[: -self.page_size] for prefix in self.slots} | self.protected
        leaves = [prefix for prefix in self.slots if prefix not in inner]
        uses = [self.last_use[prefix] for prefix in leaves]
        assert len(set(uses)) == len(uses)  # so that the order is defined
        first = min(leaves, key=lambda prefix: self.last_use[prefix])
        return self.slots.pop(first), self.last_use.pop(first)


class Machine(RuleBasedStateMachine):
    """The tree does what the dict does; a node is what the tree makes of it."""

    def __init__(self, example: ModuleType, page_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.tree = example.RadixCache(page_size, token_dtype=dtype)
        self.reference = Reference(page_size)
        self.dtype, self.new_slot = dtype, itertools.count()
        self.locked: list[Any] = []
        self.requests: list[Prefix] = [()]
        last = page_size - 1
        # Pages that differ in the first token, the last one or none; -1 and -2 have one hash.
        pages = {(5,) * page_size, (6, *[5] * last), (*[5] * last, -1), (*[5] * last, -2)}
        self.pages = sorted(pages)

    def drawn(self, data: st.DataObject) -> tuple[Prefix, Tensor]:
        """What begins like an earlier request, as most do, and ends within a page."""
        page_size = self.tree.page_size
        begin = data.draw(st.sampled_from(self.requests))
        keep = data.draw(st.integers(0, len(begin) // page_size))
        pages = data.draw(st.lists(st.sampled_from(self.pages), max_size=4))
        tail = data.draw(st.sampled_from(self.pages))
        tail = tail[: data.draw(st.integers(0, page_size - 1))]
        tokens = (*begin[: keep * page_size], *itertools.chain(*pages))
        self.requests.append(tokens)
        tokens = (*tokens, *tail)
        return tokens, torch.tensor(tokens, dtype=self.dtype)

    @rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        tokens, tensor = self.drawn(data)
        slots = [next(self.new_slot) for _ in tokens]
        cached = self.tree.insert(tensor, torch.tensor(slots, dtype=torch.int64))
        assert cached == self.reference.insert(tokens, slots)
        tensor.fill_(7)  # the tree has its own

    @rule(data=st.data(), lock=st.booleans())
    def match(self, data: st.DataObject, lock: bool) -> None:
        tokens, tensor = self.drawn(data)
        slots, node = self.tree.match_prefix(tensor)
        found = self.reference.match(tokens)
        assert slots.tolist() == self.reference.slots_of(found)
        keys = []
        above = node
        while above is not None:
            keys.append(above.key)
            above = above.parent
        assert torch.cat(keys[::-1]).tolist() == list(found)
        if lock:
            self.tree.lock(node)
            self.locked.append(node)
            self.reference.locked.append(found)

    @precondition(lambda self: self.locked)
    @rule(data=st.data(), again=st.booleans())
    def unlock(self, data: st.DataObject, again: bool) -> None:
        which = data.draw(st.integers(0, len(self.locked) - 1))
        node = self.locked.pop(which)
        self.reference.locked.pop(which)
        self.tree.unlock(node)
        if again and node not in self.locked:
            with pytest.raises(ValueError, match=r"^unlock: node: 0 locks, expected at least 1$"):
                self.tree.unlock(node)

    @rule(pages=st.integers(0, 12), fewer=st.integers(0, 15))
    def evict(self, pages: int, fewer: int) -> None:
        num_tokens = max(0, pages * self.tree.page_size - fewer)
        there = self.tree.evictable_size
        freed = self.tree.evict(num_tokens).tolist()
        assert len(freed) % self.tree.page_size == 0
        assert min(num_tokens, there) <= len(freed) <= there
        expected: list[int] = []
        enough_at = None
        while len(expected) < len(freed):
            slots, last_use = self.reference.evict_a_page()
            expected += slots
            if enough_at is None and len(expected) >= num_tokens:
                enough_at = last_use
            assert enough_at in (None, last_use)  # what is beyond is of the same leaf
        assert sorted(freed) == sorted(expected)
        if num_tokens == 0:
            assert freed == []

    @invariant()
    def the_same_is_cached(self) -> None:
        check_invariants(self.tree)
        cached = {}
        stack = [(self.tree.root, ())]
        while stack:
            node, before = stack.pop()
            key, slots = node.key.tolist(), node.slots.tolist()
            for end in range(self.tree.page_size, len(key) + 1, self.tree.page_size):
                cached[(*before, *key[:end])] = slots[end - self.tree.page_size : end]
            stack += [(child, (*before, *key)) for child in node.children.values()]
        assert cached == self.reference.slots
        protected = len(self.reference.protected) * self.tree.page_size
        assert self.tree.protected_size == protected
        assert self.reference.protected <= cached.keys()


@pytest.mark.parametrize(
    ("page_size", "dtype"), [(1, torch.int32), (3, torch.int64), (16, torch.int32)], ids=str
)
def test_it_is_a_dict_of_all_prefixes(
    example: ModuleType, page_size: int, dtype: torch.dtype
) -> None:
    run_state_machine_as_test(
        lambda: Machine(example, page_size, dtype),
        settings=settings(
            max_examples=40,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


# -- the day ---------------------------------------------------------------------------------------


def test_a_day_is_served(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a cache so small that much of it is evicted and computed again."""
    file = tmp_path / "result.json"
    args = ["--page-size", "16", "--requests", "600", "--cache-tokens", "60000"]
    assert example.main([*args, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert 0.3 < result["hit_rate"] < 1
    assert result["us_per_match"] > 0 and result["us_per_match_with_slices"] > 0
    said = capsys.readouterr().out
    rate, tokens = f"{result['hit_rate']:.1%}", result["prompt_tokens"]
    assert said.startswith(f"{rate} of {tokens} tokens of prompts were cached\na match takes ")


@pytest.mark.parametrize("broken", ["insert", "evict", "lock", "unlock", "slices_and_nonzero"])
def test_a_mistake_of_the_tree_is_found(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    tree, serve = example.RadixCache, ["--requests", "400", "--cache-tokens", "60000"]
    if broken == "slices_and_nonzero":
        # Whatever begins with the same page is the same, it says.
        monkeypatch.setattr(example, broken, lambda x, y, start, **_: min(len(x) - start, len(y)))
    elif broken == "insert":  # nothing of it was cached, it says
        insert = tree.insert
        monkeypatch.setattr(tree, broken, lambda *args: 0 * insert(*args))
    elif broken == "evict":
        evict = tree.evict
        monkeypatch.setattr(tree, broken, lambda *args: evict(*args).repeat(2))
    else:
        monkeypatch.setattr(tree, "lock", lambda self, node: None)
        if broken == "lock":
            monkeypatch.setattr(tree, "unlock", lambda self, node: None)
    try:
        status = example.main(serve)
    except (RuntimeError, ValueError):  # one slot too many for all, or an error of the tree
        status = 1
    assert status == 1


# -- by hand ---------------------------------------------------------------------------------------


def tensor(*values: int) -> Tensor:
    return torch.tensor(values)


def test_both_halves_of_a_locked_node_are_locked(example: ModuleType) -> None:
    tree = example.RadixCache(3)
    tree.insert(torch.arange(9), torch.arange(10, 19))
    _, lower = tree.match_prefix(torch.arange(9))
    tree.lock(lower)
    tree.insert(tensor(0, 1, 2, 9, 9, 9), torch.arange(20, 26))
    assert lower.parent.key.tolist() == [0, 1, 2]
    assert (lower.locks, lower.users, lower.parent.locks, lower.parent.users) == (1, 1, 0, 1)
    assert tree.evict(100).tolist() == [23, 24, 25]
    with pytest.raises(ValueError, match=r"^unlock: node: 0 locks, expected at least 1$"):
        tree.unlock(lower.parent)  # in use by what is below, but nobody has locked it


def test_what_is_returned_may_change(example: ModuleType) -> None:
    tree = example.RadixCache(1)
    tree.insert(torch.arange(4), torch.arange(10, 14))
    tree.match_prefix(torch.arange(4))[0].zero_()
    assert tree.match_prefix(torch.arange(4))[0].tolist() == [10, 11, 12, 13]


def test_slots_may_be_on_a_gpu(example: ModuleType, device: torch.device) -> None:
    tree = example.RadixCache(2, slot_dtype=torch.int32, slot_device=device)
    assert tree.match_prefix(torch.arange(4))[0].device.type == device.type
    tree.insert(torch.arange(4), torch.arange(4, dtype=torch.int32, device=device))
    slots, _ = tree.match_prefix(torch.arange(3))
    assert slots.dtype == torch.int32 and slots.device.type == device.type
    assert slots.tolist() == [0, 1]
    assert tree.evict(4).tolist() == [2, 3, 0, 1]
