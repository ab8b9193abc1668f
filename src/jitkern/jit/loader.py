"""``load_jit`` and ``load_aot``: from source files to something that can be called.

Three routes share one cache: device code to a cubin through NVRTC (``device_files``), C++ to a
library through the C++ compiler (``cpp_files``), and ``.cu`` files with host code in them to a
library through nvcc (``cuda_files``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from jitkern.cache.get import freeze
from jitkern.cache.stats import Stats, stats
from jitkern.compilers.sources import CSRC
from jitkern.jit.device import DeviceModule, Lookup, Wrapper
from jitkern.jit.native import NativeBuild, load_native
from jitkern.jit.record import Specialisation, replay

if TYPE_CHECKING:
    from tvm_ffi import Module

__all__ = [
    "DeviceModule",
    "Lookup",
    "Specialisation",
    "Stats",
    "freeze",
    "load_aot",
    "load_jit",
    "replay",
    "stats",
]

File = str | PathLike[str]
Files = Sequence[File]


@overload
def load_jit(
    *args: str,
    device_files: Files,
    device_wrappers: Sequence[Wrapper],
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_include_paths: Files | None = None,
) -> DeviceModule: ...


@overload
def load_jit(
    *args: str,
    cpp_files: Files | None = None,
    cuda_files: Files | None = None,
    cpp_wrappers: Sequence[Wrapper] | None = None,
    cuda_wrappers: Sequence[Wrapper] | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Files | None = None,
    build_directory: File | None = None,
) -> Module: ...


def load_jit(
    *args: str,
    cpp_files: Files | None = None,
    cuda_files: Files | None = None,
    cpp_wrappers: Sequence[Wrapper] | None = None,
    cuda_wrappers: Sequence[Wrapper] | None = None,
    device_files: Files | None = None,
    device_wrappers: Sequence[Wrapper] | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Files | None = None,
    build_directory: File | None = None,
) -> DeviceModule | Module:
    """Compile templated sources for given template arguments, or find them compiled.

    Give ``device_files`` for device code that is compiled by NVRTC and launched by jitkern, or
    ``cpp_files`` and ``cuda_files`` for code that brings its own host function.

    Parameters
    ----------
    *args
        The module's name, then its template arguments (see :func:`jitkern.make_cpp_args`).
    cpp_files, cuda_files, device_files
        Sources: absolute, or looked up in the package's ``csrc``, then in the current directory.
    cpp_wrappers, cuda_wrappers
        (name, expression): each C++ expression is exported as function `name` of the module.
    device_wrappers
        (name, class) of each kernel. The class has a POD type ``Params``, the constants
        ``kNumThreads`` and ``kMinBlocks``, and ``static __device__ void run(const Params&)``.
    extra_cflags, extra_cuda_cflags, extra_ldflags
        Flags beyond the default ones of the C++ compiler, of nvcc or NVRTC, of the linker.
    extra_include_paths
        Directories searched for headers, before jitkern's own.
    build_directory
        Build there and keep the files. Not with ``device_files``, which need no directory.

    Returns
    -------
    DeviceModule or tvm_ffi.Module
        For ``device_files`` a DeviceModule, which compiles nothing before an image is asked for;
        otherwise the loaded module, whose functions are its exports.

    Raises
    ------
    FileNotFoundError
        A source does not exist; the message says where it was looked for.
    CompileError
        It does not compile; the exception carries the command and the whole log.
    FrozenError
        It is not compiled yet and :func:`jitkern.freeze` was called.
    ToolchainError
        There is no compiler; the message ends with the cure.

    Examples
    --------
    >>> module = load_jit(
    ...     "scale", "4", cpp_files=["scale.cc"], cpp_wrappers=[("scale", "scale<4>")]
    ... )  # doctest: +SKIP
    >>> module.scale(10)  # doctest: +SKIP
    40
    """
    name = _name("load_jit", args)
    options = _options(locals())
    if device_files:
        for argument in ("cpp_files", "cuda_files", "cpp_wrappers", "cuda_wrappers"):
            if options.get(argument):
                raise ValueError(f"load_jit: {argument}: given along with device_files")
        if build_directory is not None or extra_cflags or extra_ldflags:
            raise ValueError(
                "load_jit: build_directory, extra_cflags, extra_ldflags: given along with "
                "device_files, which need none of them"
            )
        if not device_wrappers:
            raise ValueError("load_jit: device_wrappers: empty, expected (name, class) pairs")
        return DeviceModule(
            name,
            args[1:],
            files=_resolve("load_jit", "device_files", device_files),
            wrappers=_wrappers("device_wrappers", device_wrappers),
            options=tuple(extra_cuda_cflags or ()),
            include_dirs=[Path(path) for path in extra_include_paths or ()],
            recorded=options,
        )
    if device_wrappers:
        raise ValueError("load_jit: device_wrappers: given without device_files")
    return load_native(
        NativeBuild(
            name="_".join(args),
            args=tuple(args),
            cpp_files=_resolve("load_jit", "cpp_files", cpp_files),
            cuda_files=_resolve("load_jit", "cuda_files", cuda_files),
            cpp_wrappers=_wrappers("cpp_wrappers", cpp_wrappers),
            cuda_wrappers=_wrappers("cuda_wrappers", cuda_wrappers),
            inline=True,
            cflags=tuple(extra_cflags or ()),
            cuda_cflags=tuple(extra_cuda_cflags or ()),
            ldflags=tuple(extra_ldflags or ()),
            include_dirs=tuple(Path(path) for path in extra_include_paths or ()),
        ),
        build_directory=None if build_directory is None else Path(build_directory),
        recorded=Specialisation("load_jit", tuple(args), options, ""),
    )


def load_aot(
    *args: str,
    cpp_files: Files | None = None,
    cuda_files: Files | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Files | None = None,
    build_directory: File | None = None,
) -> Module:
    """Compile sources that export their own functions (``TVM_FFI_DLL_EXPORT_TYPED_FUNC``).

    Each file is a translation unit of its own; otherwise as :func:`load_jit`.

    Parameters
    ----------
    *args
        The module's name; further ones only make the name longer.
    cpp_files, cuda_files
        Sources: absolute, or looked up in the package's ``csrc``, then in the current directory.
    extra_cflags, extra_cuda_cflags, extra_ldflags, extra_include_paths, build_directory
        As for :func:`load_jit`.

    Returns
    -------
    tvm_ffi.Module
        The loaded module, whose functions are its exports.

    Raises
    ------
    FileNotFoundError, CompileError, FrozenError, ToolchainError
        As :func:`load_jit`.

    Examples
    --------
    >>> module = load_aot("radix", cpp_files=["radix.cc"])  # doctest: +SKIP
    """
    _name("load_aot", args)
    options = _options(locals())
    return load_native(
        NativeBuild(
            name="_".join(args),
            args=tuple(args),
            cpp_files=_resolve("load_aot", "cpp_files", cpp_files),
            cuda_files=_resolve("load_aot", "cuda_files", cuda_files),
            inline=False,
            cflags=tuple(extra_cflags or ()),
            cuda_cflags=tuple(extra_cuda_cflags or ()),
            ldflags=tuple(extra_ldflags or ()),
            include_dirs=tuple(Path(path) for path in extra_include_paths or ()),
        ),
        build_directory=None if build_directory is None else Path(build_directory),
        recorded=Specialisation("load_aot", tuple(args), options, ""),
    )


def load_recorded(used: Specialisation) -> DeviceModule | Module:
    """Load what a line of a recorded file describes; ``jitkern warm --replay`` is built on it."""
    options: dict[str, Any] = dict(used.options)
    for name in ("cpp_wrappers", "cuda_wrappers", "device_wrappers"):
        if name in options:
            options[name] = [(export, target) for export, target in options[name]]
    load: Any = load_jit if used.function == "load_jit" else load_aot
    loaded: DeviceModule | Module = load(*used.args, **options)
    return loaded


def _name(function: str, args: Sequence[str]) -> str:
    if not args:
        raise TypeError(f"{function}: args: empty, expected the module's name first")
    for position, arg in enumerate(args):
        if not isinstance(arg, str):
            raise TypeError(
                f"{function}: args[{position}]: {type(arg).__name__}, expected str; "
                "make_cpp_args() turns values into template arguments"
            )
    return args[0]


def _options(given: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments as JSON can keep them, those that were given."""
    return {
        name: str(value) if isinstance(value, (str, PathLike)) else [_plain(item) for item in value]
        for name, value in given.items()
        if name not in ("args", "name") and value is not None
    }


def _plain(item: Any) -> Any:
    return str(item) if isinstance(item, (str, PathLike)) else list(item)


def _wrappers(argument: str, given: Sequence[Wrapper] | None) -> tuple[Wrapper, ...]:
    wrappers = tuple((str(export), str(target)) for export, target in given or ())
    for export, _ in wrappers:
        if not export.isidentifier():
            raise ValueError(f"load_jit: {argument}: name {export!r}, expected a C identifier")
    return wrappers


def _resolve(function: str, argument: str, files: Files | None) -> tuple[Path, ...]:
    return tuple(_resolve_file(function, argument, Path(file)) for file in files or ())


def _resolve_file(function: str, argument: str, file: Path) -> Path:
    if file.is_absolute():
        places = [file]
    else:
        places = [CSRC / file, Path.cwd() / file]
    for place in places:
        if os.path.isfile(place):  # Path.is_file raises where a directory cannot be entered
            return place
    looked = " and ".join(str(place) for place in places)
    raise FileNotFoundError(f"{function}: {argument}: {str(file)!r} does not exist, tried {looked}")
