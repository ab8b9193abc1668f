"""The table of the ops: one line and its own files make an op.

The schemas of the PyTorch operators are frozen in op_schemas.txt.

The op `write_twice` is added in a copy of the tree: the files below tests/toy_op, and one line each
in the table, in the imports for type checkers, in the navigation of the documentation and on its
home page.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from needs import needs_cxx, needs_nvrtc
from op_schemas import FROZEN, op_schemas
from stems import STEMS

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "jitkern"
NAV, INDEX = ROOT / "mkdocs.yml", ROOT / "docs" / "index.md"


@pytest.mark.parametrize("stem", STEMS)
def test_every_op_has_its_page(stem: str) -> None:
    """In the navigation and on the home page; all its functions are on it."""
    assert {path.stem for path in (ROOT / "docs" / "ops").glob("*.md")} == set(STEMS)
    function = STEMS[stem].function
    assert f"      - {function}: ops/{stem}.md\n" in NAV.read_text()
    assert f"[`{function}`](ops/{stem}.md)" in INDEX.read_text()
    page = (ROOT / "docs" / "ops" / f"{stem}.md").read_text()
    for name in (function, *STEMS[stem].more):
        assert re.search(rf"^::: jitkern\.(ops\.{stem}\.)?{name}$", page, re.M)


# file: the line behind which the new one goes
LINES = {
    "src/jitkern/ops/_ops.py": ("OPS = (", '    Op("twice", "write_twice"),'),
    "src/jitkern/__init__.py": (
        "    from jitkern.jit.template import make_cpp_args as make_cpp_args",
        "    from jitkern.ops.twice import write_twice as write_twice",
    ),
    "mkdocs.yml": ("  - Ops:", "      - write_twice: ops/twice.md"),
    "docs/index.md": (
        "## Which function do I need?",
        "\n- Rows twice: [`write_twice`](ops/twice.md)",
    ),
}

# In the copy, after its tests: what is found by asking.
ASK = """
import os, sys, torch, jitkern
from jitkern.cli import main

def check():
    assert output.tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]

rows, output = torch.arange(6).reshape(2, 3), torch.zeros(4, 3, dtype=torch.int64)
jitkern.write_twice(rows, output)
check()
import jitkern.torch_ops
output.zero_()
torch.ops.jitkern.write_twice(rows, output)
check()

assert main(["warm", "--op", "twice", "--row-bytes", "16", "--arch", "9.0"]) == 0

sys.path[:0] = ["", "tests"]
import sanitize
for tests in (sanitize.HOST_TESTS, sanitize.CUDA_TESTS):
    assert os.path.abspath("tests/ops/test_twice.py") in tests
"""
PASSED = (
    "test_row_sizes[cpu-656]",
    "test_mistake[write_twice-0]",
    "test_the_table_has_every_argument[write_twice]",
    "test_random_arguments[write_twice]",
    "test_public_name[write_twice]",
    "test_the_table_says_what_the_type_checker_sees",
    "test_imports_go_down[ops.twice]",
    "test_every_op_has_its_page[twice]",
)


def copy_of_the_tree(target: Path) -> None:
    """Copy what there is, lay the files of the op over it, and add its lines."""
    left_out = shutil.ignore_patterns("__pycache__", "_prebuilt", "results")
    for name in ("src", "tests", "bench", "docs"):
        shutil.copytree(ROOT / name, target / name, ignore=left_out)
    if (ROOT / "build").exists():  # only the op's own source is compiled
        shutil.copytree(ROOT / "build", target / "build")
    for name in ("mkdocs.yml", "pyproject.toml", "hatch_build.py"):
        shutil.copy(ROOT / name, target)
    shutil.copytree(ROOT / "tests" / "toy_op", target, dirs_exist_ok=True)
    target.chmod(0o755)  # it is to hold caches, and took the mode of the checkout, whatever that is
    for name, (behind, line) in LINES.items():
        text = (target / name).read_text()
        assert text.count(f"{behind}\n") == 1
        (target / name).write_text(text.replace(f"{behind}\n", f"{behind}\n{line}\n"))


@pytest.mark.slow
@needs_cxx
@needs_nvrtc
def test_one_line_and_its_own_files_make_an_op(tmp_path: Path) -> None:
    """Public, checked, fuzzed, warmed, recorded, sanitized and documented."""
    copy_of_the_tree(tmp_path)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(tmp_path / "src")

    def run(*command: str, **more: str) -> str:
        how: dict[str, Any] = {"cwd": tmp_path, "env": {**env, **more}}
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, **how)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    files = ["ops/test_twice", "ops/test_errors_table", "ops/test_fuzz"]
    files += ["test_package", "test_design", "test_table"]
    tests = run(
        *("-m", "pytest", "-v", "-p", "no:cacheprovider", "--basetemp=pytest", "--fuzz-seconds=3"),
        *("-k", "twice or what_the_type_checker_sees"),
        *(f"tests/{file}.py" for file in files),
    )
    for name in PASSED:
        assert f"::{name} PASSED" in tests, tests

    cache = str(tmp_path / "pytest" / "jitkern-cache")  # the host module is in it
    said = run("-c", ASK, JITKERN_CACHE_DIR=cache, JITKERN_RECORD="run.jsonl")
    assert re.search(r"^jitkern_twice_16B_v16 +9\.0 +compiled", said, re.MULTILINE), said
    recorded = (tmp_path / "run.jsonl").read_text()
    assert '"twice"' in recorded


def test_op_schemas_are_frozen() -> None:
    frozen, schemas = FROZEN.read_text().splitlines(), op_schemas()
    assert schemas == frozen, (
        f"schemas of torch.ops.jitkern changed: {sorted(set(schemas) ^ set(frozen))}; before 0.1.0 "
        "regenerate with: PYTHONPATH=src python tests/op_schemas.py; after it add an overload "
        "instead, because warm inductor caches call the old one"
    )
