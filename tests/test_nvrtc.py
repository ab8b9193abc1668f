"""Device code to cubins: NVRTC, and nvcc as the alternative."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from headers import load
from needs import needs_nvcc, needs_nvrtc
from tiny import SM_90

from jitkern.arch import SUPPORTED_ARCHS, Arch
from jitkern.compilers import nvcc, nvrtc
from jitkern.compilers.find import Nvrtc, find_nvrtc
from jitkern.compilers.sources import include_closure
from jitkern.errors import CompileError, ToolchainError, UnsupportedError

KERNEL = 'extern "C" __global__ void kernel(int* x) { *x = VALUE; }\n'
STORE = """\
#include "ops/store.cu"
using K = jitkern::StoreKernel<656, 256, 2, false, 16, 4, 2>;
extern "C" __global__ void __launch_bounds__(K::kNumThreads, K::kMinBlocks)
    store(const __grid_constant__ K::Params params) { K::run(params); }
"""


pytestmark = needs_nvrtc


def compile_kernel(source: str = KERNEL, **changes: object) -> nvrtc.Image:
    settings: dict[str, object] = {"name": "k.cu", "headers": {}, "arch": Arch(9, 0)}
    return nvrtc.compile(source, **{**settings, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", SUPPORTED_ARCHS, ids=str)
def test_cubin_of_an_op(arch: Arch) -> None:
    closure = include_closure(STORE)
    image = compile_kernel(closure.source, headers=closure.headers, arch=arch)
    assert image.kind == "cubin"
    assert image.data.startswith(b"\x7fELF")
    assert b".text.store\0" in image.data
    assert image.log == ""


def test_minimal_gives_the_same_code() -> None:
    closure = include_closure(STORE)
    full, minimal = (
        compile_kernel(closure.source, headers=closure.headers, minimal=minimal).data
        for minimal in (False, True)
    )
    assert full == minimal


def test_headers_come_from_memory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of that name in the current directory is not what is compiled."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "value.h").write_text("#define VALUE 1\n")
    source = '#include "value.h"\nstatic_assert(VALUE == 2, "from memory");\n' + KERNEL
    with pytest.raises(CompileError, match=r"value\.h"):
        compile_kernel(source)
    compile_kernel(source, headers={"value.h": "#define VALUE 2\n"})


def test_closure_compiles_with_clashing_names(tmp_path: Path) -> None:
    """NVRTC knows headers by spelling alone; the closure keeps two files of one spelling apart."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part.cu").write_text(
            f'#include "util.h"\n__device__ int {name}(int);\n'
        )
        (tmp_path / name / "util.h").write_text(f"#pragma once\n#define {name.upper()} 1\n")
    parts = "".join(f'#include "{tmp_path}/{name}/part.cu"\n' for name in ("one", "two"))
    closure = include_closure(parts + "#define VALUE ONE + TWO\n" + KERNEL)
    assert compile_kernel(closure.source, headers=closure.headers).kind == "cubin"


def test_failure_carries_everything() -> None:
    source = "#include <deep.h>\n" + KERNEL
    headers = {"deep.h": "// one\nstruct Broken { missing_type x; };\n"}
    with pytest.raises(CompileError) as caught:
        compile_kernel(source, headers=headers, options=["-DVALUE=1", "-lineinfo"])
    error = caught.value
    assert error.source == source
    assert "deep.h(2)" in error.log
    assert "missing_type" in error.log
    assert error.command.startswith("nvrtc -arch=sm_90 -std=c++17")
    assert error.command.endswith("-DVALUE=1 -lineinfo")
    assert f"NVRTC {find_nvrtc().version} for 9.0" in str(error)
    for part in (error.command, error.log, "2  extern"):
        assert part in str(error)


FILES = "-I/usr/include -I --include-path=/x -include=a.h --pre-include=a.h --system-include=/x"
FILES += " -system-include -isystem/x -optf --options-file=x"


@pytest.mark.parametrize("option", FILES.split())
def test_options_bring_no_files(option: str) -> None:
    with pytest.raises(ValueError, match=r"extra_cuda_cflags: '-.*', expected extra_include_paths"):
        compile_kernel(options=[option])


@pytest.mark.parametrize("standard", ["-std=c++20", "--std=c++20"])
def test_another_standard(standard: str) -> None:
    source = 'static_assert(__cplusplus >= 202002L, "");\n#define VALUE 1\n' + KERNEL
    compile_kernel(source, options=[standard])
    with pytest.raises(CompileError):
        compile_kernel(source)


def test_gpu_newer_than_the_library_gets_ptx() -> None:
    newest = max(nvrtc.load_nvrtc(find_nvrtc().path).archs)
    image = compile_kernel(options=["-DVALUE=1"], arch=Arch(99, 0))
    assert image.kind == "ptx"
    assert f".target sm_{newest}".encode() in image.data
    assert image.data.endswith(b"\0")  # the driver reads a C string


def test_gpu_older_than_the_library() -> None:
    with pytest.raises(UnsupportedError, match=r"arch: 3\.0, but NVRTC .* compiles for .* newer"):
        compile_kernel(arch=Arch(3, 0))


def test_library_that_does_not_load(tmp_path: Path) -> None:
    path = tmp_path / "libnvrtc.so.13"
    path.write_text("no library")
    with pytest.raises(ToolchainError, match=r'no usable libnvrtc .*pip install "jitkern\[cuda\]"'):
        compile_kernel(library=Nvrtc(path, "13.0"))


