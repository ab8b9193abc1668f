"""The Python of README and docs runs as it stands, page by page."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from needs import needs_cxx, needs_nvrtc

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *(p.relative_to(ROOT).as_posix() for p in sorted(ROOT.glob("docs/**/*.md")))]

# As under torchrun, for a page that starts a process group.
RANK_0 = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each fenced block that has a language."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def program(page: str) -> str:
    """All Python of a page, in its order: a later block may use what an earlier one has made."""
    found = [text for language, text in blocks(page) if language == "python"]
    code = "\n".join(text for text in found if not text.startswith(">>>"))
    return re.sub(r"^(.+)\n# (\w+Error): (.+)$", _expected, code, flags=re.MULTILINE)


def _expected(match: re.Match[str]) -> str:
    """A statement with its error in a comment behind it, as a test that it raises that."""
    statement, error, text = match.groups()
    return f"""
try:
    {statement}
except {error} as raised:
    assert str(raised).startswith({text.removesuffix(" ...")!r}), raised
else:
    raise AssertionError({statement!r})
"""


def write_files(page: str, folder: Path) -> None:
    """Write the blocks that begin with the name of a file, such as ``// scale.cu``."""
    for _, text in blocks(page):
        name = re.match(r"(?://|#) (\w+\.\w+)\n", text)
        if name:
            (folder / name[1]).write_text(text)


@pytest.mark.slow
@needs_cxx
@needs_nvrtc
@pytest.mark.parametrize("page", [page for page in PAGES if program(page)])
def test_the_python_of_a_page_runs(
    page: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    code = program(page)
    asks = '"cuda"' in code.replace('"cuda" if', "").replace('== "cuda"', "")
    if asks and not torch.cuda.is_available():
        pytest.skip("this page is about a GPU")
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    for name, value in RANK_0.items():
        monkeypatch.setenv(name, value)
    assert fresh_python(code).returncode == 0


def test_the_pages_have_what_is_to_be_run() -> None:
    """So that a change of the fences does not leave nothing to be tested."""
    with_python = [page for page in PAGES if program(page)]
    assert len(with_python) >= 9
    assert "README.md" in with_python
