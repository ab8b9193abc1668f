"""CUDA's own headers on the route without a compiler: found, compiled, never stale, hinted at."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from headers import load, put, toolkit
from needs import has, needs_nvcc, needs_nvrtc
from tiny import SM_90

from jitkern.cache import get
from jitkern.compilers import find_headers, find_nvrtc, for_nvrtc, nvrtc
from jitkern.compilers.find_cuda import find_cuda_home
from jitkern.compilers.find_headers import header_hint
from jitkern.compilers.find_nvrtc import Nvrtc
from jitkern.env import settings
from jitkern.errors import CompileError, ToolchainError
from jitkern.fs import digest
from jitkern.jit import device
from jitkern.jit.loader import DeviceModule

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


def no_nvrtc() -> Nvrtc:
    raise ToolchainError(f"NVRTC (libnvrtc.so) was not found; {find_nvrtc.NVRTC_HINT}")


def variant(module: DeviceModule) -> str:
    return module.lookup(SM_90).entry.variant


# -- real headers ----------------------------------------------------------------------------------


def brings_headers() -> bool:
    if not has(find_nvrtc.find_nvrtc):
        return False
    return find_headers._release(find_nvrtc.find_nvrtc().version) >= find_headers.FIRST_BUNDLED


needs_bundle = pytest.mark.skipif(not brings_headers(), reason="needs NVRTC 13.3 or newer")


@needs_bundle
@pytest.mark.parametrize("header", [*(f"<{name}>" for name in REAL), '"cuda_fp16.h"', '"mma.h"'])
def test_headers_that_nvrtc_brings(
    header: str, empty_cache: Path, bare_machine: Callable[..., Path]
) -> None:
    kind, body = REAL[header[1:-1]]
    module = load(bare_machine(), header, type=kind, body=body)
    assert variant(module) == find_nvrtc.find_nvrtc().id


@needs_nvrtc
@pytest.mark.skipif(not has(find_cuda_home), reason="needs a toolkit's headers")
def test_headers_of_a_toolkit(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them in one kernel: CUB and cooperative groups take seconds each."""
    monkeypatch.setattr(find_headers, "FIRST_BUNDLED", (99, 0))
    body = "; ".join(f"{{ {kind}* out = nullptr; {use} }}" for kind, use in USES)
    module = load(tmp_path, *(f"<{name}>" for name in REAL), body=body)
    assert variant(module).startswith(f"{find_nvrtc.find_nvrtc().id}+cuda-")


@pytest.mark.cuda
@needs_bundle
def test_half_precision_on_a_gpu(empty_cache: Path, tmp_path: Path) -> None:
    import torch

    kind, body = REAL["cuda_fp16.h"]
    x = torch.ones(1, dtype=torch.float16, device="cuda")
    load(tmp_path, "<cuda_fp16.h>", type=kind, body=body).launch("kernel", x, grid=1)
    assert x.item() == 2.0


