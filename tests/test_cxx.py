"""C++ and single-source CUDA to shared libraries, and what happens when the builder is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from needs import needs_cxx, needs_nvcc

from jitkern.arch import Arch
from jitkern.compilers import cxx
from jitkern.compilers.ninja import Step, ninja_text, run_ninja
from jitkern.env import settings
from jitkern.errors import CompileError

ADD = """\
#include <tvm/ffi/function.h>
#include "term.h"
static int add(int x) { return x + TERM; }
TVM_FFI_DLL_EXPORT_TYPED_FUNC(add, add);
"""
CUDA = """\
#include <cuda_runtime.h>
#include <tvm/ffi/function.h>
__global__ void kernel(int* x) { *x = 1; }
static int runtime_major() {
  int version = 0;
  cudaRuntimeGetVersion(&version);
  return version / 1000;
}
TVM_FFI_DLL_EXPORT_TYPED_FUNC(runtime_major, runtime_major);
"""
# Minutes of constant folding, for g++ and for the front end of nvcc.
SLOW = """\
constexpr long f(long n) { return n < 2 ? n : f(n - 1) + f(n - 2); }
#ifdef __CUDACC__
#define R4(x) x x x x
#define R256(x) R4(R4(R4(R4(x))))
__global__ void slow(float* a) {
  float x = a[0];
  R256(R256(x = x * a[int(x)] + 1.0f; if (x > 3) a[int(x)] = x;))
}
#else
static_assert(f(90) > 0);
#endif
"""


def write(directory: Path, name: str, text: str) -> Path:
    path = directory / name
    path.write_text(text)
    return path


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@needs_cxx
def test_build_and_call(tmp_path: Path, out: Path) -> None:
    import tvm_ffi

    include = tmp_path / "include $dir"
    include.mkdir()
    header = write(include, "term.h", "#define TERM 40\n")
    source = write(tmp_path, "a source.cc", ADD)
    built = cxx.build("add", sources=[source], directory=out, include_paths=[include])
    assert built.path == out / "add.so"
    assert tvm_ffi.load_module(str(built.path)).add(2) == 42

    names = {path.name for path in built.dependencies}
    assert {source, header} <= set(built.dependencies)
    assert {"function.h", "stddef.h"} <= names, "headers of tvm-ffi and of the system"
    assert all(path.is_file() for path in built.dependencies)
    assert "-std=c++20" in built.log


@needs_cxx
def test_a_header_is_compiled_once(tmp_path: Path, out: Path) -> None:
    """The source needs it and does not name it; the second build sees that it has changed."""
    import tvm_ffi

    write(tmp_path, "term.h", "")
    header = write(tmp_path, "all.h", "#pragma once\n#include <vector>\n#define TERM 5\n")
    source = write(tmp_path, "add.cc", ADD)
    built = cxx.build("add", sources=[source], directory=out, precompiled=header)
    assert built.log.count("-x c++-header") == 1
    assert tvm_ffi.load_module(str(built.path)).add(2) == 7
    header.write_text(header.read_text().replace("5", "6"))
    again = tmp_path / "again"
    again.mkdir()
    built = cxx.build("add", sources=[source], directory=again, precompiled=header)
    assert tvm_ffi.load_module(str(built.path)).add(2) == 8


@needs_cxx
def test_library_holds_no_path(tmp_path: Path, out: Path) -> None:
    """Two checkouts, two users and two machines share it."""
    write(tmp_path, "term.h", "inline int term(const char* s) { return *s; }\n")
    source = write(tmp_path, "a.cc", ADD.replace("TERM", "term(__FILE__)"))
    data = cxx.build("a", sources=[source], directory=out).path.read_bytes()
    assert os.fsencode(tmp_path) not in data
    assert b"site-packages" not in data
    if shutil.which("readelf"):
        command = ["readelf", "-d", str(out / "a.so")]
        dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "[libtvm_ffi.so]" in dynamic
        assert "RPATH" not in dynamic
        assert "RUNPATH" not in dynamic


@needs_cxx
def test_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    data = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        source = write(tmp_path / name, "a.cc", "const char* where() { return __FILE__; }\n")
        built = cxx.build("a", sources=[source], directory=tmp_path / name)
        data.append(built.path.read_bytes())
    assert data[0] == data[1]


@needs_cxx
def test_flags_hold_words_quoted_as_in_a_shell(tmp_path: Path, out: Path) -> None:
    text = 'static_assert(A == 1 && B == 2);\nextern "C" const char* s() { return TEXT; }\n'
    source = write(tmp_path, "a.cpp", text)
    flags = ["-DA=1 -DB=2", "'-DTEXT=\"two words $HOME\"'", "-std=c++17"]
    built = cxx.build(
        "a", sources=[source], directory=out, cflags=flags, ldflags=["-Wl,-soname,odd.so"]
    )
    data = built.path.read_bytes()
    assert b"two words $HOME\0" in data
    assert b"odd.so\0" in data
    assert "-std=c++20" not in built.log  # one standard in a command


@needs_cxx
def test_failure_carries_command_and_log(tmp_path: Path, out: Path) -> None:
    good = write(tmp_path, "good.cc", "int good;\n")
    bad = write(tmp_path, "bad.cc", '#error "this one"\nint bad = missing_name;\n')
    with pytest.raises(CompileError) as caught:
        cxx.build("m", sources=[good, bad], directory=out, cflags=["-DMARK=1"])
    error = caught.value
    assert "bad.cc" in error.command
    assert "good.cc" not in error.command
    assert "-DMARK=1" in error.command
    assert "this one" in error.log
    assert "missing_name" in error.log
    assert error.log in str(error) + "\n"


@needs_cxx
def test_link_failure(tmp_path: Path, out: Path) -> None:
    source = write(tmp_path, "a.cc", "int a;\n")
    with pytest.raises(CompileError, match="no_such_library") as caught:
        cxx.build("m", sources=[source], directory=out, ldflags=["-lno_such_library"])
    assert "-shared" in caught.value.command


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "build: sources: none, expected at least one"),
        (["a.txt"], r"build: sources: .*a\.txt, expected \.cc"),
        (["missing.cc"], r"build: sources: .*missing\.cc does not exist"),
        (["a.cu"], r"build: arch: None, expected an Arch to compile a\.cu for"),
    ],
)
def test_bad_sources(tmp_path: Path, out: Path, names: list[str], message: str) -> None:
    for name in ("a.txt", "a.cu"):
        write(tmp_path, name, "")
    with pytest.raises(ValueError, match=message):
        cxx.build("m", sources=[tmp_path / name for name in names], directory=out)
    assert not list(out.iterdir())


@needs_cxx
def test_cxx_is_obeyed(tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("c++")
    script = write(tmp_path, "my cxx", f'#!/bin/sh\necho marked >> "$0.log"\nexec {real} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{script}' -DFROM_CXX")
    settings.cache_clear()
    try:
        source = write(tmp_path, "a.cc", "#ifndef FROM_CXX\n#error no\n#endif\n")
        cxx.build("m", sources=[source], directory=out)
        assert "marked" in script.with_name("my cxx.log").read_text()
    finally:
        monkeypatch.undo()
        settings.cache_clear()


@needs_nvcc
@pytest.mark.slow
def test_cuda_source(tmp_path: Path, out: Path) -> None:
    """Compiles for an arch that this machine need not have, links the runtime by its plain name."""
    source = write(tmp_path, "k.cu", CUDA)
    plain = write(tmp_path, "p.cc", "#include <cuda_runtime.h>\nint bytes = sizeof(dim3);\n")
    built = cxx.build("k", sources=[source, plain], directory=out, arch=Arch(8, 0))
    data = built.path.read_bytes()
    assert b"libcudart.so." in data
    assert b"sm_80" in data
    assert os.fsencode(tmp_path) not in data
    assert {"cuda_runtime.h", "k.cu", "p.cc"} <= {path.name for path in built.dependencies}


@needs_nvcc
def test_cuda_failure(tmp_path: Path, out: Path) -> None:
    source = write(tmp_path, "k.cu", "__global__ void k() { missing_name(); }\n")
    with pytest.raises(CompileError, match="missing_name") as caught:
        cxx.build("m", sources=[source], directory=out, arch=Arch(9, 0))
    assert "compute_90" in caught.value.command


def test_ninja_text_quotes() -> None:
    step = Step("o ut", ("/a b/$x:y.cc",), ("cc", "a b", "$HOME"), depfile="o ut.d")
    assert ninja_text([step]).splitlines()[2:] == [
        "rule r0",
        "  command = cc 'a b' '$$HOME'",
        "  depfile = o ut.d",
        "  deps = gcc",
        "build o$ ut: r0 /a$ b/$$x$:y.cc",
    ]


@pytest.mark.parametrize("name", ["a$ b", "a$$ b", " $", "$", "a: b", "x$y", "a$"])
@pytest.mark.parametrize("words", [1, 60])
def test_ninja_runs_what_is_written(out: Path, name: str, words: int) -> None:
    """Spaces inside quotes, dollars and lines longer than a ninja file's usual width."""
    source = write(out, name, "")
    args = [f"{number}  $ {'x' * number}" for number in range(words)]
    code = "import sys; open(sys.argv[1], 'w').write('\\n'.join(sys.argv[2:]))"
    command = (sys.executable, "-c", code, "out.txt", *args)
    run_ninja("echo", out, [Step("out.txt", (str(source),), command)])
    assert (out / "out.txt").read_text().split("\n") == args


