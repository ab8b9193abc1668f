"""Python values to C++ template arguments."""

from __future__ import annotations

import math
from typing import NamedTuple

from jitkern.args import int_arg
from jitkern.lazy import torch

# CUDA's names of torch's dtypes.
_DTYPES = {
    "bool": "bool",
    **{f"{sign}int{bits}": f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)},
    "float16": "__half",
    "bfloat16": "__nv_bfloat16",
    "float32": "float",
    "float64": "double",
    "float8_e4m3fn": "__nv_fp8_e4m3",
    "float8_e5m2": "__nv_fp8_e5m2",
}


class CppArgs(tuple[str, ...]):
    """C++ literals, in order; ``str()`` joins them the way a template argument list is written."""

    def __str__(self) -> str:
        return ", ".join(self)


class KernelConfig(NamedTuple):
    """A launch configuration that a kernel is compiled for, in the order of the C++ template.

    `num_threads`: threads per block, 1 to 1024. `max_occupancy`: minimum number of blocks per SM,
    the second argument of ``__launch_bounds__``. `use_pdl`: whether the kernel uses programmatic
    dependent launch (compute capability 9.0 or newer). It can be unpacked:
    ``make_cpp_args(656, *config)``.

    Examples
    --------
    >>> KernelConfig(256, 2, use_pdl=True).template_args
    '256, 2, true'
    """

    num_threads: int
    max_occupancy: int
    use_pdl: bool

    @property
    def template_args(self) -> str:
        """The three template arguments, such as ``256, 2, true``."""
        return str(make_cpp_args(self))


def make_cpp_args(*args: int | float | bool | str | torch.dtype | KernelConfig) -> CppArgs:
    """Convert Python values to C++ template arguments.

    Accepts bool, int and float; a torch.dtype, which becomes CUDA's type (``float``,
    ``__nv_bfloat16``, ``int32_t``, ...; the kernel must include its header); a str, which is
    inserted unchanged; and a KernelConfig, which expands to its three values. ``str()`` of the
    result joins the arguments with ``", "``.

    Raises
    ------
    TypeError
        A value has another type, such as a NumPy or torch scalar, which might be on a GPU or hide a
        dtype; or CUDA has no type for a dtype.
    ValueError
        An int does not fit 64 bits, or a float is not finite.

    Examples
    --------
    >>> str(make_cpp_args(656, 0.5, True, "Op::kSum"))
    '656, 0.5, true, Op::kSum'
    """
    literals: list[str] = []
    for position, value in enumerate(args):
        if isinstance(value, KernelConfig):
            int_arg("KernelConfig", "num_threads", value.num_threads, 1, 1024)
            int_arg("KernelConfig", "max_occupancy", value.max_occupancy, 1)
            literals += make_cpp_args(*value)
        else:
            literals.append(_literal(value, f"make_cpp_args: argument {position}"))
    return CppArgs(literals)


def _literal(value: object, argument: str) -> str:
    # type() and not isinstance(): bool is an int, numpy.float64 is a float, an IntEnum is an int
    # whose repr is not a C++ literal.
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int:
        if value == -(1 << 63):
            # C++ reads -9223372036854775808 as minus a literal that no signed type holds.
            return "(-9223372036854775807 - 1)"
        if not -(1 << 63) < value < 1 << 64:
            raise ValueError(f"{argument}: {value}, expected an int of 64 bits")
        return str(value) if value < 1 << 63 else f"{value}u"
    if type(value) is float:
        if not math.isfinite(value):
            raise ValueError(f"{argument}: {value}, expected a finite float")
        return repr(value)
    if type(value) is str:
        return value
    if f"{type(value).__module__}.{type(value).__name__}" == "torch.dtype":
        known = _DTYPES.get(str(value).removeprefix("torch."))
        if known is not None:
            return known
    raise TypeError(
        f"{argument}: {type(value).__name__} {value!r:.60}, "
        "expected int, float, bool, str, a torch.dtype with a type of CUDA's, or KernelConfig"
    )
