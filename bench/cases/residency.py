"""ResidencyMap: lists of rows, most of which a cache on the GPU has, beside the kernels of engines.

Each call of a graph has the list of the next step. States are restored before each replay. Bytes:
the missing rows. The ceiling is their fetch alone, with the slots known.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row, Run
from bench.cases.common import call_case, ceiling, ours
from bench.measure import measure
from bench.peers import host_pool
from jitkern.offload import MissPlan, ResidencyMap

FIRST_ROW = 64  # engines have no block 0
POOL_GIB = 1.25
MISSING = (0.0, 0.001, 0.05, 0.2, 1.0)  # share of a list
MOST_FETCHED = 4  # lists of which all rows are missing


class Job(NamedTuple):
    """Lists of `top_k` rows for `batch` states, of which `misses` are missing."""

    batch: int
    misses: int
    row_bytes: int = 656
    top_k: int = 2048
    num_slots: int = 8192
    context: int = 0  # rows of each state; 0: as many as 2**20 rows of the host are

    @property
    def name(self) -> str:
        share = f"{100 * self.misses / self.top_k:.1f}".removesuffix(".0")
        return f"batch {self.batch}, {share} % of {self.top_k} rows of {self.row_bytes} B missing"

    @property
    def steps(self) -> int:
        """Calls in a graph."""
        if self.batch >= 64 or self.misses > self.top_k / 2:
            return 6
        return 10 if self.batch >= 16 else 20


EXPERTS = Job(1, 2, row_bytes=4 << 20, top_k=8, num_slots=32, context=64)
ON_CPU = Job(2, 13, top_k=64, num_slots=256, context=1024)


def jobs(ctx: Context) -> Iterator[Job]:
    if ctx.device == "cpu":
        yield ON_CPU
        return
    for batch in (1, 16) if ctx.quick else (1, 4, 16, 64):
        for share in (0.0, 0.05, 0.2) if ctx.quick else MISSING:
            if share < 1 or batch <= MOST_FETCHED:
                yield Job(batch, round(2048 * share))
    if not ctx.quick:
        for row_bytes in (512, 576, 1152):
            yield from (Job(b, round(2048 * s), row_bytes) for b in (1, 16) for s in (0.05, 0.2))
    yield EXPERTS


def run(ctx: Context) -> Iterator[Row]:
    for job in jobs(ctx):
        yield from measure(ctx, case_of(ctx, job))


def cases(ctx: Context) -> Iterator[Case]:
    """Yield a call in which all of 16 rows are missing, and one in which none is."""
    for name, num_slots in (("call, 16 rows are fetched", 16), ("call, 16 rows are there", 32)):
        host = torch.zeros(64, 656, dtype=torch.uint8, pin_memory=ctx.device == "cuda")
        cache = torch.zeros(num_slots, 656, dtype=torch.uint8, device=ctx.device)
        residency = ResidencyMap(1, num_slots, 64, device=ctx.device)
        lists = torch.arange(32, dtype=torch.int32, device=ctx.device).view(2, 1, 16)
        slots = torch.empty_like(lists[0])
        turn = cycle(lists)

        def call(residency: Any = residency, args: Any = (host, cache, slots, turn)) -> None:
            host, cache, slots, turn = args
            residency.swap_in(host, cache, next(turn), slots)

        yield call_case("residency", name, call, (host, cache, lists[0], slots))


# -- the lists of each step ------------------------------------------------------------------------


@dataclass
class States:
    """The states of a batch, in plain PyTorch: the rows in the slots, and the order of use."""

    rows: torch.Tensor  # [batch, num_slots]: of the state
    order: torch.Tensor  # [batch, num_slots]

    @classmethod
    def random(cls, job: Job, context: int, device: str) -> "States":
        shuffled = torch.rand(job.batch, context, device=device).argsort(1)
        order = torch.rand(job.batch, job.num_slots, device=device).argsort(1)
        return cls(shuffled[:, : job.num_slots], order)

    def step(self, job: Job, context: int) -> SimpleNamespace:
        """Return a random list for each state, its slots and its misses; update the states."""
        batch, num_hits = job.batch, job.top_k - job.misses
        random = partial(torch.rand, device=self.rows.device)
        hit_slots = random(batch, job.num_slots).argsort(1)[:, :num_hits]
        weights = random(batch, context).scatter_(1, self.rows, -1.0)
        new = weights.topk(job.misses, 1).indices
        listed = torch.cat([self.rows.gather(1, hit_slots), new], 1)
        turn = random(batch, job.top_k).argsort(1)
        listed = listed.gather(1, turn)
        missing = listed[turn >= num_hits].view(batch, job.misses)

        used = torch.zeros_like(self.order).scatter_(1, hit_slots, 1)
        sorted_ = self.order.gather(1, used.gather(1, self.order).argsort(dim=1, stable=True))
        free, hits = sorted_.tensor_split([job.num_slots - num_hits], 1)
        victims = free[:, : job.misses]
        self.order = torch.cat([free[:, job.misses :], victims, hits], 1)
        self.rows = self.rows.scatter(1, victims, missing)
        slot_of = torch.empty_like(weights, dtype=torch.int64).scatter_(1, self.rows, self._slots())
        slots = slot_of.gather(1, listed)
        return SimpleNamespace(listed=listed, slots=slots, missing=missing, victims=victims)

    def _slots(self) -> torch.Tensor:
        return torch.arange(self.rows.shape[1], device=self.rows.device).expand_as(self.rows)


def case_of(ctx: Context, job: Job) -> Case:
    """Return the case of one job. Its states are shared by all steps."""
    on_gpu, device = ctx.device == "cuda", ctx.device
    context = job.context or min(1 << 17, (1 << 20) // job.batch)
    num_rows = FIRST_ROW + job.batch * context
    pool = host_pool.allocated(POOL_GIB if on_gpu else 1 / 512)
    host = pool[: num_rows * job.row_bytes].view(num_rows, job.row_bytes)
    first_rows = FIRST_ROW + context * torch.arange(job.batch, device=device).unsqueeze(1)
    first_slots = job.num_slots * torch.arange(job.batch, device=device).unsqueeze(1)

    states = States.random(job, context, device)
    resident, order = states.rows, states.order
    steps = [states.step(job, context) for _ in range(job.steps)]
    cache = host[(resident + first_rows).flatten().cpu()].to(device)
    residency = ResidencyMap(job.batch, job.num_slots, num_rows, device=device)
    residency.row_of_slot.copy_(resident + first_rows)
    residency.lru_order.copy_(order)
    slots = torch.arange(job.num_slots, dtype=torch.int32, device=device).expand_as(resident)
    residency.slot_of_row.scatter_(1, resident + first_rows, slots)
    of_map = (residency.slot_of_row, residency.row_of_slot, residency.lru_order)
    saved = [(tensor, tensor.clone()) for tensor in of_map]
    restores: list[Callable[[], object]] = [lambda: [t.copy_(before) for t, before in saved]]

    def make(i: int) -> SimpleNamespace:
        step = steps[i]
        rows, cache_rows = step.listed + first_rows, step.slots + first_slots
        misses = (step.missing + first_rows, step.victims + first_slots)
        return SimpleNamespace(
            positions=step.listed.int(),
            rows=rows.int(),
            slots=torch.empty_like(rows, dtype=torch.int32),
            plan=MissPlan.like(rows.int()),
            expected=cache_rows,
            victims=misses[1].flatten(),
            misses=torch.stack(misses, 2).view(-1, 2).int(),
            all=torch.stack([rows, cache_rows], 2).view(-1, 2).int(),
        )

    def swap_in(b: Any) -> None:
        residency.swap_in(host, cache, b.rows, b.slots)

    def resolve(b: Any) -> None:
        residency.resolve(b.rows, b.slots, plan=b.plan)

    def gather_misses(b: Any) -> None:
        jitkern.h2d_gather(host, cache, b.misses, dedup=False, order="given", method="sm")

    def gather_all(b: Any) -> None:
        jitkern.h2d_gather(host, cache, b.all, dedup=False, order="given", method="sm")

    def engine(make_state: peers.Once) -> Run:
        """Build an engine's state, and check the slots of its first step."""
        state = make_state()(host, job.num_slots, context, resident, order)
        first, out = steps[0], torch.empty_like(steps[0].listed, dtype=torch.int32)
        state.step(first.listed.int(), out)
        if not torch.equal(state.slots(out), first.slots):
            raise ValueError("the slots differ from the PyTorch reference; not timed")
        restores.append(state.restore)
        return lambda b: state.step(b.positions, out)

    missing_bytes = job.batch * job.misses * job.row_bytes
    all_bytes = job.batch * job.top_k * job.row_bytes
    other = partial(Impl, role="floor", check=False)
    impls = [ours(swap_in), other("jitkern, resolve alone", build=lambda: resolve, bytes_moved=0)]
    if job.misses:
        impls.append(ceiling("h2d_gather of the misses", gather_misses))
    impls.append(other("h2d_gather of all rows", build=lambda: gather_all, bytes_moved=all_bytes))
    if on_gpu:
        for name, peer in (("sglang", peers.sglang_residency), ("vLLM", peers.vllm_residency)):
            impls.append(Impl(name, "peer", partial(engine, peer), check=False))
    return Case(
        op="residency",
        name=job.name,
        params=job._asdict(),
        bytes_moved=missing_bytes,
        make=make,
        outputs=lambda b: (b.slots, cache[b.expected.flatten()]),
        reference=lambda b: (b.expected.int(), host[b.rows.flatten().cpu()].to(device)),
        prepare=lambda b: cache.index_fill_(0, b.victims, 0),
        restore=lambda: [restore() for restore in restores],
        impls=impls,
        calls=job.steps,
        touched_bytes=1,  # as many working sets as calls: each is a step
    )
