"""What the ops are meant to reach, and what a run got: ratios of figures of that run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from jitkern.bench import Row

# benchmark | case, by a pattern | implementation | measure | goal
#   of PEER         speed, as a multiple of the peer's; the goal is the least
#   time of PEER    time, as a multiple of the peer's; the goal is the most
#   above FLOOR     microseconds more than the floor takes
#   us, host us, ms, NAME of params
# A line whose figures a run lacks says nothing.
WANTED = """
store | 131072 rows of 656 B | jitkern | of copy kernel, same bytes | 0.93
store | 131072 rows of 256 B | jitkern | of copy kernel, same bytes | 0.97
store | 131072 rows of 1024 B | jitkern | of copy kernel, same bytes | 0.97
store | 131072 rows of 2048 B | jitkern | of copy kernel, same bytes | 0.97
store | 131072 rows of * B | jitkern | of nvcc, mini-sglang style | 1.0
store | 131072 rows of * B | jitkern | of torch cache[idx] = x, twice | 4.0
store | 131072 rows of * B, one cache | jitkern | of copy kernel, same bytes | 0.93
store | * B and * B | jitkern | of jitkern, twice | 1.0
store | * rows of * B | jitkern | above empty kernel | 0.3
store | 8192 rows of * B | jitkern | of copy_ of the same bytes | 0.8
store | 8192 rows of * B | jitkern | of torch cache[idx] = x, twice | 8.0
index | 65536 rows of * | jitkern | of copy kernel | 0.97
index | 65536 rows of * | jitkern | of torch index_select(out=) | 1.05
index | 65536 rows of * | jitkern | of torch F.embedding | 1.05
index | 8192 rows of * | jitkern | of copy_ of as many rows | 0.8
h2d_gather | 262144 rows of 656 B, distinct | jitkern, num_sms=2, dedup=False | of 6 line-aligned, 2 SMs | 0.99
h2d_gather | 262144 rows of 656 B, distinct | jitkern, num_sms=2, dedup=False | of cudaMemcpyAsync, contiguous | 0.87
h2d_gather | 262144 rows of 656 B, distinct | jitkern, dedup=True | time of jitkern, dedup=False | 1.02
h2d_gather | 262144 rows of 656 B, repeats | jitkern | of cudaMemcpyAsync, contiguous | 1.25
h2d_gather | * rows of 656 B, distinct | jitkern | time of 4 loads before stores | 1.2
d2h_scatter | 262144 rows of 656 B, distinct | jitkern | of cudaMemcpyAsync, contiguous | 0.85
pools | scatter of 262144 rows of 656 B, pool of 16 GiB, uniform | jitkern | of jitkern, as they come | 1.8
pools | gather of 524288 rows of 256 B, pool of 16 GiB, uniform | jitkern | of jitkern, as they come | 2.9
pools | gather of 524288 rows of 8 B, pool of 16 GiB, uniform | jitkern | of jitkern, as they come | 3.5
pools | gather of * rows of 656 B, pool of 0.2 GiB, uniform | jitkern | time of jitkern, as they come | 1.01
pools | table of 24576 rows of 256 B, pool of 16 GiB, Zipf(1.1) | jitkern | of triton, rows where they lie | 3.0
swap | 262144 rows of 656 B, distinct, pool of 0.4 GiB | jitkern | of cudaMemcpyAsync both ways, contiguous | 0.76
swap | 262144 rows of 656 B, distinct, pool of 0.4 GiB | jitkern | of d2h_scatter, then h2d_gather | 1.3
swap | 262144 rows of 656 B, distinct, pool of 16 GiB | jitkern | of jitkern, order="given" | 2.5
copy_blocks | h2d, 128 blocks x 32 layers x 4 KB | jitkern | of cudaMemcpyAsync, contiguous | 0.90
copy_blocks | h2d, 128 blocks x 32 layers x 16 KB | jitkern | of cudaMemcpyAsync, contiguous | 0.91
copy_blocks | h2d, 128 blocks x 32 layers x 64 KB | jitkern | of cudaMemcpyAsync, contiguous | 0.92
copy_blocks | d2h, 128 blocks x 32 layers x ?* KB | jitkern | of cudaMemcpyAsync, contiguous | 0.85
copy_blocks | * KB | jitkern | of loop of cuMemcpy2DAsync in C++ | 1.0
copy_blocks | * KB | jitkern | host us | 6.0
copy_blocks | * 256 KB | jitkern, pairs on the CPU | of cudaMemcpyAsync, contiguous | 0.97
copy_blocks | * block-first | jitkern, pairs on the CPU | of cudaMemcpyAsync, contiguous | 0.97
memcpy_2d | * rows of [61]*[60] B | jitkern | of cudaMemcpyAsync, contiguous | 0.99
memcpy_2d | * rows of [61]*[60] B | jitkern | of torch copy_, pageable | 5.0
memcpy_2d | * 32 rows of 4096 B | jitkern | host us of cuMemcpy2DAsync through FFI | 1.2
unpack | 128 pieces of 4096 B* | jitkern | above empty kernel | 1.3
unpack | 2048 pieces of 256 B* | jitkern | above empty kernel | 1.5
unpack | 2048 pieces of 65536 B | jitkern | of copy kernel | 0.95
unpack | 128 descriptors, 43 MB in pieces of 32 B | jitkern | of copy kernel | 0.6
unpack | * | jitkern | of copy_ of as many bytes | 0.8
merge | 16384 x * bf16 | jitkern | of copy kernel | 0.92
merge | 16384 x 32 x 128 bf16 | jitkern | of torch | 4.3
merge | 16384 x 32 x 128 bf16 | jitkern | of triton, two kernels | 1.5
merge | * x 32 x 128 bf16 | jitkern | of vLLM | 1.0
merge | * x 32 x 128 bf16 | jitkern | of FlashInfer | 1.0
merge | 8 of 16384 x 32 x 128 bf16 | jitkern | of copy kernel | 0.98
merge | 8 of 16384 x 32 x 128 bf16 | jitkern | of torch.stack, torch | 3.0
merge | host time, 2 of 1 row | jitkern | us | 5.0
merge | host time, 8 of 1 row | jitkern | us | 8.0
merge | * fp32 | jitkern | of torch | 4.0
compare_key | 131072 equal int32 tokens | jitkern | of std::mismatch -O3 | 4.0
compare_key | 131072 equal int32 tokens | jitkern | time of memcmp | 1.3
compare_key | 1 equal int32 tokens | jitkern | above no-op FFI call | 0.1
compare_key | 16 equal int32 tokens | jitkern | above no-op FFI call | 0.1
ring | 128 x 4096 B, a push each, in a graph | jitkern, mapped | above empty kernel | 3.5
ring | host time, 128 descriptors | push, mapped | us | 0.5
ring | host time, 128 descriptors | push and unpack, mapped | us | 6.0
ring | served by * | jitkern | us | 6.0
pipeline | load, * | jitkern, depth 4 | time of the longer side alone | 1.05
pipeline | update, both directions | jitkern, depth 4 | of both engines at once, no bodies | 0.9
offload | 128 blocks * | jitkern, numbers on the GPU | of copy_blocks, pairs on the GPU | 0.97
offload | 128 blocks * | jitkern, lists | of copy_blocks, pairs on the CPU | 0.97
beside | * | copy_blocks h2d | slowdown of params | 1.06
beside | * | copy_blocks d2h | slowdown of params | 1.06
beside | * | copy_blocks both | slowdown of params | 1.09
beside | * | pages, ?2? | slowdown of params | 1.06
beside | * | h2d_gather | slowdown of params | 1.06
beside | * | swap_rows | slowdown of params | 1.09
host_overhead | store_cache, 1 row of 656 B | jitkern | time of bare cuLaunchKernel, C++ loop + no-op FFI call, 5 tensors | 1.15
host_overhead | store_cache, 1 row of 656 B | jitkern | time of torch cache[idx] = x, twice | 0.333
first_call | first kernel of a process | jitkern: NVRTC, cold | ms | 500
first_call | store | jitkern: NVRTC, cold | ms | 150
first_call | index | jitkern: NVRTC, cold | ms | 150
first_call | h2d_gather* | jitkern: NVRTC, cold | ms | 150
first_call | store | jitkern: NVRTC, cold | of load_inline with nvcc, cold | 60
first_call | store | jitkern: warm, new process | ms | 2
first_call | index | jitkern: warm, new process | ms | 2
first_call | h2d_gather* | jitkern: warm, new process | ms | 2
first_call | first call of a process, imports included | jitkern: warm | ms | 80
first_call | first call of a process, imports included | jitkern: warm | time of load_inline of what is built | 1.0
first_call | first call of a process, imports included | jitkern: warm, no bytecode | ms | 80
comm | all_reduce, 8 KB bf16, * GPUs, host time | jitkern | time of torch.distributed | 0.6
comm | all_reduce, 8 KB bf16, * GPUs, host time | jitkern | time of bare ncclAllReduce | 1.15
comm | all_reduce, 8 KB bf16, * GPUs, host time | jitkern | above jitkern, no deadlines | 0.3
comm | all_reduce, * bf16, * GPUs | jitkern | time of torch.distributed | 1.0
comm | TPEmbedding, 1 tokens of *, * GPUs | jitkern | time of mask, F.embedding, all_reduce | 0.5
comm | TPEmbedding, 1,024 tokens of *, * GPUs | jitkern | time of mask, F.embedding, all_reduce | 0.75
comm | TPEmbedding, 16,384 tokens of *, * GPUs | jitkern | time of mask, F.embedding, all_reduce | 0.8
peer | all_reduce, 8 KB bf16, 2 GPUs | jitkern | time of torch.distributed | 0.28
peer | all_reduce, 128 KB bf16, 2 GPUs | jitkern | time of torch.distributed | 0.32
peer | all_reduce, 1 MB bf16, 2 GPUs | jitkern | time of torch.distributed | 0.42
peer | all_reduce, * bf16, * GPUs | jitkern | time of torch symmetric memory, one shot | 1.0
peer | all_reduce, * bf16, * GPUs | jitkern | time of torch symmetric memory, two shots | 1.0
peer | all_reduce, 8 KB bf16, 2 GPUs | jitkern, one behind the other | us | 2.6
peer | all_reduce, 1 MB bf16, 2 GPUs | jitkern, one behind the other | us | 6.8
peer | all_reduce, 8 KB bf16, * GPUs, host time | jitkern | us | 6.0
peer | TPEmbedding, 1 tokens of *, 2 GPUs | jitkern | of mask, F.embedding, all_reduce | 7.0
peer | TPEmbedding, 1,024 tokens of *, 2 GPUs | jitkern | of mask, F.embedding, all_reduce | 4.0
peer | peer_gather, *, 2 GPUs | jitkern | of one rank, by itself and alone | 1.9
peer | peer_gather, *, 4 GPUs | jitkern | of one rank, by itself and alone | 3.6
peer | GEMM of * | jitkern | time of each rank by itself, all at once | 1.0
"""  # noqa: E501


@dataclass(frozen=True)
class Goal:
    """One line: a figure, what it should be, what it is."""

    figure: str
    wanted: str
    got: str
    met: bool


def reached(rows: Sequence[Row]) -> list[Goal]:
    """Return a line for each goal that the rows have figures for."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row.median_us:
            cases.setdefault((row.op, row.case), {})[row.impl] = row
    found = []
    for line in WANTED.strip().splitlines():
        op, pattern, impl, measure, goal = (part.strip() for part in line.split(" | "))
        for (its_op, case), impls in cases.items():
            if op == its_op and fnmatchcase(case, pattern):
                found += _goals(f"{op}, {case}", impls, impl, measure, float(goal))
    return found


