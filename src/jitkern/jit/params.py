"""The members of a kernel's ``Params``: declared by the user, or read in the source.

``"float* data, double factor, int64 count"`` declares them. Only a struct that is a plain list of
numbers and pointers is read, and the compiler checks what was read (``jitkern/wrapper.cuh``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

_INT, _UINT, _FLOAT, _BOOL = 0, 1, 2, 6
# DLPack's code and bits of each dtype, by torch's name; "void" is any.
_DTYPES = {
    "void": (3, 0),
    "bool": (_BOOL, 8),
    **{f"int{bits}": (_INT, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (_UINT, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (_FLOAT, bits) for bits in (16, 32, 64)},
    "bfloat16": (4, 16),
    **{f"complex{bits}": (5, bits) for bits in (64, 128)},
    "float8_e4m3fn": (10, 8),
    "float8_e4m3fnuz": (11, 8),
    "float8_e5m2": (12, 8),
    "float8_e5m2fnuz": (13, 8),
    "float8_e8m0fnu": (14, 8),
}
_TYPES = "a dtype of torch (float32, bfloat16, ...), a number of C (float, long long, ...) or void"
_C_NAMES = {
    **dict.fromkeys(("half", "__half"), "float16"),
    "__nv_bfloat16": "bfloat16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    **dict.fromkeys(("int", "i32"), "int32"),  # i32 and the like are of jitkern/types.h
    **dict.fromkeys(("long", "long long", "i64"), "int64"),
    **dict.fromkeys(("unsigned", "unsigned int", "u32"), "uint32"),
    **dict.fromkeys(("unsigned long", "unsigned long long", "size_t", "u64"), "uint64"),
    **{f"{name}_t": name for name in _DTYPES if "int" in name},
}
_DECLARATION = re.compile(
    r"(?P<strided>strided\s+)?(?:const\s+)?"
    r"(?P<type>[A-Za-z_][\w:]*(?:\s+[A-Za-z_]\w*)*?)(?:\s+const)?\s*(?P<stars>\**)\s*"
    r"(?:__restrict(?:__)?\s+)?(?P<name>(?<=[\s*])[A-Za-z_]\w*)"
)


@dataclass(frozen=True)
class Param:
    """One member of ``Params``."""

    name: str
    dtype: str  # torch's name of its type, or of what a pointer points to; "void" is any
    is_pointer: bool  # the argument is a tensor
    is_strided: bool  # any strides; otherwise contiguous
    is_declared: bool = True  # declared by the user; otherwise read in the source

    def __str__(self) -> str:
        return f"{self.dtype}{'*' * self.is_pointer} {self.name}"

    def for_cpp(self) -> tuple[str, str, int, int, bool, bool]:
        """Return the description for csrc/host/user_launch.cc."""
        return (self.name, self.dtype, *_DTYPES[self.dtype], self.is_pointer, self.is_strided)


def parse_params(kernel: str, text: str) -> tuple[Param, ...]:
    """Parse a declaration of a kernel's ``Params``; ValueError quotes what makes no sense."""
    params: list[Param] = []
    for part in map(str.strip, text.split(",")):
        try:
            params.append(_parse(part))
        except ValueError as error:
            reason = f"{part!r}, expected {error}"
            raise ValueError(f"load_jit: device_wrappers: {kernel}: {reason}") from None
    return tuple(params)


def _parse(text: str) -> Param:
    match = _DECLARATION.fullmatch(text)
    if match is None or len(match["stars"]) > 1:
        raise ValueError("TYPE NAME or TYPE* NAME, such as float* data, int64 count")
    words = " ".join(match["type"].split())
    dtype, is_pointer = _C_NAMES.get(words, words), bool(match["stars"])
    if dtype not in _DTYPES:
        raise ValueError(_TYPES)
    code, bits = _DTYPES[dtype]
    if not is_pointer and not (code in (_INT, _UINT, _BOOL) or (code == _FLOAT and bits >= 32)):
        raise ValueError("a number of 1 to 8 bytes, or a pointer: TYPE* NAME")
    if match["strided"] and not is_pointer:
        raise ValueError("strided in front of a pointer only")
    return Param(match["name"], dtype, is_pointer, match["strided"] is not None)


# -- read in the source ----------------------------------------------------------------------------

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_STRUCT = re.compile(r"\bstruct\s+Params\s*\{([^{}]*)\}\s*;")
# Pointers in C that say their dtype. Those to unsigned words and chars are as often raw memory.
_POINTEES = {"float32", "float64", "float16", "bfloat16", "int32", "int64", "bool"}


