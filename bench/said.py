"""The pieces of the docs that have figures, by page: ``bench/figures.py`` puts them in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from bench.figures import Bench, Said, said, span
from bench.said_ci import bench_ci
from bench.said_names import (
    ARGSORT,
    COLD,
    COPY,
    ENGINE,
    FIRST,
    FIRSTS,
    GATHER,
    GIVEN,
    GRAD,
    HOST,
    INDEX,
    LARGE,
    LAUNCH,
    NVCC,
    ONE_CALL,
    POOLS,
    STORE,
    TWICE,
    WARMED,
    uniform,
)
from bench.said_ops import BLOCKS, LOOP, OPS, UNPACK, blocks
from bench.said_performance import performance
from bench.tables import read

PINNED, RING, PIPELINE = Bench("pinned_pool", "pinned_pool"), Bench("ring"), Bench("pipeline")
COMM = Bench("comm", "nvidia-h200-x2")
NEW_SIZE = ("store", "index", "h2d_gather", "h2d_gather, large call")


def seconds(bench: Bench, cases: Iterable[str], *impls: str) -> list[float]:
    """Return the seconds of some implementations in some cases."""
    return [us / 1e6 for us in bench.each(cases, *impls)]


def readme() -> Iterator[Said]:
    """README."""
    yield said(
        "| first call of a new row size | {:.2f} to {:.2f} s, no compiler on the machine |"
        " {:.1f} to {:.1f} s with nvcc |",
        *span(seconds(FIRST, NEW_SIZE, COLD)),
        *span(seconds(FIRST, NEW_SIZE[:3], "load_inline with nvcc, cold")),
    )
    case = "131072 rows of 1024 B"
    yield said(
        "| `store_cache`, 131,072 rows of 1 KB | {} GB/s (a copy: {}) | PyTorch {}, torch.compile"
        " {}, a warp a row {} |",
        *(STORE.gb_s(case, impl) for impl in ("jitkern", COPY, TWICE, "torch.compile", NVCC)),
    )
    yield said(
        "| {:.1f} us in inference mode, {:.1f} with gradients enabled (a bare launch: {:.1f}) |"
        " PyTorch {} us |",
        *HOST.each([ONE_CALL], "jitkern", GRAD, LAUNCH, TWICE),
    )
    case = "65536 rows of 8192 B"
    yield said(
        "| `indexing`, 65,536 rows of 8 KB | {} GB/s (a copy: {}) | index_select {} |",
        *(
            INDEX.gb_s(case, impl)
            for impl in ("jitkern", "copy kernel", "torch index_select(out=)")
        ),
    )
    yield said(
        "| `h2d_gather`, distinct rows of 656 B | {} GB/s on 3 SMs | `cudaMemcpyAsync` of as many"
        " bytes in one piece {:.0f} |",
        GATHER.gb_s(LARGE),
        GATHER.gb_s(LARGE, ENGINE),
    )
    case = "262144 rows of 656 B, repeats"
    yield said(
        "| the same, a third of the rows repeated | {:.0f} GB/s | {:.0f} |",
        GATHER.gb_s(case),
        GATHER.gb_s(case, ENGINE),
    )
    case = uniform(262144, 656, 16)
    yield said(
        "| {} GB/s, in the order of the pool | {} as they come; `torch.argsort` first {} |",
        *(POOLS.gb_s(case, impl) for impl in ("jitkern", GIVEN, ARGSORT)),
    )
    case = blocks("h2d", 16)
    yield said(
        '| `copy_blocks`, 128 blocks of 32 layers x 16 KB to the GPU, `method="sm"` | {} GB/s |'
        " a loop of `cuMemcpy2DAsync` {}; one piece {} |",
        *(BLOCKS.gb_s(case, impl) for impl in ("jitkern", LOOP, ENGINE)),
    )
    yield said(
        "| `PinnedPool` of 64 GiB | {:.1f} s | `cuMemHostAlloc` {:.1f} s |",
        *seconds(PINNED, ["64 GiB"], "PinnedPool", "cuMemHostAlloc"),
    )


def index() -> Iterator[Said]:
    """The first page."""
    yield said(
        "compiled by NVRTC in [{:.2f} to {:.2f} s](performance.md#the-first-call),",
        *span(seconds(FIRST, NEW_SIZE, COLD)),
    )


def cli() -> Iterator[Said]:
    """`jitkern warm`."""
    least, most = span(bench.us(WARMED) / 1e6 for bench in (FIRST, *FIRSTS))
    yield said(
        "3 ops x 8 row sizes x 4 archs are 328 kernels and take 15 to 22 s on two cores;",
        holds=15 <= least <= most <= 22,
    )


def pinned_pools() -> Iterator[Said]:
    """`PinnedPool`."""
    both = ["32 GiB", "64 GiB"]
    ours, driver = (seconds(PINNED, both, impl) for impl in ("PinnedPool", "cuMemHostAlloc"))
    yield said("| `PinnedPool`, memory that was touched before | {} s | {} s |", *ours)
    yield said("| `cuMemHostAlloc` | {} s | {} s |", *driver)
    yield said(
        "| `torch.empty(pin_memory=True)` | {} s | |",
        *seconds(PINNED, both[:1], "torch, pin_memory=True"),
    )
    yield said(
        "That is {:.1f} and {:.1f} times as fast, {:.0f} GB/s:",
        *(theirs / mine for theirs, mine in zip(driver, ours, strict=True)),
        PINNED.gb_s("64 GiB", "PinnedPool"),
    )
    fresh, again = (row["touch_s"] + row["register_s"] for row in read("pinned_pool_fresh")["rows"])
    yield said(
        "of fresh 32 GiB the touch and the registration took {} s instead of {}", fresh, again
    )


def descriptor_ring() -> Iterator[Said]:
    """Rings."""
    graph, host = "128 x 4096 B, a push each, in a graph", "host time, 128 descriptors"
    times = {
        "128 packets of 4 KiB, a call in a graph, with completion": (graph, "jitkern, mapped"),
        "the same where nothing was pushed": ("nothing pushed, in a graph", "jitkern, mapped"),
        "an empty kernel there": (graph, "empty kernel"),
        "host, `push` of 128 descriptors": (host, "push, mapped"),
        "host, `unpack`": (host, "unpack, mapped"),
        "served, one packet of 4 KiB, 1 SM: from the push until `wait` returns": (
            "served by 1 SM, 1 x 4096 B",
            "jitkern",
        ),
        "served, 128 x 256 B, 1 SM": ("served by 1 SM, 128 x 256 B", "jitkern"),
        "served, 128 x 256 B, 8 SMs": ("served by 8 SMs, 128 x 256 B", "jitkern"),
        "served, 128 x 4 KiB, 8 SMs": ("served by 8 SMs, 128 x 4096 B", "jitkern"),
    }
    for label, (case, impl) in times.items():
        yield said(f"| {label} | {{:.1f}} |", RING.us(case, impl))
    yield said(
        "The copy itself is {:.1f} of the {:.1f} us",
        UNPACK.us("128 pieces of 4096 B"),
        RING.us(graph, "jitkern, mapped"),
    )
    yield said(
        "{:.1f} us a call together in a graph, and {:.1f} of the host a push.",
        RING.us(graph, "jitkern, device"),
        RING.us(host, "push, device"),
    )


def offload_pipeline() -> Iterator[Said]:
    """Pipelines."""
    cases = ("load, bodies of sleep", "load, bodies of 2 GEMMs of 2048^3", "in a graph")
    for label, impl in {
        "depth 1": "jitkern, depth 1",
        "depth 2": "jitkern, depth 2",
        "depth 4": "jitkern, depth 4",
        "depth 8": "jitkern, depth 8",
        "depth 4, 4 streams": "jitkern, 4 streams",
        "two buffers by hand, with torch's streams and events": "torch, double buffer",
        "one stream, copy and body in turn": "one behind the other",
        "the least": "the longer side alone",
    }.items():
        known = cases if label in ("depth 4", "the least") else cases[:2]
        times = [us / 1e3 for us in PIPELINE.each(known, impl)]
        yield said(f"| {label} |" + " {:.2f} |" * len(times), *times)
    both, host = "update, both directions", "host, us an iteration"
    yield said(
        "go at {} GB/s at depth 4, where both engines at once make {}; at depth 2 at {}. An"
        " iteration takes the host {:.1f} us.",
        PIPELINE.gb_s(both, "jitkern, depth 4"),
        PIPELINE.gb_s(both, "both engines at once, no bodies"),
        PIPELINE.gb_s(both, "jitkern, depth 2"),
        PIPELINE.us(host),
    )
    watched, every, auto = PIPELINE.each(
        [host], "jitkern, monitored", "jitkern, every iteration timed", "jitkern, auto depth"
    )
    yield said(
        "an iteration of a load and a body then costs the host {:.1f} us more, by default {:.1f}.",
        every - PIPELINE.us(host),
        watched - PIPELINE.us(host),
    )
    yield said("and to decide takes {:.1f} us an iteration besides.", auto - every)


def offload_engine() -> Iterator[Said]:
    """Attention over an offloaded cache."""
    offload = Bench("offload")
    case = "prefill of 16,384 tokens, 8 layers, a quarter of the cache on the GPU"
    ms = offload.us(case) / 1e3
    yield said(
        "take an H200 {} ms ({:,.0f},000 tokens/s), {} times as fast as one behind the other. With"
        " copies by SMs it is {:.1f} ms:",
        ms,
        16384 / ms,
        offload.time(case, "one behind the other", "jitkern"),
        offload.us(case, "jitkern, copies by SMs") / 1e3,
    )


def comm() -> Iterator[Said]:
    """Sums over ranks."""
    impls = ("jitkern", "jitkern, registered buffer", "torch.distributed")
    impls += ("copied to a buffer and back, as mini-sglang",)
    for size in ("8 KB", "128 KB", "1 MB", "16 MB", "256 MB"):
        times = COMM.each([f"all_reduce, {size} bf16, 2 GPUs"], *impls)
        units = [(us, "{:.1f} us") if us < 1000 else (us / 1e3, "{:.2f} ms") for us in times]
        cells = "".join(f" {unit} |" for _, unit in units)
        yield said(f"| {size} |{cells}", *(time for time, _ in units))
    yield said(
        "a call of 8 KB takes {:.1f} us there, {:.1f} us by way of `torch.distributed`, {:.1f} us"
        " with nothing around NCCL but an FFI call, and {:.1f} us with `timeout_s=math.inf`:",
        *COMM.each(
            ["all_reduce, 8 KB bf16, 2 GPUs, host time"],
            *("jitkern", "torch.distributed", "bare ncclAllReduce", "jitkern, no deadlines"),
        ),
    )


def nn() -> Iterator[Said]:
    """Split embeddings."""
    for tokens in ("1", "16", "64", "256", "1,024", "16,384"):
        case = f"TPEmbedding, {tokens} tokens of 4,096 bf16, 2 GPUs"
        theirs = "mask, F.embedding, all_reduce"
        yield said(
            f"| {tokens} | {{:.1f}} us | {{:.1f}} us | {{}} |",
            *COMM.each([case], "jitkern", theirs),
            COMM.time(case, "jitkern", theirs),
        )


def torch_ops() -> Iterator[Said]:
    """What PyTorch's rules cost."""
    rules = read("torch_rules")["cuda"]
    modes = ("inference", "no_grad", "grad")
    writing = ("store_cache", "indexing out", "h2d_gather", "d2h_scatter")

    def more(mode: str, op: str) -> float:
        return rules[f"{mode}: {op}"]["new_us"] - rules[f"{mode}: {op}"]["old_us"]

    for label, op in {
        "`store_cache`": "store_cache",
        "`indexing`, new output": "indexing",
        "`indexing`, `output=`": "indexing out",
        "`h2d_gather`": "h2d_gather",
        "`d2h_scatter`": "d2h_scatter",
    }.items():
        times = [rules[f"{mode}: {op}"][when] for mode in modes for when in ("old_us", "new_us")]
        yield said(f"| {label} |" + " {:.2f} to {:.2f} |" * 3, *times)
    yield said(
        "what writes into tensors costs {:.1f} to {:.1f} us more there, and {:.1f} to {:.1f} us"
        " elsewhere.",
        *span(more("inference", op) for op in writing),
        *span(more(mode, op) for mode in modes[1:] for op in writing),
    )
    yield said("and costs {:.1f} us at most.", max(more(mode, "indexing") for mode in modes))
    yield said(
        "{:.2f} to {:.2f} us for `store_cache`, is how far such medians stray.",
        *span(rules[f"{mode}: store_cache"]["old_us"] for mode in modes),
    )
    calls = read("one_allocation")["calls"]

    def second(count: int, key: str) -> float:
        one, two = (
            calls[f"{count} rows, {kind}"] for kind in ("one allocation", "two allocations")
        )
        return one[key] - two[key]

    yield said(
        "the second launch costs {:.1f} us in a CUDA graph for one row, {:.1f} for 1,024 and {:.1f}"
        " for 16,384, and {:.0f} to {:.0f} us of host time",
        *(second(count, "graph_us") for count in (1, 1024, 16384)),
        *span(second(count, "host_us") for count in (1, 128, 1024, 16384)),
    )


