"""store_rows: rows in an engine's format, and rows of two parts, to random slots of a cache.

Bytes: parts are read once, rows of the cache are written once. The ceiling is a kernel that reads
and writes as many.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

import jitkern
from bench import peers
from bench.case import Case, Context, Impl, Row
from bench.cases import common
from bench.cases.common import ours, peer

MIN_SLOTS = 262_144  # a cache of rows of 656 bytes is then larger than twice the L2
COUNTS, CPU_ROWS = (1, 16, 256, 4096, 16_384, 131_072), 1024
COPY = "copy kernel, same bytes in and out"
FP8 = torch.float8_e4m3fn


class Job(NamedTuple):
    """What a row is: two parts of bfloat16, and the bytes that a cache holds of it."""

    name: str
    parts: tuple[int, int]
    row_bytes: int
    num_caches: int = 1
    format: str | None = None
    shape: tuple[int, ...] = (-1,)  # of a row of a part
    in_order: bool = False  # slots follow each other, as in a prefill; else they are random

    @property
    def read_bytes(self) -> int:
        return 2 * sum(self.parts)


MLA = Job("fp8_ds_mla", (512, 64), 656, format="fp8_ds_mla")
PREFILL = MLA._replace(name="fp8_ds_mla, slots in order", in_order=True)
KV = Job("fp8, K and V of 8 x 128", (1024, 1024), 1024, 2, format="fp8", shape=(8, 128))
PARTS = Job("parts of 1024 and 128 B", (512, 64), 1152)


def run(ctx: Context) -> Iterator[Row]:
    for job in (MLA, KV, PARTS):
        for rows in counts(ctx):
            case = case_of(ctx, job, rows)
            yield from common.beside(ctx, case, _peers(ctx, job), COPY, rows <= 256)
    case = case_of(ctx, PREFILL, counts(ctx)[-1])
    yield from common.beside(ctx, case, _peers(ctx, PREFILL), COPY, False)


def counts(ctx: Context) -> tuple[int, ...]:
    if ctx.device == "cpu":
        return (CPU_ROWS,)
    return (256, COUNTS[-1]) if ctx.quick else COUNTS


def cases(ctx: Context) -> Iterator[Case]:
    for job in (MLA, KV, PARTS):
        yield case_of(ctx, job, counts(ctx)[-1])
    b = case_of(ctx, MLA, 1).make(0)
    empty = b.caches, b.indices[:0], tuple(part[:0] for part in b.parts)
    one = b.caches, b.indices, b.parts
    yield from common.call_cases("store_rows", jitkern.store_rows, empty, one, format=MLA.format)


def case_of(ctx: Context, job: Job, rows: int) -> Case:
    """Return the case of one job and number of rows: jitkern and a copy."""
    on_gpu, device = ctx.device == "cuda", ctx.device
    slots = max(2 * rows, MIN_SLOTS if on_gpu else 0)
    new_bytes = partial(torch.empty, dtype=torch.uint8, device=device)
    caches = new_bytes(job.num_caches, slots, job.row_bytes)
    scale = torch.tensor([0.01], device=device)
    written_bytes = job.num_caches * job.row_bytes
    copied_bytes = job.read_bytes, written_bytes
    if not on_gpu:  # copy_ reads as many bytes as it writes
        copied_bytes = (sum(copied_bytes) // 2,) * 2

    def make(_: int) -> SimpleNamespace:
        new_slots = torch.arange if job.in_order else torch.randperm
        slot_numbers = new_slots(slots, device=device)[:rows]
        items = rows * max(job.read_bytes, copied_bytes[0]) // 2
        read = torch.randn(items, device=device).bfloat16()
        parts = read[: rows * sum(job.parts)].split([rows * dim for dim in job.parts])
        return SimpleNamespace(
            caches=tuple(caches),
            indices=slot_numbers.to(torch.int32),
            indices64=slot_numbers,
            parts=[part.view(rows, *job.shape) for part in parts],
            scales=(scale, scale) if job is KV else None,
            read=read.view(torch.uint8)[: rows * copied_bytes[0]],
            written=new_bytes(rows * copied_bytes[1]),
            dense=[new_bytes(rows, job.row_bytes) for _ in caches],
            in_order=torch.arange(rows, dtype=torch.int32, device=device),
        )

    def reference(b: Any) -> tuple[torch.Tensor, ...]:
        pairs = zip(b.caches, stored(job, b.parts, b.scales), strict=True)
        return tuple(cache.clone().index_copy_(0, b.indices64, rows) for cache, rows in pairs)

    def store(b: Any) -> None:
        jitkern.store_rows(b.caches, b.indices, b.parts, format=job.format, scales=b.scales)

    return Case(
        op="store_rows",
        name=f"{rows} rows, {job.name}",
        params={"rows": rows, "read_bytes": job.read_bytes, "written_bytes": written_bytes},
        bytes_moved=rows * (job.read_bytes + written_bytes),
        make=make,
        outputs=lambda b: b.caches,
        reference=reference,
        impls=[ours(store), common.copy_impl(ctx, lambda b: (b.written, b.read))],
        calls=4 if rows > 16_384 else 16 if rows > 1024 else 50,
    )


# -- in plain PyTorch ------------------------------------------------------------------------------


def stored(job: Job, parts: Any, scales: Any) -> list[torch.Tensor]:
    """Return the rows of each cache as bytes, [rows, row_bytes]."""
    if job is KV:
        scaled = [part.float() / scale for part, scale in zip(parts, scales, strict=True)]
        return [x.clamp(-448, 448).to(FP8).view(torch.uint8).flatten(1) for x in scaled]
    if job is PARTS:
        return [torch.cat(parts, 1).view(torch.uint8)]
    groups = parts[0].float().unflatten(1, (-1, 128))
    scales = (groups.abs().amax(2) / 448).clamp(min=1e-4)
    mantissa, exponent = torch.frexp(scales)
    scales = torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).int())
    payload = (groups / scales.unsqueeze(2)).to(FP8).flatten(1)
    return [torch.cat([x.view(torch.uint8) for x in (payload, scales, parts[1])], 1)]


def _peers(ctx: Context, job: Job) -> list[Impl]:
    def torch_ops(b: Any) -> None:
        for cache, new in zip(b.caches, stored(job, b.parts, b.scales), strict=True):
            cache[b.indices64] = new

    def quantise_then_store(b: Any) -> None:
        jitkern.store_rows(b.dense, b.in_order, b.parts, format=job.format, scales=b.scales)
        k_cache, v_cache = (*b.caches, None)[:2]
        jitkern.store_cache(k_cache, v_cache, b.indices, *b.dense)

    def part_by_part(b: Any) -> None:
        pieces = b.caches[0].tensor_split([2 * job.parts[0]], 1)
        for piece, part in zip(pieces, b.parts, strict=True):
            jitkern.store_cache(piece, None, b.indices, part.view(torch.uint8))

    def vllm(b: Any) -> None:
        if job.format == MLA.format:
            peers.vllm_store_mla()(*b.parts, *b.caches, b.indices64)
        else:
            peers.vllm_store_fp8()(*b.parts, *b.caches, b.indices64, *b.scales)

    def sglang(b: Any) -> None:
        peers.sglang_store_mla()(*b.parts, *b.caches, b.indices64)

    found = [peer("torch ops and cache[idx] = x", torch_ops)]
    if job is PARTS:
        return [*found, peer("jitkern, a launch per part", part_by_part)]
    found += [peer("jitkern, quantise, then store", quantise_then_store)]
    if ctx.device == "cuda":
        found += [peer("vLLM", vllm)]
        if job.format == MLA.format:  # its scales are not powers of two
            found += [peer("sglang, two launches", sglang, check=False)]
    return found
