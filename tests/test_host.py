"""The host module: built once, shipped, refused with advice; calls through it. Stand-in sources."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from headers import put
from needs import needs_cxx

from jitkern.arch import Arch
from jitkern.cache import get
from jitkern.cache.entry import META_NAME
from jitkern.cache.store import Cache
from jitkern.compilers import cxx
from jitkern.compilers.sources import CSRC, include_dirs
from jitkern.env import settings
from jitkern.errors import CompileError, JitkernError, ToolchainError
from jitkern.host import library as host

SOURCE = """\
#include <jitkern/answer.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

using namespace tvm::ffi;

static auto& resolver = *new Function();
static auto& fault_handler = *new Function();

static void fault(String text) {
  if (fault_handler == nullptr) TVM_FFI_THROW(IndexError) << text;
  fault_handler(text);
}
static int64_t demo(int64_t rows, int64_t bytes) {
  const Array<String> names{"rows", "bytes"};
  const auto [image, entries, config] = resolver("demo", names, Array<int64_t>{rows, bytes}, 90)
      .cast<Tuple<Bytes, Array<String>, Array<int64_t>>>();
  return image.size() + 100 * entries.size() + 10000 * config[0];
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(answer, [] { return ANSWER; });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_resolver, [](Function f) { resolver = f; });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_torch_state, ([](int64_t, int64_t, int64_t) {}));
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_fault_handler, [](Function f) { fault_handler = f; });
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fault, fault);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(demo, demo);
"""

CFLAGS = ("-std=c++20", "-O0", "-fvisibility=hidden")  # compiles in half the time


def write_csrc(folder: Path, answer: int = 42) -> Path:
    put(folder / "host/precompiled.h", "#pragma once\n#include <string>\n")
    put(folder / "include/jitkern/answer.h", f"#define ANSWER {answer}\n")
    put(folder / "ops/demo.cc", SOURCE)
    put(folder / "ops/demo.cu", "no part of the host module")
    return folder


def forget() -> None:
    host._lookup = None
    host._builders.clear()
    get._caches.cache_clear()
    settings.cache_clear()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the stand-in was built as for a wheel."""
    folder = tmp_path_factory.mktemp("host")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "CFLAGS", CFLAGS)
        csrc = write_csrc(folder / "src/jitkern/csrc")
        entry = host.HostModule(csrc).compile(ldflags=("-s",))
        Cache(folder / "_prebuilt", shared=True).publish(entry)
    assert entry.artefact_name == "jitkern_host.so"
    return folder / "_prebuilt"


