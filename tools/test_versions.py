"""Run one wheel under several versions of Python, torch and tvm-ffi: `make test-versions`.

The wheel is built once. Each pair of Python and torch gets an environment, which is deleted after
it has run with each version of tvm-ffi. pip's own settings say where packages come from.

    python tools/test_versions.py --torch 2.13.0 --tvm-ffi 0.1.11 --python python3.11 python3.14
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from setup_venv import cpu_index_options

ROOT = Path(__file__).resolve().parent.parent
TVM_FFI = ["0.1.11", "0.1.12", "0.1.13.post3", "0.1.14.post1", "0.1.15.post2"]
TORCH = ["2.8.0", "2.11.0", "2.13.0", "2.14.1", "2.15.0"]
PYTHON = ["python3.10", "python3.11", "python3.12", "python3.13", "python3.14"]
TESTS = [
    "tests/versions_probe.py",
    # What crosses to the host module: tensors, lists, strings, functions, errors; bytes from it.
    "tests/ops/test_errors_table.py",
    "tests/offload/test_monitor.py",
    "tests/test_table.py::test_op_schemas_are_frozen",
]


class UnfitError(Exception):
    """A step failed; the message has the end of its output."""


class Environment:
    """A virtual environment with the wheel, one version of torch and one of tvm-ffi at a time."""

    def __init__(self, folder: Path, python: str) -> None:
        self.python = folder / "bin" / "python"
        run(python, "-m", "venv", "--without-pip", str(folder))

    def install(self, *packages: str) -> None:
        # The pip that is here: it installs for any interpreter.
        pip = (sys.executable, "-m", "pip", "--python", str(self.python), "install", "-q")
        options = ("--disable-pip-version-check", "--no-compile", *cpu_index_options())
        run(*pip, *options, *packages)

    def run(self, *arguments: str, **variables: str) -> str:
        return run(str(self.python), *arguments, **variables)


def run(*command: str, **variables: str) -> str:
    environ = {**os.environ}
    environ.pop("PYTHONPATH", None)  # under `make PY=...` it names the checkout
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**environ, **variables}, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        raise UnfitError(str(error)) from error
    if done.returncode:
        raise UnfitError(f"{' '.join(command)}\n{done.stdout[-8000:]}{done.stderr[-8000:]}")
    return done.stdout


class Pair(NamedTuple):
    """An interpreter and a version of torch, and the versions of tvm-ffi to run them with."""

    python: str
    torch: str
    tvm_ffi: list[str]


def pairs(args: argparse.Namespace) -> Iterator[Pair]:
    """Yield all versions of one package with one version of the others: not every combination.

    tvm-ffi in full with `--base-torch` on this Python, else its oldest and newest.
    """
    ends = list(dict.fromkeys([args.tvm_ffi[0], args.tvm_ffi[-1]]))
    yield Pair(sys.executable, args.base_torch, args.tvm_ffi)
    for torch in args.torch:
        if torch != args.base_torch:
            yield Pair(sys.executable, torch, ends)
    for python in args.python:
        if python != f"python{sys.version_info[0]}.{sys.version_info[1]}":
            yield Pair(python, args.base_torch, ends)


def build_wheel(scratch: Path) -> Path:
    run(sys.executable, "-m", "pip", "wheel", "-q", str(ROOT), "--no-deps", "-w", str(scratch))
    (wheel,) = scratch.glob("*.whl")
    return wheel


def run_pair(pair: Pair, wheel: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield each version of tvm-ffi, and what pytest said: its last line, or all if one failed."""
    environment = Environment(folder, pair.python)
    environment.install(f"torch=={pair.torch}")
    environment.install(f"jitkern[cuda,test] @ {wheel.as_uri()}")
    for version in pair.tvm_ffi:
        try:
            environment.install(f"apache-tvm-ffi=={version}")
            options = ("-q", "-p", "no:cacheprovider", "-m", "not cuda")
            # Inductor and jitkern keep what they compile in folders of this run.
            said = environment.run("-m", "pytest", *options, *TESTS, HOME=str(folder))
        except UnfitError as error:
            yield version, f"FAILED\n{error}"
        else:
            yield version, said.splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tvm-ffi", nargs="*", default=TVM_FFI, help=f"default: {TVM_FFI}")
    parser.add_argument("--torch", nargs="*", default=TORCH, help=f"default: {TORCH}")
    parser.add_argument("--python", nargs="*", default=PYTHON, help="interpreters: names or paths")
    parser.add_argument("--base-torch", default="2.13.0", help="the torch that the others run with")
    parser.add_argument("--wheel", type=Path, help="default: built here")
    args = parser.parse_args()
    failures = 0
    with tempfile.TemporaryDirectory(prefix="jitkern-versions-") as scratch:
        wheel = args.wheel or build_wheel(Path(scratch))
        print(f"{'python':20} {'torch':10} {'tvm-ffi':14} result", flush=True)
        for pair in pairs(args):
            folder = Path(scratch) / "environment"
            start = f"{Path(pair.python).name:20} {pair.torch:10}"
            try:
                for version, said in run_pair(pair, wheel, folder):
                    failures += said.startswith("FAILED")
                    print(f"{start} {version:14} {said}", flush=True)
            except UnfitError as error:
                failures += 1
                print(f"{start} {'':14} FAILED: not installed\n{error}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    sys.exit(f"{failures} failed" if failures else 0)


if __name__ == "__main__":
    main()
