"""The way to a launch, without a GPU: launch_child.py on a driver that notes what it is told."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SOURCE = "".join((HERE / name).read_text() for name in ("launch_child.py", "launch_users.py"))
COMPILER = shutil.which("cc") or shutil.which("gcc")

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="puts a libcuda.so.1 in place"),
]


def checks(prefix: str) -> list[str]:
    return [
        line.split()[1].partition("(")[0]
        for line in SOURCE.splitlines()
        if line.startswith(f"def {prefix}")
    ]


def run(folder: Path, prefix: str, *flags: str, **env: str) -> dict[str, str]:
    """Traceback, or nothing, by the name of each check."""
    library = folder / "libcuda.so.1"
    command = [str(COMPILER), "-shared", "-fPIC", *flags, str(HERE / "fake_driver.c")]
    subprocess.run([*command, "-o", str(library)], check=True)
    paths = {
        "LD_LIBRARY_PATH": os.pathsep.join([str(folder), os.environ.get("LD_LIBRARY_PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(HERE.parent / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "launch_child.py"), prefix],
        env={**os.environ, **paths, **env},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    failed: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return failed


@pytest.fixture(scope="module")
def on_hopper(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run(tmp_path_factory.mktemp("driver"), "check_")


@pytest.fixture(scope="module")
def on_ampere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("driver")
    return run(folder, "old_", "-DOLD_DRIVER", FAKE_ARCH="80", FAKE_DRIVER="12000")


@pytest.mark.parametrize("name", checks("check_"))
def test_on_hopper(on_hopper: dict[str, str], name: str) -> None:
    assert on_hopper[name] == "", on_hopper[name]


@pytest.mark.parametrize("name", checks("old_"))
def test_on_ampere_with_an_old_driver(on_ampere: dict[str, str], name: str) -> None:
    assert on_ampere[name] == "", on_ampere[name]