@needs_bundle
def test_cub_itself_says_what_to_include(empty_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(CompileError) as caught:
        load(tmp_path, "<cub/cub.cuh>").image(SM_90)
    assert "Include the specific device header instead" in caught.value.log


@needs_bundle
def test_standins_agree_with_cccl(empty_cache: Path, tmp_path: Path) -> None:
    headers = ("<cuda/std/cstdint>", "<cstdint>", "<cuda/std/cstddef>", "<cstddef>")
    for order in (headers, headers[::-1]):
        assert load(tmp_path, *order, type="uint64_t").image(SM_90)[:4] == b"\x7fELF"


@needs_nvcc
def test_nvcc_has_its_own(
    tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITKERN_COMPILER", "nvcc")
    settings.cache_clear()
    module = load(tmp_path, "<cuda_fp16.h>", "<cstdint>", type="__half")
    assert variant(module).startswith("nvcc-")
    assert "+" not in variant(module)


def test_texts_that_no_key_holds() -> None:
    """Another text of a stand-in is another kernel: raise DEVICE_ABI along with it."""
    assert (device.DEVICE_ABI, digest(dict(for_nvrtc.STANDINS))) == (1, "a7e62191957843feaf94")


# -- never stale -----------------------------------------------------------------------------------


def grow(include: Path) -> None:
    put(include / "cuda_fp16.h", "#define VALUE 22\n")


def touch(include: Path) -> None:
    os.utime(include / "deep/part.h", (1, 1))


def add(include: Path) -> None:
    put(include / "deep/new.h")


def remove(include: Path) -> None:
    (include / "deep/part.h").unlink()


@needs_nvrtc
@pytest.mark.parametrize("change", [grow, touch, add, remove])
def test_a_changed_header_is_compiled_anew(
    change: Callable[[Path], None],
    bare_machine: Callable[..., Path],
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(find_headers, "FIRST_BUNDLED", (99, 0))
    include = toolkit(bare_machine() / "usr-local-cuda/include")
    put(include / "cuda_fp16.h", "#define VALUE 1\n")
    put(include / "deep/part.h")

    def source() -> str:
        module = load(include.parents[1], '"cuda_fp16.h"', body="*p.out = VALUE")
        return str(module.lookup(SM_90).source)

    assert [source(), source()] == ["compiled", "cached"]
    change(include)
    assert [source(), source()] == ["compiled", "cached"]


@needs_nvrtc
@pytest.mark.parametrize("state", ["frozen", "other toolkit", "without NVRTC's", "no NVRTC"])
def test_given_headers_are_the_same_for_any_entry(
    state: str,
    bare_machine: Callable[..., Path],
    empty_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user's own, in a directory with CUDA's: an entry of other content was loaded."""
    monkeypatch.setattr(find_headers, "FIRST_BUNDLED", (99, 0))
    root = bare_machine()
    include = toolkit(root / "usr-local-cuda/include", 12080, "cuda_fp16.h")
    given = put(root / "cccl/cub/version.cuh").parents[1]
    factor = put(given / "my/factor.cuh", "#define VALUE 3\n")

    def module() -> Any:
        headers = ("<my/factor.cuh>", "<cuda_fp16.h>")
        return load(root, *headers, body="*p.out = VALUE", extra_include_paths=[given])

    image = module().image(SM_90)
    if state in ("frozen", "other toolkit"):
        get.freeze()
    if state == "other toolkit":
        grow(include)
    if state == "without NVRTC's":
        (include / "cuda_fp16.h").unlink()
    if state == "no NVRTC":
        monkeypatch.setattr(device, "find_nvrtc", no_nvrtc)
    found = module().find(SM_90)
    assert (found.source, found.loaded) == ("cached", image)
    factor.write_text("#define VALUE 15\n")
    assert module().find(SM_90) is None


@needs_bundle
def test_given_headers_then_those_of_nvrtc_then_a_toolkits(
    bare_machine: Callable[..., Path], empty_cache: Path
) -> None:
    """A toolkit's went before NVRTC's own."""
    root = bare_machine()
    kit = toolkit(root / "usr-local-cuda/include", 12080, "curand.h")
    put(kit / "cuda_fp16.h", "#error of the toolkit\n")
    put(kit / "cub/version.cuh", "#error of the toolkit\n")
    given = put(root / "given/cub/version.cuh").parents[1]
    put(given / "mma.h", "#define FROM_GIVEN 1\n")
    headers = ("<mma.h>", "<cuda_fp16.h>", "<curand.h>")
    body = "*p.out = __float2half(FROM_GIVEN + FROM_TOOLKIT)"
    module = load(root, *headers, type="__half", body=body, extra_include_paths=[given])
    assert module.image(SM_90)
    headers = ("<cub/version.cuh>", "<curand.h>")
    assert load(root, *headers, body="*p.out = CUB_VERSION").image(SM_90)


@needs_nvrtc
def test_a_header_changed_while_it_is_compiled(
    bare_machine: Callable[..., Path], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is published is what was compiled: it is compiled again."""
    monkeypatch.setattr(find_headers, "FIRST_BUNDLED", (99, 0))
    include = toolkit(bare_machine() / "usr-local-cuda/include", 12080, "cuda_fp16.h")
    module = load(include.parents[1], "<cuda_fp16.h>")
    compiled, real = [], nvrtc.compile

    def compile_and_edit(*args: Any, **kwargs: Any) -> nvrtc.Image:
        image = real(*args, **kwargs)
        compiled.append(image)
        if len(compiled) == 1:
            grow(include)
        return image

    monkeypatch.setattr(nvrtc, "compile", compile_and_edit)
    published = variant(module)
    assert len(compiled) == 2
    assert published == f"{find_nvrtc.find_nvrtc().id}+{module.cuda_headers().id}"


@needs_nvrtc
def test_without_the_headers_what_is_cached_will_do(
    bare_machine: Callable[..., Path], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_headers, "FIRST_BUNDLED", (99, 0))
    root = bare_machine()
    include = toolkit(root / "usr-local-cuda/include", 12080, "cuda_fp16.h")
    image = load(root, "<cuda_fp16.h>").image(SM_90)
    include.rename(root / "elsewhere")
    found = load(root, "<cuda_fp16.h>").lookup(SM_90)
    assert (found.source, found.loaded) == ("cached", image)


@needs_nvrtc
def test_the_current_directory_is_not_searched(
    bare_machine: Callable[..., Path], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = bare_machine()
    toolkit(root / "usr-local-cuda/include", 12080, "curand.h")
    put(root / "work/mine.h", "#error planted\n")
    monkeypatch.chdir(root / "work")
    with pytest.raises(CompileError) as caught:
        load(root, '"curand.h"', '"mine.h"').image(SM_90)
    assert 'own.cu(2): catastrophic error: cannot open source file "mine.h"' in caught.value.log
    assert "/dev/null" not in caught.value.log


@needs_bundle
def test_unpacked_once_a_process_and_deleted(
    fresh_python: Callable[..., Any], empty_cache: Path, tmp_path: Path
) -> None:
    code = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_cuda_headers import SM_90, load
work = Path(sys.argv[1])
for n in range(2):
    load(work, "<cuda_fp16.h>", type="__half", body=f"// {n}\\n").image(SM_90)
if os.fork() == 0:
    sys.exit()  # which deletes nothing of its parent's
os.wait()
print(*(folder.name for folder in Path(os.environ["TMPDIR"]).iterdir()))
print(*(oct(folder.stat().st_mode) for folder in Path(os.environ["TMPDIR"]).iterdir()))
"""
    folder = tmp_path / "tmp"
    folder.mkdir()
    done = fresh_python(
        code, str(tmp_path), str(Path(__file__).parent), env={"TMPDIR": str(folder)}
    )
    names, modes = done.stdout.splitlines()
    assert names.startswith("jitkern-headers-.")
    assert (len(names.split()), modes) == (1, "0o40700")
    assert list(folder.iterdir()) == []


@needs_nvrtc
def test_a_missing_header_ends_with_the_hint(
    bare_machine: Callable[..., Path], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find_headers, "FIRST_BUNDLED", (99, 0))
    with pytest.raises(CompileError) as caught:
        load(bare_machine(), "<cuda_fp16.h>").image(SM_90)
    version = find_nvrtc.find_nvrtc().version
    hint = header_hint("cuda_fp16.h", find_nvrtc.find_nvrtc())
    assert caught.value.message == (
        f"own.instance.cu: NVRTC {version} for 9.0: NVRTC_ERROR_COMPILATION; {hint}"
    )
    assert "or set CUDA_HOME to a CUDA toolkit" in hint


def test_a_machine_without_nvrtc_says_so(
    bare_machine: Callable[..., Path], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "find_nvrtc", no_nvrtc)
    with pytest.raises(ToolchainError, match=r'pip install "jitkern\[cuda\]"$'):
        load(bare_machine(), "<cuda_fp16.h>").image(SM_90)
