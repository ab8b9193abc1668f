"""sparse: a decode step of sparse attention with its rows on the host (examples/sparse_decode.py).

Beside it, in lockstep: all rows on the GPU, and a fetch of all rows that a step asks for. Outputs
must have the same bits. On several GPUs, whose requests are the same: each fetches its misses by
itself, or all share one plan and each fetches a part (`peer_gather`).
"""

import os
import statistics
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch

import jitkern
from bench import ranks as processes
from bench.case import Context, Row, error_row
from bench.peers import host_pool
from bench.ranks import Call, Ranks
from bench.timing import cuda_timer
from jitkern.offload import MissPlan, PinnedPool, PoolShare, ResidencyStats

NEEDS_GPU = True

ROOT = Path(__file__).parents[2]
_SPEC = spec_from_file_location("sparse_decode", ROOT / "examples" / "sparse_decode.py")
example: Any = module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)

BATCHES = (64, 32, 8, 1)  # the largest first: its pool serves all
# Drifts of the query for which 5 and 20 % of the rows were missing, by context.
DRIFTS = {32768: {0.05: 0.25, 0.2: 0.62}, 131072: {0.05: 0.157, 0.2: 0.38}}
SETTLED = 70  # steps after which the slots hold what a drift leaves there
ROUNDS, ROUND_STEPS = 9, 5
MEMORY = 80e9
SHAPE = {"k": 2048, "slots": 8192, "layers": 8, "hidden": 7168, "heads": 128}


def arguments(batch: int, context: int) -> Namespace:
    # Requests do not end in the run, so prompts leave room for its steps.
    return Namespace(
        **SHAPE, batch=batch, context=context, steps=500, turn=1 << 30, seed=0, drift=0.1
    )


@cache
def pool(num_bytes: int) -> torch.Tensor:
    with host_pool.trusted():
        return PinnedPool(num_bytes).tensor()


class FromPool(example.Offloaded):
    """Rows in the pool of all decoders, which store the same bytes there."""

    pool: torch.Tensor

    def allocate(self, *shape: int) -> torch.Tensor:
        size = torch.Size(shape)
        return self.pool[: size.numel()].view(size)