def test_threads_compile_at_once() -> None:
    """Each gets the bytes that it would get alone."""
    closure = include_closure(STORE)

    def compiled(arch: Arch) -> bytes:
        return compile_kernel(closure.source, headers=closure.headers, arch=arch).data

    with ThreadPoolExecutor(4) as pool:
        images = list(pool.map(compiled, SUPPORTED_ARCHS * 2))
    assert images[:4] == images[4:]


def test_non_ascii_source() -> None:
    source = "// Grüße\n#define VALUE 1\n" + KERNEL
    assert compile_kernel(source, headers={"a.h": "// \udcfc\n"}).kind == "cubin"


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["-O3"], []),
        (["-O", "2", "--optimize", "3", "-g"], []),
        (["-Xcompiler", "-fPIC", "-Xcompiler=-Wall", "-ccbin", "g++", "--threads", "4"], []),
        (["--extended-lambda", "-Wno-deprecated-gpu-targets"], []),
        (["-Xptxas -v"], ["-Xptxas=-v"]),
        (["-Xptxas", "-v,-warn-spills"], ["-Xptxas=-v", "-Xptxas=-warn-spills"]),
        (["--ptxas-options=-v"], ["-Xptxas=-v"]),
        (["-res-usage"], ["-Xptxas=-v"]),
        (["-std", "c++20"], ["-std=c++20"]),
        (["--std=c++20"], ["-std=c++20"]),
        (["--expt-relaxed-constexpr"], ["-default-device"]),
        (["-Xcudafe", "--diag_suppress=177"], ["--diag-suppress=177"]),
        (["--use_fast_math", "-lineinfo", "-DX=1"], ["--use_fast_math", "-lineinfo", "-DX=1"]),
        (["-maxrregcount", "32", "-D", "X"], ["-maxrregcount", "32", "-D", "X"]),
        (["-DNAME='\"a b\"'"], ['-DNAME="a b"']),
    ],
)
def test_options_of_nvcc(given: list[str], passed: list[str]) -> None:
    assert nvrtc.nvrtc_options(given) == passed


@needs_nvrtc
def test_options_compile(tmp_path: Path, empty_cache: Path) -> None:
    flags = ["-O3 --use_fast_math", "-Xptxas", "-v", "--expt-relaxed-constexpr", "-lineinfo"]
    flags += ["-Xcudafe --diag_suppress=177", "-std=c++20", "-maxrregcount=32"]
    module = load(tmp_path, body="constexpr auto f = [](int x) { return x; }; *p.out = f(1)",
                  extra_cuda_cflags=flags)  # fmt: skip
    assert "Used" in module.lookup(SM_90).entry.meta["log"]


ARCH = "the arch is that of the GPU, of JITKERN_ARCH or of image(arch); leave it out"
LINKED = "device_files are not linked; leave it out, or give the source as cuda_files to nvcc"


@needs_nvrtc
@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ("-gencode=arch=compute_90,code=sm_90", ARCH),
        ("-arch=sm_80", ARCH),
        ("-rdc=true", LINKED),
    ],
)
def test_options_without_a_meaning(
    given: str, advice: str, tmp_path: Path, empty_cache: Path
) -> None:
    with pytest.raises(CompileError) as caught:
        load(tmp_path, extra_cuda_cflags=["-lineinfo", given]).image(SM_90)
    assert caught.value.message == f"own.instance.cu: extra_cuda_cflags: {given!r}: {advice}"
    assert caught.value.command == f"-lineinfo {given}"


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ('-DX="a', "'-DX=\"a': No closing quotation, expected words quoted as in a shell"),
        ("-g -I/usr/include", "'-I/usr/include', expected extra_include_paths for headers, and"),
        ("-optf=flags.txt", "'-optf=flags.txt', expected extra_include_paths for headers, and"),
    ],
)
def test_a_wrong_flag_is_named_before_anything_is_compiled(
    tmp_path: Path, flag: str, says: str
) -> None:
    with pytest.raises(ValueError, match=f"^load_jit: extra_cuda_cflags: {re.escape(says)}"):
        load(tmp_path, extra_cuda_cflags=["-lineinfo", flag])


@needs_nvrtc
def test_options_that_nvrtc_does_not_know(tmp_path: Path, empty_cache: Path) -> None:
    with pytest.raises(CompileError) as caught:
        load(tmp_path, extra_cuda_cflags=["--nope"]).image(SM_90)
    assert caught.value.message.endswith(
        "NVRTC_ERROR_INVALID_OPTION; NVRTC knows no --nope: leave it out, "
        "or set JITKERN_COMPILER=nvcc"
    )


# ------------------------------------------------------------------------------------------- nvcc


@needs_nvcc
@pytest.mark.parametrize("arch", [Arch(8, 0), Arch(9, 0)], ids=str)
def test_nvcc_compiles_the_same_closure(arch: Arch) -> None:
    closure = include_closure(STORE)
    image = nvcc.compile_with_nvcc(
        closure.source, name="store.cu", headers=closure.headers, arch=arch
    )
    assert image.kind == "cubin"
    assert b".text.store\0" in image.data
    assert b".debug_line" in image.data  # -lineinfo
    assert "registers" in image.log  # -Xptxas=-v


@needs_nvcc
def test_nvcc_failure_carries_everything() -> None:
    source = "#include <deep.h>\n" + KERNEL
    headers = {"deep.h": "struct Broken { missing_type x; };\n"}
    with pytest.raises(CompileError) as caught:
        nvcc.compile_with_nvcc(source, name="k.cu", headers=headers, arch=Arch(9, 0))
    error = caught.value
    assert "nvcc" in error.command
    assert "-arch=sm_90" in error.command
    assert "deep.h(1)" in error.log
    assert error.source == source
