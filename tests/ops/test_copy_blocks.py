"""copy_blocks against a loop in PyTorch, with every byte around the blocks accounted for."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import mistakes as common
import pytest
import torch
from buffers import INT_DTYPES, Buffer, distinct, host_buffer, make_buffer, to_index
from contract import Case
from mistakes import Mistake
from ref import ref_h2d_gather
from stems import OpCheck, Rows
from torch import Tensor

from jitkern import copy_blocks

CPU = torch.device("cpu")
LAYERS, SRC_BLOCKS, DST_BLOCKS = 3, 13, 17
DIRECTIONS = ("h2d", "d2h", "d2d")
LAYOUTS = list(itertools.product((0, 1), repeat=2))  # the block dimensions of dst and src
# Addresses of a warp's next 4 KiB, while 8 vectors a lane are on their way: the same 50 GB/s.
ALLOWED_SPILL_BYTES = 96
ITEM_BYTES = [1, 3, 16, 40, 656, 4096, 4104, 65536]


def ref_copy_blocks(
    dst: Tensor, src: Tensor, pairs: Tensor, dst_dim: int, src_dim: int, count: int | None = None
) -> None:
    """Block by block; a pair with a negative member is skipped."""
    to, source = dst.transpose(0, dst_dim), src.transpose(0, src_dim)  # blocks first
    listed = pairs.reshape(-1, 2).tolist()
    for a, b in listed[: max(count, 0)] if count is not None else listed:
        if a >= 0 and b >= 0:
            to[b].copy_(source[a].to(dst.device))


def shape_of(blocks: int, block_dim: int) -> list[int]:
    return [LAYERS, blocks] if block_dim == 1 else [blocks, LAYERS]


def buffers_for(
    device: torch.device, direction: str, dims: tuple[int, int], item: int
) -> tuple[Buffer, Buffer]:
    """A destination and a source; on the CPU both are there, whatever the direction."""
    make_dst, make_src = (
        host_buffer if direction == way else make_buffer for way in ("d2h", "h2d")
    )
    dst, src = (shape_of(DST_BLOCKS, dims[0]), shape_of(SRC_BLOCKS, dims[1]))
    return (
        make_dst([*dst, item], torch.uint8, device, seed=1),
        make_src([*src, item], torch.uint8, device, seed=2),
    )


def pairs_of(device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return pairs with repeated sources, runs, padding and distinct destinations."""
    rows = [[a, b] for a, b in zip(distinct(9, SRC_BLOCKS), distinct(9, DST_BLOCKS), strict=True)]
    rows[1][0] = rows[2][0]
    free = [b for b in range(DST_BLOCKS) if b not in [row[1] for row in rows]]
    rows += [[i, free[i]] for i in range(4)]
    rows[4], rows[6], rows[7] = [-1, 3], [4, -7], [SRC_BLOCKS + 9, -1]
    return to_index(rows, dtype, device)


def run_and_compare(
    dst: Buffer, src: Buffer, pairs: Tensor, dims: tuple[int, int] = (1, 1), **how: Any
) -> None:
    dst_twin, src_twin = dst.twin(), src.twin()
    options = {"dst_block_dim": dims[0], "src_block_dim": dims[1], **how}
    assert copy_blocks(src.view, dst.view, pairs, **options) is None
    if dst.view.is_cuda or src.view.is_cuda:
        torch.cuda.synchronize()
    count = how.get("count")
    number = None if count is None else int(count)
    ref_copy_blocks(dst_twin.view, src_twin.view, pairs, *dims, number)
    assert dst.same(dst_twin)
    assert src.same(src_twin)


def ways(device: torch.device) -> list[tuple[torch.device, str]]:
    """Where pairs may be, and the methods that go with them there."""
    on_cpu = [(CPU, method) for method in ("auto", "sm", "engine")]
    return on_cpu if device.type == "cpu" else [*on_cpu, (device, "auto"), (device, "sm")]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
