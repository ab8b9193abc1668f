"""What a user declares of a kernel's ``Params``: ``"float* data, double factor, int64 count"``."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Code and bits of each dtype in DLPack, by torch's name; "void" is any.
_DTYPES = {
    "void": (3, 0),
    "bool": (6, 8),
    **{f"int{bits}": (0, bits) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (1, bits) for bits in (8, 16, 32, 64)},
    **{f"float{bits}": (2, bits) for bits in (16, 32, 64)},
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
    # Of jitkern/types.h.
    **{
        f"{sign}{bits}": f"{name}{bits}"
        for sign, name in (("i", "int"), ("u", "uint"))
        for bits in (32, 64)
    },
}
_INT, _UINT, _FLOAT, _BOOL = 0, 1, 2, 6
_PARAM = re.compile(
    r"(?P<strided>strided\s+)?(?:const\s+)?"
    r"(?P<type>[A-Za-z_]\w*(?:\s+[A-Za-z_]\w*)*?)\s*(?P<pointer>\*)?\s*(?P<name>(?<=[\s*])[A-Za-z_]\w*)"
)
_POINTER_BYTES = 8


@dataclass(frozen=True)
class Param:
    """One member of ``Params``.

    Attributes
    ----------
    name
        The member's name.
    dtype
        Torch's name of its type; of a pointer what it points to, ``"void"`` being any.
    is_pointer
        The argument is a tensor.
    is_strided
        It may have any strides; otherwise it is contiguous.
    is_declared
        The user says so; otherwise it was read in the source.
    """

    name: str
    dtype: str
    is_pointer: bool
    is_strided: bool
    is_declared: bool = True

    def __str__(self) -> str:
        return f"{self.dtype}{'*' * self.is_pointer} {self.name}"

    @property
    def item_bytes(self) -> int:
        """Bytes of its dtype; 0 for ``void``."""
        return _DTYPES[self.dtype][1] // 8

    @property
    def nbytes(self) -> int:
        """Its size in ``Params``, and its alignment."""
        return _POINTER_BYTES if self.is_pointer else self.item_bytes

    @property
    def kind(self) -> str:
        """What jitkern/declared.cuh calls its dtype: f, b or i where C++ has it as well, else ?."""
        return {_FLOAT: "f", _BOOL: "b", _INT: "i", _UINT: "i"}.get(_DTYPES[self.dtype][0], "?")

    @property
    def expected(self) -> str:
        """What a message says of an argument for it."""
        if not self.is_pointer:
            return self.dtype
        return "a tensor" if self.dtype == "void" else f"a tensor of {self.dtype}"

    def for_cpp(self) -> tuple[str, str, int, int, bool, bool]:
        """Return what csrc/host/user_launch.cc is told of it."""
        return (self.name, self.dtype, *_DTYPES[self.dtype], self.is_pointer, self.is_strided)


def parse_params(kernel: str, text: str) -> tuple[Param, ...]:
    """Parse the members of a kernel's ``Params``, in order, separated by commas.

    Each is a type, ``*`` behind it for a tensor, and a name. A type is torch's name of a dtype, or
    C's of a number; ``const`` is allowed, and ``strided`` in front for a tensor that need not be
    contiguous.

    Raises
    ------
    ValueError
        It says something else; the message quotes it.

    Examples
    --------
    >>> [param.dtype for param in parse_params("scale", "float* data, double factor")]
    ['float32', 'float64']
    """
    params: list[Param] = []
    for part in text.split(","):
        match = _PARAM.fullmatch(part.strip())
        if match is None:
            raise _wrong(kernel, part, "TYPE NAME or TYPE* NAME, such as float* data, int64 count")
        dtype = plain_type(match["type"])
        is_pointer = match["pointer"] is not None
        if dtype is None:
            raise _wrong(kernel, part, _TYPES)
        if not is_pointer and not is_number(dtype):
            raise _wrong(kernel, part, "a number of 1 to 8 bytes, or a pointer: TYPE* NAME")
        if match["strided"] and not is_pointer:
            raise _wrong(kernel, part, "strided in front of a pointer only")
        if any(match["name"] == param.name for param in params):
            raise _wrong(kernel, part, "another name: it is there twice")
        params.append(Param(match["name"], dtype, is_pointer, match["strided"] is not None))
    return tuple(params)


def plain_type(text: str) -> str | None:
    """Return torch's name for a type as C or torch writes it; None for what is no dtype."""
    words = " ".join(text.split())
    dtype = _C_NAMES.get(words, words)
    return dtype if dtype in _DTYPES else None


def is_number(dtype: str) -> bool:
    """Whether a member of ``Params`` may be of it: what Python's numbers turn into."""
    code, bits = _DTYPES[dtype]
    return code in (_INT, _UINT, _BOOL) or (code == _FLOAT and bits >= 32)


def _wrong(kernel: str, part: str, expected: str) -> ValueError:
    return ValueError(f"load_jit: device_wrappers: {kernel}: {part.strip()!r}, expected {expected}")
