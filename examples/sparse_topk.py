"""Sparse attention's top-k rows from a pool in pinned host memory, with a cache on the GPU.

As in DSA, a small indexer scores all tokens at each decode step, and attention reads the top k of
them: rows of 656 bytes of a latent (MLA) cache in host memory. Consecutive steps pick mostly the
same rows. So the GPU keeps the rows of the last few steps, and one call of `ResidencyMap.swap_in`
finds a step's rows there or fetches them over the link.

Only the checks and the printed counts make a step wait for the GPU.

    python examples/sparse_topk.py
    python examples/sparse_topk.py --tokens 65536 --top 2048 --parts 8
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from jitkern import check
from jitkern.offload import ResidencyMap

ROW_BYTES = 656  # 512 of fp8, 16 of scales, 128 of the rotary part in bf16
INDEX_DIM = 32


def main(argv: Sequence[str] | None = None) -> int:
    """Decode; return 1 if a byte is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=8192, help="rows of the pool")
    parser.add_argument("--top", type=int, default=256, help="rows that a step attends to")
    parser.add_argument("--parts", type=int, default=4, help="steps whose rows stay on the GPU")
    parser.add_argument("--steps", type=int, default=12, help="decode steps")
    parser.add_argument("--drift", type=float, default=0.2, help="change of the query per step")
    args = parser.parse_args(argv)
    if not 0 < args.top <= args.tokens or args.parts < 1:
        parser.error("--top: 1 to --tokens; --parts: 1 or more")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    pool = torch.randint(256, (args.tokens, ROW_BYTES), dtype=torch.uint8)
    if device == "cuda":
        pool = pool.pin_memory()
    keys = torch.randn(args.tokens, INDEX_DIM, device=device)
    query = torch.randn(INDEX_DIM, device=device)

    num_slots = args.parts * args.top
    cache = torch.zeros(num_slots, ROW_BYTES, dtype=torch.uint8, device=device)
    residency = ResidencyMap(1, num_slots, args.tokens, device=device)  # one request
    slots = torch.empty(1, args.top, dtype=torch.int64, device=device)
    wrong, stats = 0, residency.stats()
    for step in range(args.steps):
        query = query + args.drift * torch.randn(INDEX_DIM, device=device)
        tokens = (keys @ query).topk(args.top).indices.unsqueeze(0)
        residency.swap_in(pool, cache, tokens, slots)

        rows = cache[slots[0]]  # attention reads them in place
        wrong += not torch.equal(rows.cpu(), pool[tokens[0].cpu()])
        before, stats = stats, residency.stats()
        share = (stats.hits - before.hits) / args.top
        moved_bytes = stats.moved_bytes - before.moved_bytes
        print(f"step {step}: {share:.0%} on the GPU, {moved_bytes} bytes fetched")
    check(device)
    residency.check(0)
    is_held = residency.row_of_slot[0].cpu() >= 0
    held_rows = residency.row_of_slot[0].cpu()[is_held].long()
    is_sound = torch.equal(cache.cpu()[is_held], pool[held_rows])
    kind = f"{num_slots} slots of {args.tokens} tokens on {device}"
    print(f"{kind}: {stats.hits / args.steps / args.top:.0%} found, wrong steps: {wrong}")
    print(f"the map {'names the rows that are there' if is_sound else 'is WRONG'}")
    return 0 if not wrong and is_sound else 1


if __name__ == "__main__":
    sys.exit(main())
