"""The code blocks of README and docs: what is left out on this machine is named here, with why."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

import torch
from needs import has

from jitkern import errors
from jitkern.compilers.find import find_nvcc

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *(p.relative_to(ROOT).as_posix() for p in sorted(ROOT.glob("docs/**/*.md")))]
HAS_NVCC = has(find_nvcc)
HAS_GPU = torch.cuda.is_available()

# What is no code: drawings, messages, lists of files.
PROSE = ("text",)

_LAUNCHES = "launches device code that has no form for the CPU"
NEEDS_GPU = {
    ("docs/writing-kernels.md", "x = torch.ones(1 << 20, device="): _LAUNCHES,
    ("docs/writing-kernels.md", 'mod.launch("scale", x.double()'): _LAUNCHES,
    ("docs/writing-kernels.md", "add_one.launch(x)"): "launches what nvcc compiles",
}
"""Python that is left out where there is no GPU: (page, a text in the block) and the reason."""
NEEDS_NVCC = {
    ("docs/writing-kernels.md", 'cuda_files=["add_one.cu"]'): "needs nvcc",
    ("docs/writing-kernels.md", "add_one.launch(x)"): "needs nvcc, and a GPU",
}
"""The same, where there is no nvcc."""


@dataclass(frozen=True)
class Block:
    """A fenced block; `line` is that of its fence."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str | None:
        """The file that it is: one that begins with a name such as ``// scale.cu``."""
        found = re.match(r"(?://|#) (\w+\.\w+)\n", self.text)
        return found[1] if found else None

    @property
    def is_session(self) -> bool:
        return self.language == "python" and self.text.startswith(">>>")

    @property
    def is_signature(self) -> bool:
        """The block under the title shows the signature of the page's function or class."""
        return self.language == "python" and self.line == 3

    @property
    def left_out(self) -> str:
        """Why this machine does not run it; empty where it does, or checks it."""
        if self.language in PROSE or self.is_signature:
            return "no code"
        lacking = {**({} if HAS_NVCC else NEEDS_NVCC), **({} if HAS_GPU else NEEDS_GPU)}
        for (page, text), reason in lacking.items():
            if self.page == page and text in self.text and self.language == "python":
                return reason
        return ""


def blocks(page: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(page, text.count("\n", 0, m.start()) + 1, m[1], m[2]) for m in found]


ALL = [block for page in PAGES for block in blocks(page)]


def program(page: str) -> str:
    """All Python of a page, in its order: a later block may use what an earlier one has made.

    At the end the device code of its modules is compiled, which a launch may have done already.
    """
    found = [block for block in blocks(page) if block.language == "python"]
    code = "\n".join(block.text for block in found if not (block.is_session or block.left_out))
    code = with_expected_errors(code)
    return code + _COMPILE if "device_files" in code else code


# But for the one whose page is about what the compiler says to it.
_COMPILE = """
for _made in [value for value in globals().values() if hasattr(value, "image")]:
    if _made.name != "broken":
        _made.image(__import__("jitkern").Arch.parse("9.0"))
"""


def with_expected_errors(code: str) -> str:
    """Have a statement with its error in a comment behind it tested for that error."""
    return re.sub(r"^( *)(.+)\n\1# (\w+Error): (.+)$", _expected, code, flags=re.MULTILINE)


def _expected(match: re.Match[str]) -> str:
    indent, statement, error, text = match.groups()
    if hasattr(errors, error):
        error = f'__import__("jitkern").{error}'
    lines = f"""\
try:
    {statement}
except {error} as raised:
    assert str(raised).startswith({text.removesuffix(" ...")!r}), raised
else:
    raise AssertionError({statement!r})"""
    return textwrap.indent(lines, indent)
