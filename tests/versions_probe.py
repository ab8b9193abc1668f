"""Run by tools/test_versions.py under other versions of Python, torch and tvm-ffi.

`make test` does not collect it: it tests an installed wheel. PROBE_LIBRARY is versions_probe.cc,
built against the oldest tvm-ffi, as the wheel's host module is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import tvm_ffi
from needs import needs_cxx, needs_nvrtc

import jitkern
from jitkern.host.library import find

ROOT = Path(__file__).resolve().parent.parent
KEYS = {2: {"key0": 0, "key1": 1}, 20: {f"key{i}": i for i in range(20)}}
RENDERED = (
    "1 7 2.5 float16 short a text of more than seven bytes raw 1 2 3 25 3 4 "
    f"{' '.join(map(str, range(20)))} 2 1 1 20 190 1"
)


def run_python(*arguments: str) -> None:
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_wheel_is_used_as_it_is() -> None:
    """Its host module loads; nothing is built."""
    assert ROOT not in Path(jitkern.__file__).resolve().parents
    assert find().source == "shipped"


def test_doctor() -> None:
    run_python("-m", "jitkern", "doctor")


def test_readme() -> None:
    run_python("-c", (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0])


@needs_cxx
@needs_nvrtc
def test_own_kernel() -> None:
    """Its C++ form on the CPU, compared with PyTorch, and its device code compiled."""
    run_python(str(ROOT / "examples" / "own_kernel" / "own_kernel.py"), "--warm", "9.0")


@cache
def library(name: str) -> Any:
    """Return versions_probe.cc, built against the "oldest" or the "installed" tvm-ffi."""
    if name == "oldest":
        return tvm_ffi.load_module(os.environ["PROBE_LIBRARY"])
    return jitkern.load_aot("probe", cpp_files=[Path(__file__).with_suffix(".cc")])


def values(maker: str) -> Any:
    """Return values of all types that cross, made by a library or by Python."""
    tensor: Any = torch.tensor([1, 2, 3])

    def add_five(value: int) -> int:
        return value + 5

    if maker != "python":
        return library(maker).make_values(tensor, library(maker).make_adder(5))
    return [
        *(True, 7, 2.5, torch.float16, "short", "a text of more than seven bytes", b"raw"),
        *(tensor, add_five, tvm_ffi.Shape((3, 4)), list(range(20)), KEYS[2], KEYS[20]),
    ]


LIBRARIES = ("oldest", "installed")


@needs_cxx
@pytest.mark.parametrize("reader", LIBRARIES)
@pytest.mark.parametrize("maker", ["python", *LIBRARIES])
def test_values_cross(maker: str, reader: str) -> None:
    assert library(reader).render(*values(maker)) == RENDERED


@needs_cxx
@pytest.mark.parametrize("maker", LIBRARIES)
def test_python_reads_values(maker: str) -> None:
    *plain, tensor, function, shape, items, small, large = values(maker)
    wanted = [True, 7, 2.5, "float16", "short", "a text of more than seven bytes", b"raw"]
    assert plain == wanted
    assert torch.from_dlpack(tensor).tolist() == [1, 2, 3]
    assert function(20) == 25
    assert tuple(shape) == (3, 4)
    assert list(items) == list(range(20))
    assert (dict(small.items()), dict(large.items())) == (KEYS[2], KEYS[20])


@needs_cxx
@pytest.mark.parametrize("reader", LIBRARIES)
@pytest.mark.parametrize("raiser", ["python", *LIBRARIES])
def test_errors_cross(raiser: str, reader: str) -> None:
    def fail() -> None:
        if raiser == "python":
            raise ValueError("a message")
        library(raiser).raise_error("ValueError", "a message")

    assert library(reader).name_error(fail) == "ValueError: a message"
    with pytest.raises(ValueError, match=r"^a message$"):
        fail()
