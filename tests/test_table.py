"""The table of the ops: one line makes an op; what an op's own files do not say nobody says.

The op `write_twice` is added in a copy of the tree: the files below tests/toy_op, and one line each
in the table, in the imports for type checkers, in the navigation of the documentation and in its
index.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from needs import needs_cxx, needs_nvrtc
from stems import STEMS

ROOT = Path(__file__).resolve().parent.parent
NAV, INDEX = ROOT / "mkdocs.yml", ROOT / "docs" / "index.md"


@pytest.mark.parametrize("stem", STEMS)
def test_every_op_has_its_page(stem: str) -> None:
    """In the navigation, and in the index with what it does; all its functions are on it."""
    function = STEMS[stem].function
    assert f"      - {function}: ops/{stem}.md\n" in NAV.read_text()
    assert re.search(rf"^\| \[`{function}`\]\(ops/{stem}.md\) \| .+ \|$", INDEX.read_text(), re.M)
    page = (ROOT / "docs" / "ops" / f"{stem}.md").read_text()
    for name in (function, *STEMS[stem].more):
        assert re.search(rf"^::: jitkern\.(ops\.{stem}\.)?{name}$", page, re.M)


def test_no_page_is_of_no_op() -> None:
    pages = {path.stem for path in (ROOT / "docs" / "ops").glob("*.md")}
    assert pages == set(STEMS)


# -- who names an op -------------------------------------------------------------------------------

# Files that use ops, as anyone may who calls them, to do or to prove something else. An op that is
# new, or goes, is no matter to them, unless it is the very one that they took for an example.
USERS = {
    "ops that meet: on the CPU, in graphs, in pools, in PyTorch, of large sizes, among threads": """
        tests/ops/test_cpu_copy.py tests/ops/test_cuda_graphs.py tests/ops/test_large.py
        tests/ops/test_together.py tests/test_torch_ops.py tests/test_autograd.py
        tests/test_tracing.py tests/ops/test_pair_order.py tests/emulate/pair_copy.cc
        tests/emulate/race.cc tests/emulate/race.py bench/cases/pools.py
        tests/ops/test_memory_of_indices.py tests/ops/test_aliases.py
        tests/examples/test_offload_attention.py
        tests/examples/test_radix_cache_model.py
        tests/threads/ops.cc tests/threads/calls.cc tests/threads/trouble.cc
        tests/offload/test_pool.py tests/offload/pool_child.py
        bench/cases/offload.py src/jitkern/calibration.py
        src/jitkern/offload/mover.py tests/offload/mover_child.py
        tests/ops/test_pairs_on_host.py tests/ops/test_pairs_on_host_large.py
        tests/ops/test_pairs_on_host_cuda.py tests/ops/test_pairs_on_host_refused.py
        tests/ops/test_pairs_on_host_threads.py
        tests/fault_child.py tests/ops/test_foreign_streams.py
    """,
    "an op to compile, to launch, to keep or to time, where any would do": """
        bench/cases/launch.py
        src/jitkern/bench/counts.py tests/launch_child.py
        tests/test_bench.py tests/test_bench_guard.py
        tests/test_cli_cache.py tests/test_cli_lacking.py
        tests/test_bundle.py tests/test_cli.py tests/test_design.py tests/test_docs_commands.py
        tests/test_mutations.py
        tests/test_kernels_wheel.py
        tests/test_nvrtc.py tests/test_package.py tests/test_record.py tests/recorded_app.py
        tests/test_replay.py
        tests/test_warm.py tests/test_warm_sizes.py tests/test_wheel.py
    """,
    "a ring, which unpack consumes": """
        bench/cases/ring.py src/jitkern/csrc/offload/ring_launch.cc
        src/jitkern/offload/ring.py src/jitkern/offload/ring_call.py
        tests/offload/ring_child.py tests/offload/rings.py
        tests/offload/test_ring.py tests/offload/test_ring_consumer.py
        tests/offload/test_ring_cuda.py tests/offload/test_ring_graphs.py
        tests/offload/test_ring_misuse.py tests/offload/test_ring_producer.py
        tests/offload/test_ring_serve.py
        tests/offload/test_ring_unpack.py
    """,
    "a module that looks rows up": """
        src/jitkern/nn/tp_embedding.py tests/nn/test_tp_embedding.py
        tests/nn/test_tp_embedding_peer.py
        tests/comm/test_peer_in_step.py
    """,
    "rows of one pool, which are those of an op where there is one rank": """
        bench/peer_rows.py src/jitkern/comm/peer_rows.py
    """,
    "a figure or a show of a few ops": """
        bench/cases/beside.py bench/cases/first_call.py bench/cases/host_overhead.py
        bench/goals.py bench/plots.py bench/tables.py src/jitkern/cli/demo.py
        src/jitkern/cli/doctor.py
    """,
}
# Here "store" is a direction and "index" the number of a slot: plain words.
PIPELINES = (
    *("src/jitkern/offload/", "tests/offload/", "bench/cases/pipeline.py"),
    "tests/comm/test_rendezvous.py",  # the store of torch.distributed
)
# And functions of others have this name: struct.unpack.
PLAIN_WORDS = ("unpack",)
MAX_FOREIGN = 3  # the table, the import for type checkers, and a reference that several tests use


def code_of(path: Path) -> str:
    """The words of a source file that are no prose: no comments, no docstrings."""
    text = path.read_text()
    if path.suffix != ".py":
        return re.sub(r"//.*", "", text)
    tree = ast.parse(text)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            names = node.value.split(",") if re.fullmatch(r"[\w,]+", node.value) else []
            found += [node.value, *(f'"{name}"' for name in names)]
        elif isinstance(node, ast.ImportFrom):
            found += [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            found += [str(getattr(node, name, "")) for name in ("id", "attr", "name")]
    return "\n".join(found)


def stem_of(path: Path) -> str | None:
    """The op whose file it is: store.cu, test_store.py, test_store_properties.py, ..."""
    if path.parent.name not in ("ops", "cases", "emulate"):
        return None
    name = path.stem.removeprefix("test_")
    return next((stem for stem in STEMS if name == stem or name.startswith(f"{stem}_")), None)


@functools.cache
def names_of_files() -> dict[str, set[str]]:
    """The ops that each file of src, tests and bench names, but for files that are an op's.

    A name is the public function, also in a message, a reference of it in PyTorch, or the stem
    where that is no plain word: as a string of its own, or in the path of a file or module.
    """
    ways = {
        stem: re.compile(
            rf"\b{'jitkern.' if stem in PLAIN_WORDS else '(ref_)?'}{op.function}\b"
            rf'|\b(ref|test)_{stem}\b|"{stem}"|\b(ops|cases)[./]{stem}\b'
        )
        for stem, op in STEMS.items()
    }
    words = re.compile('"(store|index)"')
    found = {}
    for folder in ("src", "tests", "bench"):
        for path in sorted((ROOT / folder).rglob("*.*")):
            name = path.relative_to(ROOT).as_posix()
            if path.suffix not in (".py", ".cc", ".cu", ".h", ".cuh") or stem_of(path):
                continue
            if path == Path(__file__) or name.startswith("tests/toy_op/"):
                continue
            code = code_of(path)
            if name.startswith(PIPELINES):
                code = words.sub("", code)
            found[name] = {stem for stem, way in ways.items() if way.search(code)}
    return found


@pytest.mark.parametrize("stem", STEMS)
def test_few_files_know_an_op(stem: str) -> None:
    users = " ".join(USERS.values()).split()
    foreign = [name for name, ops in names_of_files().items() if stem in ops and name not in users]
    assert len(foreign) <= MAX_FOREIGN, foreign


def test_every_user_names_an_op_and_none_names_all() -> None:
    """One that names all is a list: it belongs to the table."""
    for name in " ".join(USERS.values()).split():
        assert 0 < len(names_of_files()[name]) < len(STEMS), name


# -- an op more ------------------------------------------------------------------------------------

# file: the line behind which the new one goes
LINES = {
    "src/jitkern/ops/_ops.py": ("OPS = (", '    Op("twice", "write_twice"),'),
    "src/jitkern/__init__.py": (
        "    from jitkern.jit.template import make_cpp_args as make_cpp_args",
        "    from jitkern.ops.twice import write_twice as write_twice",
    ),
    "mkdocs.yml": ("  - Ops:", "      - write_twice: ops/twice.md"),
    "docs/index.md": ("|---|---|", "| [`write_twice`](ops/twice.md) | writes every row twice |"),
}

# In the copy, after its tests: what is found by asking.
ASK = """
import json, os, sys, torch, jitkern
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