def read_params(kernel: str, texts: Iterable[str]) -> tuple[Param, ...]:
    """Return the members of a class's ``Params`` if one of the C++ sources lists them plainly.

    An example: ``struct Scale { struct Params { float* data; double factor; }; };``. A macro that
    changes a member's type or name does not compile then: its ``Params`` has to be declared.
    """
    name = re.escape(kernel.partition("<")[0].rpartition("::")[2].strip())
    template = r"(?:\btemplate\s*<(?P<parameters>[^<>]*)>\s*)?"
    head = re.compile(rf"{template}\b(?:struct|class)\s+{name}\b[^;{{}}()]*\{{")
    plain = [_COMMENT.sub(" ", text) for text in texts]
    if any("pragma pack" in text for text in plain):  # then members are not aligned
        return ()
    heads = [(text, match) for text in plain for match in head.finditer(text)]
    bodies = [_body(text, match.end()) for text, match in heads]
    if len(bodies) != 1 or "#" in bodies[0]:  # elsewhere, specialised, or the preprocessor decides
        return ()
    structs = _STRUCT.findall(bodies[0])
    if len(structs) != 1:
        return ()
    members: str = structs[0]
    for parameter, argument in _template_types(heads[0][1]["parameters"] or "", kernel).items():
        members = re.sub(rf"\b{parameter}\b", argument, members)
    try:
        return tuple(_member(text.strip()) for text in members.split(";") if text.strip())
    except ValueError:
        return ()


def _template_types(parameters: str, kernel: str) -> dict[str, str]:
    """Return the argument of each type parameter of a kernel such as ``Scale<256, float>``."""
    arguments = re.split(r",(?![^<]*>)", kernel.partition("<")[2].rpartition(">")[0])
    words = [parameter.split() for parameter in parameters.split(",")]
    return {
        word[1]: argument.strip()
        for word, argument in zip(words, arguments, strict=False)
        if len(word) > 1 and word[0] in ("typename", "class") and re.fullmatch(r"[\w: ]+", argument)
    }


def _member(text: str) -> Param:
    """Return a member as C++ declares it; a pointer to another type is taken as ``void*``."""
    match = _DECLARATION.fullmatch(text)
    if match is not None and match["stars"]:
        words = " ".join(match["type"].split())
        dtype = _C_NAMES.get(words, words) if match["stars"] == "*" else ""
        return Param(match["name"], dtype if dtype in _POINTEES else "void", True, False, False)
    return replace(_parse(text), is_declared=False)


def _body(text: str, start: int) -> str:
    """Return what is before the brace that closes the one before `start`."""
    depth = 1
    for match in re.finditer(r"[{}]", text[start:]):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return text[start : start + match.start()]
    return ""


# -- checked by the compiler -----------------------------------------------------------------------


def checks(export: str, kernel: str, params: tuple[Param, ...]) -> str:
    """Return lines of C++ that compare `params` with a kernel's ``Params``."""
    differs = ", but Params has another type or order"
    if not all(param.is_declared for param in params):
        differs += "; declare the parameters as the third item of device_wrappers"
    lines = [f"using Params = {kernel}::Params;"]
    for param in params:
        code, bits = _DTYPES[param.dtype]
        kind = {_FLOAT: "f", _BOOL: "b", _INT: "i", _UINT: "i"}.get(code, "?")
        fits = "points_to" if param.is_pointer else "is_number"
        asked = f"decltype(Params::{param.name}){{}}, '{kind}', {bits // 8}"
        message = f"{export}: taken as {param}{differs}"
        lines.append(f'static_assert(jitkern::{fits}({asked}), "{message}");')
    # Number and order of the members, by addresses: NVRTC 13.0 has no __builtin_offsetof yet.
    names = [f"member{number}" for number in range(len(params))]
    same = " && ".join(
        f"jitkern::at({name}) == jitkern::at(p.{param.name})"
        for name, param in zip(names, params, strict=True)
    )
    is_so = f"[](Params p) {{ auto& [{', '.join(names)}] = p; return {same}; }}"
    message = f"{export}: taken as {', '.join(map(str, params))}{differs}"
    lines += [f"constexpr auto is_so = {is_so};", f'static_assert(is_so(Params{{}}), "{message}");']
    return "".join(f"  {line}\n" for line in lines)
