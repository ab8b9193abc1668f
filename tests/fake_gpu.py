"""Runs checks in a child process that finds fake_driver.c for its CUDA driver."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from paths import TESTS, python_path

HERE = Path(__file__).resolve().parent
COMPILER = shutil.which("cc") or shutil.which("gcc")

needs_fake_gpu = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="puts a libcuda.so.1 in place"),
]


def checks_of(sources: Iterable[Path], prefix: str) -> list[str]:
    """Names of the functions that begin so."""
    return [
        line.split()[1].partition("(")[0]
        for source in sources
        for line in source.read_text().splitlines()
        if line.startswith(f"def {prefix}")
    ]


def build_driver(folder: Path, *flags: str, name: str = "libcuda.so.1") -> Path:
    """Make the fake driver."""
    library = folder / name
    sources = [str(HERE / name) for name in ("fake_driver.c", "fake_vmm.c")]
    command = [str(COMPILER), "-shared", "-fPIC", *flags, *sources, "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def environment(folder: Path) -> dict[str, str]:
    """What a process finds that driver by, these tests' modules and jitkern's."""
    libraries = os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")])
    return {**os.environ, "LD_LIBRARY_PATH": libraries, "PYTHONPATH": python_path(TESTS)}


def run_checks(script: Path, folder: Path, prefix: str, *flags: str, **env: str) -> dict[str, str]:
    """Run a script that ends with `report_checks`: traceback, or nothing, by the name of each."""
    build_driver(folder, *flags)
    done = subprocess.run(
        [sys.executable, str(script), prefix],
        env={**environment(folder), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    failed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failed


def report_checks(
    known: dict[str, Callable[[], object]], before_each: Callable[[], object]
) -> None:
    """Run those whose name begins with the script's argument, and print what failed, as JSON."""
    failed = {}
    for name in [name for name in known if name.startswith(sys.argv[1])]:
        before_each()
        try:
            known[name]()
            failed[name] = ""
        except Exception:
            failed[name] = traceback.format_exc()
    print(json.dumps(failed))


def dl_tensor(capsule: object) -> int:
    """Return the address of the DLTensor in what `__dlpack__()` returned."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype = ctypes.c_void_p
    get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    address: int = get_pointer(capsule, b"dltensor")
    return address


def address_of(tensor: Any) -> int:
    """Return where a tensor begins. Those of tvm-ffi 0.1.11 have no ``data_ptr()``."""
    if hasattr(tensor, "data_ptr"):
        return int(tensor.data_ptr())
    capsule = tensor.__dlpack__()
    return ctypes.c_uint64.from_address(dl_tensor(capsule)).value


class OnCuda:
    """A tensor in CPU memory that says that it is on a GPU."""

    def __init__(self, tensor: Any, number: int = 0) -> None:
        self._tensor = tensor
        self._number = number

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._number

    def __dlpack__(self, **_: object) -> object:
        capsule = self._tensor.__dlpack__()
        address = dl_tensor(capsule)
        ctypes.c_int32.from_address(address + 8).value = 2
        ctypes.c_int32.from_address(address + 12).value = self._number
        return capsule
