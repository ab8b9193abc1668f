"""A KV cache connector: an engine's per-layer tensors, offloaded to pinned host memory.

This is the loop of vLLM's offloading connector. The engine has one tensor of K and one of V for
each layer, and gives each prompt some of their blocks. When a prompt is done its full blocks are
copied to the host (`PinnedPool`), under a hash of all tokens up to the block's end. A later prompt
that begins with the same tokens loads these blocks instead of computing them: one call copies all
layers in order, and the model waits for one layer at a time (`LayerSignals`), so the first layers
compute while the last ones are still on their way.

Every layer compares what it loads with what a model without a cache computes, byte by byte.

    python examples/kv_connector.py
"""

from __future__ import annotations

import argparse
import sys
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from jitkern import BlockBuffers, LayerSignals, check, copy_blocks, store_cache
from jitkern.offload import PinnedPool

LAYERS, HEADS, HEAD_DIM, BLOCK = 4, 2, 64, 16  # BLOCK: tokens
DTYPE = torch.bfloat16


class Connector:
    """Blocks of prompts on the host, the least recently used one first."""

    def __init__(self, k: list[Tensor], v: list[Tensor], num_host_blocks: int) -> None:
        self.device = k[0].device
        self.gpu = BlockBuffers(k, v)  # K and V of layer 0, K and V of layer 1, ...
        block_numel = k[0][0].numel()
        self.pool = PinnedPool(num_host_blocks * len(self.gpu) * block_numel * DTYPE.itemsize)
        # Block-first: all layers of a block are side by side, ready to be written to a disk.
        self.host = self.pool.tensor([num_host_blocks, len(self.gpu), block_numel], DTYPE)
        self.signals = LayerSignals(len(k), device=self.device)
        # All copies are on one stream: a load comes after the stores of its blocks.
        self.stream = torch.cuda.Stream() if self.device.type == "cuda" else None
        self.num_host_blocks, self.free = num_host_blocks, list(range(num_host_blocks))
        self.blocks: OrderedDict[int, int] = OrderedDict()  # from hash to host block

    def store(self, hashes: Sequence[int], gpu_blocks: Sequence[int]) -> None:
        """Copy the blocks that the host does not have. Reuse GPU blocks after `wait_for_stores`."""
        written = dict[int, int]()  # from host block to GPU block: none is written twice in a call
        for key, gpu_block in zip(hashes, gpu_blocks, strict=True):
            if key in self.blocks:
                self.blocks.move_to_end(key)
            elif len(written) < self.num_host_blocks:
                evicted = self.free.pop() if self.free else self.blocks.popitem(last=False)[1]
                self.blocks[key] = evicted
                written[evicted] = gpu_block
        pairs = [[gpu_block, block] for block, gpu_block in written.items()]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())  # the model writes the blocks
        with torch.cuda.stream(self.stream):  # None has no effect
            copy_blocks(self.gpu, self.host, self.pairs(pairs), dst_block_dim=0)

    def wait_for_stores(self) -> None:
        """Make the current stream wait for all copies; the host does not wait."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def num_hits(self, hashes: Sequence[int]) -> int:
        """Return how many blocks of a prompt, from its first on, are on the host."""
        hits = 0
        while hits < len(hashes) and hashes[hits] in self.blocks:
            self.blocks.move_to_end(hashes[hits])
            hits += 1
        return hits

    def start_load(self, hashes: Sequence[int], gpu_blocks: Sequence[int]) -> None:
        """Queue the copy of all layers; then `wait_for_layer` before each layer's attention."""
        pairs = [[self.blocks[key], block] for key, block in zip(hashes, gpu_blocks, strict=True)]
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())  # an earlier use of the blocks
        with torch.cuda.stream(self.stream):
            # "sm" is faster than the default, which leaves the SMs to a model that runs beside.
            copy_blocks(
                self.host,
                self.gpu,
                self.pairs(pairs),
                src_block_dim=0,
                method="sm",
                signals=self.signals,
            )

    def wait_for_layer(self, layer: int) -> None:
        """Make the current stream wait for K and V of a layer; the host does not wait."""
        self.signals.wait(layer)

    def pairs(self, pairs: list[list[int]]) -> Tensor:
        return torch.tensor(pairs, dtype=torch.int64).view(-1, 2).to(self.device)


def key_value(layer: int, tokens: Tensor) -> Tensor:
    """Return K and V `[2, tokens, HEADS, HEAD_DIM]`: here a function of layer, token and place."""
    places = torch.arange(len(tokens), device=tokens.device)
    row = (tokens * 31 + places * 7 + layer).view(-1, 1, 1)
    column = torch.arange(HEADS * HEAD_DIM, device=tokens.device).view(HEADS, HEAD_DIM)
    return torch.stack([(row + column).cos(), (row - column).sin()]).to(DTYPE)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve prompts that share their beginnings; return 1 if a byte is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--prompts", type=int, default=12, help="prompts; three beginnings are shared"
    )
    num_prompts = parser.parse_args(argv).prompts
    if num_prompts < 1:
        parser.error(f"--prompts: {num_prompts}, expected 1 or more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    num_blocks = 32
    print(f"{num_prompts} prompts, {LAYERS} layers of {num_blocks} blocks on {device}", flush=True)
    shape = (num_blocks, BLOCK, HEADS, HEAD_DIM)
    k, v = ([torch.zeros(shape, dtype=DTYPE, device=device) for _ in range(LAYERS)] for _ in "kv")
    connector = Connector(k, v, num_host_blocks=40)
    torch.manual_seed(0)
    system_prompts = torch.randint(1000, (3, 10 * BLOCK))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(num_prompts):
        question = torch.randint(1000, (40,))
        tokens = torch.cat([system_prompts[number % 3], question])
        ends = range(BLOCK, len(tokens) + 1, BLOCK)
        hashes = [hash(tuple(tokens[:end].tolist())) for end in ends]
        gpu_blocks = torch.randperm(num_blocks)[: len(hashes) + 1].tolist()

        connector.wait_for_stores()  # of the last prompt, whose blocks this one may write
        hits = connector.num_hits(hashes)
        connector.start_load(hashes[:hits], gpu_blocks[:hits])
        on_device = tokens.to(device)
        slots = torch.tensor([block * BLOCK + at for block in gpu_blocks for at in range(BLOCK)])
        slots = slots[: len(tokens)].to(device)
        for layer in range(LAYERS):
            new_k, new_v = expected = key_value(layer, on_device)
            start = hits * BLOCK  # the tokens before are loaded, not computed
            caches = k[layer].flatten(0, 1), v[layer].flatten(0, 1)
            store_cache(*caches, slots[start:], new_k[start:], new_v[start:])
            connector.wait_for_layer(layer)
            # Attention would read the blocks here.
            for cache, rows in zip(caches, expected, strict=True):
                wrong += (cache[slots].view(torch.int16) != rows.view(torch.int16)).sum()
        connector.store(hashes, gpu_blocks[: len(hashes)])
        print(f"prompt {number}: {hits} of {len(hashes)} blocks loaded, the others computed")
    check(device)  # an index past the end would be raised here
    print(f"{len(connector.blocks)} blocks on the host, {int(wrong)} wrong values")
    connector.wait_for_stores()
    connector.pool.close()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
