"""Benchmarks, implementations and cases that several pages name."""

from __future__ import annotations

from bench.figures import Bench, span

STORE, INDEX = Bench("store"), Bench("index")
GATHER, SCATTER, SWAP = Bench("h2d_gather"), Bench("d2h_scatter"), Bench("swap")
POOLS, WAYS = Bench("pools"), Bench("ways")
COMPARE, HOST, FIRST = Bench("compare_key"), Bench("host_overhead"), Bench("first_call")
BESIDE = Bench("beside", "beside")
# On hosts other than that of the large run.
HOSTS = [Bench("host_overhead", f"host_overhead_{run}") for run in "ab"]
FIRSTS = [Bench("first_call", f"first_call_{run}") for run in "abc"]

TWICE, COPY = "torch cache[idx] = x, twice", "copy kernel, same bytes"
NVCC = "nvcc, mini-sglang style"
GRAD, GIVEN = "jitkern, gradients enabled", "jitkern, as they come"
LAUNCH, NO_OP = "bare cuLaunchKernel, C++ loop", "no-op FFI call, 5 tensors"
FULL, LINES = "4 loads before stores, full grid", "6 line-aligned, 4 SMs"
ARGSORT = f"torch.argsort, then {LINES}"
LINES_2, PLAIN = "6 line-aligned, 2 SMs", "loads before stores, full grid"
ENGINE = "cudaMemcpyAsync, contiguous"
ONE_BY_ONE, STREAMS = "d2h_scatter, then h2d_gather", "both on two streams, by a staging buffer"
COLD, WARM = "jitkern: NVRTC, cold", "jitkern: warm"
WARMED = "jitkern warm, 3 ops x 8 row sizes x 4 archs"

ONE_CALL = "store_cache, 1 row of 656 B"
LARGE = "262144 rows of 656 B, distinct"


def uniform(rows: int, row_bytes: int, gib: float) -> str:
    """Return the case of a gather of random rows out of a pool."""
    return f"gather of {rows} rows of {row_bytes} B, pool of {gib} GiB, uniform"


def step_percent(way: str) -> list[float]:
    """Return the % by which a decode step is longer beside a mover, of each batch."""
    cases = [f"decode step, batch {batch}" for batch in (1, 32, 128)]
    return [100 * (BESIDE.us(case, way) / BESIDE.us(case, "nothing") - 1) for case in cases]


def misses() -> tuple[float, float]:
    """Return the ns that a row takes out of pools of 4 GiB and more, in large calls."""
    cases = [(262144, 656, gib) for gib in (4, 8, 16, 32, 64)]
    cases += [(524288, size, gib) for size in (8, 256) for gib in (4, 16, 64)]
    return span(POOLS.us(uniform(*case), GIVEN) * 1e3 / case[0] for case in cases)