def _goals(
    case: str, rows: dict[str, Row], pattern: str, measure: str, goal: float
) -> Iterator[Goal]:
    for impl, row in rows.items():
        if impl == pattern or fnmatchcase(impl, pattern):
            got, unit = _figure(rows, row, measure)
            if got is not None:
                least = measure.startswith("of ")
                met = got >= goal if least else got <= goal
                sign = ">=" if least else "<="
                name = f"{case}: {impl}, {measure}"
                yield Goal(name, f"{sign} {goal:g} {unit}", f"{got:.3f} {unit}", met)


def _figure(rows: dict[str, Row], row: Row, measure: str) -> tuple[float | None, str]:
    """Return the figure and its unit; None where the run lacks it."""
    us = row.median_us or 0.0
    if measure in ("us", "ms", "host us"):
        return {"us": us, "ms": us / 1e3, "host us": row.host_us}[measure], measure[-2:]
    if measure.endswith(" of params"):
        return row.params.get(measure.removesuffix(" of params")), "x"
    kind, _, names = measure.partition("of ")
    if measure.startswith("above "):
        kind, names = "above ", measure.removeprefix("above ")
    others = [rows.get(name) for name in names.split(" + ")]
    known = [other for other in others if other is not None and other.median_us]
    if len(known) < len(others):
        return None, ""
    theirs_us = sum(other.median_us or 0.0 for other in known)
    if kind == "above ":
        return us - theirs_us, "us"
    if kind == "time ":
        return us / theirs_us, "x"
    if kind == "host us ":
        theirs = known[0].host_us
        return (row.host_us / theirs if row.host_us and theirs else None), "x"
    # By bandwidth: a ceiling may move other bytes.
    if row.gb_s and known[0].gb_s:
        return row.gb_s / known[0].gb_s, "x"
    return theirs_us / us, "x"


def goals_table(goals: Sequence[Goal]) -> Table:
    """Return the goals this run has figures for, with what it got."""
    made = Table(title="goals", title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in ("figure", "goal", "got", ""):
        made.add_column(column, justify="right" if column in ("goal", "got") else "left")
    for goal in goals:
        met = "met" if goal.met else "short"
        made.add_row(goal.figure, goal.wanted, goal.got, met, style="green" if goal.met else "red")
    return made


def recorded(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the goals as they go into the JSON."""
    return [asdict(goal) for goal in reached(rows)]
