"""The Python of README and docs runs as it stands, page by page."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from needs import has, needs_cxx, needs_nvrtc

from jitkern.cli import _COMMANDS, _parser, completion
from jitkern.compilers.find_cuda import find_nvcc

HAS_NVCC = has(find_nvcc)
ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *(p.relative_to(ROOT).as_posix() for p in sorted(ROOT.glob("docs/**/*.md")))]

# As under torchrun, for a page that starts a process group.
RANK_0 = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


def blocks(page: str) -> list[tuple[str, str]]:
    """(language, text) of each fenced block that has a language."""
    text = (ROOT / page).read_text()
    return re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def program(page: str) -> str:
    """All Python of a page, in its order: a later block may use what an earlier one has made.

    What needs nvcc is left out where there is none; nothing else may use what it makes.
    """
    found = [text for language, text in blocks(page) if language == "python"]
    if not HAS_NVCC:
        found = [text for text in found if "cuda_files=" not in text]
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
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples"), prepend=os.pathsep)
    for name, value in RANK_0.items():
        monkeypatch.setenv(name, value)
    assert fresh_python(code).returncode == 0


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_the_files_that_it_loads(page: str, tmp_path: Path) -> None:
    """Also where nothing runs them, for they are about a GPU."""
    write_files(page, tmp_path)
    python = "\n".join(text for language, text in blocks(page) if language == "python")
    lists = re.findall(r"(?:device|cuda|cpp)_files=\[(.*?)\]", python, re.DOTALL)
    loaded = {name for names in lists for name in re.findall(r'"(.+?)"', names)}
    assert loaded <= {file.name for file in tmp_path.iterdir()}


@pytest.mark.parametrize("command", _COMMANDS)
def test_the_page_of_the_command_line_names_the_options_that_there_are(command: str) -> None:
    _, _, section = (ROOT / "docs/cli.md").read_text().partition(f"\n## jitkern {command}\n")
    named = set(re.findall(r"--[a-z][a-z-]*", section.partition("\n## ")[0]))
    there_are = {
        option
        for one in completion._commands(_parser(), "")
        if one.path.split()[:1] == [command]
        for option in one.options
    }
    assert named - {"--help"} == there_are - {"-h", "--help"}


def test_the_pages_have_what_is_to_be_run() -> None:
    """So that a change of the fences does not leave nothing to be tested."""
    with_python = [page for page in PAGES if program(page)]
    assert len(with_python) >= 9
    assert "README.md" in with_python
