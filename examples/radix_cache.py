"""A radix tree of cached prefixes, as serving engines keep, on `jitkern.fast_compare_key`.

A walk finds a child by the first page of its key, and compares the whole key with the request from
the matched position on (`start`), without slicing the request. `main` simulates a day of serving:
conversations share system prompts, and the cache is too small for all of them. It prints the hit
rate and the time of a match, also with torch slices.

    python examples/radix_cache.py --page-size 16
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from jitkern import fast_compare_key

Page = int | tuple[int, ...]  # the tokens of a page; an int if a page is one token
Request = tuple[Tensor, int]  # the prompt with the answer that it will get, the prompt's length


@dataclass(eq=False)
class Node:
    """Whole pages of tokens that follow the parent's, and the slots of their K and V."""

    key: Tensor
    slots: Tensor
    parent: Node | None
    children: dict[Page, Node] = field(default_factory=dict)
    locks: int = 0  # on this node
    users: int = 0  # locks on this node and all nodes below
    last_use: int = 0

    def __lt__(self, other: Node) -> bool:
        return self.last_use < other.last_use  # heapq compares nodes


class RadixCache:
    """Slots, on any device, of cached prefixes. Sizes are in tokens. One thread at a time."""

    def __init__(
        self,
        page_size: int = 1,
        *,
        token_dtype: torch.dtype = torch.int64,
        slot_dtype: torch.dtype = torch.int64,
        slot_device: torch.device | str = "cpu",
        compare: Callable[..., int] = fast_compare_key,
    ) -> None:
        if page_size < 1:
            raise ValueError(f"RadixCache: page_size: {page_size}, expected at least 1")
        self.page_size, self._compare = page_size, compare
        self.evictable_size = self.protected_size = 0
        no_slots = torch.empty(0, dtype=slot_dtype, device=slot_device)
        self.root = Node(torch.empty(0, dtype=token_dtype), no_slots, None)
        self._clock = 0  # counts walks: clock times may repeat

    def match_prefix(self, tokens: Tensor) -> tuple[Tensor, Node]:
        """Return the slots of the longest cached prefix, and the node that it ends at.

        Without a match, that is the root. A node is split at the end of the prefix, so that a lock
        holds no more.
        """
        _check("match_prefix: tokens", tokens, self.root.key)
        path = self._walk(tokens)
        return torch.cat([node.slots for node in path]), path[-1]

    def insert(self, tokens: Tensor, slots: Tensor) -> int:
        """Cache the whole pages of `tokens`; return how many tokens had been cached already.

        Their slots, and those after the last whole page, stay the caller's to free.
        """
        _check("insert: tokens", tokens, self.root.key)
        _check("insert: slots", slots, self.root.slots)
        if len(slots) != len(tokens):
            came, wanted = f"{len(slots)} items", f"{len(tokens)}, one for each token"
            raise ValueError(f"insert: slots: {came}, expected {wanted}")
        path = self._walk(tokens)
        cached = sum(len(node.key) for node in path)
        end = len(tokens) // self.page_size * self.page_size
        if cached < end:
            # Copies: a view would keep the memory of the whole request, and change with it.
            copies = tokens[cached:end].clone(), slots[cached:end].clone()
            leaf = Node(*copies, path[-1], last_use=self._clock)
            path[-1].children[self._page(tokens, cached)] = leaf
            self.evictable_size += end - cached
        return cached

    def lock(self, node: Node) -> None:
        """Keep the prefix that ends at this node from being evicted, until as many unlocks."""
        if node.parent is None and node is not self.root:
            raise ValueError("lock: node: was evicted, expected a node of the tree")
        node.locks += 1
        self._use(node, 1)

    def unlock(self, node: Node) -> None:
        """Take back one lock of this node."""
        if node.locks < 1:
            raise ValueError("unlock: node: 0 locks, expected at least 1")
        node.locks -= 1
        self._use(node, -1)

    def evict(self, num_tokens: int) -> Tensor:
        """Evict at least `num_tokens`, least recently used leaves first; return their slots.

        Evicts all unlocked tokens if there are fewer.
        """
        if num_tokens < 0:
            raise ValueError(f"evict: num_tokens: {num_tokens}, expected at least 0")
        leaves = [node for node in self.nodes() if not node.children and not node.users]
        heapq.heapify(leaves)
        freed, target = [self.root.slots], max(self.evictable_size - num_tokens, 0)
        while self.evictable_size > target:
            leaf = heapq.heappop(leaves)
            parent = leaf.parent
            assert parent is not None
            freed.append(leaf.slots)
            self.evictable_size -= len(leaf.slots)
            del parent.children[self._page(leaf.key, 0)]
            leaf.parent = None  # `lock` refuses evicted nodes
            if parent is not self.root and not parent.children and not parent.users:
                heapq.heappush(leaves, parent)
        return torch.cat(freed)

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes except the root, parents before their children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()

    def _walk(self, tokens: Tensor) -> list[Node]:
        """Return the nodes of the longest cached prefix, the root first, the last one split."""
        self._clock += 1
        path, matched, end = [self.root], 0, len(tokens) // self.page_size * self.page_size
        while matched < end and (node := path[-1].children.get(self._page(tokens, matched))):
            length = self._compare(tokens, node.key, start=matched, page_size=self.page_size)
            matched += length
            path.append(node if length == len(node.key) else self._split(path[-1], node, length))
            path[-1].last_use = self._clock
        return path

    def _split(self, parent: Node, node: Node, length: int) -> Node:
        """Insert a node with the first `length` tokens above this one, which keeps its locks."""
        # Halves of tensors are views: their memory is freed with the later one.
        upper = Node(node.key[:length], node.slots[:length], parent, users=node.users)
        parent.children[self._page(node.key, 0)] = upper
        node.key, node.slots, node.parent = node.key[length:], node.slots[length:], upper
        upper.children[self._page(node.key, 0)] = node
        return upper

    def _use(self, node: Node | None, change: int) -> None:
        while node is not None:
            if node.users == 0 or node.users + change == 0:
                self.protected_size += change * len(node.key)
                self.evictable_size -= change * len(node.key)
            node.users += change
            node = node.parent

    def _page(self, tokens: Tensor, at: int) -> Page:
        page = tokens[at : at + self.page_size].tolist()
        return page[0] if self.page_size == 1 else tuple(page)


