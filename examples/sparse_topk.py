"""Sparse attention's top-k rows from a pool in pinned host memory, with a cache on the GPU.

As in DSA, a small indexer scores all tokens at each decode step, and attention reads the top k of
them: rows of 656 bytes of a latent (MLA) cache in host memory. Consecutive steps pick mostly the
same rows. So the GPU keeps the rows of the last few steps, a part of its slots per step, and a map
from token to slot. A step gathers its rows contiguously: rows in the map are copied on the GPU, and
one call of `h2d_gather` fetches the others over the link.

The slots that a step will write are first removed from the map. Only the printed count makes a step
wait for the GPU.

    python examples/sparse_topk.py
    python examples/sparse_topk.py --tokens 65536 --top 2048 --parts 8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from jitkern import check, h2d_gather

ROW_BYTES = 656  # 512 of fp8, 16 of scales, 128 of the rotary part in bf16
INDEX_DIM = 32


class SparseCache:
    """The rows of the last `parts` steps, `top` slots for each."""

    def __init__(self, pool: Tensor, top: int, parts: int, device: str) -> None:
        self.pool, self.top, self.parts = pool, top, parts
        self.rows = torch.zeros(parts * top, pool.shape[1], dtype=pool.dtype, device=device)
        # The slot of each token's row, -1: none; and the token of each slot.
        self.slot_of = torch.full((len(pool),), -1, dtype=torch.int32, device=device)
        self.token_in = torch.zeros(parts * top, dtype=torch.int64, device=device)
        self.steps = 0

    def fetch(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of distinct tokens, contiguous, and how many were on the GPU."""
        begin = self.steps % self.parts * self.top
        end = begin + self.top
        self.forget(begin, end)
        old_slots = self.slot_of[tokens]
        is_resident = old_slots >= 0
        slots = torch.arange(begin, end, device=tokens.device)
        self.rows[begin:end] = self.rows[old_slots.clamp(min=0).long()]
        missing = torch.where(is_resident, -1, tokens)  # a pair with -1 is skipped
        h2d_gather(self.pool, self.rows, torch.stack([missing, slots], 1))
        self.slot_of[tokens] = slots.int()
        self.token_in[begin:end] = tokens
        self.steps += 1
        return self.rows[begin:end], is_resident.sum()

    def forget(self, begin: int, end: int) -> None:
        """Remove slots from the map, except for tokens that have moved to another slot."""
        tokens = self.token_in[begin:end]
        slots = self.slot_of[tokens]
        self.slot_of[tokens] = torch.where((slots >= begin) & (slots < end), -1, slots)

    def is_sound(self) -> bool:
        """Tell whether every slot that the map names holds the row of its token."""
        tokens = self.slot_of.cpu().ge(0).nonzero().flatten()
        slots = self.slot_of.cpu()[tokens].long()
        return torch.equal(self.rows.cpu()[slots], self.pool[tokens])


def main(argv: Sequence[str] | None = None) -> int:
    """Decode; return 1 if a byte is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the pool")
    parser.add_argument("--top", type=int, default=256, help="rows that a step attends to")
    parser.add_argument("--parts", type=int, default=4, help="steps whose rows stay on the GPU")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--drift", type=float, default=0.2, help="change of the query per step")
    args = parser.parse_args(argv)
    if not 0 < args.top <= args.tokens or args.parts < 2:
        parser.error("--top: 1 to --tokens; --parts: 2 or more: a step reads another's slots")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    pool = torch.randint(256, (args.tokens, ROW_BYTES), dtype=torch.uint8)
    if device == "cuda":
        pool = pool.pin_memory()
    keys = torch.randn(args.tokens, INDEX_DIM, device=device)
    query = torch.randn(INDEX_DIM, device=device)

    cache = SparseCache(pool, args.top, args.parts, device)
    wrong = found = 0
    for step in range(args.steps):
        query = query + args.drift * torch.randn(INDEX_DIM, device=device)
        tokens = (keys @ query).topk(args.top).indices
        rows, hits = cache.fetch(tokens)

        direct = torch.empty_like(rows)  # all rows by one gather
        to = torch.arange(args.top, device=device)
        h2d_gather(pool, direct, torch.stack([tokens, to], 1))
        wrong += not torch.equal(rows, direct)
        misses = args.top - int(hits)
        found += int(hits)
        over_link = misses * ROW_BYTES
        print(f"step {step}: {int(hits) / args.top:.0%} on the GPU, {over_link} bytes fetched")
    check(device)
    sound = cache.is_sound()
    kind = f"{args.parts * args.top} slots of {args.tokens} tokens on {device}"
    print(f"{kind}: {found / args.steps / args.top:.0%} found, wrong steps: {wrong}")
    print(f"the map {'names the rows that are there' if sound else 'is WRONG'}")
    return 0 if not wrong and sound else 1


if __name__ == "__main__":
    sys.exit(main())
