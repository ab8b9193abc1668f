"""A paged KV cache in a decode loop that is one CUDA graph, replayed for every token.

K and V of each new token go to a slot of a paged cache (`store_cache`). A block table says which
pages a request has, and attention reads keys and values through it, here in plain PyTorch. A graph
has a fixed batch size: rows without a request are padded with slot -1, which `store_cache` skips.
Requests arrive, grow page by page, and end; their pages are reused.

On a GPU the step is captured once and replayed; on the CPU the same step runs eagerly. Every step
is compared with attention over a contiguous cache per request.

    python examples/paged_decode.py
    python examples/paged_decode.py --steps 200 --batch-size 16
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from jitkern import check, store_cache

HEADS, HEAD_DIM = 4, 64


class PagedCache:
    """Pages of K and V, and a block table for each row of the batch."""

    def __init__(self, pages: int, page_size: int, rows: int, max_pages: int, device: str) -> None:
        shape = (pages * page_size, HEADS, HEAD_DIM)
        self.k, self.v = (torch.zeros(shape, device=device) for _ in range(2))
        self.page_size = page_size
        self.free = list(range(pages - 1, -1, -1))
        self.pages: list[list[int]] = [[] for _ in range(rows)]
        self.lengths = [0] * rows
        self.max_pages = max_pages

    def append(self, row: int) -> int:
        """Return the slot of the row's next token, on a new page if the last one is full."""
        at = self.lengths[row]
        if at % self.page_size == 0:
            self.pages[row].append(self.free.pop())
        self.lengths[row] += 1
        return self.pages[row][-1] * self.page_size + at % self.page_size

    def release(self, row: int) -> None:
        self.free += self.pages[row]
        self.pages[row], self.lengths[row] = [], 0

    def tables(self) -> list[list[int]]:
        return [pages + [0] * (self.max_pages - len(pages)) for pages in self.pages]


class Step:
    """The tensors that a graph reads and writes; their addresses stay the same at each replay."""

    def __init__(self, cache: PagedCache, rows: int, device: str) -> None:
        self.cache = cache
        self.slots = torch.full((rows,), -1, device=device)  # padding, until a request comes
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables = torch.zeros(rows, cache.max_pages, dtype=torch.int64, device=device)
        shape = (rows, HEADS, HEAD_DIM)
        self.q, self.k, self.v, self.out = (torch.zeros(shape, device=device) for _ in range(4))
        self.inputs = (self.q, self.k, self.v, self.slots, self.lengths, self.tables)
        self.queue = self.captured().replay if device == "cuda" else self.run

    def run(self) -> None:
        """Write the new tokens and attend to all of each request. Lengths are on the GPU only."""
        cache = self.cache
        store_cache(cache.k, cache.v, self.slots, self.k, self.v)
        # Reads all pages of the table. Padding rows give NaN, which is not used.
        offsets = torch.arange(cache.page_size, device=self.tables.device)
        slots = (self.tables.unsqueeze(-1) * cache.page_size + offsets).flatten(1)
        k, v = cache.k[slots], cache.v[slots]  # [rows, tokens, heads, dim]
        scores = torch.einsum("rhd,rthd->rht", self.q, k) / math.sqrt(HEAD_DIM)
        is_past_end = torch.arange(slots.shape[1], device=slots.device) >= self.lengths.unsqueeze(1)
        weights = scores.masked_fill(is_past_end.unsqueeze(1), -math.inf).softmax(-1)
        self.out.copy_(torch.einsum("rht,rthd->rhd", weights, v))

    def captured(self) -> torch.cuda.CUDAGraph:
        """Capture the step. All rows are padding now, so the warm-up writes no cache."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.run()  # cuBLAS makes its workspace outside of the graph
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.run()
        return graph


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention of one token to a contiguous `[tokens, heads, dim]` cache, in float64."""
    q, k, v = q.double(), k.double(), v.double()
    weights = (torch.einsum("hd,thd->ht", q, k) / math.sqrt(HEAD_DIM)).softmax(-1)
    return torch.einsum("ht,thd->hd", weights, v)


def main(argv: Sequence[str] | None = None) -> int:
    """Decode; return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=60, help="decode steps")
    parser.add_argument("--batch-size", type=int, default=8, help="rows of the graph")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per page")
    parser.add_argument("--max-tokens", type=int, default=48, help="per request")
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dice, rows = random.Random(0), args.batch_size
    how = "one graph, replayed" if device == "cuda" else "eagerly"
    print(f"{args.steps} steps of {rows} rows on {device}, {how}", flush=True)
    max_pages = -(-args.max_tokens // args.page_size)
    cache = PagedCache(rows * max_pages, args.page_size, rows, max_pages, device)
    step = Step(cache, rows, device)

    left = [0] * rows  # tokens still to decode for the request in each row; 0: the row is free
    plain: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(rows)]
    tokens = requests = worst = 0
    for _ in range(args.steps):
        for row in range(rows):
            if left[row] == 0 and dice.random() < 0.1:
                left[row], requests = dice.randint(1, args.max_tokens), requests + 1
        slots = [cache.append(row) if left[row] else -1 for row in range(rows)]
        q, k, v = torch.randn(3, rows, HEADS, HEAD_DIM)
        news = [q, k, v, *map(torch.tensor, (slots, cache.lengths, cache.tables()))]
        for ours, new in zip(step.inputs, news, strict=True):
            ours.copy_(new)
        step.queue()
        out = step.out.cpu()
        live = [row for row in range(rows) if left[row]]
        for row in live:
            plain[row].append((k[row], v[row]))
            keys, values = (torch.stack(column) for column in zip(*plain[row], strict=True))
            expected = reference(q[row], keys, values)
            worst = max(worst, (out[row] - expected).abs().max().item())
            left[row] -= 1
            if left[row] == 0:
                cache.release(row)
                plain[row].clear()
        tokens += len(live)
    check(device)  # an index past the end would be raised here
    print(f"{requests} requests, {tokens} tokens, {args.steps * rows - tokens} rows of padding")
    print(f"largest difference from caches without pages: {worst:.1e}")
    return 0 if worst < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