def _check(name: str, tensor: Tensor, like: Tensor) -> None:
    if (tensor.dtype, tensor.device) != (like.dtype, like.device):
        came, wanted = (f"{t.dtype} on {t.device}".removeprefix("torch.") for t in (tensor, like))
        raise TypeError(f"{name}: {came}, expected {wanted}")
    if tensor.dim() != 1:
        raise ValueError(f"{name}: shape {list(tensor.shape)}, expected 1 dimension")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: not contiguous, expected a contiguous tensor")


# -- a day of serving ------------------------------------------------------------------------------


def requests_of_a_day(count: int) -> Iterator[Request]:
    """Yield requests in order; 64 conversations are interleaved."""
    rng, source = random.Random(0), torch.Generator().manual_seed(0)

    def text(low: int, high: int) -> Tensor:
        size = (rng.randint(low, high),)
        return torch.randint(150_000, size, generator=source, dtype=torch.int32)

    system_prompts = [text(100, 3000) for _ in range(8)]
    conversations: list[list[Request]] = [[] for _ in range(64)]  # the remaining turns
    for _ in range(count):
        turns = rng.choice(conversations)
        if not turns:  # the conversation has ended: start another
            (whole,) = rng.choices(system_prompts, weights=range(8, 0, -1))
            for _ in range(rng.randint(1, 10)):
                prompt = torch.cat([whole, text(10, 300)])
                whole = torch.cat([prompt, text(20, 500)])
                turns.append((whole, len(prompt)))
        yield turns.pop(0)