# --------------------------------------------------------------------------------------- orphans


def processes_in(directory: Path) -> dict[int, str]:
    """pid -> name of every process that runs in a directory."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == directory:
                found[int(entry.name)] = (entry / "comm").read_text().strip()
        except OSError:
            continue  # gone, or another user's
    return found


def wait_for(condition, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda s: s.name
)
@pytest.mark.parametrize(
    ("name", "compilers"),
    [
        pytest.param("slow.cc", {"cc1plus"}, marks=needs_cxx),
        pytest.param("slow.cu", {"cicc", "cudafe++", "ptxas"}, marks=needs_nvcc),
    ],
)
def test_nothing_outlives_the_builder(
    tmp_path: Path, out: Path, name: str, compilers: set[str], how: signal.Signals
) -> None:
    source = write(tmp_path, name, SLOW)
    # Where the tests run in the background of a script, children inherit that SIGINT is ignored.
    code = f"""
import signal
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)
from jitkern.compilers import cxx
from jitkern.arch import Arch
cxx.build("m", sources=[Path({str(source)!r})], directory=Path({str(out)!r}), arch=Arch(9, 0),
          cflags=["-fconstexpr-ops-limit=1000000000000"])
"""
    path = os.pathsep.join(sys.path)
    # A session of its own: an interrupt reaches only the Python process, as kill -INT would.
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        start_new_session=True,
        stderr=subprocess.PIPE,
    )
    try:
        started = wait_for(lambda: compilers & set(processes_in(out).values()), 60)
        if not started:
            process.kill()
            pytest.fail(f"no compiler was seen: {process.communicate()[1].decode()}")
        assert "ninja" in processes_in(out).values()
        process.send_signal(how)
        process.wait(20)
        assert wait_for(lambda: not processes_in(out), 5), processes_in(out)
    finally:
        process.kill()
        process.communicate()


@needs_cxx
def test_an_interrupt_is_no_fault_of_the_source(tmp_path: Path, out: Path) -> None:
    """ninja hears of a Ctrl-C by itself, also where Python goes on, as in a thread."""
    source = write(tmp_path, "slow.cc", SLOW)
    code = f"""
import signal
from pathlib import Path
signal.signal(signal.SIGINT, lambda *_: None)
from jitkern.compilers import cxx
from jitkern.errors import CompileError, JitkernError
try:
    cxx.build("m", sources=[Path({str(source)!r})], directory=Path({str(out)!r}),
              cflags=["-fconstexpr-ops-limit=1000000000000"])
except JitkernError as error:
    print(type(error).__name__, error, sep=": ")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert wait_for(lambda: "cc1plus" in processes_in(out).values(), 60)
        os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    text = "the build was interrupted; it begins anew with the next call"
    assert said == f"JitkernError: m: {text}\n"