class GatherAll(FromPool):
    """Without a map: all rows that a step asks for are fetched."""

    def __init__(self, args: Namespace, pages: torch.Tensor) -> None:
        super().__init__(args, pages)
        size = args.batch * args.k
        self.cache = self.cache[:size].clone()  # frees what only a map needs
        del self.map
        self.slots = torch.arange(size, device=self.device).view(args.batch, args.k)

    def find(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.row_of_token[self.numbers.unsqueeze(1), tokens]
        pairs = torch.stack([rows, self.slots], 2)
        self.fetch_stream.wait_stream(self.store_stream)
        with example.beside(self.fetch_stream, pairs):
            # The rows of a list differ: no search for repeats.
            jitkern.h2d_gather(self.rows[layer], self.cache, pairs, dedup=False, method="sm")
        return self.cache, self.slots

    def forget(self, request: int) -> None:
        """Nothing is kept."""


KINDS = {
    "jitkern": ("ours", FromPool),
    "all rows on the GPU": ("floor", example.Resident),
    "h2d_gather of all rows": ("peer", GatherAll),
}


class Timed:
    """A decoder whose step has been captured, and the memory that it takes."""

    def __init__(self, model: Any, make_rows: Callable[[Any, torch.Tensor], Any]) -> None:
        before = torch.cuda.memory_allocated()
        self.decoder = example.Decoder(model, make_rows)
        torch.cuda.reset_peak_memory_stats()  # prompts have needed more than a step does
        for _ in range(3):
            self.decoder.step()
        self.num_bytes = torch.cuda.max_memory_allocated() - before

    def replay(self, steps: int = ROUND_STEPS) -> None:
        for _ in range(steps):
            self.decoder.graph.replay()

    def stats(self) -> ResidencyStats:
        torch.cuda.synchronize()
        return self.decoder.rows.map.stats()


def run(ctx: Context) -> Iterator[Row]:
    batches, contexts = ((8,), (32768,)) if ctx.quick else (BATCHES, (131072, 32768))
    most_bytes = batches[0] * contexts[0] * SHAPE["layers"] * example.ROW_BYTES
    if note := host_pool.lacks(most_bytes / host_pool.GIB):
        yield Row("sparse", "decode step", "jitkern", "ours", note=note)
        return
    FromPool.pool = pool(most_bytes)
    for context in contexts:
        for batch in batches:
            ctx.say(f"sparse: batch {batch}, context {context:,}")
            try:
                yield from _steps(batch, context)
            except Exception as error:  # a case that fails is a row, not the end of the run
                yield error_row(
                    "sparse", f"batch {batch}, context {context}", "jitkern", "ours", error
                )
            torch.cuda.empty_cache()
    yield from processes.run("sparse", __name__, ctx)


def _steps(batch: int, context: int) -> Iterator[Row]:
    args = arguments(batch, context)
    before = torch.cuda.memory_allocated()
    model = example.Model(args, torch.device("cuda"))
    model_bytes = torch.cuda.memory_allocated() - before
    timed = {name: Timed(model, make) for name, (_, make) in KINDS.items()}
    link_rate = _link_bytes_per_us()
    for share, drift in DRIFTS[context].items():
        case = f"batch {batch}, context {context}, {100 * share:g} % missing"
        for one in timed.values():
            one.decoder.drift.fill_(drift)
            one.replay(SETTLED)
        before = timed["jitkern"].stats()
        timer, times = cuda_timer(), {name: list[float]() for name in timed}
        for _ in range(ROUNDS):
            for name, one in timed.items():
                times[name].append(timer(one.replay) / ROUND_STEPS * 1e3)
        after = timed["jitkern"].stats()
        hits, misses = after.hits - before.hits, after.misses - before.misses
        outputs = [one.decoder.output for one in timed.values()]
        if not all(torch.equal(outputs[0], output) for output in outputs[1:]):
            raise ValueError(f"{case}: outputs differ from those with all rows on the GPU")
        step_bytes = (after.moved_bytes - before.moved_bytes) // (ROUNDS * ROUND_STEPS)
        step_us = {name: statistics.median(values) for name, values in times.items()}
        for name, one in timed.items():
            row = Row("sparse", case, name, KINDS[name][0], median_us=step_us[name])
            request_bytes = one.num_bytes / batch
            row.params = {
                "batch": batch,
                "context": context,
                "missing": misses / (hits + misses),
                "step_bytes": step_bytes,
                "tokens_per_s": batch / step_us[name] * 1e6,
                "to_resident": step_us[name] / step_us["all rows on the GPU"],
                "request_bytes": request_bytes,
                "batch_in_80_gb": int((MEMORY - model_bytes) / request_bytes),
            }
            row.note = ", ".join(f"{k} {v:.4g}" for k, v in list(row.params.items())[2:])
            yield row
        link = "the missing bytes by the copy engine"
        yield Row("sparse", case, link, "ceiling", median_us=step_bytes / link_rate)
        if share == min(DRIFTS[context]):
            part = f"one layer, batch {batch}, context {context}"
            yield from _timeline(timed["jitkern"].decoder, part)
            for name in KINDS.keys() - {"jitkern"}:
                timed[name].replay(1)  # in lockstep again


def _timeline(decoder: Any, case: str) -> Iterator[Row]:
    """Yield when the parts of a layer in the middle of a step began, and how long they took."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        decoder.graph.replay()
        torch.cuda.synchronize()
    kernels = sorted(
        (e.time_range.start, e.time_range.end, e.name, e.device_resource_id)
        for e in profiled.events()
    )
    stores = [kernel for kernel in kernels if "store_rows" in kernel[2]]
    middle = len(stores) // 2
    first, end = stores[middle - 1], stores[middle][0]
    layer = [kernel for kernel in kernels if first[0] <= kernel[0] < end]
    write, swap_in, gather = (
        next(kernel for kernel in layer if part in kernel[2])
        for part in ("d2h_scatter", "swap_in", "gather_rows")
    )
    current = [kernel for kernel in layer if kernel[3] == first[3]]
    picked = max(kernel[1] for kernel in current if kernel[1] <= swap_in[0])
    queries = [kernel for kernel in current if picked <= kernel[0] < gather[0]]
    spans = {
        "store the new rows": first[:2],
        "write them to the pool": write[:2],
        "indexer, top k": (first[1], picked),
        "find and fetch": swap_in[:2],
        "queries": (queries[0][0], queries[-1][1]),
        "read the rows": gather[:2],
        "attend": (gather[1], end),
    }
    for part, (start, stop) in spans.items():
        params = {"start_us": start - first[0]}
        yield Row("sparse", case, part, "floor", params, median_us=stop - start)


def _link_bytes_per_us() -> float:
    """Return the rate of the copy engine."""
    source = FromPool.pool[: 256 << 20]
    target = torch.empty_like(source, device="cuda")
    copy = partial(target.copy_, source, non_blocking=True)
    copy()
    return len(source) / statistics.median(cuda_timer()(copy) * 1e3 for _ in range(5))


# -- several GPUs ----------------------------------------------------------------------------------


class Shared(FromPool):
    """All ranks resolve the same lists; each fetches a part of the misses for all."""

    comm: Any
    group: Any

    def __init__(self, args: Namespace, pages: torch.Tensor) -> None:
        from jitkern.comm import PeerMemory

        super().__init__(args, pages)
        shape = self.cache.shape
        self.memory = PeerMemory(self.cache.nbytes, self.group)
        size = range(self.comm.world_size)
        self.caches = [self.memory.remote(rank, shape, torch.uint8) for rank in size]
        self.cache = self.caches[self.comm.rank]
        lists = torch.empty(args.batch, args.k, dtype=torch.int64, device=self.device)
        self.plans = [MissPlan.like(lists) for _ in range(args.layers)]

    def find(self, layer: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from jitkern.comm import peer_gather

        slots, plan = torch.empty_like(tokens), self.plans[layer]
        self.fetch_stream.wait_stream(self.store_stream)
        with example.beside(self.fetch_stream, tokens, slots):
            states = self.states[layer]
            self.map.resolve(tokens, slots, plan=plan, states=states, pages=self.pages)
            peer_gather(self.rows[layer], self.caches, plan.pairs, self.comm, order="given")
        return self.cache, slots


def measure_ranks(ranks: Ranks, quick: bool) -> Iterator[Row]:
    from jitkern.comm import PeerCommunicator, init_pynccl, peer_gather

    inner = init_pynccl(tp_rank=ranks.rank, tp_size=ranks.size, tp_cpu_group=ranks.cpu_group)
    Shared.comm = PeerCommunicator(inner, ranks.cpu_group)
    Shared.group = ranks.cpu_group
    context = 32768
    for batch in (8,) if quick else (32, 8):
        args = arguments(batch, context)
        share = PoolShare(f"bench-sparse-{os.getppid()}-{batch}", ranks.cpu_group, timeout_s=120)
        num_bytes = batch * context * args.layers * example.ROW_BYTES
        with host_pool.trusted():
            FromPool.pool = PinnedPool(num_bytes, share=share).tensor()
        model = example.Model(args, ranks.device)
        alone, shared = Timed(model, FromPool), Timed(model, Shared)
        for missing, drift in DRIFTS[context].items():
            for one in (alone, shared):
                one.decoder.drift.fill_(drift)
                one.replay(SETTLED)
                ranks.barrier()
            where = f"batch {batch}, context {context}, {100 * missing:g} % missing, {ranks.where}"
            calls = {
                "jitkern, a part each": Call("ours", shared.decoder.graph.replay),
                "jitkern, all rows each": Call("peer", alone.decoder.graph.replay),
            }
            yield from _step_rows(ranks, where, calls)
            is_same = torch.equal(alone.decoder.output, shared.decoder.output)
            if wrong := ranks.first_text("" if is_same else f"rank {ranks.rank}: outputs differ"):
                raise RuntimeError(f"sparse: {wrong}")
            plan, rows = shared.decoder.rows.plans[0], shared.decoder.rows.rows[0]
            caches, is_miss = shared.decoder.rows.caches, plan.pairs[..., 0] >= 0
            misses = plan.pairs[is_miss].contiguous()  # h2d_gather gets them without padding
            count, how = len(misses), {"dedup": False, "order": "given", "method": "sm"}
            gather = partial(jitkern.h2d_gather, rows, caches[ranks.rank], misses, **how)
            part = partial(peer_gather, rows, caches, plan.pairs, Shared.comm, order="given")
            fetches = {
                "jitkern, a part each": Call("ours", part),
                "jitkern, all rows each": Call("peer", gather),
            }
            fields = {"params": {"rows": count}, "bytes_moved": count * example.ROW_BYTES}
            yield from ranks.timed(f"fetch of {where}", fetches, 20, **fields)
        del alone, shared, model


def _step_rows(ranks: Ranks, where: str, calls: dict[str, Call]) -> Iterator[Row]:
    """Yield the step of each way, with all ranks replaying at once."""
    timer, times = cuda_timer(), {name: list[float]() for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            ranks.barrier()
            steps = partial(_repeat, call.run, ROUND_STEPS)
            times[name].append(timer(steps) / ROUND_STEPS * 1e3)
    for name, call in calls.items():
        row = Row("sparse", where, name, call.role, median_us=statistics.median(times[name]))
        yield row


def _repeat(call: Callable[[], object], count: int) -> None:
    for _ in range(count):
        call()
