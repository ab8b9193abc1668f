"""The members of a kernel's ``Params``, read out of its source where they are plainly written.

No C++ is understood here: what is not a list of numbers and pointers is left alone, and the
compiler is asked whether what was read is so (``jitkern/declared.cuh``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from jitkern.jit.params import Param, is_number, plain_type

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_PARAMS = re.compile(r"\bstruct\s+Params\s*\{(?P<members>[^{}]*)\}\s*;")
# What is written is then not what it means.
_DEFINED = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_PACKED = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+pack\b", re.MULTILINE)
_TOKEN = re.compile(r"[A-Za-z_][\w:]*|\S")
_SAYS_NOTHING = {"const", "__restrict__", "__restrict"}
# What pointers in C say of a dtype. Unsigned words and chars are as often raw memory.
_POINTEES = {"float32", "float64", "float16", "bfloat16", "int32", "int64", "bool"}


def read_params(kernel: str, texts: Iterable[str]) -> tuple[Param, ...]:
    """Return the members of a class's ``Params`` where one of `texts` has them; else none.

    Parameters
    ----------
    kernel
        The class with its template arguments, such as ``mine::Scale<256>``.
    texts
        C++ sources.

    Examples
    --------
    >>> text = "struct Scale { struct Params { float* data; double factor; }; };"
    >>> [str(param) for param in read_params("Scale", [text])]
    ['float32* data', 'float64 factor']
    """
    name = re.escape(kernel.partition("<")[0].rpartition("::")[2].strip())
    head = re.compile(rf"\b(?:struct|class)\s+{name}\b[^;{{}}()]*\{{")
    plain = [_COMMENT.sub(" ", text) for text in texts]
    bodies = [
        _to_closing_brace(text, match.end()) for text in plain for match in head.finditer(text)
    ]
    if len(bodies) != 1:  # not here, or specialised
        return ()
    found = _PARAMS.findall(bodies[0])
    if len(found) != 1 or "#" in bodies[0]:  # conditions are for the compiler
        return ()
    macros = {name for text in plain for name in _DEFINED.findall(text)}
    if any(map(_PACKED.search, plain)) or macros.intersection(_TOKEN.findall(found[0])):
        return ()
    params = list(_members(found[0]))
    return () if None in params else tuple(param for param in params if param is not None)


def _to_closing_brace(text: str, start: int) -> str:
    depth = 1
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[start : start + match.start()]
    return ""


def _members(text: str) -> Iterator[Param | None]:
    """Yield each member, None for one that is something else."""
    for statement in text.split(";"):
        tokens = [token for token in _TOKEN.findall(statement) if token not in _SAYS_NOTHING]
        if not tokens:
            continue
        first, *others = " ".join(tokens).split(",")
        *type_words, name = first.split()
        type_name = " ".join(type_words).rstrip("* ")
        yield _member(type_name, first.count("*"), name)
        for other in others:
            yield _member(type_name, other.count("*"), other.replace("*", "").strip())


def _member(type_name: str, stars: int, name: str) -> Param | None:
    if not name.isidentifier() or not re.fullmatch(r"[\w:]+( [\w:]+)*", type_name):
        return None
    dtype = plain_type(type_name)
    if stars:
        known = dtype if stars == 1 and dtype in _POINTEES else "void"
        return Param(name, known, is_pointer=True, is_strided=False, is_declared=False)
    if dtype is None or not is_number(dtype):
        return None
    return Param(name, dtype, is_pointer=False, is_strided=False, is_declared=False)
