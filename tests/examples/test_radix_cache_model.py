"""The example of a radix tree: against a dict of all prefixes, and the day that it serves."""

from __future__ import annotations

import itertools
import json
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
from radix import check_invariants, dtype, example
from torch import Tensor

__all__ = ["dtype", "example"]  # fixtures

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


@pytest.mark.parametrize("page_size", [1, 3, 16])
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


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_day_is_served(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], page_size: int
) -> None:
    """In a cache so small that much of it is evicted and computed again."""
    file = tmp_path / "result.json"
    args = ["--page-size", str(page_size), "--requests", "600", "--cache-tokens", "60000"]
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


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (["--page-size", "0"], "--page-size and --requests are at least 1"),
        (["--requests", "0"], "--page-size and --requests are at least 1"),
        (["--cache-tokens", "100", "--requests", "9"], "--cache-tokens: 100, expected at least "),
    ],
)
def test_wrong_options(
    example: ModuleType, capsys: pytest.CaptureFixture[str], wrong: list[str], text: str
) -> None:
    with pytest.raises(SystemExit):
        example.main(wrong)
    assert text in capsys.readouterr().err


def test_the_usual_way_is_the_same(example: ModuleType, dtype: torch.dtype) -> None:
    x = torch.tensor([1, 2, 3, 4, 5, 6], dtype=dtype)
    for start, page_size in itertools.product(range(7), (1, 2, 7)):
        for y in (x[start:], x[:3], x[start : start + 2], x.flip(0), x[:0]):
            ways = (example.fast_compare_key, example.slices_and_nonzero)
            found = {way(x, y, start=start, page_size=page_size) for way in ways}
            assert len(found) == 1
