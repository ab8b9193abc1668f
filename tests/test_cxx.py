"""C++ to shared libraries, and what happens when the builder is killed."""

from __future__ import annotations

import io
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from children import wait_until
from headers import put
from needs import needs_cxx

from jitkern.compilers import cxx
from jitkern.compilers.cxx import run_ninja
from jitkern.compilers.load import load_library
from jitkern.errors import CompileError

# By the C ABI, which takes 0.03 s to compile, where the header for C++ takes 1.5.
ADD = """\
#include <tvm/ffi/c_api.h>
#include "term.h"
extern "C" __attribute__((visibility("default"))) int __tvm_ffi_add(
    void*, const TVMFFIAny* args, int32_t, TVMFFIAny* result) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = args[0].v_int64 + TERM;
  return 0;
}
"""
# Minutes of constant folding.
SLOW = """\
constexpr long f(long n) { return n < 2 ? n : f(n - 1) + f(n - 2); }
static_assert(f(90) > 0);
"""


def add(library: Path, x: int) -> int:
    import tvm_ffi

    return int(tvm_ffi.load_module(str(library)).add(x))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@needs_cxx
def test_an_edit_recompiles_one_file(tmp_path: Path, out: Path) -> None:
    include = tmp_path / "include $dir"
    put(include / "term.h", "#define TERM 40\n")
    sources = [put(tmp_path / "a source.cc", ADD), put(tmp_path / "other.cc", "int other;\n")]

    def built() -> set[str]:
        before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
        cxx.build("add", sources=sources, directory=out, include_paths=[include])
        made = (file for file in out.iterdir() if file.suffix in (".o", ".so"))
        return {f.stem for f in made if f.stat().st_mtime_ns != before.get(f.name)}

    first, library, second = sorted(built())
    assert (first[:9], library, second[:6]) == ("a_source-", "add", "other-")
    assert add(out / "add.so", 2) == 42
    assert built() == set()
    put(include / "term.h", "#define TERM 50\n")
    assert built() == {"add", first}


