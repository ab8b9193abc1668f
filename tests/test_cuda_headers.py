"""CUDA's own headers on the route without a compiler: found, compiled, never stale, hinted at."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headers import load, put, toolkit
from needs import has, needs_nvrtc
from paths import TESTS, python_path
from tiny import SM_90

from jitkern.compilers import find, nvrtc
from jitkern.compilers.find import CudaHeaders, Tool, find_headers, header_hint
from jitkern.fs import digest
from jitkern.jit import device

# Header -> type and statement that need it.
REAL = {
    "cuda_fp16.h": ("__half", "*p.out = __hadd(*p.out, __float2half(1.f))"),
    "cuda_bf16.h": ("__nv_bfloat16", "*p.out = __float2bfloat16(1.f)"),
    "cuda_fp8.h": ("__nv_fp8_e4m3", "*p.out = __nv_fp8_e4m3(1.f)"),
    "cooperative_groups.h": ("int", "*p.out = cooperative_groups::this_thread_block().size()"),
    "cuda/std/cstdint": ("cuda::std::uint16_t", "*p.out = 1"),
    "cuda/std/type_traits": ("int", "*p.out = cuda::std::is_same_v<int, int>"),
    "mma.h": ("int", "nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float> a"),
    "cub/block/block_reduce.cuh": ("int", "*p.out = sizeof(cub::BlockReduce<int, 32>)"),
    "cstdint": ("std::uint64_t", "*p.out = sizeof(uintptr_t)"),
    "stdint.h": ("int8_t", "*p.out = 1"),
    "cstddef": ("std::size_t", "std::nullptr_t n{}; *p.out = sizeof(ptrdiff_t) + (n == 0)"),
    "cuda_runtime.h": ("float4", "*p.out = make_float4(1, 2, 3, 4)"),
}
USES = [(kind, f"{body};".replace("p.out", "out")) for kind, body in REAL.values()]


def in_blocks(uses: list[tuple[str, str]]) -> str:
    return "; ".join(f"{{ {kind}* out = nullptr; {use} }}" for kind, use in uses)


HAS_BUNDLE = has(find.find_nvrtc) and find_headers(["mma.h"], find.find_nvrtc()).bundled
needs_bundle = pytest.mark.skipif(not HAS_BUNDLE, reason="needs NVRTC 13.3 or newer")


@needs_bundle
def test_headers_that_nvrtc_brings(empty_cache: Path, bare_machine: Callable[..., Path]) -> None:
    """All of them in one kernel: CUB and cooperative groups take seconds each."""
    quoted = ("cuda_fp16.h", "mma.h")
    names = (f'"{name}"' if name in quoted else f"<{name}>" for name in REAL)
    module = load(bare_machine(), *names, body=in_blocks(USES))
    assert module._lookup(SM_90).entry.variant == find.find_nvrtc().id


def test_texts_that_no_key_holds() -> None:
    """Another text of a stand-in is another kernel: raise DEVICE_ABI along with it."""
    assert (device.DEVICE_ABI, digest(dict(nvrtc.STANDINS))) == (1, "a7e62191957843feaf94")


OLD, NEW = (Tool(("libnvrtc.so",), "nvrtc", version) for version in ("12.8", "13.3"))


def test_a_plain_kernel_searches_nothing(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "_installed_headers", lambda *_: pytest.fail("searched"))
    monkeypatch.setattr(device.toolchain, "find_nvrtc", lambda: OLD)
    assert load(tmp_path, '"jitkern/copy.cuh"')._cuda_headers() == CudaHeaders()
    assert load(tmp_path, "<cstdint>", "<vector>", "<math.h>")._cuda_headers() == CudaHeaders()


def test_where_headers_are(bare_machine: Callable[..., Path]) -> None:
    root = bare_machine()
    assert find_headers(["cuda_fp16.h"], OLD) == CudaHeaders(are_missing=True)
    wheels = toolkit(root / "site/nvidia/cuda_runtime/include")
    headers = find_headers(["cuda_fp16.h"], OLD)
    assert headers == CudaHeaders((wheels,)) and headers.id == "cuda"
    home = toolkit(root / "home/targets/x86_64-linux/include")
    (home / "cccl").mkdir()
    bare_machine(CUDA_HOME=root / "home")
    assert find_headers(["cuda_fp16.h"], OLD).installed == (home, home / "cccl")
    assert find_headers(["cuda_fp16.h"], NEW) == CudaHeaders(bundled=True)
    assert find_headers(["vector"], OLD) == CudaHeaders()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("curand_kernel.h", ': pip install "nvidia-cuda-nvrtc>=13.3", or set CUDA_HOME for'),
        ("vector", "what CUDA has of it is in <cuda/std/...>"),
        ("mine.h", ""),
    ],
)
def test_hints(name: str, hint: str) -> None:
    assert hint in header_hint(name) and bool(hint) == bool(header_hint(name))


@needs_nvrtc
def test_headers_of_another_toolkit_are_compiled_anew(
    bare_machine: Callable[..., Path], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "FIRST_BUNDLED", (99, 0))
    include = toolkit(bare_machine(CUDA_HOME=bare_machine() / "home") / "home/include")

    def source(version: int) -> str:
        put(include / "cuda_runtime_api.h", f"#define CUDART_VERSION  {version}\n")
        put(include / "cuda_fp16.h", f"#define VALUE {version}\n")
        module = load(include.parents[1], '"cuda_fp16.h"', body="*p.out = VALUE")
        lookup = module._lookup(SM_90)
        assert lookup.entry.variant == f"{find.find_nvrtc().id}+cuda-{version}"
        return str(lookup.source)

    assert [source(12080), source(12080), source(13000)] == ["compiled", "cached", "compiled"]


def test_cuda_headers_among_the_users_are_refused(bare_machine: Callable[..., Path]) -> None:
    folder = put(bare_machine() / "cccl/cub/version.cuh").parents[1]
    text = f"^load_jit: extra_include_paths: {folder} holds CUDA's own headers, expected your own "
    with pytest.raises(ValueError, match=text):
        load(bare_machine(), "<cub/version.cuh>", extra_include_paths=[folder])


@needs_bundle
def test_unpacked_once_a_process_and_deleted(
    fresh_python: Callable[..., Any], empty_cache: Path, tmp_path: Path
) -> None:
    code = """
import os, sys
from pathlib import Path
from test_cuda_headers import SM_90, load
for n in range(2):
    load(Path(sys.argv[1]), "<cuda_fp16.h>", type="__half", body=f"// {n}\\n").image(SM_90)
if os.fork() == 0:
    sys.exit()  # which deletes nothing of its parent's
os.wait()
(folder,) = Path(os.environ["TMPDIR"]).iterdir()
print(folder.name[:16], oct(folder.stat().st_mode))
"""
    folder = tmp_path / "tmp"
    folder.mkdir()
    env = {"TMPDIR": str(folder), "PYTHONPATH": python_path(TESTS)}
    said = fresh_python(code, str(tmp_path), env=env).stdout
    assert said == "jitkern-headers- 0o40700\n"
    assert list(folder.iterdir()) == []