assert main(["warm", "--op", "twice", "--element-size", "16", "--arch", "9.0"]) == 0

sys.path[:0] = ["", "tests"]
import sanitize
for tests in (sanitize.HOST_TESTS, sanitize.CUDA_TESTS):
    assert os.path.abspath("tests/ops/test_twice.py") in tests

from bench import harness
assert harness.main(["twice", "--quick", "--device", "cpu", "--json", "bench.json"]) == 0
os.environ["PATH"] = ""  # without valgrind nothing is counted, which would take a minute
arguments = ["--ci", "--only", "twice", "--device", "cpu", "--json", "guard.json"]
assert main(["bench", *arguments]) == 0
"""
PASSED = (
    "test_row_sizes[cpu-656]",
    "test_mistake[write_twice-0]",
    "test_the_table_has_every_argument[write_twice]",
    "test_random_calls[cpu-twice]",
    "test_public_name[write_twice]",
    "test_the_table_says_what_the_type_checker_sees",
    "test_imports_go_down[ops.twice]",
    "test_every_op_has_its_page[twice]",
    "test_few_files_know_an_op[twice]",
)


def copy_of_the_tree(target: Path) -> None:
    """Copy what there is, lay the files of the op over it, and add its lines."""
    left_out = shutil.ignore_patterns("__pycache__", "_prebuilt", "results", "toy_op")
    for name in ("src", "tests", "bench", "docs"):
        shutil.copytree(ROOT / name, target / name, ignore=left_out)
    for name in ("mkdocs.yml", "pyproject.toml"):
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
    """Public, checked, fuzzed, warmed, recorded, sanitized, benchmarked and documented."""
    copy_of_the_tree(tmp_path)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = str(tmp_path / "src")

    def run(*command: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**env, **more},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    files = ["ops/test_twice", "ops/test_errors_table", "ops/test_fuzz"]
    files += ["test_package", "test_levels", "test_table"]
    tests = run(
        *("-m", "pytest", "-v", "-p", "no:cacheprovider", "--basetemp=pytest", "--fuzz-seconds=3"),
        *("-k", "twice or what_the_type_checker_sees"),
        *(f"tests/{file}.py" for file in files),
    )
    for name in PASSED:
        assert f"::{name} PASSED" in tests, tests

    cache = str(tmp_path / "pytest" / "jitkern-cache")  # the host module is in it
    said = run("-c", ASK, JITKERN_CACHE_DIR=cache, JITKERN_RECORD="run.jsonl")
    assert re.search(r"^twice +16, .* 9\.0 +compiled", said, re.MULTILINE), said
    recorded = (tmp_path / "run.jsonl").read_text()
    assert '"twice"' in recorded
    rows = json.loads((tmp_path / "bench.json").read_text())["benchmarks"]["twice"]["rows"]
    assert [row["impl"] for row in rows if not row["error"]] == ["jitkern", "torch"]
    assert "twice, 1024 rows" in (tmp_path / "bench.json").read_text()  # its goal
    guard = json.loads((tmp_path / "guard.json").read_text())["benchmarks"]["twice"]["rows"]
    assert [row["case"] for row in guard] == ["call, checks only", "call, 1 row"]