@pytest.fixture
def stand_in(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in sources in the place of jitkern's own, nothing shipped, nothing cached."""
    csrc = write_csrc(tmp_path / "src/jitkern/csrc")
    monkeypatch.setattr(host, "CSRC", csrc)
    monkeypatch.setattr(host, "CFLAGS", CFLAGS)
    monkeypatch.setattr(get, "SHIPPED", tmp_path / "nothing")
    monkeypatch.setattr(host, "_lookup", None)
    monkeypatch.setattr(host, "_builders", {})
    forget()
    return csrc


@pytest.fixture
def shipped(stand_in: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, with a copy of its shipped library."""
    place = tmp_path / "_prebuilt"
    shutil.copytree(built, place)
    monkeypatch.setattr(get, "SHIPPED", place)
    return place


pytestmark = needs_cxx


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    settings.cache_clear()


def edit_meta(place: Path, **changes: Any) -> None:
    """Publish the shipped library anew with a changed meta."""
    cache = Cache(place)
    entry = cache.lookup(host.HostModule(host.CSRC).key)
    assert entry is not None and entry.path is not None
    shutil.rmtree(entry.path)
    cache.publish(entry._replace(meta={**entry.meta, **changes}))


def test_built_once_with_one_line(
    stand_in: Path, empty_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "jitkern")
    with ThreadPoolExecutor(8) as pool:
        modules = list(pool.map(lambda _: host.module(), range(8)))
    assert len(set(map(id, modules))) == 1
    assert modules[0]["answer"]() == 42
    (line,) = caplog.messages
    assert line.startswith("jitkern: building the host module with c++")
    (entry,) = Cache(empty_cache).entries()
    assert (entry.key.op, entry.key.route) == ("jitkern_host", "cxx")

    forget()
    assert host.module()["answer"]() == 42
    assert len(caplog.messages) == 1  # found in the cache


def test_the_shipped_library_is_used_while_no_source_or_header_changed(
    shipped: Path, stand_in: Path, empty_cache: Path
) -> None:
    def source() -> str | None:
        forget()
        found = host.find_built()
        return None if found is None else found.source

    assert source() == "shipped"
    write_csrc(stand_in, answer=43)
    assert source() is None
    write_csrc(stand_in, answer=42)
    (stand_in / "ops" / "demo.cu").write_text("changed")
    os.utime(stand_in / "ops" / "demo.cc")
    assert source() == "shipped"


def test_a_checkout_is_built_by_ninja_in_its_own_folder(
    stand_in: Path, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An edit recompiles one file, another cache nothing; CPATH has no part in it."""
    (tmp_path / "hatch_build.py").touch()
    (stand_in / "ops" / "other.cc").write_text("int other() { return 1; }\n")

    def times() -> dict[str, int]:
        made = (tmp_path / "build").glob("host-*/*")
        return {f.name: f.stat().st_mtime_ns for f in made if f.suffix in (".o", ".so")}

    def made() -> set[str]:
        before = times()
        forget()
        assert host.find().source == "compiled"
        names = [name for name, time in times().items() if time != before.get(name)]
        return {re.sub(r"(-[0-9a-f]{8})?\.s?o$", "", name) for name in names}

    # With packages below TMPDIR too, as in a virtual environment there: each cache built it anew.
    monkeypatch.setattr(tempfile, "tempdir", str(Path(cxx.tvm_ffi_include_dirs()[0].anchor)))
    assert made() == {"demo", "other", "jitkern_host"}
    (stand_in / "ops" / "other.cc").write_text("int other() { return 2; }\n")
    assert made() == {"other", "jitkern_host"}
    monkeypatch.setenv("JITKERN_CACHE_DIR", str(tmp_path / "another"))
    monkeypatch.setenv("CPATH", str(tmp_path))
    assert made() == set()


def test_without_a_compiler_the_error_says_what_to_install(
    shipped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_meta(shipped, tvm_ffi="0.9.0")
    no_compiler(monkeypatch)
    with pytest.raises(ToolchainError, match=r"is not shipped .* install g\+\+"):
        host.module()


@pytest.mark.parametrize(
    ("built_against", "installed", "fits"),
    [
        ("0.1.15", "0.1.15", True),
        ("0.1.15.post2", "0.1.15", True),
        ("0.1.15", "0.1.20", True),
        ("0.1.20", "0.1.15", False),  # a function it calls may not be there yet
        ("0.1.15", "0.2.0", False),
        ("", "0.1.15", False),
        ("garbage", "0.1.15", False),
    ],
)
def test_which_versions_fit(built_against: str, installed: str, fits: bool) -> None:
    assert host.fits(built_against, installed) is fits


def test_the_shipped_library_is_portable(built: Path) -> None:
    (library,), (meta,) = built.rglob("*.so"), built.rglob(META_NAME)
    assert '"tvm_ffi": ' in meta.read_text()
    for path in (str(built.parent), sys.prefix):
        assert path not in meta.read_text()
        assert path.encode() not in library.read_bytes()
    if shutil.which("objdump") is None:
        pytest.skip("needs objdump")
    command = ["objdump", "-p", str(library)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = [line.split()[1] for line in text.splitlines() if "NEEDED" in line]
    assert "libtvm_ffi.so" in needed
    assert not any("cuda" in name for name in needed)  # found by dlopen if there is one
    assert "RPATH" not in text
    assert "RUNPATH" not in text


def test_a_fork_keeps_the_module(shipped: Path) -> None:
    assert host.module()["answer"]() == 42
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork with threads, 3.12
        pid = os.fork()
    if pid == 0:
        os._exit(0 if host.module()["answer"]() == 42 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def kernels(**image: Any) -> Mock:
    """What a builder returns: a module whose `image` returns or raises this."""
    return Mock(exports=("one", "two"), _launch_config=(7, 8), image=Mock(**image))


def test_ops_resolve_through_python(shipped: Path) -> None:
    builder = Mock(return_value=kernels(return_value=b"12345"))
    host.builds("demo", builder)
    demo = host.Function("demo")
    assert demo(656, 16) == 70205  # image, entry points and configuration
    builder.assert_called_once_with(rows=656, bytes=16)
    builder().image.assert_called_once_with(Arch(9, 0))
    host.builds("demo", lambda bytes_, lines: kernels())  # other parameters
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        demo(656, 16)


def test_exceptions_survive_the_way_through_cxx(shipped: Path) -> None:
    error = CompileError("demo: failed", command="nvrtc", log="line 1", source="text")
    host.builds("demo", lambda **_: kernels(side_effect=error))
    demo = host.Function("demo")
    for _ in range(2):
        with pytest.raises(type(error)) as caught:
            demo(1, 2)
        assert caught.value is error
    assert not vars(host._in_cpp)


def test_threads_that_fail_at_once_get_their_own_exceptions(shipped: Path) -> None:
    barrier = threading.Barrier(2)

    def failing(rows: int, **_: int) -> Mock:
        barrier.wait()
        raise JitkernError(f"{rows} rows")

    host.builds("demo", failing)
    demo = host.Function("demo")

    def failure(rows: int) -> str:
        with pytest.raises(JitkernError) as caught:
            demo(rows, 16)
        return str(caught.value)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(failure, (3, 4))) == ["3 rows", "4 rows"]


@pytest.mark.parametrize(
    ("mode", "outcome"),
    [
        ("raise", pytest.raises(IndexError, match="row 3 was skipped")),
        ("warn", pytest.warns(RuntimeWarning, match="row 3 was skipped")),
        ("ignore", nullcontext()),
    ],
)
def test_what_python_says_of_faults_is_what_cxx_does(
    shipped: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    outcome: AbstractContextManager[object],
) -> None:
    monkeypatch.setenv("JITKERN_FAULTS", mode)
    settings.cache_clear()
    module = host.module()
    with outcome:
        module["fault"]("row 3 was skipped")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-g++") is None, reason="needs a cross-compiler")
def test_the_sources_compile_for_aarch64() -> None:
    include_paths = [*include_dirs(CSRC), *cxx.tvm_ffi_include_dirs()]
    command = ["aarch64-linux-gnu-g++", *host.CFLAGS, "-Wall", "-Werror", "-fsyntax-only"]
    command += [f"-I{path}" for path in include_paths]
    done = subprocess.run([*command, *CSRC.rglob("*.cc")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
