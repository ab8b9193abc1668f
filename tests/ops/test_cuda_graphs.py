"""Graphs, streams, several GPUs, and faults that kernels report: what only a GPU can show."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from buffers import random_bytes
from ref import ref_h2d_gather, ref_indexing, ref_store
from torch import Tensor

import jitkern
from jitkern import d2h_scatter, h2d_gather, indexing, store_cache

pytestmark = pytest.mark.cuda

SLOTS, ROWS, ROW_BYTES = 500, 64, 656


def device_bytes(rows: int, seed: int = 0, device: str = "cuda") -> Tensor:
    return random_bytes(rows * ROW_BYTES, seed).view(rows, ROW_BYTES).to(device)


def pinned_bytes(rows: int, seed: int = 0) -> Tensor:
    return random_bytes(rows * ROW_BYTES, seed).view(rows, ROW_BYTES).pin_memory()


FIRST_CALL_IN_A_CAPTURE = """
import sys, torch, jitkern
mode = sys.argv[1]
torch.manual_seed(0)
cache = torch.zeros(2, 100, 656, dtype=torch.uint8, device="cuda")
new = torch.randint(0, 256, (2, 16, 656), dtype=torch.uint8, device="cuda")
slots = torch.randperm(100, device="cuda")[:16]
src = torch.randint(0, 256, (50, 656), dtype=torch.uint8).pin_memory()
far = torch.zeros(100, 656, dtype=torch.uint8, device="cuda")
pairs = torch.stack([torch.randperm(50)[:16], torch.randperm(100)[:16]], 1).cuda()
rows = torch.empty(16, 656, dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode=mode):
    jitkern.store_cache(cache[0], cache[1], slots, new[0], new[1])
    jitkern.indexing(cache[0], slots, output=rows)
    made = jitkern.indexing(cache[1], slots)
    jitkern.h2d_gather(src, far, pairs)
assert not rows.equal(new[0]), "capturing must not run anything"
for _ in range(2):
    graph.replay()
