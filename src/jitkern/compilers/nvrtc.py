"""NVRTC through ctypes: source text and headers in memory to a cubin. Knows no cache.

ctypes rather than cuda-bindings: thirteen functions are needed, the same in every NVRTC 12 and 13,
and a binding has to match the library's version and takes longer to import than a kernel takes to
load. A ctypes call releases the GIL, so threads compile in parallel; a fork waits for them.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from jitkern.arch import Arch
from jitkern.compilers.find_nvrtc import NVRTC_HINT, Nvrtc, find_nvrtc
from jitkern.compilers.sources import DEVICE_STD, check_options, with_defaults
from jitkern.errors import CompileError, ToolchainError, UnsupportedError
from jitkern.forks import PerProcess

BASE_OPTIONS = (DEVICE_STD, "-no-source-include")
"""Given to every compile, in front of the caller's options.

``-no-source-include``: without it NVRTC also opens files in the current directory, and what was
hashed would not be what is compiled.
"""

_FIRST_MINIMAL = (12, 4)  # the version that knows -minimal

_FORK_WAIT_S = 30.0


@dataclass(frozen=True)
class Image:
    """What the CUDA driver loads.

    Attributes
    ----------
    data : bytes
        A cubin, or PTX text.
    kind : {"cubin", "ptx"}
        PTX where the GPU is newer than the compiler: the driver compiles it when it loads.
    log : str
        What the compiler said, empty if nothing.
    """

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
    minimal: bool = False,
    library: Nvrtc | None = None,
) -> Image:
    """Compile device code. May be called from several threads, which then run in parallel.

    Parameters
    ----------
    source
        The translation unit.
    name
        What it is called in messages, such as ``store.cu``.
    headers
        Include name -> text, see `sources.include_closure`. No file is read.
    arch
        The architecture to compile for. Where the library does not know it, PTX for the newest
        older architecture that it does know.
    options
        More options of NVRTC, such as ``-lineinfo``. A later ``-std`` replaces c++17.
    minimal
        The source has no need of textures, surfaces and the device side of the CUDA runtime, whose
        declarations take 3.5 of the 40 ms of a kernel. The code is the same.
    library
        The libnvrtc to use; by default the one that `find_nvrtc` finds.

    Raises
    ------
    CompileError
        The source does not compile; carries options, log and source.
    ToolchainError
        There is no NVRTC, or it does not load.
    UnsupportedError
        The library knows only architectures newer than `arch`.
    ValueError
        An option that names an include directory or file.

    Examples
    --------
    >>> image = compile('extern "C" __global__ void k() {}', name="k.cu", headers={},
    ...                 arch=Arch(9, 0))
    >>> image.kind, image.data[:4]
    ('cubin', b'\\x7fELF')
    """
    check_options(options)
    with no_fork():
        api = _load((library or find_nvrtc()).path)
        target, kind = _target(arch, api.archs, api.version)
        arguments = [f"-arch={target}", *with_defaults(BASE_OPTIONS, options)]
        if minimal and api.release >= _FIRST_MINIMAL:
            arguments.append("-minimal")
        program = api.create(source, name, headers)
        try:
            status = api.compile_program(program, arguments)
            log = api.program_log(program)
            if status == 0:
                return Image(api.result(program, kind), kind, log)
        finally:
            api.destroy(program)
    raise CompileError(
        f"{name}: NVRTC {api.version} for {arch}: {api.error_text(status)}",
        command="nvrtc " + shlex.join(arguments),
        log=log,
        source=source,
    )


def supported_archs(library: Nvrtc | None = None) -> tuple[int, ...]:
    """Return what the library compiles for, as major * 10 + minor, ascending. Loads the library."""
    return _load((library or find_nvrtc()).path).archs


class _ForkGate:
    """How many threads are at work, and the door that a fork holds."""

    def __init__(self) -> None:
        self.door = threading.Condition()
        self.inside = 0


_gate = PerProcess(_ForkGate)


def _before_fork() -> None:
    # Bounded: a fork that comes too early is a risk, one that never comes is a hang.
    gate = _gate.value
    gate.door.acquire()
    gate.door.wait_for(lambda: gate.inside == 0, timeout=_FORK_WAIT_S)


os.register_at_fork(before=_before_fork, after_in_parent=lambda: _gate.value.door.release())


@contextmanager
def no_fork() -> Iterator[None]:
    """Hold off a fork in other threads for the body.

    A child that is forked while a compiler library is at work inherits its locks as they are, and
    its own first compile never ends (seen with NVRTC 13.5).
    """
    gate = _gate.value
    with gate.door:
        gate.inside += 1
    try:
        yield
    finally:
        with gate.door:
            gate.inside -= 1
            gate.door.notify_all()


def _target(
    arch: Arch, supported: tuple[int, ...], version: str
) -> tuple[str, Literal["cubin", "ptx"]]:
    if arch.number in supported:
        return arch.sm, "cubin"
    older = [number for number in supported if number < arch.number]
    if not older:
        oldest = min(supported)
        raise UnsupportedError(
            f"arch: {arch}, but NVRTC {version} compiles for {oldest // 10}.{oldest % 10} and newer"
        )
    return f"compute_{max(older)}", "ptx"


class _Api:
    """The functions of one loaded libnvrtc."""

    def __init__(self, path: Path) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            self._declare()
        except (OSError, AttributeError) as error:
            raise ToolchainError(f"{path} is no usable libnvrtc ({error}); {NVRTC_HINT}") from error
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.release = (major.value, minor.value)
        self.version = f"{major.value}.{minor.value}"
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        numbers = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(numbers))
        self.archs = tuple(sorted(numbers))

    def _declare(self) -> None:
        program, text = ctypes.c_void_p, ctypes.c_char_p
        texts, size = ctypes.POINTER(text), ctypes.POINTER(ctypes.c_size_t)
        number = ctypes.POINTER(ctypes.c_int)
        signatures: dict[str, list[type[ctypes._CDataType]]] = {
            "nvrtcVersion": [number, number],
            "nvrtcGetNumSupportedArchs": [number],
            "nvrtcGetSupportedArchs": [number],
            "nvrtcCreateProgram": [
                ctypes.POINTER(program), text, text, ctypes.c_int, texts, texts,
            ],
            "nvrtcCompileProgram": [program, ctypes.c_int, texts],
            "nvrtcDestroyProgram": [ctypes.POINTER(program)],
            "nvrtcGetProgramLogSize": [program, size],
            "nvrtcGetProgramLog": [program, text],
            "nvrtcGetCUBINSize": [program, size],
            "nvrtcGetCUBIN": [program, text],
            "nvrtcGetPTXSize": [program, size],
            "nvrtcGetPTX": [program, text],
        }  # fmt: skip
        for function, argtypes in signatures.items():
            entry = getattr(self._library, function)
            entry.argtypes = argtypes
            entry.restype = ctypes.c_int
        self._library.nvrtcGetErrorString.argtypes = [ctypes.c_int]
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def error_text(self, status: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(status)
        return text.decode()

    def create(self, source: str, name: str, headers: Mapping[str, str]) -> ctypes.c_void_p:
        program = ctypes.c_void_p()
        texts = _strings(list(headers.values()))
        names = _strings(list(headers))
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), _encode(source), _encode(name), len(headers), texts, names
            )
        )
        return program

    def compile_program(self, program: ctypes.c_void_p, options: Sequence[str]) -> int:
        status: int = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
        return status

    def program_log(self, program: ctypes.c_void_p) -> str:
        log = self._bytes(program, "ProgramLog").rstrip(b"\0")
        return log.decode("utf-8", "replace").strip()

    def result(self, program: ctypes.c_void_p, kind: Literal["cubin", "ptx"]) -> bytes:
        return self._bytes(program, "CUBIN" if kind == "cubin" else "PTX")

    def destroy(self, program: ctypes.c_void_p) -> None:
        self._check(self._library.nvrtcDestroyProgram(ctypes.byref(program)))

    def _bytes(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status != 0:
            raise UnsupportedError(f"NVRTC failed: {self.error_text(status)}")


# One _Api a path; two threads that load it at once get the same library from the loader.
_load = lru_cache(maxsize=4)(_Api)


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _strings(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*map(_encode, texts))
