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

from jitkern.cache.get import Lookup
from jitkern.compilers.sources import CSRC
from jitkern.jit.device import DeviceModule, Wrapper
from jitkern.jit.record import Specialisation

if TYPE_CHECKING:
    from tvm_ffi import Module

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
        There is no compiler; the message ends with what to install.

    Examples
    --------
    >>> module = load_jit(
    ...     "scale", "4", cpp_files=["scale.cc"], cpp_wrappers=[("scale", "scale<4>")]
    ... )  # doctest: +SKIP
    >>> module.scale(10)  # doctest: +SKIP
    40
    """
    used = _specialisation("load_jit", args, locals())
    return load_device(used) if used.options.get("device_files") else load_library(used).loaded


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
    module: Module = load_library(_specialisation("load_aot", args, locals())).loaded
    return module


def load_library(used: Specialisation, *, load: bool = True) -> Lookup[Any]:
    """Load a module with host functions, as load_jit or load_aot was asked to.

    Without `load` it is only built and published.
    """
    # Imported here, with the compilers of this route: kernels for a GPU need none of them.
    from jitkern.jit.native import NativeBuild, load_native

    if used.options.get("device_wrappers"):
        raise ValueError("load_jit: device_wrappers: given without device_files")
    options = used.options
    directory = options.get("build_directory")
    build = NativeBuild(
        name="_".join(used.args),
        args=used.args,
        cpp_files=_files(used, "cpp_files"),
        cuda_files=_files(used, "cuda_files"),
        cpp_wrappers=_wrappers(used, "cpp_wrappers"),
        cuda_wrappers=_wrappers(used, "cuda_wrappers"),
        inline=used.function == "load_jit",
        cflags=tuple(options.get("extra_cflags", ())),
        cuda_cflags=tuple(options.get("extra_cuda_cflags", ())),
        ldflags=tuple(options.get("extra_ldflags", ())),
        include_dirs=tuple(map(Path, options.get("extra_include_paths", ()))),
    )
    build_directory = None if directory is None else Path(directory)
    return load_native(build, build_directory, used, load=load)


def load_device(used: Specialisation) -> DeviceModule:
    """Return the module of device code that load_jit was asked for."""
    options = used.options
    for argument in ("cpp_files", "cuda_files", "cpp_wrappers", "cuda_wrappers"):
        if options.get(argument):
            raise ValueError(f"load_jit: {argument}: given along with device_files")
    if any(map(options.get, ("build_directory", "extra_cflags", "extra_ldflags"))):
        raise ValueError(
            "load_jit: build_directory, extra_cflags, extra_ldflags: given along with "
            "device_files, which need none of them"
        )
    if not options.get("device_wrappers"):
        raise ValueError("load_jit: device_wrappers: empty, expected (name, class) pairs")
    files = _files(used, "device_files")
    return DeviceModule(used, files, _wrappers(used, "device_wrappers"))


def _specialisation(function: str, args: Sequence[str], given: dict[str, Any]) -> Specialisation:
    """What a function was given, as JSON can keep it."""
    if not args:
        raise TypeError(f"{function}: args: empty, expected the module's name first")
    for position, arg in enumerate(args):
        if not isinstance(arg, str):
            raise TypeError(
                f"{function}: args[{position}]: {type(arg).__name__}, expected str; "
                "make_cpp_args() turns values into template arguments"
            )
    options = {
        name: str(value) if isinstance(value, (str, PathLike)) else [_plain(item) for item in value]
        for name, value in given.items()
        if name != "args" and value is not None
    }
    return Specialisation(function, tuple(args), options, "")


def _plain(item: Any) -> Any:
    return str(item) if isinstance(item, (str, PathLike)) else list(item)


def _wrappers(used: Specialisation, argument: str) -> tuple[Wrapper, ...]:
    wrappers = tuple((str(name), str(target)) for name, target in used.options.get(argument, ()))
    for name, _ in wrappers:
        if not name.isidentifier():
            raise ValueError(f"load_jit: {argument}: name {name!r}, expected a C identifier")
    return wrappers


def _files(used: Specialisation, argument: str) -> tuple[Path, ...]:
    return tuple(_file(used.function, argument, Path(f)) for f in used.options.get(argument, ()))


def _file(function: str, argument: str, file: Path) -> Path:
    candidates = [file] if file.is_absolute() else [CSRC / file, Path.cwd() / file]
    for path in candidates:
        if os.path.isfile(path):  # Path.is_file raises where a directory cannot be entered
            return path
    tried = " and ".join(map(str, candidates))
    raise FileNotFoundError(f"{function}: {argument}: {str(file)!r} does not exist, tried {tried}")