torch.cuda.synchronize()
jitkern.check()
assert cache[0][slots].equal(new[0]) and cache[1][slots].equal(new[1])
assert rows.equal(new[0]) and made.equal(new[1])
assert far[pairs[:, 1]].cpu().equal(src[pairs[:, 0].cpu()])
print("ok", jitkern.stats())
"""


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_first_call_inside_a_capture(
    mode: str, fresh_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    """With an empty cache, so that it compiles while capturing, then with a warm one."""
    for _ in ("cold", "warm"):
        done = fresh_python(
            FIRST_CALL_IN_A_CAPTURE, mode, env={"JITKERN_CACHE_DIR": str(tmp_path / "cache")}
        )
        assert done.stdout.startswith("ok")


class Captured:
    """All three ops in one graph, on buffers whose contents change between replays."""

    def __init__(self) -> None:
        self.cache = torch.zeros(2, SLOTS, ROW_BYTES, dtype=torch.uint8, device="cuda")
        self.new = torch.zeros(2, ROWS, ROW_BYTES, dtype=torch.uint8, device="cuda")
        self.slots = torch.zeros(ROWS, dtype=torch.int32, device="cuda")
        self.tokens = torch.zeros(ROWS, dtype=torch.int64, device="cuda")
        self.found = torch.zeros(ROWS, ROW_BYTES, dtype=torch.uint8, device="cuda")
        self.src = pinned_bytes(SLOTS)
        self.dst = torch.zeros(SLOTS, ROW_BYTES, dtype=torch.uint8, device="cuda")
        self.pairs = torch.full((ROWS, 2), -1, dtype=torch.int64, device="cuda")
        self.slot_map = torch.full((SLOTS,), -1, dtype=torch.int32, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            store_cache(self.cache[0], self.cache[1], self.slots, self.new[0], self.new[1])
            indexing(self.cache[1], self.tokens, output=self.found)
            h2d_gather(self.src, self.dst, self.pairs, slot_map=self.slot_map)


@pytest.fixture(scope="module")
def captured() -> Iterator[Captured]:
    graph = Captured()
    yield graph
    torch.cuda.synchronize()


@pytest.mark.slow
def test_1000_replays_with_changing_contents(captured: Captured) -> None:
    """Mismatches are counted on the GPU, so that replays follow each other without a pause."""
    c = captured
    c.slot_map.fill_(-1)
    spare_row = c.cache[:, :1]  # where the reference puts padding
    expected_cache, expected_dst = torch.cat([c.cache, spare_row], dim=1), c.dst.clone()
    expected_map, source = c.slot_map.clone(), c.src.cuda()
    mismatches = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        c.new.random_(0, 256)
        c.slots.copy_(torch.randperm(SLOTS, device="cuda")[:ROWS])
        c.slots[::7] = -1
        c.tokens.random_(-1, SLOTS)
        c.pairs[:, 0] = torch.randperm(SLOTS, device="cuda")[:ROWS]
        c.pairs[:, 1] = torch.randperm(SLOTS, device="cuda")[:ROWS]
        c.graph.replay()
        expected_cache[:, torch.where(c.slots < 0, SLOTS, c.slots).long()] = c.new
        expected_found = expected_cache[1][c.tokens.clamp_min(0)]
        expected_found.masked_fill_((c.tokens < 0)[:, None], 0)
        expected_dst[c.pairs[:, 1]] = source[c.pairs[:, 0]]
        expected_map[c.pairs[:, 0]] = c.pairs[:, 1].int()
        for got, expected in (
            (c.cache, expected_cache[:, :SLOTS]), (c.found, expected_found), (c.dst, expected_dst),
            (c.slot_map, expected_map),
        ):  # fmt: skip
            mismatches += got.ne(expected).sum()
    assert int(mismatches) == 0
    jitkern.check()


def test_a_source_changed_on_the_host_between_replays(captured: Captured) -> None:
    c = captured
    for seed in range(1, 20):
        c.slots.fill_(-1)
        c.tokens.fill_(-1)
        c.src.copy_(random_bytes(c.src.numel(), seed).view_as(c.src))
        c.pairs[:, 0] = torch.randperm(SLOTS, device="cuda")[:ROWS]
        c.pairs[:, 1] = torch.randperm(SLOTS, device="cuda")[:ROWS]
        c.graph.replay()
        torch.cuda.synchronize()
        pairs = c.pairs.cpu()
        assert torch.equal(c.dst.cpu()[pairs[:, 1]], c.src[pairs[:, 0]])


@pytest.mark.parametrize("reuse_resident", [False, True])
def test_a_large_gather_in_a_graph(reuse_resident: bool) -> None:
    """With its scratch memory from the graph's pool, and other repeats in each replay."""
    count, num_src = 40_000, 5_000
    src = pinned_bytes(num_src)
    source = src.cuda()
    dst = torch.zeros(count + num_src, ROW_BYTES, dtype=torch.uint8, device="cuda")
    pairs = torch.full((count, 2), -1, dtype=torch.int32, device="cuda")
    slot_map = torch.full((num_src,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h2d_gather(src, dst, pairs, slot_map=slot_map, reuse_resident=reuse_resident)
    for distinct_rows in (1, 50, num_src):
        dst.zero_()
        slot_map.fill_(-1)
        if reuse_resident:  # a tenth of the rows is behind those that the call writes
            slot_map[::10] = torch.arange(count, count + num_src, 10, device="cuda").int()
            dst[count:][::10] = source[::10]
        pairs[:, 0].random_(0, distinct_rows)
        pairs[:, 1] = torch.randperm(count, device="cuda")
        graph.replay()
        expected = source[pairs[:, 0].long()]
        assert torch.equal(dst[pairs[:, 1].long()], expected)
        asked = pairs[:, 0].unique().long()
        assert torch.equal(dst[slot_map[asked].long()], source[asked])
        assert int(slot_map[asked].max()) < count
    jitkern.check()


def test_faults_in_replays(captured: Captured) -> None:
    """Found, told once, cleared, and found again; the other rows of each replay are written."""
    c = captured
    for value in (SLOTS, 2**31 - 1):
        c.pairs.fill_(-1)
        c.tokens.fill_(0)
        c.slots.copy_(torch.arange(ROWS, device="cuda"))
        c.slots[17] = value
        c.new.random_(0, 256)
        c.graph.replay()
        torch.cuda.synchronize()
        text = f"store_cache: indices: index {value} at position 17, expected below {SLOTS}"
        with pytest.raises(IndexError, match=text):
            jitkern.check()
        jitkern.check()
        good = c.slots < SLOTS
        assert torch.equal(c.cache[:, :ROWS][:, good], c.new[:, good])
        c.slots[17] = 17
        c.graph.replay()
        torch.cuda.synchronize()
        jitkern.check()
        assert torch.equal(c.cache[:, :ROWS], c.new)


def test_the_next_call_raises_an_earlier_fault_and_does_nothing() -> None:
    cache, rows = device_bytes(SLOTS), device_bytes(4, 1)
    before = cache.clone()
    store_cache(cache, before.clone(), torch.full((4,), SLOTS + 3, device="cuda"), rows, rows)
    torch.cuda.synchronize()
    slots = torch.arange(4, device="cuda")
    with pytest.raises(IndexError, match="store_cache: indices: index 503 at position"):
        indexing(cache, slots)
    with_other = before.clone()
    store_cache(cache, with_other, slots, rows, rows)  # told once, forgotten
    torch.cuda.synchronize()
    assert torch.equal(cache[:4], rows)
    assert torch.equal(cache[4:], before[4:])


def test_side_streams() -> None:
    """Each stream works on its own buffers, after a delay that a wrong stream would not see."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for i, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            cache, v_cache = device_bytes(SLOTS, i), device_bytes(SLOTS, i)
            rows = torch.zeros(ROWS, ROW_BYTES, dtype=torch.uint8, device="cuda")
            dst = torch.zeros_like(cache)
            src = pinned_bytes(SLOTS, i + 10)
            slots = torch.randperm(SLOTS, device="cuda")[:ROWS]
            pairs = torch.stack([slots, slots], dim=1)
            torch.cuda._sleep(20_000_000)
            rows.fill_(i + 1)  # visible to a later kernel of this stream only
            store_cache(cache, v_cache, slots, rows, rows)
            h2d_gather(src, dst, pairs)
            results.append((indexing(cache, slots), rows, dst, src, slots))
    torch.cuda.synchronize()
    for found, rows, dst, src, slots in results:
        assert torch.equal(found, rows)
        assert torch.equal(dst[slots].cpu(), src[slots.cpu()])


@pytest.mark.parametrize("rows", [SLOTS, 40_000], ids=["small", "large"])
def test_a_gather_and_a_scatter_on_two_streams(rows: int) -> None:
    """Both ways over the bus at once, 50 times; large gathers each with scratch memory."""
    incoming, outgoing = pinned_bytes(rows), device_bytes(rows, 1)
    arrived = torch.zeros_like(outgoing)
    written = torch.zeros(rows, ROW_BYTES, dtype=torch.uint8, pin_memory=True)
    numbers = torch.arange(rows, device="cuda")
    there = torch.stack([numbers // 2, torch.randperm(rows, device="cuda")], dim=1)  # repeats
    back = torch.stack([numbers, numbers.flip(0)], dim=1)
    torch.cuda.synchronize()
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(50):
        with torch.cuda.stream(first):
            h2d_gather(incoming, arrived, there)
        with torch.cuda.stream(second):
            d2h_scatter(outgoing, written, back)
    torch.cuda.synchronize()
    assert torch.equal(arrived[there[:, 1]].cpu(), incoming[there[:, 0].cpu()])
    assert torch.equal(written, outgoing.cpu().flip(0))


def test_many_threads_at_first_use() -> None:
    """Every thread needs the same new kernels at once, each on its own stream."""
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(i: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                table = random_bytes(100 * 733, i).view(100, 733).cuda()
                indices = torch.randperm(100, device="cuda")
                start.wait()
                for _ in range(20):
                    result = indexing(table, indices)
                torch.cuda.current_stream().synchronize()
                assert torch.equal(result, table[indices])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.multigpu
def test_each_gpu_by_its_tensors() -> None:
    """The current device does not matter and is left as it was."""
    last = torch.cuda.device_count() - 1
    for ordinal in range(last, -1, -1):
        device = f"cuda:{ordinal}"
        caches = [device_bytes(SLOTS, s, device) for s in (1, 2)]
        rows = [device_bytes(ROWS, s, device) for s in (3, 4)]
        expected = [cache.clone() for cache in caches]
        slots = torch.randperm(SLOTS, device=device)[:ROWS]
        with torch.cuda.device(0 if ordinal else last):
            current = torch.cuda.current_device()
            store_cache(*caches, slots, *rows)
            found = indexing(caches[0], slots)
            dst = torch.zeros_like(caches[0])
            src = pinned_bytes(SLOTS, 5)
            pairs = torch.stack([slots, slots], dim=1)
            h2d_gather(src, dst, pairs)
            assert torch.cuda.current_device() == current
        torch.cuda.synchronize(ordinal)
        ref_store(*expected, slots, *rows)
        assert all(torch.equal(a, b) for a, b in zip(caches, expected, strict=True))
        assert torch.equal(found, ref_indexing(caches[0], slots))
        expected_dst = torch.zeros_like(dst)
        ref_h2d_gather(src, expected_dst, pairs)
        assert torch.equal(dst, expected_dst)


@pytest.mark.multigpu
def test_a_fault_belongs_to_its_gpu() -> None:
    table = device_bytes(SLOTS, device="cuda:1")
    indexing(table, torch.tensor([SLOTS], device="cuda:1"))
    torch.cuda.synchronize(1)
    jitkern.check(0)
    indexing(table.to("cuda:0"), torch.tensor([0], device="cuda:0"))
    with pytest.raises(IndexError, match=r"index 500 at position 0.*cuda:1"):
        jitkern.check("cuda:1")
    jitkern.check(1)


@pytest.mark.multigpu
def test_two_gpus_in_one_call_are_refused() -> None:
    table, indices = device_bytes(SLOTS), torch.tensor([1], device="cuda:1")
    with pytest.raises(ValueError, match=r"^indexing: indices: device cuda:1, expected cuda:0 as"):
        indexing(table, indices)


@pytest.mark.multigpu
def test_graphs_on_the_second_gpu() -> None:
    with torch.cuda.device(1):
        table = device_bytes(SLOTS, device="cuda:1")
        indices = torch.arange(ROWS, device="cuda:1")
        output = torch.zeros(ROWS, ROW_BYTES, dtype=torch.uint8, device="cuda:1")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # A stream of its own: the one that torch.cuda.graph keeps is of the GPU that was first.
        with torch.cuda.graph(graph, stream=torch.cuda.Stream("cuda:1")):
            indexing(table, indices, output=output)
        indices += 7
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(output, table[7 : 7 + ROWS])
