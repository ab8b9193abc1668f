"""Processes of the tests.

`forked_python` and `fresh_python` run code in a new process and return its output:

    def test_it(forked_python):
        forked_python("import jitkern; assert ...", "argument", env={"JITKERN_ARCH": "9.0"})

A forked process comes from a server that has imported torch: 0.1 s (see forks.py, which also starts
processes that run beside the test). A fresh one imports torch for 2 to 4 s: it is for tests of the
order of imports, or of variables that the interpreter reads.

`children` are processes that load a small kernel; tests kill and stop them.
`as_user` runs a function as another user, for tests that run as root.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
from paths import python_path

from jitkern.cache.entry import read_entry
from jitkern.cache.store import Cache

CHILD = Path(__file__).resolve().parent / "loader_child.py"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def forked_python() -> Run:
    """Run code in a process that has imported torch, and not jitkern."""
    return functools.partial(_checked, forks.run)


@pytest.fixture
def fresh_python() -> Run:
    """Do the same in a new interpreter."""

    def run(code: str, *argv: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *argv]
        return subprocess.run(command, env=env, capture_output=True, text=True)

    return functools.partial(_checked, run)


def _checked(
    run: Run, code: str, *argv: str, env: dict[str, str | None] | None = None, check: bool = True
) -> subprocess.CompletedProcess[str]:
    merged = {**os.environ, "PYTHONPATH": python_path(), **(env or {})}
    done = run(code, *argv, env={k: v for k, v in merged.items() if v is not None})
    if check and done.returncode != 0:
        pytest.fail(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def pip(command: str, *argv: object) -> None:
    """Run pip, which asks no index."""
    options = ["--no-deps", "--no-index", "-q", "--disable-pip-version-check"]
    words = [sys.executable, "-m", "pip", command, *options, *map(str, argv)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# Sum<N> sets how long the compile takes: 0.1 s for 4, 0.6 s for 150.
TINY = """\
#include "value.cuh"
struct TinyParams { float* out; };
template <int N> struct Sum {
  static __device__ float of(float x) { return Sum<N - 1>::of(x * 1.5f + N) + x; }
};
template <> struct Sum<0> { static __device__ float of(float x) { return x; } };
template <int N> struct Tiny {
  using Params = TinyParams;
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params& p) { p.out[threadIdx.x] = Sum<N>::of(VALUE); }
};
"""
SLOW = 150

# Without headers of tvm-ffi it compiles in 0.1 s; it returns the constant of value.h.
NATIVE = """\
#include <cstdint>
#include "value.h"
struct Any { int32_t type_index; int32_t padding; int64_t value; };
template <int N> struct Slow { static constexpr int value = Slow<N - 1>::value + N % 3; };
template <> struct Slow<0> { static constexpr int value = 0; };
static const int waste = Slow<COST>::value;
extern "C" __attribute__((visibility("default")))
int __tvm_ffi_value(void*, const Any*, int32_t, Any* result) {
  result->type_index = 1;
  result->padding = 0;
  result->value = VALUE + 0 * waste;
  return 0;
}
"""


def write_sources(folder: Path, value: int = 1, cost: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.cu").write_text(TINY)
    (folder / "value.cuh").write_text(f"#define VALUE {value}.0f\n")
    (folder / "tiny.cc").write_text(NATIVE)
    (folder / "value.h").write_text(f"#define VALUE {value}\n#define COST {cost}\n")
    return folder


class Children:
    """Processes of one test, with one environment; what is left of them is killed at the end."""

    def __init__(self, cache_dir: Path) -> None:
        self.env = {**os.environ, "PYTHONPATH": python_path(), "JITKERN_CACHE_DIR": str(cache_dir)}
        self._started: list[subprocess.Popen[str]] = []
        self._ready = Path(tempfile.mkdtemp(prefix="jitkern-ready-"))
        self._ready.chmod(0o777)

    def start(
        self, file: Path, *, env: dict[str, str] | None = None, **config: Any
    ) -> subprocess.Popen[str]:
        config |= {"file": str(file), "ready": str(self._ready)}
        command = [sys.executable, str(CHILD), json.dumps(config)]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env={**self.env, **(env or {})}, cwd="/", **pipes)
        self._started.append(process)
        return process

    def wait_ready(self, *processes: subprocess.Popen[str]) -> None:
        """Wait until the children have finished their imports."""
        wait_until(lambda: all((self._ready / str(p.pid)).exists() for p in processes))

    def report(self, process: subprocess.Popen[str], timeout_s: float = 60) -> dict[str, Any]:
        out, err = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, f"exit {process.returncode}\n{out}\n{err}"
        report: dict[str, Any] = json.loads(out.splitlines()[-1])
        return report

    def run(self, file: Path, **config: Any) -> dict[str, Any]:
        return self.report(self.start(file, **config))

    def stop(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        shutil.rmtree(self._ready)


@pytest.fixture
def cache_dir(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    return write_sources(tmp_path / "sources")


@pytest.fixture
def children(cache_dir: Path) -> Iterator[Children]:
    group = Children(cache_dir)
    yield group
    group.stop()


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.002)


def sound(cache_dir: Path) -> bool:
    """Tell whether no entry is damaged or half-written."""
    return all(read_entry(path) for path in Cache(cache_dir).paths())


MALLORY = 54321  # a uid without a user

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")


def as_user(uid: int, act: Callable[[], object]) -> None:
    """Run `act` in a child process of user `uid`."""

    def run() -> None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        act()

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join()
    assert child.exitcode == 0  # it has printed its traceback


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that all users may write to, as /tmp; pytest's directories are private."""
    folder = Path(tempfile.mkdtemp(prefix="jitkern-test-"))
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)
