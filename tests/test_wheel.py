"""The wheel: one file for every Python, which works where there is no compiler."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
Fresh = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.slow


def test_versions_are_read_in_any_language(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the wheel would be for machines that are too old for it."""
    program = tmp_path / "objdump"
    program.write_text("""#!/bin/sh
if [ "$LC_ALL" = C ] && [ -z "$LANGUAGE" ]; then echo "Version References:"; else echo "Autres:"; fi
[ "$2" = /without ] || echo "    0x069691b4 0x00 02 GLIBC_2.34"
""")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("LC_ALL", "fr_FR.UTF-8")
    monkeypatch.setenv("LANGUAGE", "fr")
    build = runpy.run_path(str(ROOT / "hatch_build.py"))
    assert build["needed_versions"](Path("/library")) == {("GLIBC", (2, 34))}
    with pytest.raises(RuntimeError, match="objdump names no version of glibc that without needs"):
        build["needed_versions"](Path("/without"))


CODE = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])

def no_process(*args, **kwargs):
    raise AssertionError(f"a process was started: {args}")

import torch
import jitkern
assert jitkern.__file__.startswith(sys.argv[1]), jitkern.__file__
subprocess.Popen = no_process

k_cache, v_cache = torch.zeros(2, 8, 41, dtype=torch.float16)
k, v = torch.randn(2, 3, 41).half()
jitkern.store_cache(k_cache, v_cache, torch.tensor([5, -1, 2]), k, v)
assert torch.equal(k_cache[[5, 2]], k[[0, 2]]) and torch.equal(v_cache[[5, 2]], v[[0, 2]])
rows = jitkern.indexing(k_cache, torch.tensor([2, -1]))
assert torch.equal(rows[0], k[2]) and not rows[1].any()
jitkern.h2d_gather(k, v_cache, torch.tensor([[1, 7]]))
assert torch.equal(v_cache[7], k[1])
assert jitkern.fast_compare_key(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])) == 2
"""


def test_tag(wheel: Path) -> None:
    assert re.fullmatch(r"jitkern-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    assert wheel.stat().st_size < 2_000_000


def test_contents(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "jitkern/py.typed" in names
    assert "jitkern/csrc/ops/store.cu" in names
    assert "jitkern/csrc/include/jitkern/both/descriptor.h" in names
    assert any(name.startswith("jitkern/_prebuilt/") and name.endswith(".so") for name in names)
    assert not [one for one in names if "__pycache__" in one or one.startswith(("tests", "src"))]


def test_works_without_a_compiler(wheel: Path, tmp_path: Path, fresh_python: Fresh) -> None:
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "bin").mkdir()
    env = {
        "PATH": str(tmp_path / "bin"),  # no compiler, no ninja, no nvcc
        "CXX": None,
        "CUDA_HOME": None,
        "CUDA_PATH": None,
        "JITKERN_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": None,
    }
    fresh_python(CODE, str(site), env=env)
    assert os.listdir(tmp_path / "bin") == []