@pytest.mark.parametrize("item", ITEM_BYTES)
def test_sizes_and_layouts(
    device: torch.device, item: int, dims: tuple[int, int], direction: str
) -> None:
    for i, (pairs_on, method) in enumerate(ways(device)):
        dst, src = buffers_for(device, direction, dims, item)
        pairs = pairs_of(pairs_on, INT_DTYPES[i % 2])
        run_and_compare(dst, src, pairs, dims, method=method)


@pytest.mark.parametrize("count", [-(2**31), -1, 0, 1, 5, 13, 14, 2**31 - 1])
@pytest.mark.parametrize("dtype", INT_DTYPES, ids=str)
def test_count(device: torch.device, dtype: torch.dtype, count: int) -> None:
    for pairs_on, method in ways(device):
        dst, src = buffers_for(device, "h2d", (1, 0), 656)
        pairs = pairs_of(pairs_on)
        pairs[max(count, 0) :] = 2**40  # not read
        counted = torch.tensor([count], dtype=dtype, device=pairs_on)
        how = {"method": method, "count": counted if method != "sm" else counted[0]}
        run_and_compare(dst, src, pairs, (1, 0), **how)


def test_within_one_cache(device: torch.device) -> None:
    """Copy on write: what other requests still read is left as it is."""
    cache = torch.randint(0, 256, (LAYERS, 9, 2, 64), dtype=torch.uint8, device=device)
    for one in (cache, cache[:, :, 1], cache[1:, :7, 0]):
        before = cache.clone()
        expected = cache.clone()
        expected.as_strided(one.shape, one.stride(), one.storage_offset())[:, [2, 6]] = one[
            :, [4, 0]
        ]
        pairs = torch.tensor([[4, 2], [-1, 3], [0, 6], [5, 5]])
        for pairs_on, method in ways(device):
            cache.copy_(before)
            copy_blocks(one, one, pairs.to(pairs_on), method=method)
            assert torch.equal(cache, expected)