def security() -> Iterator[Said]:
    """What looking who can write costs."""
    module, kernel = (
        read("security")["figures"][name] for name in ("load of the host module", "next kernel")
    )
    yield said(
        "that makes the host module's load {:.2f} ms instead of {:.2f} and leaves a kernel's at"
        " {:.2f} ms",
        module["now"]["min_ms"],
        module["before"]["min_ms"],
        kernel["now"]["min_ms"],
        holds=abs(kernel["now"]["min_ms"] / kernel["before"]["min_ms"] - 1) < 0.03,
    )


PAGES: dict[str, Callable[[], Iterable[Said]]] = {
    "README.md": readme,
    "docs/index.md": index,
    "docs/performance.md": performance,
    **OPS,
    "docs/bench-ci.md": bench_ci,
    "docs/cli.md": cli,
    "docs/comm.md": comm,
    "docs/descriptor-ring.md": descriptor_ring,
    "docs/nn.md": nn,
    "docs/offload-engine.md": offload_engine,
    "docs/offload-pipeline.md": offload_pipeline,
    "docs/pinned-pools.md": pinned_pools,
    "docs/security.md": security,
    "docs/torch-ops.md": torch_ops,
}


def on(page: str) -> list[Said]:
    """Return what a page says, by its path: none for one that is not in the list."""
    return list(PAGES[page]()) if page in PAGES else []
