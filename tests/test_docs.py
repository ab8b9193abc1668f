"""The code of README and docs runs as it stands, page by page; tests/pages.py says what does not.

Commands are in tests/test_docs_commands.py.
"""

from __future__ import annotations

import doctest
import inspect
import re
import subprocess
from contextlib import suppress
from operator import attrgetter
from pathlib import Path

import forks
import pages
import pytest
from needs import needs_cxx, needs_nvrtc
from pages import ALL, PAGES, ROOT, Block, blocks, program
from paths import python_path
from stems import STEMS

import jitkern
from jitkern.cli import _COMMANDS, main
from jitkern.compilers.find import find_cxx
from jitkern.env import VARIABLES

LANGUAGES = {"console", "cpp", "python", "text", "yaml"}

# As under torchrun, for a page that starts a process group.
RANK_0 = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
RANK_0 |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

# The functions and classes whose signature is under the title of a page.
SIGNATURES = {f"docs/ops/{stem}.md": [*op.more, op.function] for stem, op in STEMS.items()} | {
    "docs/comm.md": ["comm.init_pynccl"],
    "docs/descriptor-ring.md": ["offload.DescriptorRing"],
    "docs/nn.md": ["nn.TPEmbedding"],
    "docs/offload-engine.md": ["offload.OffloadEngine"],
    "docs/offload-pipeline.md": ["offload.SlotPipeline"],
    "docs/peer-memory.md": ["comm.PeerMemory"],
    "docs/pinned-pools.md": ["offload.PinnedPool"],
    "docs/residency.md": ["offload.ResidencyMap"],
}

# Pages whose code compiles for ten seconds.
LONG = ("docs/writing-kernels.md", "docs/torch-ops.md")


@needs_cxx
@needs_nvrtc
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=[pytest.mark.slow] if page in LONG else [])
        for page in PAGES
        if program(page)
    ],
)
def test_the_python_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in blocks(page):
        if block.file:
            (tmp_path / block.file).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path(ROOT, ROOT / "examples"))
    monkeypatch.setenv("JITKERN_ARCH", "9.0")  # for nvcc, where there is no GPU to ask
    for name, value in RANK_0.items():
        monkeypatch.setenv(name, value)
    done = forks.run(program(page))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("block", [block for block in ALL if block.is_session], ids=str)
def test_a_session_prints_what_it_says(block: Block) -> None:
    test = doctest.DocTestParser().get_doctest(block.text, {}, str(block), block.page, block.line)
    said: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert result.attempted > 0 and result.failed == 0, "".join(said)


@needs_cxx
@pytest.mark.parametrize(
    "block", [block for block in ALL if block.language == "cpp" and not block.file], ids=str
)
def test_cpp_that_is_no_file_compiles(block: Block, tmp_path: Path) -> None:
    """What is a file is compiled by the Python that loads it."""
    file = tmp_path / "block.cc"
    file.write_text(block.text)
    include = f"-I{ROOT / 'src/jitkern/csrc/include'}"
    command = [*find_cxx().command, "-std=c++17", "-fsyntax-only", include, str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_block_says_what_it_is() -> None:
    """A block that is only indented, or has no language, is run by nobody."""
    for block in ALL:
        assert block.language in LANGUAGES, block
    for page in PAGES:
        text = (ROOT / page).read_text()
        for block in blocks(page):
            text = text.replace(block.text, "")
        lines = text.splitlines()
        assert sum(line[:3] == "```" for line in lines) == 2 * len(blocks(page)), page
        indented = [line for line in lines if line.startswith("    ")]
        assert [line for line in indented if not line.startswith("    options: {")] == [], page


def test_what_is_left_out_is_there() -> None:
    """So that no reason outlives its block."""
    for page, text in {*pages.NEEDS_GPU, *pages.NEEDS_NVCC}:
        assert sum(text in block.text for block in blocks(page)) == 1, text


@pytest.mark.parametrize("page", SIGNATURES)
def test_a_page_shows_the_signature(page: str) -> None:
    """With the names, kinds and defaults of the parameters; their types are in the list below."""
    shown = re.findall(
        r"^jitkern\.([\w.]+)(\(.*?\))(?: -> [^\n]+)?\n", blocks(page)[0].text, re.M | re.S
    )
    assert blocks(page)[0].is_signature
    assert [name for name, _ in shown] == SIGNATURES[page]
    for name, parameters in shown:
        signature = inspect.signature(attrgetter(name)(jitkern))
        public = [p for p in signature.parameters.values() if p.name[0] != "_"]
        expected = [(p.name, p.kind, p.default) for p in public]
        written = inspect.signature(eval(f"(lambda {parameters[1:-1]}: 0)")).parameters.values()
        assert [(p.name, p.kind, p.default) for p in written] == expected, name


@pytest.mark.parametrize("command", _COMMANDS)
def test_the_page_of_the_command_line_names_all_options(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:

    def help_of(command: str) -> str:
        with suppress(SystemExit):
            main([command, "--help"])
        return capsys.readouterr().out

    _, _, section = (ROOT / "docs/cli.md").read_text().partition(f"\n## jitkern {command}\n")
    named = set(re.findall(r"--[a-z][a-z-]*", section.partition("\n## ")[0]))
    _, _, options = help_of(command).partition("\noptions:\n")
    options = options.partition("\nexample:\n")[0]
    # Also an older name, which only the text has.
    assert named | {"--help"} == set(re.findall(r"--[a-z][a-z-]*", options))


def test_the_page_of_variables_names_all() -> None:
    rows = re.findall(r"^\| `(JITKERN_\w+)`", (ROOT / "docs/environment.md").read_text(), re.M)
    assert sorted(rows) == sorted(VARIABLES)
