"""What a release rests on: one version, a whole sdist, workflows that call what there is.

The rest of `make release-check` builds, and runs by itself: tools/release_check.py.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import jitkern

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import release_check as check  # noqa: E402

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAGES = ("README.md", "docs/install.md", "CHANGELOG.md", "pyproject.toml", "kernels/pyproject.toml")
VERSION = "src/jitkern/version.py"


def test_the_version_is_in_one_place() -> None:
    assert check.check_versions(ROOT).startswith(f"{jitkern.__version__}, ")


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Path]:
    """A copy of the files that say a version, one of them with something else in it."""

    def made(name: str, old: str, new: str) -> Path:
        for page in (*PAGES, VERSION):
            (tmp_path / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / page, tmp_path / page)
        text, count = re.subn(old, new, (tmp_path / name).read_text(), count=1)
        assert count == 1
        (tmp_path / name).write_text(text)
        return tmp_path

    return made


def test_a_tag_is_the_version_and_has_its_date(tree: Callable[..., Path]) -> None:
    tag = f"v{jitkern.__version__}"
    dated = tree("CHANGELOG.md", r"\n## (\S+) \(.+\)\n", r"\n## \1 (2026-11-23)\n")
    assert check.check_versions(dated, tag) == f"{jitkern.__version__}, 2026-11-23"
    with pytest.raises(check.UnfitError, match=r"the tag is v9\.9\.9, the version"):
        check.check_versions(dated, "v9.9.9")
    undated = tree("CHANGELOG.md", r"\n## (\S+) \(.+\)\n", r"\n## \1 (unreleased)\n")
    with pytest.raises(check.UnfitError, match="expected the date of the release"):
        check.check_versions(undated, tag)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_what_there_is(path: Path) -> None:
    """Targets of make, and variables that the Makefile reads."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    variables = {"PY", *re.findall(r"^([A-Z_]+) \?=", makefile, re.MULTILINE)}
    calls = re.findall(r"run: make (.+)$", path.read_text(), re.MULTILINE)
    assert calls
    for call in calls:
        words = re.sub(r'"[^"]*"', "", call).split()
        assert {word.partition("=")[0] for word in words if "=" in word} <= variables, call
        named = {word for word in words if "=" not in word}
        assert named and named <= targets, call


def test_what_is_tested_is_what_is_supported() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    matrix = re.search(r"python: \[(.+)\]", text)
    assert matrix is not None
    classifiers = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert re.findall(r"[\d.]+", matrix[1]) == classifiers
