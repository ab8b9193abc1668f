"""The wheel: one file for every Python. tools/release_check.py installs it without a compiler."""

from __future__ import annotations

import os
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

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


def test_tag(wheel: Path) -> None:
    assert re.fullmatch(r"jitkern-[\d.]+-py3-none-manylinux_2_\d+_\w+\.whl", wheel.name)
    assert wheel.stat().st_size < 2_000_000
