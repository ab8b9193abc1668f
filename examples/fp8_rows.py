"""Rows of an MLA cache in fp8, stored and read back: 656 bytes per token instead of 1,152.

`store_rows` quantises the latent part to `fp8_ds_mla` (DeepSeek V3.2) and keeps the RoPE part in
bf16; `gather_rows` gives both back in bf16. The script checks the error of each value.

    python examples/fp8_rows.py
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from jitkern import check, gather_rows, store_rows

TOKENS, PAGES, PAGE, FORMAT = 1000, 64, 64, "fp8_ds_mla"


def main(argv: Sequence[str] | None = None) -> int:
    """Store and read rows at random slots; return 1 if one is wrong."""
    argparse.ArgumentParser(description=__doc__.partition("\n")[0]).parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows = torch.randn(TOKENS, 576, device=device).to(torch.bfloat16)
    latent, rope = rows.split([512, 64], dim=1)  # views, not copies
    slots = torch.randperm(PAGES * PAGE, device=device)[:TOKENS]

    cache = torch.zeros(PAGES, PAGE, 656, dtype=torch.uint8, device=device)
    store_rows(cache, slots, (latent, rope), format=FORMAT)
    read = torch.empty_like(rows)
    read_latent, read_rope = read.split([512, 64], dim=1)
    gather_rows(cache, slots, (read_latent, read_rope), format=FORMAT)
    check(device)  # a slot past the end would be raised here

    # e4m3 rounds to 4 significant bits: by 1/16 at most. Near zero its step is 2^-9 of the scale,
    # which is at most amax / 224.
    atol = latent.abs().max().item() / 224 / 2**10
    is_close = torch.isclose(read_latent.float(), latent.float(), rtol=1 / 16, atol=atol)
    wrong = int((~is_close.all(1) | (read_rope != rope).any(1)).sum())
    print(f"{TOKENS} rows on {device}, {cache.shape[-1]} bytes instead of {2 * rows.shape[1]}")
    print(f"{wrong} wrong rows")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