def test_a_terminal_shows_how_far_a_build_is(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    rule = "rule copy\n  command = sleep 0.25; touch $out\n"
    put(out / "build.ninja", f"{rule}build a.o: copy\nbuild b.o: copy a.o\n")
    monkeypatch.setattr(sys, "stderr", Terminal())
    run_ninja("two files", out)
    shown = sys.stderr.getvalue().split("\r")
    assert shown[0] == "" and set(shown[1:-1]) == {"jitkern: built 1 of 2 files"}
    assert shown[-1] == "\x1b[K"  # the line is cleared


@needs_cxx
def test_a_header_that_is_compiled_once(tmp_path: Path, out: Path) -> None:
    """Every source begins with it; the library holds no path of this machine."""
    put(tmp_path / "src/all.h", "#pragma once\n#include <vector>\n#define TERM 5\n")
    put(tmp_path / "src/term.h", "")
    put(tmp_path / "src/add.cc", ADD)

    def build() -> Path:
        sources, header = [tmp_path / "src/add.cc"], tmp_path / "src/all.h"
        return cxx.build("add", sources=sources, directory=out, precompiled=header)

    assert os.fsencode(tmp_path) not in build().read_bytes()
    assert "no work to do" in run_ninja("again", out)
    put(tmp_path / "src/all.h", "#pragma once\n#include <vector>\n#define TERM 6\n")
    assert add(build(), 2) == 8


@needs_cxx
def test_flags_hold_words_quoted_as_in_a_shell(tmp_path: Path, out: Path) -> None:
    text = 'static_assert(A == 1 && B == 2);\nextern "C" const char* s() { return TEXT; }\n'
    source = put(tmp_path / "a.cpp", text)
    flags = ["-DA=1 -DB=2", "'-DTEXT=\"two words $HOME\"'", "-std=c++17"]
    library = cxx.build(
        "a", sources=[source], directory=out, cflags=flags, ldflags=["-Wl,-soname,odd.so"]
    )
    assert b"two words $HOME\0" in library.read_bytes()
    assert b"odd.so\0" in library.read_bytes()
    assert "-std=c++20" not in (out / "build.ninja").read_text()  # one standard in a command


@needs_cxx
def test_failure_carries_command_and_log(tmp_path: Path, out: Path) -> None:
    good = put(tmp_path / "good.cc", "int good;\n")
    bad = put(tmp_path / "bad.cc", '#error "this one"\nint bad = missing_name;\n')
    with pytest.raises(CompileError) as caught:
        cxx.build("m", sources=[good, bad], directory=out, cflags=["-DMARK=1"])
    error = caught.value
    assert "bad.cc" in error.command and "-DMARK=1" in error.command
    assert "good.cc" not in error.command
    assert "this one" in error.log and "missing_name" in error.log
    assert error.log in str(error) + "\n"
    assert "ninja" not in str(error) and "good.cc" not in str(error)
    with pytest.raises(CompileError, match="no_such_library") as caught:
        cxx.build("m", sources=[good], directory=out, ldflags=["-lno_such_library"])
    assert "-shared" in caught.value.command


def test_a_library_that_does_not_load_says_so(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="tiny: the library was built but does not") as caught:
        load_library("tiny", put(tmp_path / "tiny.so", "no library"))
    assert "tiny.so: file too short" in caught.value.log
    with pytest.raises(CompileError, match="tiny: the library was built but does not"):
        load_library("tiny", b"no library")


@needs_cxx
def test_a_log_says_what_is_built(
    tmp_path: Path, out: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Names of spaces, colons and dollars, and lines longer than a ninja file's usual width."""
    source = put(tmp_path / "a$$ b: c.cc", "int a;\n")
    flags = [f"'-DA{number}=$ {'x' * number}'" for number in range(60)]
    caplog.set_level(logging.INFO)
    assert cxx.build("odd[name]", sources=[source], directory=out, cflags=flags).exists()
    assert caplog.messages == ["jitkern: building odd[name]"]


ODD_HOST = """
import os, signal, sys
from pathlib import Path
from jitkern.compilers import cxx
from jitkern.errors import CompileError
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
sys.executable = sys.argv[3]
source, out = Path(sys.argv[1]), Path(sys.argv[2])
for text in ("int good;", "int better;"):
    source.write_text(text)
    library = cxx.build("m", sources=[source], directory=out)
    assert text[4:8].encode() in library.read_bytes()
source.write_text("int bad")
try:
    cxx.build("m", sources=[source], directory=out)
except CompileError as error:
    print("expected" in error.log)
"""


@needs_cxx
def test_a_host_program_that_ignores_its_children(
    forked_python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, out: Path
) -> None:
    """And is no Python: a failed build counted as done, and the old library as the new one."""
    arguments = (str(tmp_path / "a.cc"), str(out), "/bin/false")
    assert forked_python(ODD_HOST, *arguments).stdout == "True\n"


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


BUILD = """
import signal, sys
from pathlib import Path
from jitkern.compilers import cxx
# Children of a script in the background inherit that SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
cxx.build("m", sources=[Path(sys.argv[1])], directory=Path(sys.argv[2]),
          cflags=["-fconstexpr-ops-limit=1000000000000"])
"""


@contextmanager
def building(tmp_path: Path, out: Path) -> Iterator[subprocess.Popen[str]]:
    """Build SLOW in another process; the body begins when its compiler runs."""
    source = put(tmp_path / "slow.cc", SLOW)
    # A session of its own: an interrupt reaches only the Python process, as kill -INT would.
    process = subprocess.Popen(
        [sys.executable, "-c", BUILD, str(source), str(out)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TMPDIR": str(tmp_path)},
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: "cc1plus" in processes_in(out).values(), 60)
        yield process
    finally:
        process.kill()
        process.wait()


@needs_cxx
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_builder(tmp_path: Path, out: Path, how: signal.Signals) -> None:
    with building(tmp_path, out) as process:
        process.send_signal(how)
        process.wait(20)
        wait_until(lambda: not processes_in(out), 5)
