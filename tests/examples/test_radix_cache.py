"""The example of a radix tree, by hand."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from radix import check_invariants, dtype, example

__all__ = ["dtype", "example"]  # fixtures

# -- by hand ---------------------------------------------------------------------------------------


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
