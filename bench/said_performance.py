"""Figures in the sentences of ``docs/performance.md``, in its order."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from bench.figures import Bench, Said, goal, said, span
from bench.said_names import (
    COLD,
    COMPARE,
    COPY,
    ENGINE,
    FIRST,
    FIRSTS,
    GATHER,
    GRAD,
    HOST,
    HOSTS,
    INDEX,
    LARGE,
    LAUNCH,
    LINES_2,
    NO_OP,
    NVCC,
    ONE_BY_ONE,
    ONE_CALL,
    PLAIN,
    POOLS,
    SCATTER,
    STORE,
    STREAMS,
    SWAP,
    TWICE,
    WARM,
    WARMED,
    WAYS,
    step_percent,
    uniform,
)
from bench.said_pools import pools
from bench.tables import read


def _first_page() -> Iterator[Said]:
    machine = read("nvidia-h200")["machine"]
    benches = (STORE, INDEX, GATHER, SCATTER, SWAP, POOLS, WAYS, COMPARE, HOST, FIRST)
    days = {bench.date() for bench in (*benches, Bench("checks"))}
    later = {Bench(op).date() for op in ("unpack", "ring", "merge")}
    yield said(
        "is from runs of {} (of `unpack`, rings and `merge`, whose goals are at the end, of {}),"
        " `bench/results/nvidia-h200.json`: an NVIDIA H200 ({:d} SMs, PCIe Gen5 x16), torch {},"
        " CUDA {}, Triton {}.",
        max(days),
        max(later),
        machine["sms"],
        *(
            ".".join(version.split(".")[:2])
            for version in (
                machine["versions"]["torch"],
                machine["cuda_of_torch"],
                machine["versions"]["triton"],
            )
        ),
        holds=len(days) == len(later) == 1,
    )


def _store() -> Iterator[Said]:
    one = [f"1 rows of {size} B" for size in (256, 656, 1024, 2048)]
    large = [case.replace("1 rows", "131072 rows") for case in one]
    known = [case for case in one if "656" not in case]  # nvcc's does not compile for 656
    yield said(
        "takes {} to {} us, where an empty kernel takes {} to {}, the peers {} to {} and PyTorch"
        " {:.1f} to {:.1f}:",
        *span(STORE.each(one, "jitkern")),
        *span(STORE.each(one, "empty kernel")),
        *span([*STORE.each(one, "triton"), *STORE.each(known, NVCC)]),
        *span(STORE.each(one, TWICE)),
    )

    ours, launch, no_op = (HOST.us(ONE_CALL, impl) for impl in ("jitkern", LAUNCH, NO_OP))
    floors = "host time of store_cache: of a bare launch + a no-op FFI call"
    yield said(
        "takes {:.1f} us of host time in inference mode, checks included, and {:.1f} with"
        " gradients enabled. A bare launch ({}) and an FFI call that does nothing ({}) take {:.1f}"
        " together, PyTorch's two assignments {}. So a call in inference mode takes {} times the"
        " two floors, where {} was wanted, and {} of PyTorch's time;",
        ours,
        HOST.us(ONE_CALL, GRAD),
        launch,
        no_op,
        launch + no_op,
        HOST.us(ONE_CALL, TWICE),
        ours / (launch + no_op),
        goal(floors, "wanted"),
        HOST.time(ONE_CALL, "jitkern", TWICE),
    )
    of_floors = [
        bench.us(ONE_CALL) / (bench.us(ONE_CALL, LAUNCH) + bench.us(ONE_CALL, NO_OP))
        for bench in HOSTS
    ]
    yield said(
        "in two runs of {}, on two hosts with an H200, it took {} and {} times the floors, and {}"
        " and {} of PyTorch's time (`bench/results/host_overhead_a.json`, `host_overhead_b.json`).",
        HOSTS[0].date(),
        *of_floors,
        *(bench.time(ONE_CALL, "jitkern", TWICE) for bench in HOSTS),
        holds=HOSTS[0].date() == HOSTS[1].date(),
    )
    both = [
        f"{count} rows of {size} B"
        for size in (256, 1024, 2048)
        for count in (1, 16, 128, 1024, 16384, 131072)
    ]
    yield said(
        "tells PyTorch nothing, takes {:.1f} us where ours with gradients enabled takes {:.1f}",
        median(STORE.host_us(case, NVCC) for case in both),
        median(STORE.host_us(case) for case in both),
    )
    rules = read("torch_rules")["cuda"]
    yield said(
        "a call took {:.1f} us in inference mode, {:.1f} with `no_grad` and {:.1f} with gradients"
        " enabled (`bench/results/torch_rules.json`)",
        *(rules[f"{mode}: store_cache"]["new_us"] for mode in ("inference", "no_grad", "grad")),
    )

    checks = Bench("checks")
    small = [case.replace("1 rows", f"{n} rows") for case in one for n in (1, 128, 1024)]
    added = [checks.us(case, "with checks") - checks.us(case, "without checks") for case in small]
    yield said(
        "at 131,072 rows ({:.3f} to {:.3f} of the time without them) and at most {} us in small",
        *span(checks.time(case, "with checks", "without checks") for case in large),
        max(added),
    )
    scattered = "131072 rows of 656 B"
    ratio = STORE.gb_s(scattered) / STORE.gb_s(scattered, COPY)
    yield said(
        "Rows of 656 bytes stay at {} of a copy, and every peer below that:",
        ratio,
        holds=all(
            STORE.us(scattered) < STORE.us(scattered, peer)
            for peer in ("triton", TWICE, "torch.compile")
        ),
    )
    sizes = "{} rows of 1536 B and 1024 B"
    twice = [STORE.time(sizes.format(n), "jitkern", "jitkern, twice") for n in (1, 1024, 131072)]
    yield said(
        "takes {} to {} of the time of two at 1 to 1,024 rows, and {:.3f} at 131,072,", *twice
    )


def _index() -> Iterator[Said]:
    case = "65536 rows of 8192 B, vocab_range"
    few = [f"1024 rows of {size} B" for size in (7168, 8192)]
    yield said(
        "half of the indices, 65,536 rows of 8 KB take {:.3f} ms; masking around an embedding in"
        " PyTorch takes {:.3f}.",
        INDEX.us(case) / 1e3,
        INDEX.us(case, "torch mask + embedding") / 1e3,
    )
    yield said(
        "Of 1,024 rows of 7 or 8 KB, `F.embedding` is as fast as ours.",
        holds=all(0.98 < INDEX.time(c, "jitkern", "torch F.embedding") < 1.02 for c in few),
    )


def _gather() -> Iterator[Said]:
    yield said(
        "the search costs {:.1f} %, and the kernel of nvcc whose lanes start at the line is"
        " {:.1f} % faster there.",
        100 * GATHER.time(LARGE, "jitkern, dedup=True", "jitkern, dedup=False") - 100,
        100 * GATHER.time(LARGE, "jitkern", LINES_2) - 100,
    )
    sizes = [512 << i for i in range(8)] + [576]
    cases = [c["case"] for c in read("nvidia-h200")["benchmarks"]["h2d_gather"]["rows"]]
    long = {c for c in cases for size in sizes if c.endswith(f" rows of {size} B, distinct")}
    yield said(
        "From 512 bytes to 64 KB a row the bus is the only limit: at least {:.3f} of contiguous",
        min(goal(f"h2d, {case}: of contiguous zero-copy x line efficiency") for case in long),
        holds=len(long) == len(sizes),
    )
    one, some = "1 rows of 656 B, distinct", "128 rows of 656 B, distinct"
    yield said(
        "`d2h_scatter` of the same rows moves {} GB/s, {} of `cudaMemcpyAsync`.",
        SCATTER.gb_s(LARGE),
        SCATTER.gb_s(LARGE) / SCATTER.gb_s(LARGE, ENGINE),
    )
    yield said(
        "one row takes {} times as long as in a grid that loads before it stores, 128 rows move"
        " {} GB/s beside its {}.",
        SCATTER.time(one, "jitkern", PLAIN),
        SCATTER.gb_s(some),
        SCATTER.gb_s(some, PLAIN),
    )
    many = "8192 rows of 656 B, distinct"
    yield said(
        "Of `h2d_gather`, one row takes {} times as long as in such a grid, and 8,192 rows arrive"
        " at {} GB/s beside the {} of a full grid whose lanes start at the line.",
        GATHER.time(one, "jitkern", "4 loads before stores"),
        GATHER.gb_s(many),
        GATHER.gb_s(many, "6 line-aligned, full grid"),
    )


def _beside() -> Iterator[Said]:
    yield said(
        "costs the step at most {:.0f} % to the host and {:.0f} % to the GPU.",
        *(max(step_percent(f"engine, contiguous, {way}")) for way in ("d2h", "h2d")),
    )
    by_sms = {n: step_percent(f"copy_blocks d2h, {n} SMs") for n in (4, 8)}
    yield said(
        "beside 4 SMs the step takes {} to {} times as long, beside 8 up to {} times.",
        *(1 + percent / 100 for percent in (*span(by_sms[4]), max(by_sms[8]))),
    )
    yield said(
        "1 SM costs {:.0f} to {:.0f} %, 8 cost {:.0f} to {:.0f} %.",
        *span(step_percent("copy_blocks h2d, 1 SMs")),
        *span(step_percent("copy_blocks h2d, 8 SMs")),
    )


def _swap() -> Iterator[Said]:
    case = "{} rows of 656 B, distinct, pool of {} GiB"
    small, *large = [case.format(262144, gib) for gib in (0.4, 4, 16, 64)]
    engines = "cudaMemcpyAsync both ways, contiguous"
    yield said(
        "One call is {} times as fast as `d2h_scatter`, then `h2d_gather`, and {} of what both copy"
        " engines reach on rows in one piece.",
        SWAP.time(small, ONE_BY_ONE, "jitkern"),
        SWAP.gb_s(small) / SWAP.gb_s(small, engines),
    )
    yield said(
        "which at 4, 16 and 64 GiB is {:.1f}, {:.1f} and {:.1f} times as fast as in the order"
        " given. The two calls sort as well: one after the other they take {}, {} and {} times as"
        " long, on two streams {}, {} and {} times. Out of 64 GiB both directions together move"
        " little more than [`h2d_gather` alone](#pools-of-real-size), {}:",
        *(SWAP.time(c, 'jitkern, order="given"', "jitkern") for c in large),
        *(SWAP.time(c, ONE_BY_ONE, "jitkern") for c in large),
        *(SWAP.time(c, STREAMS, "jitkern") for c in large),
        POOLS.gb_s(uniform(262144, 656, 64)),
    )
    yield said(
        "run on 8 SMs; on 4 they move {}, {} and {} GB/s.",
        *(SWAP.gb_s(c, "jitkern, num_sms=4") for c in large),
    )
    one, some, more = (case.format(n, 0.4) for n in (1, 128, 2048))
    yield said(
        "Out of 0.4 GiB one row takes {} us (one after the other {}), 128 rows {} ({}), 2,048 rows"
        " {} ({}; on two streams with a staging buffer {}, which wins).",
        *SWAP.each((one, some, more), "jitkern", ONE_BY_ONE),
        SWAP.us(more, STREAMS),
        holds=SWAP.us(more, STREAMS) < SWAP.us(more),
    )


def _compare() -> Iterator[Said]:
    def at(*counts: int) -> list[str]:
        return [f"{count} equal int32 tokens" for count in counts]

    memcmp, mismatch = "memcmp", "std::mismatch -O3"
    short, long = at(1, 4, 16, 64, 256), at(1024, 8192)
    yield said(
        "131,072 equal int32 tokens take {:.1f} us; `memcmp` takes {}, `std::mismatch` at -O3 {}."
        " One token takes {} us, of which a call that does nothing takes {}.",
        *COMPARE.each(at(131072), "jitkern", memcmp, mismatch),
        *COMPARE.each(at(1), "jitkern", "no-op FFI call"),
    )
    yield said(
        "`memcmp` up to 8,192 tokens ({} us for one, {} beside {} for 8,192), `std::mismatch` up to"
        " 256 ({} to {}).",
        COMPARE.us(at(1)[0], memcmp),
        *COMPARE.each(at(8192), memcmp, "jitkern"),
        *span(COMPARE.each(short, mismatch)),
        holds=all(COMPARE.time(c, memcmp, "jitkern") < 1 for c in (*short, *long))
        and all(COMPARE.time(c, mismatch, "jitkern") < 1 for c in short)
        and all(COMPARE.time(c, mismatch, "jitkern") > 1 for c in long),
    )


def _first_call() -> Iterator[Said]:
    yield said(
        "four architectures, 328 kernels, takes {} s from start to end; building the host module,"
        " which a wheel ships, {} s.",
        FIRST.us(WARMED) / 1e6,
        FIRST.us("host module", "jitkern: host module, once per machine") / 1e6,
    )
    cpu, ops = Bench("first_call", "intel-xeon-2-cores"), ("store", "index", "h2d_gather")
    yield said(
        "compiles in {:.0f}, {:.0f}, {:.0f} and {:.0f} ms what takes nvcc {:.1f} to {:.1f} s, and"
        " warmed in {:.1f} s",
        *(us / 1e3 for us in cpu.each((*ops, "h2d_gather, large call"), COLD)),
        *(us / 1e6 for us in span(cpu.each(ops, "load_inline with nvcc, cold"))),
        cpu.us(WARMED) / 1e6,
    )
    case, theirs = "first call of a process, imports included", "load_inline of what is built"
    days = sorted({bench.date() for bench in FIRSTS})
    yield said("in runs of {} and {} on three hosts with an H200;", *days)
    yield said(
        "There, and on two of the hosts with them, `load_inline` wins.",
        holds=all(
            bench.time(case, f"{WARM}, no bytecode", f"{theirs}, no bytecode") > 1
            for bench in FIRSTS
        )
        and sum(bench.time(case, WARM, theirs) > 1 for bench in FIRSTS) == 2,
    )


def _cpu() -> Iterator[Said]:
    yield said(
        "`bench/results/intel-xeon-16-cores.json`, a run of {}, which was before the rules",
        Bench("store", "intel-xeon-16-cores").date(),
    )


def performance() -> list[Said]:
    """Return what the page says."""
    parts = (_first_page, _store, _index, _gather, _beside, pools, _swap, _compare, _first_call)
    return [piece for part in (*parts, _cpu) for piece in part()]
