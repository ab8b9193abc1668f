"""The shape of the source: imports go down the levels, one module reads the environment."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jitkern

PACKAGE = Path(jitkern.__file__).parent

# Every module has a place; the longest prefix wins. A module may import from lower levels only, and
# modules that share a level do not know each other. A half is a part that was split off a module of
# the next level.
LEVELS = {
    "errors": 0,
    "env": 0,
    "jit.template": 1,
    "jit.sources": 1,
    "jit.toolchain": 1,
    "jit.entry": 1,
    "jit.failures": 1,
    "jit.locking": 1,
    "jit.bundle": 1.5,
    "jit.cache": 2,
    "jit.nvrtc": 2,
    "jit.cxx": 2,
    "jit.host": 3,
    "jit.loader": 3,
    "ops": 4,
    "perf": 5,
    "cli": 6,
}
READS_ENVIRONMENT = {"environ", "environb", "getenv", "getenvb"}

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}


def level(module: str) -> float:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        found = LEVELS.get(".".join(parts[:length]))
        if found is not None:
            return found
    pytest.fail(f"jitkern.{module} has no level: give it one in tests/test_levels.py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, module below jitkern) of every import, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
            # `from jitkern.jit import cache` names a module, `from jitkern.errors import X` not.
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name if name[8:] in MODULES else str(node.module) for name in inner]
        else:
            continue
        yield from ((node.lineno, name[8:]) for name in found if name.startswith("jitkern."))


@pytest.mark.parametrize("module", [name for name in MODULES if name != "jit"])
def test_imports_go_down(module: str) -> None:
    for line, target in imports(MODULES[module]):
        same_package = module == target.rpartition(".")[0] or target == module.rpartition(".")[0]
        if same_package:
            continue  # ops/__init__.py lists the ops
        assert level(target) < level(module), f"{MODULES[module]}:{line}: imports jitkern.{target}"


def test_only_env_reads_the_environment() -> None:
    for module, path in MODULES.items():
        if module == "env":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", None) or getattr(node, "id", None)
            assert name not in READS_ENVIRONMENT, f"{path}:{node.lineno}: reads the environment"
