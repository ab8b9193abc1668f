"""Figures in the pages of the ops, ``docs/ops``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median

from bench.figures import Bench, Said, goal, said, span
from bench.said_names import (
    COMPARE,
    ENGINE,
    GIVEN,
    ONE_BY_ONE,
    POOLS,
    SWAP,
    WAYS,
    misses,
    step_percent,
    uniform,
)
from bench.tables import read

BLOCKS, PITCHED = Bench("copy_blocks"), Bench("memcpy_2d")
UNPACK, MERGE = Bench("unpack"), Bench("merge")
MERGE_CPU = Bench("merge", "amd-epyc-2-cores")
WAYS_96 = Bench("ways", "pools_96_gib")

LOOP = "loop of cuMemcpy2DAsync in C++"
ROWS = "262144 rows of 656 B"


def blocks(towards: str, kib: int) -> str:
    """Return a case of copy_blocks, of pieces of `kib`."""
    return f"{towards}, 128 blocks x 32 layers x {kib} KB"


def one_decimal(value: float) -> str:
    """Return ``2.2`` or ``8,671``."""
    return f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def copy_blocks() -> Iterator[Said]:
    """`copy_blocks`."""
    sizes = (4, 16, 64, 256)

    def line(label: str, towards: str, impl: str, with_host: Sequence[int] = ()) -> Said:
        cells, values = "", []
        for kib in sizes:
            values.append(BLOCKS.gb_s(blocks(towards, kib), impl))
            cells += " {:.1f}"
            if kib in with_host:
                values.append(BLOCKS.host_us(blocks(towards, kib), impl))
                cells += " ({:.0f})"
            cells += " |"
        return said(f"| {label} |{cells}", *values)

    hosts = [BLOCKS.host_us(blocks(way, kib), LOOP) for way in ("h2d", "d2h") for kib in sizes]
    yield said("A loop of strided copies takes {:.0f} us a block,", median(hosts) / 128)
    yield said(
        "a decode step beside it is {:.0f} to {:.0f} % longer on the way to the host, {:.0f} to"
        " {:.0f} % to the GPU, and {:.0f} to {:.0f} % both ways at once.",
        *(
            end
            for way in ("d2h", "h2d", "both")
            for end in span(step_percent(f"copy_blocks {way}"))
        ),
    )
    yield line('to the GPU: `"sm"`', "h2d", "jitkern", sizes[:3])
    yield line("a loop of `cuMemcpy2DAsync` in C++", "h2d", LOOP, sizes[1:])
    yield line("one contiguous copy of as many bytes", "h2d", ENGINE)
    yield line('to the host: `"sm"`', "d2h", "jitkern", sizes[:3])
    yield line("the same loop", "d2h", LOOP, sizes[1:3])
    yield line("one contiguous copy", "d2h", ENGINE)


def memcpy_2d() -> Iterator[Said]:
    """`memcpy_2d_async`."""
    sizes = ("65536 rows of 4096 B", "4096 rows of 65536 B", "256 rows of 1048576 B")
    for label, impl in (
        ("`memcpy_2d_async`", "jitkern"),
        ("one contiguous copy of as many bytes", ENGINE),
        ("`copy_` of the strided view, pinned memory", "torch copy_, pinned"),
    ):
        yield said(
            f"| {label} |" + " {:.1f} / {:.1f} |" * 3,
            *(PITCHED.gb_s(f"{way}, {size}", impl) for size in sizes for way in ("h2d", "d2h")),
        )
    yield said(
        "A small call takes the host {:.1f} us where the driver's own call through the same"
        " interface takes {:.1f} to the GPU, {:.1f} and {:.1f} to the host:",
        *(
            PITCHED.host_us(f"{way}, 32 rows of 4096 B", impl)
            for way in ("h2d", "d2h")
            for impl in ("jitkern", "cuMemcpy2DAsync through FFI")
        ),
    )


def unpack() -> Iterator[Said]:
    """`unpack`."""
    cases = {
        "128 x 4 KiB": "128 pieces of 4096 B",
        "128 x 4 KiB, off by 5 and 3 bytes": "128 pieces of 4096 B, off by 5 and 3",
        "2,048 x 256 B": "2048 pieces of 256 B",
        "2,048 x 256 B, off by 5 and 3 bytes": "2048 pieces of 256 B, off by 5 and 3",
        "2,048 x 64 KiB": "2048 pieces of 65536 B",
        "one of 64 MiB among 2,000 of 256 B": "1 piece of 64 MiB among 2000 of 256 B",
        "128 descriptors of 10,500 pieces of 32 B": "128 descriptors, 43 MB in pieces of 32 B",
    }
    impls = ["jitkern", "a block a descriptor", "copy kernel", "loop of cuMemcpyAsync in C++"]
    yield said("an empty kernel takes {:.1f}:", UNPACK.us(cases["128 x 4 KiB"], "empty kernel"))
    for label, case in cases.items():
        known = impls[:3] if "descriptors" in case else impls  # pieces of 32 B are no loop's
        yield said(
            f"| {label} |" + " {} |" * len(known),
            *(one_decimal(UNPACK.us(case, impl)) for impl in known),
        )
    long = "2048 pieces of 65536 B, off by {} and {}"
    others = [long.format(i, j) for i in range(16) for j in range(16) if i or j]
    yield said(
        "with each of the {:d} other alignments of source and destination take {:.1f} to {:.1f}. A"
        " call takes the host {:.1f} us.",
        len(others),
        *span(UNPACK.each(others, "jitkern")),
        median(UNPACK.host_us(case) for case in cases.values()),
    )


def merge() -> Iterator[Said]:
    """`merge_states`."""
    yield said("all in one run of {} (`bench/results/nvidia-h200.json`;", MERGE.date())
    impls = ["jitkern", "vLLM", "FlashInfer", "triton, one kernel", "torch", "copy kernel"]
    for tokens in (1, 64, 256, 1024, 4096):
        case = f"{tokens} x 32 x 128 bf16"
        yield said(f"| {tokens:,} |" + " {} |" * 6, *MERGE.each([case], *impls))
    two, eight = "16384 x 32 x 128 bf16", "8 of 16384 x 32 x 128 bf16"
    yield said(
        "| 16,384 | {} ({:,.0f} GB/s) |" + " {} |" * 4 + " {} ({:,.0f} GB/s) |",
        MERGE.us(two),
        MERGE.gb_s(two),
        *MERGE.each([two], *impls[1:]),
        MERGE.gb_s(two, "copy kernel"),
    )
    yield said(
        "| 16,384, eight tensors | {} ({:,.0f} GB/s) | - | {}, with `torch.stack` | - |"
        " {}, with `torch.stack` | {} ({:,.0f} GB/s) |",
        MERGE.us(eight),
        MERGE.gb_s(eight),
        *MERGE.each([eight], "torch.stack, FlashInfer", "torch.stack, torch", "copy kernel"),
        MERGE.gb_s(eight, "copy kernel"),
    )
    shapes = [f"32 x {dim} bf16" for dim in (64, 96, 128, 192, 256, 512, 576)]
    shapes += [f"{heads} x 128 bf16" for heads in (1, 8, 128)]
    shapes += ["32 x 128 fp32", "32 x 128 fp16", "32 x 128 bf16 to fp8"]
    by_heads = f"{two}, lse by heads"
    counted = f"{eight}, 2 valid"
    yield said(
        "every dim from 64 to 576 and 1 to 128 heads, fp32, fp16 and an fp8 result are at {} to {}"
        " of a copy. With an lse of `[heads, tokens]`, whose rows do not follow each other as those"
        " of the values do, it is {:.3f}. With `num_valid` = 2 of 8 the call takes {} times as long"
        " as one of these two alone:",
        *span(MERGE.time(f"16384 x {shape}", "copy kernel", "jitkern") for shape in shapes),
        MERGE.time(by_heads, "copy kernel", "jitkern"),
        MERGE.time(counted, "jitkern", "jitkern, merge of these two"),
    )
    pair, eight = "host time, 2 of 1 row", "host time, 8 of 1 row"
    yield said(
        "takes {:.1f} us of host time on that machine, where an FFI call of as many tensors that"
        " does nothing takes {:.1f}; eight tensors take {:.1f} ({:.1f}). Results that the call has"
        " to make cost {:.0f} to {:.0f} us more:",
        *MERGE.each([pair, eight], "jitkern", "no-op FFI call"),
        *span(MERGE.us(c, "jitkern, new outputs") - MERGE.us(c) for c in (pair, eight)),
    )
    case = "4096 x 32 x 128 fp32"
    yield said(
        "4,096 tokens of 32 x 128 in fp32 take {:.0f} ms, {} times as fast as PyTorch",
        MERGE_CPU.us(case) / 1e3,
        MERGE_CPU.time(case, "torch", "jitkern"),
    )
    variants = read("merge_variants")["variants_us"]
    plain, streaming = (
        variants[f"{v}, 128 threads"]["16384 x 32 x 128"] for v in ("ld, st", "ld.cs, st.cs")
    )
    yield said("cost {:.0f} % at 16,384 tokens", 100 * streaming / plain - 100)


def h2d_gather() -> Iterator[Said]:
    """`h2d_gather`."""
    yield said(
        "a decode step beside it is {:.0f} to {:.0f} % longer", *span(step_percent("h2d_gather"))
    )
    at = {gib: POOLS.gb_s(uniform(262144, 656, gib)) for gib in (0.2, 4, 8, 16, 32, 64)}
    given = [POOLS.gb_s(uniform(262144, 656, gib), GIVEN) for gib in (0.2, 4, 64)]
    yield said(
        "{:.0f} to {:.0f} ns each, whatever kernel reads them: rows of 656 bytes fall from {:.0f}"
        " GB/s to {:.0f} at 4 GiB and {:.0f} at 64.",
        *misses(),
        *given,
    )
    yield said(
        "At 4 and 8 GiB the order gives {} of the small pool's bandwidth, at 16, 32 and 64 GiB {},"
        " {} and {} of it",
        at[4] / at[0.2],
        *(at[gib] / at[0.2] for gib in (16, 32, 64)),
        holds=f"{at[4] / at[0.2]:.2f}" == f"{at[8] / at[0.2]:.2f}",
    )
    pools = [f"gather of {ROWS}, pool of {gib} GiB" for gib in (0.2, 4, 16, 64)]
    for label, impls in {
        "SMs in order, pairs on the GPU": ["SMs in order, pairs on the GPU"],
        '`"sm"`': ["sm"],
        '`"cpu"`, 8 / 15 threads': ["cpu, 8 threads", "cpu, 15 threads"],
        '`"both"`, 8 / 15 threads': ["both, 8 threads", "both, 15 threads"],
        '`"auto"`': ["auto"],
        "PyTorch: rows picked on the CPU, one copy": ["torch: index on the CPU, copy"],
    }.items():
        cell = " / ".join(["{:.1f}"] * len(impls))
        values = [WAYS.gb_s(pool, impl) for pool in pools for impl in impls]
        yield said(f"| {label} |" + f" {cell} |" * len(pools), *values)
    short = "gather of 524288 rows of 256 B, pool of 64 GiB"
    yield said(
        "out of 64 GiB: {} by SMs in order, {} both ways. A pageable source of 32 GiB: {} by 15"
        ' threads. Of 40 points, 2,048 to 262,144 rows of these pools in both directions, `"auto"`'
        " is within 5 % of the best way at {:.0f}, and {:.0f} % off at the worst.",
        WAYS.gb_s(short, "SMs in order, pairs on the GPU"),
        WAYS.gb_s(short, "both"),
        WAYS.gb_s(f"gather of {ROWS}, pool of 32 GiB, pageable", "cpu, 15 threads"),
        goal("auto: points of 40 within 5 % of the best"),
        100 - 100 * goal("auto: of the best way, at the worst point"),
    )
    large = f"gather of {ROWS}, pool of 96 GiB"
    yield said(
        "had {} both ways by 15, where SMs in order had {} (`bench/results/pools_96_gib.json`)",
        WAYS_96.gb_s(large, "both, 15 threads"),
        WAYS_96.gb_s(large, "SMs in order, pairs on the GPU"),
    )


def d2h_scatter() -> Iterator[Said]:
    """`d2h_scatter`."""
    case = f"scatter of {ROWS}, pool of {{}} GiB, uniform"
    yield said(
        "{:.1f}, {:.1f} and {:.1f} times as fast as in the given order at 4, 16 and 64 GiB.",
        *(POOLS.time(case.format(gib), GIVEN, "jitkern") for gib in (4, 16, 64)),
    )
    way = f"scatter of {ROWS}, pool of {{}} GiB"
    impls = ("cpu, 8 threads", "cpu, 15 threads", "SMs in order, pairs on the GPU")
    yield said(
        "262,144 rows of 656 bytes go at {} GB/s by 8 threads and {} by 15, where SMs reach {};"
        " into 16 GiB at {} and {}, where SMs reach {}.",
        *(WAYS.gb_s(way.format(gib), impl) for gib in (64, 16) for impl in impls),
    )


def index() -> Iterator[Said]:
    """`indexing`."""
    triton = "triton, rows where they lie"
    table = "table of {} rows of 256 B, pool of {} GiB, {}"

    def times(count: int, gib: float, law: str) -> float:
        return POOLS.time(table.format(count, gib, law), triton, "jitkern")

    yield said(
        "524,288 random rows of 256 bytes come {:.1f}, {:.1f} and {:.1f} times as fast from 4, 16"
        " and 64 GiB as by a kernel",
        *(times(524288, gib, "uniform") for gib in (4, 16, 64)),
    )
    yield said(
        "{:.1f} times as fast, and no faster of one of 64 GiB. Out of a small table such a kernel"
        " brings 24,576 distinct rows {} times as fast as ours",
        times(24576, 16, "Zipf(1.1)"),
        1 / times(24576, 0.2, "uniform"),
        holds=times(24576, 64, "Zipf(1.1)") < 1.01,
    )


def swap() -> Iterator[Said]:
    """`swap_rows`."""
    yield said(
        "a decode step beside it is {:.0f} to {:.0f} % longer", *span(step_percent("swap_rows"))
    )
    small, *large = [f"{ROWS}, distinct, pool of {gib} GiB" for gib in (0.4, 4, 16, 64)]
    yield said(
        "262,144 rows of 656 bytes move {}, {} and {} GB/s at 4, 16 and 64 GiB, both directions"
        " together, {:.1f}, {:.1f} and {:.1f} times as fast as in the order given",
        *(SWAP.gb_s(case) for case in large),
        *(SWAP.time(case, 'jitkern, order="given"', "jitkern") for case in large),
    )
    yield said(
        "rows of 656 bytes move {} GB/s, both directions together, on an H200 whose two copy"
        " engines reach {:.1f}; `d2h_scatter` and `h2d_gather`, one after the other, {}.",
        SWAP.gb_s(small),
        SWAP.gb_s(small, "cudaMemcpyAsync both ways, contiguous"),
        SWAP.gb_s(small, ONE_BY_ONE),
    )


def compare_key() -> Iterator[Said]:
    """`fast_compare_key`."""
    impls = ("jitkern", "memcmp", "std::mismatch -O3", "no-op FFI call")
    for tokens in (1, 16, 1024, 8192, 131072):
        times = COMPARE.each([f"{tokens} equal int32 tokens"], *impls)
        yield said(f"| {tokens:,} |" + " {:#.3g} |" * 4, *times)


OPS: dict[str, Callable[[], Iterator[Said]]] = {
    f"docs/ops/{name}.md": page
    for name, page in {
        "copy_blocks": copy_blocks,
        "memcpy_2d": memcpy_2d,
        "unpack": unpack,
        "merge": merge,
        "h2d_gather": h2d_gather,
        "d2h_scatter": d2h_scatter,
        "index": index,
        "swap": swap,
        "compare_key": compare_key,
    }.items()
}
