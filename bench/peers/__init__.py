"""Implementations to compare with. Each is built once, when first asked for; failures are kept."""

import importlib.util
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from jitkern import load_jit

HERE = Path(__file__).resolve().parent

# What a single-source kernel of mini-sglang's style compiles for: rows of a multiple of 128 bytes,
# and how many of its warps share a row of its index kernel.
STORE_ROW_BYTES = (256, 1024, 2048)
INDEX_ROW_BYTES = {7168: 2, 8192: 4}
# Names a folder of peers that do not lie here, as they are others' code. Its peers.py has a
# function of no arguments for each name that is asked for below; what that returns is the peer.
ELSEWHERE = "BENCH_PEERS"
FOLDER = os.environ.get(ELSEWHERE, "")
_COMPILERS = ThreadPoolExecutor(max_workers=4)


class Once:
    """Build something once; hand out the same value, or the same error, ever after."""

    def __init__(self, build: Callable[[], Any]) -> None:
        self.start = cache(lambda: _COMPILERS.submit(build))

    def __call__(self) -> Any:
        return self.start().result()


def _module(kind: str, file: str, wrappers: dict[str, str], **how: Any) -> Once:
    given = {f"{kind}_files": [str(HERE / file)], f"{kind}_wrappers": list(wrappers.items())}
    return Once(lambda: load_jit(f"bench_{Path(file).stem}", **given, **how))


def _elsewhere(name: str) -> Once:
    def build() -> Any:
        if not FOLDER:
            raise LookupError(f"not here: {ELSEWHERE} names no folder of such peers")
        spec: Any = importlib.util.spec_from_file_location("bench_peers", f"{FOLDER}/peers.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return getattr(module, name)()

    return Once(build)


_HOST = ("launch_loop", "copy_bytes", "copy_2d_loop", "copy_pieces_loop", "copy_batch")
host = _module(
    "cpp",
    "host.cc",
    {name: f"peer::{name}" for name in _HOST},
    extra_cflags=["-O3"],
    extra_ldflags=["-ldl"],
)
_STORE = {f"store_{n}": f"peer::store<{n}>" for n in STORE_ROW_BYTES}
_INDEX = {f"index_{n}": f"peer::index<{n}, {k}>" for n, k in INDEX_ROW_BYTES.items()}
rows = _module("cuda", "rows.cu", {**_STORE, **_INDEX})
link = _module(
    "cuda", "link.cu", {"gather": "peer::gather", "copy_contiguous": "peer::copy_contiguous"}
)
device = _module("device", "device.cu", {"empty": "peer::Empty", "pieces": "peer::Pieces"})
triton = Once(lambda: import_module("bench.peers.triton_peers"))
vllm_merge_state = _elsewhere("vllm_merge_state")
flashinfer_merge_state = _elsewhere("flashinfer_merge_state")
flashinfer_merge_states = _elsewhere("flashinfer_merge_states")
sglang_transfer = _elsewhere("sglang_transfer")
vllm_store_mla = _elsewhere("vllm_store_mla")
vllm_store_fp8 = _elsewhere("vllm_store_fp8")
sglang_store_mla = _elsewhere("sglang_store_mla")
sglang_residency = _elsewhere("sglang_residency")
vllm_residency = _elsewhere("vllm_residency")


def empty_launch() -> Callable[[Any], object]:
    """Return a launch of a kernel that does nothing: the floor of small calls."""
    module, words = device(), [0] * 11
    return lambda _: module.launch("empty", *words, grid=1)


def prebuild() -> None:
    """Run the compilers of the peers side by side; a failure is raised where the peer is used."""
    wait([once.start() for once in (host, rows, link)])