@pytest.mark.cuda
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_in_a_cuda_graph(direction: str) -> None:
    """Pairs and their count are read at each replay; the first call is captured as well."""
    device = torch.device("cuda")
    dst, src = buffers_for(device, direction, (1, 0), 4104 if direction == "h2d" else 4120)
    pairs = pairs_of(device)
    count = torch.tensor([5], device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_blocks(src.view, dst.view, pairs, src_block_dim=0, count=count)
    for number, shift in ((5, 0), (13, 1), (0, 2)):
        count.fill_(number)
        pairs.copy_(pairs_of(device).roll(shift, 0))
        twin = dst.twin()
        graph.replay()
        torch.cuda.synchronize()
        ref_copy_blocks(twin.view, src.view, pairs, 1, 0, number)
        assert dst.same(twin)


@pytest.mark.cuda
def test_the_engine_takes_100_000_pieces() -> None:
    """The driver was seen to hang with more than 50,000 in a batch (vllm-project/vllm#49276)."""
    pool = torch.arange(2 * 65536, dtype=torch.int32).to(torch.uint8).view(1, 2, 65536).pin_memory()
    cache = torch.zeros(1, 1000, 65536, dtype=torch.uint8, device="cuda")
    places = torch.arange(100_000) % 1000  # each piece is copied to its place 100 times
    with torch.cuda.stream(torch.cuda.Stream()):
        copy_blocks(pool, cache, torch.stack([places % 2, places], 1), method="engine")
    torch.cuda.synchronize()
    assert torch.equal(cache[0].cpu(), pool[0].repeat(500, 1))


@pytest.mark.cuda
def test_the_engine_in_a_cuda_graph() -> None:
    """Its copies are of the blocks that the pairs named when it was captured."""
    device = torch.device("cuda")
    dst, src = buffers_for(device, "h2d", (1, 1), 4096)
    pairs = pairs_of(CPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copy_blocks(src.view, dst.view, pairs, method="engine")
    twin = dst.twin()
    ref_copy_blocks(twin.view, src.view, pairs, 1, 1)
    pairs.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert dst.same(twin)


@pytest.mark.cuda
@pytest.mark.parametrize(("pairs_on", "method"), ways(torch.device("cuda")), ids=str)
def test_the_current_stream(pairs_on: torch.device, method: str) -> None:
    """In order behind what is on it; pairs on the CPU may be changed once the call is back."""
    device = torch.device("cuda")
    dst, src = buffers_for(device, "d2h", (1, 1), 4096)
    pairs = pairs_of(pairs_on)
    new = torch.randint_like(src.whole, 0, 256)
    torch.cuda.synchronize()
    twin = dst.twin()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        src.whole.copy_(new)
        copy_blocks(src.view, dst.view, pairs, method=method)
        if pairs_on.type == "cpu":
            pairs.fill_(0)
        torch.cuda.current_stream().synchronize()
    ref_copy_blocks(twin.view, src.view, pairs_of(pairs_on), 1, 1)
    assert dst.same(twin)


class CopyBlocks(Case):
    """Blocks of one layer."""

    function, argument = staticmethod(copy_blocks), "pairs"
    rows, tables, columns, distinct_columns = (SRC_BLOCKS, 29), (0, 1), (0, 1), (1,)
    on_host = (0,)
    takes_num_sms = True
    ways = ({}, {"method": "sm"})
    large = (600, 500), 490, 40_000

    def call(self, tables: Sequence[Tensor], indices: Tensor, **how: Any) -> None:
        src, dst = (table.unsqueeze(1) for table in tables)
        assert copy_blocks(src, dst, indices, src_block_dim=0, dst_block_dim=0, **how) is None

    def reference(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        ref_h2d_gather(*tables, indices)


class CopyBlocksOfHostPairs(CopyBlocks):
    indices_on_host = True
    takes_num_sms = False
    ways = tuple({"method": method} for method in ("auto", "sm", "engine"))


CASES = [CopyBlocks(), CopyBlocksOfHostPairs()]


def good_arguments() -> dict[str, Any]:
    return {
        "dst": torch.zeros(3, 50, 8),
        "src": torch.ones(3, 20, 8),
        "pairs": torch.tensor([[0, 1], [2, 3]]),
        "dst_block_dim": 1,
        "src_block_dim": 1,
        "method": "auto",
        "count": torch.tensor([2]),
        "num_sms": 2,
        "signals": None,
    }


def mistakes() -> list[Mistake]:
    good = good_arguments()
    table = [
        (change, kind, text.replace("pairs: list or tuple", "pairs[0]: int"))  # [1, 2] is a pair
        for change, kind, text in common.not_tensors(good, "pairs")
    ]
    for change, kind, text in common.not_tensors(good, "dst", "src"):
        if "list" in text:
            text += ", or BlockBuffers(list) for a list of tensors"
        table.append((change, kind, text))
    table += common.not_tensors(good, "count", optional="count")
    table += common.bad_indices("pairs", good["pairs"]) + common.read_only(
        good, "src", "dst", "pairs", "count"
    )
    table += common.not_ints("src_block_dim", "dst_block_dim")
    table += common.not_num_sms() + common.not_words(
        "method", "'auto', 'sm' or 'engine'", "gpu", optional=True
    )
    wanted = "expected shape [..., 2] of (source block, destination block); a tuple of "
    wanted += "two vectors works too"
    memory = torch.zeros(3, 50, 4, dtype=torch.int64)
    shared = (
        "dst: rows of 32 bytes that overlap, 0 and 32 bytes apart (shape [3, 50, 8]), expected "
        "rows apart in a tensor that is written, as those of one that was expanded are not"
    )
    for side in ("dst", "src"):
        name = f"{side}_block_dim"
        which = "expected 0 or 1, the dimension that counts blocks; the other counts layers"
        blocks = good[side].shape[1]
        table += [
            ({name: 2}, ValueError, f"{name}: 2, {which}"),
            ({name: -1}, ValueError, f"{name}: -1, {which}"),
            ({side: torch.zeros(8)}, ValueError,
             f"{side}: shape [8], expected at least 2 dimensions"),
            ({side: torch.zeros(3, blocks, 8, 2)[..., 0]}, ValueError,
             common.stride_text(side, 2, 2, [3, blocks, 8], 1)),
        ]  # fmt: skip
    table += [
        ({"src": good["src"].half()}, TypeError,
         "src: dtype float16, expected float32 as in dst"),
        ({"src": torch.ones(2, 20, 8)}, ValueError,
         "src: 2 layers (shape [2, 20, 8]), expected 3 layers as in dst (shape [3, 50, 8])"),
        ({"src": torch.ones(100, 3, 8)}, ValueError,
         "src: 100 layers (shape [100, 3, 8]), expected 3 layers as in dst (shape [3, 50, 8]); "
         "for [num_blocks, num_layers, ...] pass src_block_dim=0"),
        ({"src": torch.ones(3, 100, 8), "src_block_dim": 0}, ValueError,
         "src: 100 layers (shape [3, 100, 8]), expected 3 layers as in dst (shape [3, 50, 8]); "
         "for [num_layers, num_blocks, ...] pass src_block_dim=1"),
        ({"dst": torch.zeros(100, 3, 8)}, ValueError,
         "src: 3 layers (shape [3, 20, 8]), expected 100 layers as in dst (shape [100, 3, 8]); "
         "for [num_blocks, num_layers, ...] pass dst_block_dim=0"),
        ({"src": torch.ones(3, 20, 7)}, ValueError,
         "src: blocks of 28 bytes a layer (shape [3, 20, 7]), expected blocks of 32 bytes a "
         "layer as in dst (shape [3, 50, 8])"),
        ({"dst": torch.zeros(1, 50, 8).expand(3, 50, 8)}, ValueError, shared),
        ({"dst": good["src"][:, :15], "src": good["src"][:, 5:]}, ValueError,
         common.overlap_text("dst", "src")),
        ({"pairs": torch.tensor(3)}, ValueError, f"pairs: shape [], {wanted}"),
        ({"pairs": torch.zeros(2, 3, dtype=torch.int32)}, ValueError,
         f"pairs: shape [2, 3], {wanted}"),
        ({"dst": memory.view(torch.float32), "pairs": memory[1, 7].view(2, 2)}, ValueError,
         common.overlap_text("pairs", "dst")),
        ({"dst": memory.view(torch.float32), "count": memory[1, 7, :1]}, ValueError,
         common.overlap_text("count", "dst")),
        ({"count": torch.tensor([1, 2])}, ValueError, "count: shape [2], expected 1 element"),
        ({"dst": torch.zeros(3, 0, 8), "count": torch.tensor([1, 2])}, ValueError,
         "count: shape [2], expected 1 element"),
        ({"count": torch.tensor([1.0])}, TypeError,
         "count: dtype float32, expected int32 or int64"),
        ({"signals": 2}, TypeError, "signals: int, expected LayerSignals"),
        ({"pairs": torch.tensor([[0, 1], [20, 3]])}, IndexError,
         common.index_text("pairs[..., 0]", 20, 1, 20)),
        ({"pairs": torch.tensor([[0, 50]])}, IndexError,
         common.index_text("pairs[..., 1]", 50, 0, 50)),
    ]  # fmt: skip
    return table


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    # Both on one device: opcheck clones all arguments, and the clone of a pinned one is pageable.
    pairs = torch.stack([where, where.flip(0)], dim=1)
    arguments = (rows(slots)[None], rows(slots)[None], pairs)
    yield "default", arguments, {}
    yield "default", arguments, {"count": torch.full_like(where, 1).sum()[None], "num_sms": 1}
    flat = (rows(slots)[None], rows(slots)[:, None], pairs.cpu())
    yield "default", flat, {"dst_block_dim": 0, "method": "engine"}
