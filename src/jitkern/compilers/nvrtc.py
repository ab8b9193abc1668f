"""NVRTC through ctypes: source text and headers in memory to a cubin. Knows no cache.

ctypes rather than cuda-bindings: thirteen functions are needed, the same in every NVRTC 12 and 13,
and a binding has to match the library's version and takes longer to import than a kernel takes to
load. A ctypes call releases the GIL, so threads compile in parallel; a fork waits for them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import re
import shlex
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jitkern.arch import Arch
from jitkern.compilers.find_nvrtc import NVRTC_HINT, Nvrtc, find_nvrtc
from jitkern.compilers.for_nvrtc import STANDINS, nvrtc_options, words
from jitkern.compilers.sources import DEVICE_STD, check_options, with_defaults
from jitkern.errors import CompileError, ToolchainError, UnsupportedError
from jitkern.fs import ForkLocal, make_scratch_folder

if TYPE_CHECKING:
    from jitkern.compilers.find_headers import CudaHeaders

# Without it NVRTC also opens files in the current directory, and what was hashed would not be what
# is compiled. With it CUDA's own headers do not find their neighbours: where they are read, the
# source is said to be in a directory that nothing can be in.
_NO_CURRENT_DIRECTORY = "-no-source-include"
_NOWHERE = "/dev/null/"

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
    cuda_headers: CudaHeaders | None = None,
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
        Include name -> text, see `sources.include_closure`. No file is read but `cuda_headers`.
    arch
        The architecture to compile for. Where the library does not know it, PTX for the newest
        older architecture that it does know.
    options
        More options, NVRTC's own or nvcc's (see `for_nvrtc.nvrtc_options`), such as ``-lineinfo``.
        A later ``-std`` replaces c++17.
    minimal
        The source has no need of textures, surfaces and the device side of the CUDA runtime, whose
        declarations take 3.5 of the 40 ms of a kernel. The code is the same.
    cuda_headers
        CUDA's own headers, see `find_headers`; by default there are none. Those that NVRTC brings
        are unpacked into a temporary directory once a process (26 MB, 0.2 to 0.6 s).
    library
        The libnvrtc to use; by default the one that `find_nvrtc` finds.

    Raises
    ------
    CompileError
        The source does not compile, or an option has no meaning; carries options, log and source.
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
    check_options(words(options))
    library = library or find_nvrtc()
    try:
        options = nvrtc_options(options)
    except ValueError as error:
        message = f"{name}: extra_cuda_cflags: {error}"
        raise CompileError(message, command=shlex.join(options), log="", source=source) from None
    with no_fork():
        api = _load(library.path)
        target, kind = _target(arch, api.archs, api.version)
        includes = _include_options(cuda_headers, library)
        place = _NOWHERE if includes else ""
        defaults = [DEVICE_STD, *(includes or [_NO_CURRENT_DIRECTORY])]
        arguments = [f"-arch={target}", *with_defaults(defaults, options)]
        if minimal and api.release >= _FIRST_MINIMAL:
            arguments.append("-minimal")
        program = api.create(source, place + name, {**STANDINS, **headers})
        try:
            # With CUDA's own headers it may take seconds.
            with _shown(name) if includes else nullcontext():
                status = api.compile_program(program, arguments)
            log = api.program_log(program).replace(_NOWHERE, "")
            if status == 0:
                return Image(api.result(program, kind), kind, log)
        finally:
            api.destroy(program)
    message = f"{name}: NVRTC {api.version} for {arch}: {api.error_text(status)}"
    raise CompileError(
        message + _advice(log, library),
        command="nvrtc " + shlex.join(arguments),
        log=log,
        source=source,
    )


def _advice(log: str, library: Nvrtc) -> str:
    """What to do about a failure, to go behind the message."""
    option = re.search(r"unrecognized option (\S+)", log)
    if option is not None:
        return f"; NVRTC knows no {option[1]}: leave it out, or set JITKERN_COMPILER=nvcc"
    header = re.search(r'(?:cannot|could not) open source file "([^"]+)"', log)
    if header is None:
        return ""
    from jitkern.compilers.find_headers import header_hint

    hint = header_hint(header[1], library)
    return f"; {hint}" if hint else ""


class _Unpacked:
    """Where this process has the headers of each NVRTC that brings some."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._folders: dict[Path, Path] = {}

    def folder(self, library: Path) -> Path:
        """The directory for those of `library`, which NVRTC fills and locks by itself."""
        with self._guard:
            folder = self._folders.get(library)
            if folder is None or not _is_own(folder):
                folder = self._folders[library] = make_scratch_folder("headers")
                atexit.register(_remove, folder, os.getpid())
            return folder


def _is_own(folder: Path) -> bool:
    """Whether it is there still: TMPDIR may have been cleaned, and others have made it anew."""
    try:
        return os.lstat(folder).st_uid == os.geteuid()
    except FileNotFoundError:
        return False


_unpacked = ForkLocal(_Unpacked)


def _remove(folder: Path, pid: int) -> None:
    if os.getpid() == pid:  # a forked child runs this as well
        shutil.rmtree(folder, ignore_errors=True)


def _shown(name: str) -> AbstractContextManager[object]:
    from jitkern.compilers.progress import shown

    return shown(name)


def _include_options(cuda_headers: CudaHeaders | None, library: Nvrtc) -> list[str]:
    if cuda_headers is None:
        return []
    directories = list(cuda_headers.directories)
    if not cuda_headers.bundled:
        return [f"-I{directory}" for directory in directories]
    unpacked = _unpacked.value.folder(library.path)
    if len(directories) > cuda_headers.num_given:
        # NVRTC itself searches them last, behind a toolkit's of the same names.
        directories[cuda_headers.num_given : cuda_headers.num_given] = [unpacked, unpacked / "cccl"]
    return [*(f"-I{path}" for path in directories), f"--use-bundled-headers={unpacked}"]


class _ForkGate:
    """How many threads are at work, and the door that a fork holds."""

    def __init__(self) -> None:
        self.door = threading.Condition()
        self.inside = 0


_gate = ForkLocal(_ForkGate)


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
