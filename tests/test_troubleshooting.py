"""The page of error messages: all exceptions are on it, and its messages are those of the sources.

That its examples raise what they say, tests/test_docs.py sees.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from jitkern import errors

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
PUBLIC = [name for name, value in vars(errors).items() if isinstance(value, type)]
EXCEPTIONS = [name for name in PUBLIC if issubclass(getattr(errors, name), errors.JitkernError)]
MESSAGES = re.findall(r"^\| `(.+?)` \| ", PAGE, re.MULTILINE)


@cache
def sources() -> str:
    """Return the texts of all sources, literals that follow each other joined."""
    files = [
        path for path in (ROOT / "src").rglob("*.*") if path.suffix in (".py", ".cc", ".h", ".cuh")
    ]
    text = "\n".join(path.read_text() for path in files)
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # "one " f"two"
    return text.replace('\\"', '"')


@pytest.mark.parametrize("name", EXCEPTIONS)
def test_every_exception_is_on_the_page(name: str) -> None:
    """By its name; those that are raised have a section of their own."""
    assert re.search(rf"\b{name}\b", PAGE)
    if name != "JitkernError":
        assert re.search(rf"^## .*\b{name}\b", PAGE, re.MULTILINE)


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_are_those_of_the_sources(message: str) -> None:
    """What stands for a value there is ``...`` here."""
    parts = [part.strip() for part in message.split("...")]
    assert max(map(len, parts)) >= 10, "hardly anything to find"
    for part in filter(None, parts):
        assert part in sources(), part


def test_the_page_has_messages() -> None:
    assert len(MESSAGES) >= 50 and len(EXCEPTIONS) == 10
