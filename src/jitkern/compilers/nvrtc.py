"""NVRTC through ctypes: source text and headers in memory to a cubin. Knows no cache.

ctypes rather than cuda-bindings: a dozen functions are needed, the same in every NVRTC 12 and 13.
A binding has to match the library's version, and imports more slowly than a kernel loads. A ctypes
call releases the GIL, so threads compile in parallel.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple

from jitkern.arch import Arch
from jitkern.compilers.find import CudaHeaders, Tool, find_nvrtc, header_hint, version_of_library
from jitkern.compilers.sources import DEVICE_STD, check_options, with_defaults, words
from jitkern.errors import CompileError, UnsupportedError
from jitkern.gate import gate

# Without this option NVRTC also opens files in the current directory, which the key does not hold.
# It hides CUDA's own headers from each other: if they are read, the source is placed in a directory
# that cannot exist instead.
_NO_CURRENT_DIRECTORY = "-no-source-include"
_NOWHERE = "/dev/null/"


class Image(NamedTuple):
    """Code for the CUDA driver, and the log. PTX if the GPU is newer than the compiler."""

    data: bytes
    kind: Literal["cubin", "ptx"]
    log: str


def compile(  # noqa: A001 - nvrtc.compile(...) is what it is
    source: str,
    *,
    name: str,
    headers: Mapping[str, str],
    arch: Arch,
    options: Sequence[str] = (),
    cuda_headers: CudaHeaders = CudaHeaders(),  # noqa: B008 - a NamedTuple
    library: Tool | None = None,
) -> Image:
    """Compile device code; threads may do so at the same time.

    `headers` are include name -> text, see `sources.include_closure`; no other file is read, except
    `cuda_headers`. `options` are NVRTC's.

    Raises CompileError (with options, log and source), ToolchainError if NVRTC does not load,
    ValueError for an option that names a file.
    """
    options = words(options)
    check_options(options)
    library = library or find_nvrtc()
    with gate:  # a child would inherit NVRTC's locks
        api = load_nvrtc(library.path)
        target, kind = _target(arch, api.archs)
        includes = _include_options(cuda_headers, library)
        defaults = [DEVICE_STD, *(includes or [_NO_CURRENT_DIRECTORY])]
        arguments = [f"-arch={target}", *with_defaults(defaults, options)]
        place = _NOWHERE if includes else ""
        unit = (source, place + name, {**STANDINS, **headers})
        status, code, log = api.compile(*unit, arguments, kind)
    log = log.replace(_NOWHERE, "")
    if status == 0 and code.strip(b"\0"):
        return Image(code, kind, log)
    # NVRTC 13.2 succeeds without code for some archs (apache/tvm#20100).
    reason = api.error_text(status) if status else "success, but no code"
    message = f"{name}: NVRTC {api.version} for {arch}: {reason}"
    message += _advice(log)
    command = f"nvrtc {shlex.join(arguments)}"
    raise CompileError(message, command=command, log=log, source=source)


def _advice(log: str) -> str:
    """Return what to do about a failure, to append to its message."""
    option = re.search(r"unrecognized option (\S+)", log)
    if option is not None:
        return f"; NVRTC knows no {option[1]}: leave it out"
    header = re.search(r'(?:cannot|could not) open source file "([^"]+)"', log)
    hint = "" if header is None else header_hint(header[1])
    return f"; {hint}" if hint else ""


def _target(arch: Arch, supported: tuple[int, ...]) -> tuple[str, Literal["cubin", "ptx"]]:
    older = [number for number in supported if number < arch.number]
    if arch.number in supported or not older:  # NVRTC reports an arch that is too old
        return arch.sm, "cubin"
    return f"compute_{max(older)}", "ptx"


_SIZES = {8: "char", 16: "short", 32: "int", 64: "long long"}  # CCCL's types under NVRTC
_FIXED = "".join(
    f"typedef signed {kind} int{bits}_t; typedef unsigned {kind} uint{bits}_t;\n"
    for bits, kind in _SIZES.items()
)
_STDINT = f"""\
#pragma once
{_FIXED}typedef int64_t intptr_t; typedef uint64_t uintptr_t;
typedef int64_t intmax_t; typedef uint64_t uintmax_t;
"""
_NAMES = [f"{sign}int{bits}_t" for bits in _SIZES for sign in ("", "u")]
_NAMES += ["intptr_t", "uintptr_t", "intmax_t", "uintmax_t"]


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
"""Include name -> text of headers that NVRTC lacks. No key holds them: after a change, raise
DEVICE_ABI."""


@lru_cache(maxsize=8)
def _unpacked(library: Path, pid: int) -> Path:
    """Return where process `pid` has the headers of `library`; NVRTC unpacks them in 0.2 s."""
    folder = Path(tempfile.mkdtemp(prefix="jitkern-headers-"))

    @atexit.register
    def remove() -> None:
        if os.getpid() == pid:  # a forked child runs this as well
            shutil.rmtree(folder, ignore_errors=True)

    return folder


def _include_options(cuda_headers: CudaHeaders, library: Tool) -> list[str]:
    options = [f"-I{path}" for path in cuda_headers.installed]
    if cuda_headers.bundled:  # NVRTC searches these last
        options.append(f"--use-bundled-headers={_unpacked(library.path, os.getpid())}")
    return options


class _Api:
    """The functions of one loaded libnvrtc."""

    def __init__(self, path: Path) -> None:
        self.version = version_of_library(path)
        self._library = ctypes.CDLL(str(path))
        # CUDA 13.0's wheel has no rpath, so NVRTC would not find this beside itself.
        with suppress(OSError):
            ctypes.CDLL(str(path.resolve().parent / f"libnvrtc-builtins.so.{self.version}"))
        count = ctypes.c_int()
        self._call("GetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("GetSupportedArchs", numbers)
        self.archs = tuple(sorted(numbers))

    def error_text(self, status: int) -> str:
        describe = self._library.nvrtcGetErrorString
        describe.restype = ctypes.c_char_p
        return str(describe(status).decode())

    def compile(
        self,
        source: str,
        name: str,
        headers: Mapping[str, str],
        options: Sequence[str],
        kind: Literal["cubin", "ptx"],
    ) -> tuple[int, bytes, str]:
        """Return the status, the code if it is 0, and the log."""
        program = ctypes.c_void_p()
        unit = (_encode(source), _encode(name), len(headers))
        texts, names = _strings(list(headers.values())), _strings(list(headers))
        self._call("CreateProgram", ctypes.byref(program), *unit, texts, names)
        try:
            arguments = (len(options), _strings(options))
            status: int = self._library.nvrtcCompileProgram(program, *arguments)
            log = self._bytes(program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
            return status, b"" if status else self._bytes(program, kind.upper()), log.strip()
        finally:
            self._call("DestroyProgram", ctypes.byref(program))

    def _bytes(self, program: ctypes.c_void_p, name: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{name}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(f"Get{name}", program, buffer)
        return buffer.raw

    def _call(self, function: str, *arguments: object) -> None:
        status = getattr(self._library, f"nvrtc{function}")(*arguments)
        if status != 0:
            raise UnsupportedError(f"NVRTC failed: {self.error_text(status)}")


# One per path. Two threads may load it at once: the loader gives both the same library.
load_nvrtc = lru_cache(maxsize=4)(_Api)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*map(_encode, texts))
