"""Errors: the page has all exceptions and the messages of the sources; they survive pickling.

tests/test_docs.py sees that its examples raise what they say.
"""

from __future__ import annotations

import pickle
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


def test_a_compile_error_holds_all_of_it_also_after_pickling() -> None:
    """Ranks and processes of a pool hand it on."""
    error = errors.CompileError(
        "store.cu: NVRTC failed", command="-arch=sm_90", log="line 2: no such type\n", source="a\nb"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.CompileError and copy.source == error.source
    assert str(copy).splitlines() == [
        *("store.cu: NVRTC failed", "command: -arch=sm_90", "log:", "line 2: no such type"),
        *("source:", "   1  a", "   2  b"),
    ]
    unseen = errors.CompileError("a.cu: no such option", command="-x", log="", source="a\nb")
    assert str(unseen) == "a.cu: no such option\ncommand: -x"  # no compiler has seen the source


def test_a_timeout_survives_pickling() -> None:
    error = errors.CommTimeoutError("late", op="all_reduce", number=3, rank=0, missing=[2, 1])
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.CommTimeoutError and isinstance(copy, TimeoutError)
    assert (str(copy), copy.op, copy.number, copy.rank) == ("late", "all_reduce", 3, 0)
    assert copy.missing == (2, 1)