class Day:
    """Serves requests, 16 at a time, from slots for `num_tokens` tokens."""

    def __init__(self, page_size: int, num_tokens: int, compare: Callable[..., int]) -> None:
        self.tree = RadixCache(page_size, token_dtype=torch.int32, compare=compare)
        self.num_slots = num_tokens // page_size * page_size
        self.free = torch.arange(self.num_slots)
        self.running: deque[tuple[Tensor, Tensor, int, Node]] = deque()
        self.match_us: list[float] = []
        self.num_cached = 0

    def serve(self, tokens: Tensor, prompt_length: int) -> None:
        if len(self.running) == 16:
            self.finish_one()
        started = time.perf_counter()
        # The last token is always computed: its logits are needed.
        slots, node = self.tree.match_prefix(tokens[: prompt_length - 1])
        self.match_us.append((time.perf_counter() - started) * 1e6)
        self.tree.lock(node)
        self.num_cached += len(slots)
        needed = -(-len(tokens) // self.tree.page_size) * self.tree.page_size - len(slots)
        while needed > len(self.free):
            self.free = torch.cat([self.free, self.tree.evict(needed - len(self.free))])
            if needed > len(self.free):
                self.finish_one()  # its prefix can then be evicted
        new, self.free = self.free[:needed], self.free[needed:]
        self.running.append((tokens, torch.cat([slots, new]), len(slots), node))

    def finish_one(self) -> None:
        """Cache the tokens of the oldest request that no other request has cached."""
        tokens, slots, num_cached, node = self.running.popleft()
        there = self.tree.insert(tokens, slots[: len(tokens)])
        full = len(tokens) // self.tree.page_size * self.tree.page_size
        self.free = torch.cat([self.free, slots[num_cached:there], slots[full:]])
        self.tree.unlock(node)

    def end(self) -> bool:
        """Finish and evict all; return whether each slot is free exactly once."""
        while self.running:
            self.finish_one()
        free = torch.cat([self.free, self.tree.evict(self.tree.evictable_size)])
        return torch.equal(free.sort().values, torch.arange(self.num_slots))


def slices_and_nonzero(x: Tensor, y: Tensor, *, start: int, page_size: int) -> int:
    """Compare as engines do without `fast_compare_key`."""
    n = min(len(x) - start, len(y))
    differ = (x[start : start + n] != y[:n]).nonzero()
    return (int(differ[0]) if len(differ) else n) // page_size * page_size


def main(argv: Sequence[str] | None = None) -> int:
    """Serve a day; return 1 if a slot is lost or the two comparisons differ."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--page-size", type=int, default=1, help="tokens per page")
    parser.add_argument("--requests", type=int, default=3000, help="requests to simulate")
    parser.add_argument(
        "--cache-tokens", type=int, default=200_000, help="tokens that the cache holds"
    )
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.page_size < 1 or args.requests < 1:
        parser.error("--page-size and --requests are at least 1")
    print(f"{args.requests} requests, slots for {args.cache_tokens} tokens", flush=True)
    requests = list(requests_of_a_day(args.requests))
    needed = max(len(tokens) for tokens, _ in requests) + args.page_size
    if args.cache_tokens < needed:
        parser.error(f"--cache-tokens: {args.cache_tokens}, expected at least {needed}")
    fast_compare_key(requests[0][0], requests[0][0])  # the first call loads the host module
    ways = fast_compare_key, slices_and_nonzero
    ours, usual = (Day(args.page_size, args.cache_tokens, compare) for compare in ways)
    for request in requests:  # alternate: a slow machine slows both
        ours.serve(*request)
        usual.serve(*request)
    correct = ours.end() and usual.end() and ours.num_cached == usual.num_cached
    num_tokens = sum(prompt_length for _, prompt_length in requests)
    result = {
        "prompt_tokens": num_tokens,
        "hit_rate": ours.num_cached / num_tokens,
        "us_per_match": statistics.median(ours.match_us),
        "us_per_match_with_slices": statistics.median(usual.match_us),
    }
    print("{:.1%} of {} tokens of prompts were cached".format(result["hit_rate"], num_tokens))
    times = result["us_per_match"], result["us_per_match_with_slices"]
    print("a match takes {:.1f} us, {:.1f} us with slices and nonzero (medians)".format(*times))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    return 0 if correct else 1


if __name__ == "__main__":
    sys.exit(main())
