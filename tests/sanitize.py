"""The ops' tests under sanitizers: ``python tests/sanitize.py [host | threads | memcheck | ...]``.

``host`` builds the host module with Address- and UBSan and runs the tests that need no GPU.
``threads`` runs test_threads.py, whose programs are built with Thread-, Address- and UBSan. The
others are the tools of compute-sanitizer, over the tests that need a GPU. Without a name: all that
this machine can run.
``--thin 5`` keeps every fifth test; further arguments go to pytest.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from threads.program import FOUND, cxx

from jitkern.ops._ops import OPS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")

# Captured graphs and the record of a source's use need torch's caching allocators, off below.
NOT_UNDER_TOOLS = "not graph and not replay and not recorded"


class Thin:
    """A pytest plugin that keeps every ``step``-th test, from another start in every file."""

    def __init__(self, step: int) -> None:
        self.step = step

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = items[:: self.step]


def tests_of(names: Iterable[str]) -> list[str]:
    """The test files of these stems."""
    return [str(path) for name in names for path in sorted((HERE / "ops").glob(f"test_{name}*.py"))]


HOST_TESTS = tests_of((*(op.stem for op in OPS), "contract", "errors_table"))
CUDA_TESTS = [
    *tests_of((*(op.stem for op in OPS if op.has_kernels), "contract")),
    str(HERE / "ops" / "test_pairs_on_host.py") + "::test_many_pairs_of_every_region",
    str(HERE / "comm" / "test_peer_reduce_cuda.py"),
]


def preload() -> str:
    """The sanitizers' libraries, which come first in a process that is not built with them."""
    paths = []
    for name in ("libasan.so", "libubsan.so"):
        command = [*cxx(), f"-print-file-name={name}"]
        paths.append(subprocess.check_output(command, text=True).strip())
        if not os.path.isabs(paths[-1]):
            raise RuntimeError(f"{shlex.join(cxx())} has no {name}")
    return " ".join(paths)


def compute_sanitizer() -> str | None:
    """The tool, from PATH, a CUDA toolkit or pip's nvidia-cuda-sanitizer-api."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    places = [Path(home) / "bin" for home in homes if home]
    places += [Path(entry) / "nvidia" / "cu13" / "bin" for entry in sys.path]
    path = os.pathsep.join([os.environ.get("PATH", ""), *map(str, places)])
    return shutil.which("compute-sanitizer", path=path)


def inner(thin: int, args: Sequence[str]) -> list[str]:
    """The command that runs the tests in this process's own interpreter."""
    return [sys.executable, str(HERE / "sanitize.py"), "inner", "--thin", str(thin), *args]


def run_host(thin: int, args: Sequence[str]) -> int:
    flags = "-fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all -g1"
    env = {
        **os.environ,
        "CXX": f"{shlex.join(cxx())} {flags}",
        "LD_PRELOAD": preload(),
        "ASAN_OPTIONS": "detect_leaks=0,verify_asan_link_order=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(inner(thin, [*HOST_TESTS, "-m", "not cuda", *args]), env=env).returncode


def run_threads(thin: int, args: Sequence[str]) -> int:
    command = inner(thin, [str(HERE / "test_threads.py"), *args])
    return subprocess.run(command).returncode


def run_tool(tool: str, thin: int, args: Sequence[str]) -> int:
    program = compute_sanitizer()
    if program is None:
        print("compute-sanitizer was not found; it is part of the CUDA toolkit, and pip's "
              "nvidia-cuda-sanitizer-api")  # fmt: skip
        return 1
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--target-processes", "all"]
    if tool == "memcheck":
        # Errors that a driver call returns are the tests' matter; what counts here is memory.
        options += ["--report-api-errors", "no", "--padding", "64"]
    # An allocation of its own for every tensor, so that its end is known to the tool.
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    tests = [*CUDA_TESTS, "-m", "cuda and not multigpu", "-k", NOT_UNDER_TOOLS, *args]
    return subprocess.run([program, *options, *inner(thin, tests)], env=env).returncode


ON_CPU = {"host": run_host, "threads": run_threads}


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the ops' tests under sanitizers.")
    parser.add_argument("what", nargs="*", choices=[*ON_CPU, *TOOLS, "inner", []])
    parser.add_argument("--thin", type=int, default=1, help="keep every THIN-th test")
    known, args = parser.parse_known_args()
    if known.what == ["inner"]:
        return int(pytest.main(["-q", "-p", "no:cacheprovider", *args], plugins=[Thin(known.thin)]))
    results = {}
    for what in known.what or [*ON_CPU, *(TOOLS if torch.cuda.is_available() else ())]:
        print(f"== {what}", flush=True)
        run = ON_CPU.get(what) or partial(run_tool, what)
        results[what] = run(known.thin, args)
    for what, status in results.items():
        meaning = {0: "no findings", FOUND: "findings"}.get(status, f"tests failed ({status})")
        print(f"{what}: {meaning}")
    return max(results.values())


if __name__ == "__main__":
    raise SystemExit(main())
