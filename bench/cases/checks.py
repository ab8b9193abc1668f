"""What the bounds checks of store_cache cost: its kernel beside itself without them.

Both are launched in the same way, from the same parameters; only the kernel's source differs.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench import peers
from bench.cases.store import Buffers, case_of
from bench.goals import Figures, Goal, at_most
from jitkern import load_jit, make_cpp_args
from jitkern.bench.case import Case, Context, Impl, Row, Run
from jitkern.bench.measure import measure
from jitkern.compilers.sources import CSRC
from jitkern.ops.store import CONFIG, IN_FLIGHT
from jitkern.ops.store import kernel as store_kernel

PEERS = (peers.host,)
CHECKED, UNCHECKED = "with checks", "without checks"
VEC_BYTES, INDEX_BYTES = 16, 4
# Every line of the kernel that looks at an index, and what is left of it.
_PATCHES = (
    ("slot[r] >= 0 && slot[r] < p.num_slots;", "group.first_row + r < p.num_rows;"),
    ("fault |= slot[r] >= p.num_slots;", ""),
)


def run(ctx: Context) -> Iterator[Row]:
    if ctx.device != "cuda":
        ctx.say("checks: needs a GPU, skipped")
        return
    for row_bytes in (256, 656, 1024, 2048):
        for rows in (1, 128, 1024, 131_072) if not ctx.quick else (1, 131_072):
            case = case_of(ctx, row_bytes, rows)
            yield from measure(ctx, _both(case, row_bytes, rows))


def goals(f: Figures) -> Iterator[Goal]:
    for case in f.cases("checks"):
        checked, bare = (f.us("checks", case, impl) for impl in (CHECKED, UNCHECKED))
        if checked is None or bare is None:
            continue
        name = f"bounds checks of store, {case}"
        if case.startswith("131072 "):
            yield from at_most(f"{name}: time", checked / bare, 1.01)
        else:
            yield from at_most(f"{name}: added", checked - bare, 0.1, "us")


def _both(case: Case, row_bytes: int, rows: int) -> Case:
    case.op = "checks"
    case.impls = [
        Impl(CHECKED, "ours", lambda: _launches(_checked(row_bytes), row_bytes, rows)),
        Impl(UNCHECKED, "peer", lambda: _launches(_unchecked(row_bytes), row_bytes, rows)),
    ]
    return case


def _checked(row_bytes: int) -> Any:
    return store_kernel(row_bytes, VEC_BYTES, INDEX_BYTES)


def _unchecked(row_bytes: int) -> Any:
    source = (CSRC / "ops" / "store.cu").read_text()
    for checked, unchecked in _PATCHES:
        if source.count(checked) != 1:
            raise LookupError(f"store.cu has changed: {checked!r} is not in it once")
        source = source.replace(checked, unchecked)
    folder = Path(tempfile.mkdtemp(prefix="jitkern-bench-"))
    (folder / "store_unchecked.cu").write_text(source.replace('"store.h"', '"ops/store.h"'))
    args = make_cpp_args(row_bytes, *CONFIG, VEC_BYTES, INDEX_BYTES, IN_FLIGHT)
    return load_jit(
        "store_unchecked",
        device_files=[str(folder / "store_unchecked.cu")],
        device_wrappers=[("store", f"jitkern::StoreKernel<{args}>")],
    )


def _launches(module: Any, row_bytes: int, rows: int) -> Run:
    fault = torch.zeros(8, dtype=torch.int64, pin_memory=True)  # a FaultRecord nobody reads
    threads = peers.host().num_threads(row_bytes, VEC_BYTES, IN_FLIGHT, rows)
    grid = (-(-threads // CONFIG.num_threads), 2)

    def launch(b: Buffers) -> None:
        stride = row_bytes
        module.launch(
            module.exports[0],
            *(b.k_cache, b.k, stride, stride),
            *(b.v_cache, b.v, stride, stride),
            *(b.indices, rows, b.k_cache.shape[0], ctypes.c_uint32(0), fault.data_ptr()),
            grid=grid,
            use_pdl=CONFIG.use_pdl,
        )

    return launch
