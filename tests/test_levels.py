"""The shape of the source: imports go down the wings, one module reads the environment, few files
name an op."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from stems import STEMS

import jitkern

PACKAGE = Path(jitkern.__file__).parent
ROOT = PACKAGE.parent.parent

# A wing is a folder, or a module of the top level. It imports its own modules and the lines above.
# Wings of one line do not import each other.
WINGS = """
errors
env fs
arch
cache compilers
host
jit
ops torch_ops
comm
offload nn
warming calibration
bench
perf
integrations
cli
__main__
"""
RANK = {wing: rank for rank, line in enumerate(WINGS.split("\n")) for wing in line.split()}
EXCEPTIONS = {
    ("host", "calibration"),  # the host module asks for figures that were measured
    ("ops", "torch_ops"),  # an op of PyTorch's is registered when one is traced
    ("torch_ops", "ops"),  # and is described by each op
}
MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, wing of jitkern) of every import, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            found = [str(node.module)]
            if node.module == "jitkern":
                found = [f"jitkern.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name.split(".")[1]) for name in found if name[:8] == "jitkern.")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module: str) -> None:
    wing = module.split(".")[0]
    assert wing in RANK, f"{wing} has no place: give it one in tests/test_levels.py"
    for line, target in imports(MODULES[module]):
        if target == wing or (wing, target) in EXCEPTIONS or target not in RANK:
            continue
        assert RANK[target] < RANK[wing], f"{MODULES[module]}:{line}: imports jitkern.{target}"


def test_only_env_reads_the_environment() -> None:
    for module, path in MODULES.items():
        if module == "env":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            reads = {"environ", "environb", "getenv", "getenvb"}
            assert name not in reads, f"{path}:{node.lineno}: reads the environment"


# -- who names an op -------------------------------------------------------------------------------

# Besides an op's own files, the table and the import for type checkers. Above it are old sins, of
# which most are tests that take these ops as examples: a number here may only fall.
MOST_FILES = 8
ABOVE = {"store": 48, "index": 46, "h2d_gather": 42, "d2h_scatter": 29, "unpack": 19}
ABOVE |= {"copy_blocks": 13, "swap": 9}
# Words of their own: the store of torch.distributed, a direction of copies, the index of a slot.
PLAIN = {"store", "index"}
NOT_OF_OPS = ("src/jitkern/offload/", "tests/offload/", "tests/comm/", "bench/cases/pipeline.py")


def code_of(path: Path) -> str:
    """The names and strings of a source file: no comments, no docstrings."""
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


def is_own(path: Path) -> bool:
    """Tell whether it is a file of an op: store.cu, test_store.py, test_store_sizes.py."""
    name = path.stem.removeprefix("test_")
    return path.parent.name in ("ops", "cases", "emulate") and any(
        name == stem or name.startswith(f"{stem}_") for stem in STEMS
    )


@cache
def codes() -> dict[str, str]:
    files = [path for top in ("src", "tests", "bench") for path in (ROOT / top).rglob("*.*")]
    sources = [path for path in files if path.suffix in (".py", ".cc", ".cu", ".h", ".cuh")]
    skipped = {Path(__file__), PACKAGE / "__init__.py", PACKAGE / "ops" / "_ops.py"}
    return {
        path.relative_to(ROOT).as_posix(): code_of(path)
        for path in sources
        if path not in skipped and not is_own(path) and "toy_op" not in path.parts
    }


@pytest.mark.parametrize("stem", STEMS)
def test_few_files_name_an_op(stem: str) -> None:
    """By its public function, by the stem as a string, or in the path of a file or module."""
    function = STEMS[stem].function
    called = rf"\bjitkern\.{function}\b" if function == stem else rf"\b(ref_)?{function}\b"
    in_paths = rf"\b(ref|test)_{stem}\b|\b(ops|cases)[./]{stem}\b"
    way = re.compile(rf'{called}|{in_paths}|"{stem}"')
    way_of_others = re.compile(f"{called}|{in_paths}") if stem in PLAIN else way
    found = [
        name
        for name, code in codes().items()
        if (way_of_others if name.startswith(NOT_OF_OPS) else way).search(code)
    ]
    assert len(found) <= ABOVE.get(stem, MOST_FILES), found
