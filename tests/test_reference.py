"""Every public name is on a page: what a package shows, and each of its classes' members."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import jitkern

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "jitkern"
PAGES = "\n".join(page.read_text() for page in sorted((ROOT / "docs").rglob("*.md")))
SHOWN = re.findall(r"^::: (\S+)$", PAGES, re.MULTILINE)
# A type of arguments, which says itself what it may be.
ALIASES = {"ReduceOp"}


def names_of(package: str) -> set[str]:
    """What its ``__init__`` gives away: ``from x import name as name``."""
    if package == "jitkern":
        return set(jitkern.__all__) - {"__version__"}
    tree = ast.parse((PACKAGE / package.partition(".")[2] / "__init__.py").read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname for node in imports for alias in node.names if alias.asname} - ALIASES


@pytest.mark.parametrize("package", ["jitkern", "jitkern.comm", "jitkern.nn", "jitkern.offload"])
def test_every_public_name_is_on_a_page(package: str) -> None:
    names = names_of(package)
    assert len(names) > 0
    errors = {name for name, value in vars(jitkern.errors).items() if isinstance(value, type)}
    shown = {place.rpartition(".")[2] for place in SHOWN}
    assert "jitkern.errors" in SHOWN
    assert names - shown - errors == set()


def test_no_page_shows_a_name_twice() -> None:
    """The links of the others would lead to either."""
    assert sorted(SHOWN) == sorted(set(SHOWN))


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if f": {page}\n" not in navigation} == set()
