"""Implementations to compare with. Each is built once, when first asked for; failures are kept."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any

from jitkern import load_jit

HERE = Path(__file__).resolve().parent

# What a single-source kernel of mini-sglang's style compiles for: rows of a multiple of 128 bytes,
# and how many of its warps share a row of its index kernel.
STORE_ROW_BYTES = (256, 1024, 2048)
INDEX_ROW_BYTES = {7168: 2, 8192: 4}
EMPTY_KERNEL = "empty"
# Names a folder of peers that do not lie here, as they are others' code. Its peers.py has a
# function of no arguments for each name that is asked for below; what that returns is the peer.
# Taken out of the environment: the package calls every other name of its prefix a mistake.
ELSEWHERE = "JITKERN_BENCH_PEERS"
FOLDER = os.environ.pop(ELSEWHERE, "")
_COMPILERS = ThreadPoolExecutor(max_workers=4)


class Once:
    """Build something once; hand out the same value, or the same error, ever after."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.start = cache(lambda: _COMPILERS.submit(build))

    def __call__(self) -> Any:
        return self.start().result()


def prebuild(device: str, wanted: Iterable[Once]) -> None:
    """Run the compilers of the peers side by side; a failure surfaces where the peer is used."""
    wait([once.start() for once in wanted if device == "cuda" or once is host])


def _exports(namespace: str, names: str) -> list[tuple[str, str]]:
    return [(name, f"{namespace}::{name}") for name in names.split()]


def _cuda(name: str, wrappers: list[tuple[str, str]]) -> Once:
    files = [str(HERE / f"{name}.cu")]
    return Once(lambda: load_jit(f"bench_{name}", cuda_files=files, cuda_wrappers=wrappers))


def _device(name: str, kernel: str) -> Once:
    files, wrappers = [str(HERE / f"{name}.cu")], [(name, kernel)]
    return Once(lambda: load_jit(f"bench_{name}", device_files=files, device_wrappers=wrappers))


def _elsewhere(name: str) -> Once:
    def build() -> Any:
        if not FOLDER:
            raise LookupError(f"not here: {ELSEWHERE} names no folder of such peers")
        spec = importlib.util.spec_from_file_location("bench_peers_elsewhere", f"{FOLDER}/peers.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)()

    return Once(build)


host = Once(
    lambda: load_jit(
        "bench_host",
        cpp_files=[str(HERE / "host.cc")],
        cpp_wrappers=_exports(
            "peer",
            "noop noop_pair common_prefix same_bytes launch_loop copy_2d copy_bytes copy_2d_loop "
            "copy_pieces_loop copy_batch",
        ),
        extra_cflags=["-O3"],
        extra_ldflags=["-ldl"],
    )
)
rows = _cuda(
    "rows",
    [
        *((f"store_{n}", f"peer::StoreKernel<{n}>::run") for n in STORE_ROW_BYTES),
        *((f"index_{n}", f"peer::IndexKernel<{n}, {k}>::run") for n, k in INDEX_ROW_BYTES.items()),
    ],
)
link = _cuda("link", _exports("link_peer", "gather copy_contiguous"))
empty = _device(EMPTY_KERNEL, "peer::EmptyKernel")
pieces = _device("pieces", "peer::Pieces")
triton = Once(lambda: importlib.import_module("bench.peers.triton_rows"))
merge_by_triton = Once(lambda: importlib.import_module("bench.peers.triton_merge"))
vllm_merge_state = _elsewhere("vllm_merge_state")
flashinfer_merge_state = _elsewhere("flashinfer_merge_state")
flashinfer_merge_states = _elsewhere("flashinfer_merge_states")
sglang_transfer = _elsewhere("sglang_transfer")


def empty_launch() -> Callable[[Any], object]:
    """Return a launch of a kernel that does nothing: the floor of small calls."""
    module = empty()
    words = [0] * 11
    return lambda _: module.launch(EMPTY_KERNEL, *words, grid=1)
