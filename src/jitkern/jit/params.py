"""The members of a kernel's ``Params``: declared by the user, or read in the source.

``"float* data, double factor, int64 count"`` declares them. Only a struct that is a plain list of
numbers and pointers is read, and the compiler checks what was read (``jitkern/declared.cuh``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_INT, _UINT, _FLOAT, _BOOL = 0, 1, 2, 6
# DLPack's code and bits of each dtype, by torch's name; "void" is any.
_DTYPES = {
    "void": (3, 0),
    "bool": (_BOOL, 8),
    **{f"int{bits}": (_INT, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (_UINT, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (_FLOAT, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    "complex64": (5, 64),
    "complex128": (5, 128),
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}
_TYPES = "a dtype of torch (float32, bfloat16, ...), a number of C (float, long long, ...) or void"
_C_NAMES = {
    "half": "float16",
    "__half": "float16",
    "__nv_bfloat16": "bfloat16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "unsigned": "uint32",
    "unsigned int": "uint32",
    "long": "int64",
    "long long": "int64",
    "unsigned long": "uint64",
    "unsigned long long": "uint64",
    "size_t": "uint64",
    **{f"{name}_t": name for name in _DTYPES if "int" in name},
    "i32": "int32",
    "i64": "int64",
    "u32": "uint32",
    "u64": "uint64",  # of jitkern/types.h
}
_DECLARATION = re.compile(
    r"(?P<strided>strided\s+)?(?:const\s+)?"
    r"(?P<type>[A-Za-z_]\w*(?:\s+[A-Za-z_]\w*)*?)\s*(?P<pointer>\*)?\s*(?P<name>(?<=[\s*])[A-Za-z_]\w*)"
)


@dataclass(frozen=True)
class Param:
    """One member of ``Params``."""

    name: str
    dtype: str  # torch's name of its type, or of what a pointer points to; "void" is any
    is_pointer: bool  # the argument is a tensor
    is_strided: bool  # of any strides; otherwise contiguous
    is_declared: bool = True  # by the user; otherwise read in the source

    def __str__(self) -> str:
        return f"{self.dtype}{'*' * self.is_pointer} {self.name}"

    def for_cpp(self) -> tuple[str, str, int, int, bool, bool]:
        """Return the description for csrc/host/user_launch.cc."""
        return (self.name, self.dtype, *_DTYPES[self.dtype], self.is_pointer, self.is_strided)


def parse_params(kernel: str, text: str) -> tuple[Param, ...]:
    """Parse a declaration of a kernel's ``Params``; see :func:`jitkern.load_jit`.

    Raises ValueError, which quotes the part that makes no sense.

    Examples
    --------
    >>> [param.dtype for param in parse_params("scale", "float* data, double factor")]
    ['float32', 'float64']
    """
    params: list[Param] = []
    for part in text.split(","):
        match = _DECLARATION.fullmatch(part.strip())
        if match is None:
            raise _wrong(kernel, part, "TYPE NAME or TYPE* NAME, such as float* data, int64 count")
        dtype = _dtype_of(match["type"])
        is_pointer = match["pointer"] is not None
        if dtype is None:
            raise _wrong(kernel, part, _TYPES)
        if not is_pointer and not _is_number(dtype):
            raise _wrong(kernel, part, "a number of 1 to 8 bytes, or a pointer: TYPE* NAME")
        if match["strided"] and not is_pointer:
            raise _wrong(kernel, part, "strided in front of a pointer only")
        if any(match["name"] == param.name for param in params):
            raise _wrong(kernel, part, "another name: it is there twice")
        params.append(Param(match["name"], dtype, is_pointer, match["strided"] is not None))
    return tuple(params)


def _dtype_of(text: str) -> str | None:
    """Return torch's name of a type that is written as in C or torch; None for any other."""
    words = " ".join(text.split())
    dtype = _C_NAMES.get(words, words)
    return dtype if dtype in _DTYPES else None


def _is_number(dtype: str) -> bool:
    """Tell whether Python's numbers can be converted to it."""
    code, bits = _DTYPES[dtype]
    return code in (_INT, _UINT, _BOOL) or (code == _FLOAT and bits >= 32)


def _wrong(kernel: str, part: str, expected: str) -> ValueError:
    return ValueError(f"load_jit: device_wrappers: {kernel}: {part.strip()!r}, expected {expected}")


