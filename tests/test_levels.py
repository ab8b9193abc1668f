"""The shape of the source: imports go down the wings, one module reads the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jitkern

PACKAGE = Path(jitkern.__file__).parent

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
