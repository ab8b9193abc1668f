"""The code of README and docs runs as it stands, page by page; tests/pages.py says what does not.

Commands are in tests/test_docs_commands.py.
"""

from __future__ import annotations

import doctest
import re
from contextlib import suppress
from pathlib import Path

import forks
import pytest
from needs import needs_cxx, needs_nvrtc
from pages import (
    ALL,
    NEEDS_GPU,
    NEEDS_NVCC,
    PAGES,
    ROOT,
    Block,
    blocks,
    program,
    write_files,
)
from paths import python_path
from proved import unproved

from jitkern.cli import _COMMANDS, main

LANGUAGES = {"console", "cpp", "python", "text", "yaml"}

# As under torchrun, for a page that starts a process group.
RANK_0 = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}


# They compile for ten seconds.
LONG = ("docs/writing-kernels.md", "docs/torch-ops.md")


@needs_cxx
@needs_nvrtc
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[unproved(page, page)] if page in LONG else [])
        for page in PAGES
        if program(page)
    ],
)
def test_the_python_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT / "examples"))
    monkeypatch.setenv("JITKERN_ARCH", "9.0")  # for nvcc, where there is no GPU to ask
    for name, value in RANK_0.items():
        monkeypatch.setenv(name, value)
    done = forks.run(program(page))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", [one for one in ALL if one.is_session], ids=str)
def test_a_session_prints_what_it_says(block: Block) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, {}, str(block), block.page, block.line)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert result.attempted > 0 and result.failed == 0, "".join(said)


def test_every_block_says_what_it_is() -> None:
    """One of another language is run by nobody; no reason to leave one out outlives its block."""
    assert {block.language for block in ALL} <= LANGUAGES
    # The Python that loads a file compiles it.
    assert all(block.file for block in ALL if block.language == "cpp")
    for page, text in {*NEEDS_GPU, *NEEDS_NVCC}:
        assert sum(text in block.text for block in blocks(page)) == 1, text


@pytest.mark.parametrize("command", _COMMANDS)
def test_the_page_of_the_command_line_names_all_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, section = (ROOT / "docs/cli.md").read_text().partition(f"\n## jitkern {command}\n")
    named = set(re.findall(r"--[a-z][a-z-]*", section.partition("\n## ")[0]))
    helps = []
    with suppress(SystemExit):
        main([command, "--help"])
    helps.append(capsys.readouterr().out)
    for action in re.findall(r"^    (\w+)  ", helps[0].partition("ACTION\n")[2], re.MULTILINE):
        with suppress(SystemExit):
            main([command, action, "--help"])
        helps.append(capsys.readouterr().out)
    usage = " ".join(text.partition("\n\n")[0] for text in helps)
    assert named - {"--help"} == set(re.findall(r"--[a-z][a-z-]*", usage))