# -- read in the source ----------------------------------------------------------------------------

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRUCT = re.compile(r"\bstruct\s+Params\s*\{(?P<members>[^{}]*)\}\s*;")
_DEFINED = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
_PACKED = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+pack\b", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z_][\w:]*|\S")
_QUALIFIERS = {"const", "__restrict__", "__restrict"}
# Pointers in C that say their dtype. Those to unsigned words and chars are as often raw memory.
_POINTEES = {"float32", "float64", "float16", "bfloat16", "int32", "int64", "bool"}


def read_params(kernel: str, texts: Iterable[str]) -> tuple[Param, ...]:
    """Return the members of a class's ``Params`` if one of the C++ sources lists them plainly.

    Examples
    --------
    >>> text = "struct Scale { struct Params { float* data; double factor; }; };"
    >>> [str(param) for param in read_params("mine::Scale<256>", [text])]
    ['float32* data', 'float64 factor']
    """
    name = re.escape(kernel.partition("<")[0].rpartition("::")[2].strip())
    head = re.compile(rf"\b(?:struct|class)\s+{name}\b[^;{{}}()]*\{{")
    plain = [_COMMENT.sub(" ", text) for text in texts]
    bodies = [_body(text, match.end()) for text in plain for match in head.finditer(text)]
    if len(bodies) != 1:  # not here, or specialised
        return ()
    found = _STRUCT.findall(bodies[0])
    if len(found) != 1 or "#" in bodies[0]:  # the preprocessor decides
        return ()
    macros = {name for text in plain for name in _DEFINED.findall(text)}
    if any(map(_PACKED.search, plain)) or macros.intersection(_WORD.findall(found[0])):
        return ()
    params: list[Param] = []
    for statement in found[0].split(";"):
        words = [word for word in _WORD.findall(statement) if word not in _QUALIFIERS]
        # "float * a , * b": the type, then each name with its stars.
        first, *others = (part.strip() for part in " ".join(words).split(","))
        type_name, _, name = first.rpartition(" ")
        members = [(name, first)] if first else []
        for name, text in members + [(other.strip("* "), other) for other in others]:
            param = _member(type_name.rstrip("* "), text.count("*"), name)
            if param is None:
                return ()
            params.append(param)
    return tuple(params)


def _body(text: str, start: int) -> str:
    """Return what is before the brace that closes the one before `start`."""
    depth = 1
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[start : start + match.start()]
    return ""


def _member(type_name: str, stars: int, name: str) -> Param | None:
    if not name.isidentifier() or not re.fullmatch(r"[\w:]+( [\w:]+)*", type_name):
        return None
    dtype = _dtype_of(type_name)
    if stars:
        dtype = dtype if stars == 1 and dtype in _POINTEES else "void"
    elif dtype is None or not _is_number(dtype):
        return None
    return Param(name, str(dtype), bool(stars), is_strided=False, is_declared=False)


# -- checked by the compiler -----------------------------------------------------------------------


def checks(kernel: str, params: tuple[Param, ...]) -> list[str]:
    """Return C++ lines that compare `params` with the struct ``Params`` when it is compiled.

    They need ``jitkern/declared.cuh``.
    """
    advice = "; declare the parameters as the third item of device_wrappers"
    if all(param.is_declared for param in params):
        advice = ""
    lines, end, alignment = [], 0, 1
    for param in params:
        code, bits = _DTYPES[param.dtype]
        kind = {_FLOAT: "f", _BOOL: "b", _INT: "i", _UINT: "i"}.get(code, "?")
        nbytes = 8 if param.is_pointer else bits // 8
        end += -end % nbytes + nbytes
        alignment = max(alignment, nbytes)
        fits = "points_to" if param.is_pointer else "is_number"
        asked = f"decltype(Params::{param.name}){{}}, '{kind}', {bits // 8}"
        other = f"{kernel}: taken as {param}, but Params has another type or order{advice}"
        lines.append(f'static_assert(jitkern::{fits}({asked}), "{other}");')
    members = ", ".join(map(str, params))
    has_others = f"{kernel}: Params has more members than {members}{advice}"
    lines.append(f'static_assert(sizeof(Params) == {end + -end % alignment}, "{has_others}");')
    # By addresses, since NVRTC 13.0 has no __builtin_offsetof yet.
    names = [f"member{number}" for number in range(len(params))]
    same = " && ".join(
        f"jitkern::at({name}) == jitkern::at(p.{param.name})"
        for name, param in zip(names, params, strict=True)
    )
    is_so = f"[](Params p) {{ auto& [{', '.join(names)}] = p; return {same}; }}"
    other = f"{kernel}: taken as {members}, but Params has another type or order{advice}"
    lines += [f"constexpr auto is_so = {is_so};", f'static_assert(is_so(Params{{}}), "{other}");']
    return lines
