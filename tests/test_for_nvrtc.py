"""Options that are written for nvcc, and what becomes of them on the route without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from headers import load
from needs import needs_nvrtc
from tiny import SM_90

from jitkern.compilers import for_nvrtc
from jitkern.errors import CompileError


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
    assert for_nvrtc.nvrtc_options(given) == passed


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
        ("--ptx", "the output is a cubin in the cache; leave it out"),
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
