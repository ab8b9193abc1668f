"""What makes sources and options that are written for nvcc do for NVRTC."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

_SIZES = {8: "char", 16: "short", 32: "int", 64: "long long"}  # as CCCL has them under NVRTC

_FIXED = "".join(
    f"typedef signed {kind} int{bits}_t; typedef unsigned {kind} uint{bits}_t;\n"
    for bits, kind in _SIZES.items()
)
_STDINT = f"""\
#pragma once
{_FIXED}typedef int64_t intptr_t; typedef uint64_t uintptr_t;
typedef int64_t intmax_t; typedef uint64_t uintmax_t;
"""
_FIXED_NAMES = [f"{sign}int{bits}_t" for bits in _SIZES for sign in ("", "u")]
_NAMES = [*_FIXED_NAMES, "intptr_t", "uintptr_t", "intmax_t", "uintmax_t"]


def _in_std(header: str, names: Sequence[str]) -> str:
    lines = "".join(f"using ::{name};\n" for name in names)
    return f"#pragma once\n#include <{header}>\nnamespace std {{\n{lines}}}\n"


STANDINS: Mapping[str, str] = {
    "stdint.h": _STDINT,
    "cstdint": _in_std("stdint.h", _NAMES),
    "stddef.h": "#pragma once\n#define offsetof(type, member) __builtin_offsetof(type, member)\n",
    "cstddef": _in_std("stddef.h", ["size_t", "ptrdiff_t"])
    + "namespace std {\nusing nullptr_t = decltype(nullptr);\n}\n",
    # Their device side is built into NVRTC.
    "cuda_runtime.h": "#pragma once\n",
    "device_launch_parameters.h": "#pragma once\n",
}
"""Include name -> text of headers that NVRTC has no file for. Not part of a key: where these texts
change, DEVICE_ABI does."""

# nvcc's options by their names without dashes.
# There is no host code here, device code is optimised fully without being told, and lambdas in it
# need no option.
_NO_MEANING = {
    *("O0", "O1", "O2", "O3", "g", "debug", "Wno-deprecated-gpu-targets"),
    *("expt-extended-lambda", "extended-lambda"),
}
_NO_MEANING_WITH_VALUE = {
    *("Xcompiler", "compiler-options", "Xlinker", "linker-options"),
    *("ccbin", "compiler-bindir", "t", "threads", "O", "optimize"),
}
_WITH_VALUE = {
    *_NO_MEANING_WITH_VALUE,
    "Xptxas",
    "ptxas-options",
    "Xcudafe",
    "cudafe-options",
    "std",
}
_OTHER_WORDS = {
    # Both let device code call a constexpr function that is not marked __device__.
    "expt-relaxed-constexpr": "-default-device",
    "res-usage": "-Xptxas=-v",
    "resource-usage": "-Xptxas=-v",
}
_ARCH = "the arch is that of the GPU, of JITKERN_ARCH or of image(arch); leave it out"
_LINKED = "device_files are not linked; leave it out, or give the source as cuda_files to nvcc"
_OUTPUT = "the output is a cubin in the cache; leave it out"
_REFUSED = {
    **dict.fromkeys(("arch", "gpu-architecture", "code", "gpu-code"), _ARCH),
    **dict.fromkeys(("gencode", "generate-code"), _ARCH),
    **dict.fromkeys(
        ("rdc", "relocatable-device-code", "dc", "device-c", "dlto", "shared"), _LINKED
    ),
    **dict.fromkeys(("c", "o", "cubin", "ptx", "fatbin", "keep"), _OUTPUT),
}


def words(options: Sequence[str], argument: str = "extra_cuda_cflags") -> list[str]:
    """Return the words of options, each of which may hold several, quoted as in a shell.

    Raises
    ------
    ValueError
        A quote that is not closed; the message names `argument` and the option.
    """
    found: list[str] = []
    for option in options:
        try:
            found += shlex.split(option)
        except ValueError as error:
            raise ValueError(
                f"{argument}: {option!r}: {error}, expected words quoted as in a shell"
            ) from None
    return found


def is_cpp17(options: Sequence[str]) -> bool:
    """Tell whether device code is C++17 or newer with these options, as it is without any."""
    standard = ""
    pending = iter(words(options))
    for word in pending:
        name, has_value, value = word.partition("=")
        if name in ("-std", "--std"):
            standard = value if has_value else next(pending, "")
    return standard.rpartition("+")[2] not in ("98", "03", "11", "14")


def nvrtc_options(options: Sequence[str]) -> list[str]:
    """Return nvcc's options as NVRTC takes them; one that is not known here stays as it is.

    Raises
    ------
    ValueError
        An option that has no meaning for one kernel image; the message says what to do.

    Examples
    --------
    >>> nvrtc_options(["-O3", "-Xptxas -v,-warn-spills", "--use_fast_math"])
    ['-Xptxas=-v', '-Xptxas=-warn-spills', '--use_fast_math']
    """
    made: list[str] = []
    pending = iter(words(options))
    for word in pending:
        spelled, has_value, value = word.partition("=")
        name = spelled.lstrip("-") if spelled.startswith("-") else ""
        if name in _REFUSED:
            raise ValueError(f"{word!r}: {_REFUSED[name]}")
        if name in _WITH_VALUE and not has_value:
            value = next(pending, "")
        if name not in _NO_MEANING and name not in _NO_MEANING_WITH_VALUE:
            made += _translated(name, value) or [word]
    return made


def _translated(name: str, value: str) -> list[str]:
    """The option in NVRTC's words; empty where they are the same."""
    if name in ("Xptxas", "ptxas-options"):
        return [f"-Xptxas={part}" for part in value.split(",")]
    if name in ("Xcudafe", "cudafe-options"):  # --diag_suppress=177
        return [value.replace("--diag_", "--diag-")]
    if name == "std":
        return [f"-std={value}"]
    return [_OTHER_WORDS[name]] if name in _OTHER_WORDS else []
