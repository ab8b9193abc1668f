"""Implementations to compare with. Each is built once, when first asked for; failures are kept."""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jitkern import load_jit

HERE = Path(__file__).resolve().parent

# What a single-source kernel of mini-sglang's style compiles for: rows of a multiple of 128 bytes.
STORE_ROW_BYTES = (256, 1024, 2048)
INDEX_ROW_BYTES = (7168, 8192)
EMPTY_KERNEL = "empty"
# Names a folder of peers that do not lie here, as they are others' code. Its peers.py has a
# function of no arguments for each name that is asked for below; what that returns is the peer.
# Taken out of the environment: the package calls every other name of its prefix a mistake.
ELSEWHERE = "JITKERN_BENCH_PEERS"
FOLDER = os.environ.pop(ELSEWHERE, "")


class Once:
    """Build something once; hand out the same value, or the same error, ever after."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self._build = build
        self._lock = threading.Lock()
        self._value: Any = None
        self._error: Exception | None = None

    def __call__(self) -> Any:
        with self._lock:
            if self._value is None and self._error is None:
                try:
                    self._value = self._build()
                except Exception as error:
                    self._error = error
        if self._error is not None:
            raise self._error
        return self._value


def num_splits_of(row_bytes: int) -> int:
    """mini-sglang's rule for how many warps share a row of its index kernel."""
    return 4 if row_bytes % 2048 == 0 else 2 if row_bytes % 1024 == 0 else 1


def _exports(namespace: str, names: str) -> list[tuple[str, str]]:
    return [(name, f"{namespace}::{name}") for name in names.split()]


def _folder() -> Any:
    if not FOLDER:
        raise LookupError(f"not here: {ELSEWHERE} names no folder of such peers")
    spec = importlib.util.spec_from_file_location("bench_peers_elsewhere", f"{FOLDER}/peers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _elsewhere(name: str) -> Once:
    return Once(lambda: getattr(folder(), name)())


host = Once(
    lambda: load_jit(
        "bench_host",
        cpp_files=[str(HERE / "host.cc")],
        cpp_wrappers=_exports(
            "peer",
            "noop noop_pair common_prefix same_bytes launch_loop copy_2d copy_bytes copy_2d_loop "
            "copy_pieces_loop",
        ),
        extra_cflags=["-O3"],
        extra_ldflags=["-ldl"],
    )
)
nccl = Once(
    lambda: load_jit(
        "bench_nccl",
        cpp_files=[str(HERE / "nccl.cc")],
        cpp_wrappers=_exports("peer", "open unique_id communicator all_reduce"),
        extra_ldflags=["-ldl"],
    )
)
rows = Once(
    lambda: load_jit(
        "bench_rows",
        cuda_files=[str(HERE / "rows.cu")],
        cuda_wrappers=[
            *((f"store_{n}", f"peer::StoreKernel<{n}>::run") for n in STORE_ROW_BYTES),
            *(
                (f"index_{n}", f"peer::IndexKernel<{n}, {num_splits_of(n)}>::run")
                for n in INDEX_ROW_BYTES
            ),
        ],
    )
)
ladder = Once(
    lambda: load_jit(
        "bench_ladder",
        cuda_files=[str(HERE / "ladder.cu")],
        cuda_wrappers=_exports("ladder", "gather copy_contiguous copy_engine"),
    )
)
empty = Once(
    lambda: load_jit(
        "bench_empty",
        device_files=[str(HERE / "empty.cu")],
        device_wrappers=[(EMPTY_KERNEL, "peer::EmptyKernel")],
    )
)
pieces = Once(
    lambda: load_jit(
        "bench_pieces",
        device_files=[str(HERE / "pieces.cu")],
        device_wrappers=[("pieces", "peer::Pieces")],
    )
)
triton = Once(lambda: importlib.import_module("bench.peers.triton_rows"))
merge_by_triton = Once(lambda: importlib.import_module("bench.peers.triton_merge"))
folder = Once(_folder)
vllm_merge_state = _elsewhere("vllm_merge_state")
flashinfer_merge_state = _elsewhere("flashinfer_merge_state")
flashinfer_merge_states = _elsewhere("flashinfer_merge_states")


def empty_launch() -> Callable[[Any], object]:
    """Return a launch of a kernel that does nothing: the floor of small calls."""
    module = empty()
    words = [0] * 11
    return lambda _: module.launch(EMPTY_KERNEL, *words, grid=1)


def prebuild(device: str, wanted: Iterable[Once]) -> None:
    """Run the compilers of the peers side by side; a failure surfaces where the peer is used."""
    wanted = [once for once in dict.fromkeys(wanted) if device == "cuda" or once is host]
    with ThreadPoolExecutor(max_workers=4) as pool:
        for done in [pool.submit(_quietly, once) for once in wanted]:
            done.result()


def installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _quietly(once: Once) -> None:
    try:
        once()
    except Exception:
        return  # kept in `once`, and raised again for the row that needs it
