"""The table of the ops: each has its page, in the navigation and in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
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
