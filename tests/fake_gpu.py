"""Runs checks in a child process that finds fake_driver.c for its CUDA driver."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

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


def run_checks(script: Path, folder: Path, prefix: str, *flags: str, **env: str) -> dict[str, str]:
    """Run a script that ends with `report_checks`: traceback, or nothing, by the name of each."""
    library = folder / "libcuda.so.1"
    command = [str(COMPILER), "-shared", "-fPIC", *flags, str(HERE / "fake_driver.c")]
    subprocess.run([*command, "-o", str(library)], check=True)
    paths = {
        "LD_LIBRARY_PATH": [str(folder), os.environ.get("LD_LIBRARY_PATH", "")],
        "PYTHONPATH": [str(HERE.parent / "src"), str(HERE), os.environ.get("PYTHONPATH", "")],
    }
    done = subprocess.run(
        [sys.executable, str(script), prefix],
        env={**os.environ, **{name: os.pathsep.join(p) for name, p in paths.items()}, **env},
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
