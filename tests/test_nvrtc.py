"""Device code to cubins by NVRTC."""

from __future__ import annotations

from pathlib import Path

import pytest
from headers import load
from needs import needs_nvrtc
from tiny import SM_90

from jitkern.arch import Arch
from jitkern.compilers import nvrtc
from jitkern.compilers.find import Tool, find_nvrtc
from jitkern.compilers.sources import include_closure
from jitkern.errors import CompileError, ToolchainError

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


def test_cubin_of_an_op() -> None:
    closure = include_closure(STORE)
    image = compile_kernel(closure.source, headers=closure.headers)
    assert image.kind == "cubin"
    assert image.data.startswith(b"\x7fELF")
    assert b".text.store\0" in image.data
    assert image.log == ""


def test_headers_come_from_memory_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of that name in the current directory is not what is compiled."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "value.h").write_text("#define VALUE 1\n")
    source = '#include "value.h"\nstatic_assert(VALUE == 2, "from memory");\n' + KERNEL
    with pytest.raises(CompileError, match=r"value\.h"):
        compile_kernel(source)
    compile_kernel(source, headers={"value.h": "#define VALUE 2\n"})


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


def test_gpu_newer_than_the_library_gets_ptx() -> None:
    newest = max(nvrtc.load_nvrtc(find_nvrtc().path).archs)
    image = compile_kernel(options=["-DVALUE=1"], arch=Arch(99, 0))
    assert image.kind == "ptx"
    assert f".target sm_{newest}".encode() in image.data
    assert image.data.endswith(b"\0")  # the driver reads a C string


@pytest.mark.parametrize("code", [b"", b"\0"])
def test_success_without_code_is_a_failure(monkeypatch: pytest.MonkeyPatch, code: bytes) -> None:
    """NVRTC 13.2 for compute_*: apache/tvm#20100."""
    monkeypatch.setattr(nvrtc._Api, "compile", lambda *_: (0, code, "a log"))
    with pytest.raises(
        CompileError, match=r"k\.cu: NVRTC \S+ for 9\.0: success, but no code"
    ) as caught:
        compile_kernel()
    assert caught.value.log == "a log"


FILES = r"extra_cuda_cflags: '-.*', expected extra_include_paths"
NO_LIBRARY = Tool((__file__,), "nvrtc", "13.0")


@pytest.mark.parametrize(
    ("how", "error", "says"),
    [
        ({"arch": Arch(3, 0)}, CompileError, r"for 3\.0: [^$]*--gpu-architecture"),
        ({"library": NO_LIBRARY}, ToolchainError, r'no usable libnvrtc .*"jitkern\[cuda\]"'),
        ({"options": ["-I/x"]}, ValueError, FILES),
        ({"options": ["--pre-include=a.h"]}, ValueError, FILES),
        ({"options": ["-isystem/x"]}, ValueError, FILES),
        ({"options": ["-optf"]}, ValueError, FILES),
        ({"options": ["--frob"]}, CompileError, "NVRTC knows no --frob: leave it out"),
    ],
)
def test_mistakes_are_named(how: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        compile_kernel(**how)


def test_options_compile(tmp_path: Path, empty_cache: Path) -> None:
    flags = ["-lineinfo --use_fast_math", "--ptxas-options=-v", "-default-device", "-std=c++20"]
    flags += ["-maxrregcount=32", "-DNAME='\"a b\"'"]
    body = 'static_assert(__cplusplus >= 202002L, ""); auto f = [] { return 1; }; *p.out = f()'
    module = load(tmp_path, body=body, extra_cuda_cflags=flags)
    assert "Used" in module._lookup(SM_90).entry.meta["log"]
