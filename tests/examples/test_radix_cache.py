"""The example of a radix tree: by hand, and against a dict of all prefixes."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
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
from torch import Tensor

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


# -- by hand ---------------------------------------------------------------------------------------

DTYPES = (torch.int32, torch.int64)


@pytest.fixture(params=DTYPES, ids=["int32", "int64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


class Tree:
    """A tree by lists, whose invariants are checked after each call."""

    def __init__(self, example: ModuleType, page_size: int, dtype: torch.dtype) -> None:
        self.tree, self.dtype = example.RadixCache(page_size, token_dtype=dtype), dtype

    def match(self, *tokens: int) -> tuple[list[int], Any]:
        slots, node = self.tree.match_prefix(torch.tensor(tokens, dtype=self.dtype))
        check_invariants(self.tree)
        assert slots.dtype == torch.int64
        return slots.tolist(), node

    def insert(self, tokens: list[int], slots: list[int]) -> int:
        cached = self.tree.insert(
            torch.tensor(tokens, dtype=self.dtype), torch.tensor(slots, dtype=torch.int64)
        )
        check_invariants(self.tree)
        assert type(cached) is int
        return cached

    def evict(self, num_tokens: int) -> list[int]:
        slots = self.tree.evict(num_tokens)
        check_invariants(self.tree)
        return slots.tolist()

    @property
    def sizes(self) -> tuple[int, int]:
        return self.tree.evictable_size, self.tree.protected_size

    @property
    def keys(self) -> list[list[int]]:
        return sorted(node.key.tolist() for node in self.tree.nodes())


@pytest.fixture
def of_ones(example: ModuleType, dtype: torch.dtype) -> Tree:
    return Tree(example, 1, dtype)


@pytest.fixture
def of_threes(example: ModuleType, dtype: torch.dtype) -> Tree:
    return Tree(example, 3, dtype)


def test_a_conversation_goes_on(of_ones: Tree) -> None:
    tree = of_ones
    assert tree.match(1, 2, 3) == ([], tree.tree.root)
    assert tree.insert([1, 2, 3], [10, 11, 12]) == 0
    slots, node = tree.match(1, 2, 3, 4)
    assert slots == [10, 11, 12] and node.key.tolist() == [1, 2, 3]
    assert tree.insert([1, 2, 3, 4, 5], [10, 11, 12, 13, 14]) == 3
    assert tree.match(1, 2, 3, 4, 5, 6)[0] == [10, 11, 12, 13, 14]
    assert tree.keys == [[1, 2, 3], [4, 5]] and tree.sizes == (5, 0)


def test_two_requests_part_within_a_node(of_ones: Tree) -> None:
    tree = of_ones
    tree.insert([1, 2, 3, 4], [10, 11, 12, 13])
    assert tree.insert([1, 2, 8, 9], [20, 21, 22, 23]) == 2
    assert tree.keys == [[1, 2], [3, 4], [8, 9]]
    assert tree.match(1, 2, 8, 9)[0] == [10, 11, 22, 23]
    assert tree.match(1, 2, 3, 9)[0] == [10, 11, 12]


def test_only_whole_pages_are_shared(of_threes: Tree) -> None:
    tree = of_threes
    assert tree.insert([*range(8)], [*range(50, 58)]) == 0
    assert tree.keys == [[*range(6)]] and tree.sizes == (6, 0)
    assert tree.match(*range(5))[0] == [50, 51, 52]
    assert tree.match(0, 1, 2, 3, 4, 9)[0] == [50, 51, 52]
    assert tree.match(*range(8))[0] == [*range(50, 56)]
    assert tree.insert([0, 1, 2, 3, 4, 9, 9], [*range(60, 67)]) == 3
    assert tree.match(0, 1, 2, 3, 4, 9)[0] == [50, 51, 52, 63, 64, 65]
    assert tree.match(0, 1, 9)[0] == []  # an equal page is found, or none


def test_the_same_prefix_is_found_by_a_view(of_threes: Tree) -> None:
    tree, tokens = of_threes, torch.arange(20, dtype=of_threes.dtype)
    tree.tree.insert(tokens[2:14], torch.arange(12))
    assert tree.tree.match_prefix(tokens[2:])[0].tolist() == [*range(12)]


def test_an_empty_request(of_threes: Tree) -> None:
    tree = of_threes
    for _ in range(2):
        assert tree.match() == ([], tree.tree.root)
        before = tree.keys, tree.sizes
        assert tree.insert([], []) == 0
        assert (tree.keys, tree.sizes) == before
        tree.insert([1, 2, 3], [4, 5, 6])


def test_a_request_shorter_than_a_page(of_threes: Tree) -> None:
    tree = of_threes
    assert tree.insert([1, 2], [10, 11]) == 0
    assert tree.keys == [] and tree.sizes == (0, 0)
    tree.insert([1, 2, 3], [10, 11, 12])
    assert tree.match(1, 2) == ([], tree.tree.root)
    assert tree.insert([1, 2], [20, 21]) == 0
    assert tree.keys == [[1, 2, 3]] and tree.sizes == (3, 0)


def test_the_same_request_twice(of_threes: Tree) -> None:
    tree = of_threes
    assert tree.insert([*range(7)], [*range(10, 17)]) == 0
    assert tree.insert([*range(7)], [*range(20, 27)]) == 6
    assert tree.keys == [[*range(6)]] and tree.sizes == (6, 0)
    assert tree.match(*range(7))[0] == [*range(10, 16)]


def test_a_prefix_of_a_cached_one(of_threes: Tree) -> None:
    tree = of_threes
    tree.insert([*range(9)], [*range(10, 19)])
    assert tree.insert([*range(6)], [*range(20, 26)]) == 6
    assert tree.match(*range(9))[0] == [*range(10, 19)]
    assert tree.sizes == (9, 0)


def test_what_is_given_may_change_and_what_is_returned_too(of_ones: Tree) -> None:
    tree = of_ones
    tokens, slots = torch.arange(4, dtype=tree.dtype), torch.arange(10, 14)
    tree.tree.insert(tokens, slots)
    tokens += 1
    slots += 1
    tree.tree.match_prefix(torch.arange(4, dtype=tree.dtype))[0].zero_()
    assert tree.match(0, 1, 2, 3)[0] == [10, 11, 12, 13]


def test_what_is_locked_is_not_evicted(of_ones: Tree) -> None:
    tree = of_ones
    tree.insert([1, 2, 3], [10, 11, 12])
    tree.insert([1, 2, 4, 5], [10, 11, 13, 14])
    _, node = tree.match(1, 2, 3)
    tree.tree.lock(node)
    assert tree.sizes == (2, 3)
    assert sorted(tree.evict(100)) == [13, 14]
    assert tree.evict(100) == [] and tree.sizes == (0, 3)
    tree.tree.lock(node)
    tree.tree.unlock(node)
    assert tree.evict(100) == [] and tree.sizes == (0, 3)
    tree.tree.unlock(node)
    assert tree.sizes == (3, 0)
    assert sorted(tree.evict(100)) == [10, 11, 12] and tree.sizes == (0, 0)


def test_a_lock_holds_what_was_matched_and_no_more(of_threes: Tree) -> None:
    tree = of_threes
    tree.insert([*range(9)], [*range(10, 19)])
    slots, node = tree.match(*range(7))
    tree.tree.lock(node)
    assert slots == [*range(10, 16)] and tree.sizes == (3, 6)
    assert tree.evict(100) == [16, 17, 18]


def test_both_halves_of_a_locked_node_are_locked(of_threes: Tree) -> None:
    tree = of_threes
    tree.insert([*range(9)], [*range(10, 19)])
    _, lower = tree.match(*range(9))
    tree.tree.lock(lower)
    tree.insert([0, 1, 2, 9, 9, 9], [20, 21, 22, 23, 24, 25])
    assert lower.key.tolist() == [3, 4, 5, 6, 7, 8]
    assert lower.parent.key.tolist() == [0, 1, 2]
    assert (lower.locks, lower.users, lower.parent.locks, lower.parent.users) == (1, 1, 0, 1)
    assert tree.evict(100) == [23, 24, 25] and tree.sizes == (0, 9)
    with pytest.raises(ValueError, match=r"^unlock: node: 0 locks, expected at least 1$"):
        tree.tree.unlock(lower.parent)  # in use by what is below, but nobody has locked it
    tree.tree.unlock(lower)
    assert tree.sizes == (9, 0)


def test_unlock_too_often(of_ones: Tree) -> None:
    tree = of_ones
    tree.insert([1, 2], [10, 11])
    tree.insert([1, 2, 3], [10, 11, 12])
    (_, above), (_, below) = tree.match(1, 2), tree.match(1, 2, 3)
    tree.tree.lock(below)
    for node in (above, tree.tree.root):
        with pytest.raises(ValueError, match=r"^unlock: node: 0 locks, expected at least 1$"):
            tree.tree.unlock(node)
        check_invariants(tree.tree)
    tree.tree.unlock(below)
    with pytest.raises(ValueError, match=r"^unlock: node: 0 locks, expected at least 1$"):
        tree.tree.unlock(below)
    assert tree.sizes == (3, 0)


def test_the_root_may_be_locked_like_any_node(of_ones: Tree) -> None:
    tree = of_ones
    _, root = tree.match(1, 2)
    tree.tree.lock(root)
    tree.insert([1, 2], [10, 11])
    assert tree.sizes == (2, 0)
    assert tree.evict(1) == [10, 11]
    tree.tree.unlock(root)
    with pytest.raises(ValueError, match=r"^unlock: node: 0 locks, expected at least 1$"):
        tree.tree.unlock(root)


def test_a_node_that_was_evicted_is_not_locked(of_ones: Tree) -> None:
    tree = of_ones
    tree.insert([1, 2], [10, 11])
    _, node = tree.match(1, 2)
    tree.evict(1)
    text = r"^lock: node: was evicted, expected a node of the tree$"
    with pytest.raises(ValueError, match=text):
        tree.tree.lock(node)
    assert tree.sizes == (0, 0) and node.locks == node.users == 0


def test_least_recently_used_leaves_go_first(of_ones: Tree) -> None:
    tree = of_ones
    tree.insert([1, 2], [10, 11])
    tree.insert([1, 3], [10, 12])
    tree.insert([5, 6, 7], [13, 14, 15])
    tree.match(1, 2)
    assert tree.evict(0) == []
    assert tree.evict(1) == [12]
    assert tree.evict(1) == [13, 14, 15]  # a leaf as a whole
    assert tree.match(1, 2)[0] == [10, 11]
    tree.insert([8], [16])
    assert tree.evict(2) == [11, 10]  # the leaf, then what has become one
    assert tree.sizes == (1, 0)


def test_an_insertion_of_what_is_there_is_a_use(of_ones: Tree) -> None:
    tree = of_ones
    tree.insert([1], [10])
    tree.insert([2], [11])
    tree.insert([1], [12])
    assert tree.evict(1) == [11]


def test_evict_more_than_is_there(of_threes: Tree) -> None:
    tree = of_threes
    assert tree.evict(10) == []
    tree.insert([*range(6)], [*range(10, 16)])
    tree.insert([*range(3), 9, 9, 9], [*range(10, 13), 20, 21, 22])
    assert sorted(tree.evict(1 << 62)) == [10, 11, 12, 13, 14, 15, 20, 21, 22]
    assert tree.keys == [] and tree.sizes == (0, 0) and tree.tree.root.children == {}
    assert tree.match(0, 1, 2) == ([], tree.tree.root)


def test_slots_may_be_on_a_gpu(example: ModuleType, device: torch.device) -> None:
    tree = example.RadixCache(2, slot_dtype=torch.int32, slot_device=device)
    assert tree.match_prefix(torch.arange(4))[0].device.type == device.type
    tree.insert(torch.arange(4), torch.arange(4, dtype=torch.int32, device=device))
    slots, _ = tree.match_prefix(torch.arange(3))
    assert slots.dtype == torch.int32 and slots.device.type == device.type
    assert slots.tolist() == [0, 1]
    assert tree.evict(4).tolist() == [2, 3, 0, 1]


FOUR = torch.arange(4)


@pytest.mark.parametrize(
    ("error", "call", "text"),
    [
        (
            ValueError,
            lambda tree: tree.insert(FOUR, FOUR[:3]),
            "insert: slots: 3 items, expected 4, one for each token",
        ),
        (
            ValueError,
            lambda tree: tree.insert(FOUR[:0], FOUR),
            "insert: slots: 4 items, expected 0, one for each token",
        ),
        (
            TypeError,
            lambda tree: tree.insert(FOUR, FOUR.int()),
            "insert: slots: int32 on cpu, expected int64 on cpu",
        ),
        (
            TypeError,
            lambda tree: tree.insert(FOUR.int(), FOUR),
            "insert: tokens: int32 on cpu, expected int64 on cpu",
        ),
        (
            TypeError,
            lambda tree: tree.match_prefix(FOUR.float()),
            "match_prefix: tokens: float32 on cpu, expected int64 on cpu",
        ),
        (
            TypeError,
            lambda tree: tree.match_prefix(FOUR.to("meta")),
            "match_prefix: tokens: int64 on meta, expected int64 on cpu",
        ),
        (
            ValueError,
            lambda tree: tree.match_prefix(FOUR.view(2, 2)),
            "match_prefix: tokens: shape [2, 2], expected 1 dimension",
        ),
        (
            ValueError,
            lambda tree: tree.match_prefix(FOUR[::2]),
            "match_prefix: tokens: not contiguous, expected a contiguous tensor",
        ),
        (
            ValueError,
            lambda tree: tree.insert(FOUR[:2], FOUR[::2]),
            "insert: slots: not contiguous, expected a contiguous tensor",
        ),
        (
            ValueError,
            lambda tree: tree.evict(-1),
            "evict: num_tokens: -1, expected at least 0",
        ),
        (
            ValueError,
            lambda tree: type(tree)(0),
            "RadixCache: page_size: 0, expected at least 1",
        ),
    ],
)
@pytest.mark.parametrize("empty", [True, False])
def test_wrong_arguments(
    example: ModuleType, error: type[Exception], call: Any, text: str, empty: bool
) -> None:
    """With the same words of an empty tree, and nothing has changed."""
    tree = example.RadixCache(2)
    if not empty:
        tree.insert(FOUR, FOUR)
    before = [(node.key.tolist(), node.slots.tolist()) for node in tree.nodes()]
    with pytest.raises(error) as raised:
        call(tree)
    assert str(raised.value) == text
    assert before == [(node.key.tolist(), node.slots.tolist()) for node in tree.nodes()]
    check_invariants(tree)


# -- against a dict of all prefixes ----------------------------------------------------------------

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
