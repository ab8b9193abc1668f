"""``load_jit`` and ``load_aot``: from source files to something that can be called.

Three routes share one cache: device code to a cubin through NVRTC (``device_files``), C++ to a
library through the C++ compiler (``cpp_files``), and ``.cu`` files with host code in them to a
library through nvcc (``cuda_files``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any, overload

from jitkern.arch import target_archs
from jitkern.cache.get import Lookup
from jitkern.compilers.find import is_cuda_headers
from jitkern.compilers.sources import check_options, is_cpp17, source_path, words
from jitkern.gate import gate
from jitkern.jit.device import CpuForm, DeviceModule, Wrapper
from jitkern.jit.params import parse_params, read_params
from jitkern.jit.record import FILES, FLAGS, FOLDERS, Specialisation

File = str | PathLike[str]
Files = Sequence[File]
# Name and template class of a kernel, and the members of its Params.
DeclaredWrapper = tuple[str, str, str]

# The expected tuple of strings, by its length.
_WRAPPERS = {
    "cpp_wrappers": {2: "(name, expression)"},
    "cuda_wrappers": {2: "(name, expression)"},
    "device_wrappers": {2: "(name, class)", 3: "(name, class, params)"},
}
_OF_CPP = ("cpp_files", "cpp_wrappers", "extra_cflags", "extra_ldflags")


@overload
def load_jit(
    *args: str,
    device_files: Files,
    device_wrappers: Sequence[Wrapper | DeclaredWrapper],
    cpp_files: Files | None = None,
    cpp_wrappers: Sequence[Wrapper] | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
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
) -> Any: ...


def load_jit(
    *args: str,
    cpp_files: Files | None = None,
    cuda_files: Files | None = None,
    cpp_wrappers: Sequence[Wrapper] | None = None,
    cuda_wrappers: Sequence[Wrapper] | None = None,
    device_files: Files | None = None,
    device_wrappers: Sequence[Wrapper | DeclaredWrapper] | None = None,
    extra_cflags: Sequence[str] | None = None,
    extra_cuda_cflags: Sequence[str] | None = None,
    extra_ldflags: Sequence[str] | None = None,
    extra_include_paths: Files | None = None,
    build_directory: File | None = None,
) -> Any:
    """Load kernels or functions from sources: from the cache, or by compiling them.

    Three routes: ``device_files`` are device code, compiled by NVRTC and launched by jitkern; with
    them, ``cpp_files`` are the kernels' CPU versions. ``cuda_files`` are ``.cu`` files with host
    functions, compiled by nvcc. ``cpp_files`` alone are C++. After mini-sglang's ``load_jit``.

    Parameters
    ----------
    *args
        The module's name, then its template arguments (see ``make_cpp_args``).
    cpp_files, cuda_files, device_files : sequence of str or PathLike, optional
        Paths of sources. Relative paths start at the current directory. ``jitkern:ops/store.cu`` is
        a source of jitkern.
    cpp_wrappers, cuda_wrappers : sequence of (str, str), optional
        (name, expression): the C++ expression is exported as function `name` of the module. With
        ``device_files``, `name` is that of a kernel, and the function takes the kernel's arguments.
    device_wrappers : sequence of tuples of str, optional
        (name, class) or (name, class, params) for each kernel. The class has a POD type ``Params``
        and ``static __device__ void run(const Params&)``. Its constants ``kNumThreads`` (threads
        per block) and ``kMinBlocks`` are the launch bounds. A launch checks its arguments against
        the members of ``Params``. jitkern reads these in `device_files` if the struct is a plain
        list of numbers and pointers. Otherwise declare them in `params`, such as ``"float* data,
        int64 count"``. A type is a torch dtype or a C number type; ``void*`` accepts a tensor of
        any dtype, ``strided float*`` one of any strides. The compiler checks both against the
        struct (C++17 or newer).
    extra_cflags, extra_cuda_cflags, extra_ldflags : sequence of str, optional
        Additional flags for the C++ compiler, for nvcc or NVRTC, and for the linker. Relative paths
        in them start at the current directory.
    extra_include_paths : sequence of str or PathLike, optional
        Directories to search for headers, before jitkern's own.
    build_directory : str or PathLike, optional
        Build in this directory and keep the files. Not with ``device_files``.

    Returns
    -------
    DeviceModule or tvm_ffi.Module
        With ``device_files`` a DeviceModule, which compiles at its first launch; otherwise the
        loaded module with the exported functions.

    Raises
    ------
    FileNotFoundError
        A source does not exist; the message names the searched places.
    CompileError
        A source does not compile; the exception has the command and the whole log.
    FrozenError
        The code is in no cache, and ``freeze`` was called.
    ToolchainError
        There is no compiler; the message ends with what to install.
    ValueError, TypeError
        An argument is invalid; the message names it.

    Examples
    --------
    >>> exports = [("add", "add<4>")]
    >>> module = load_jit("add", "4", cpp_files=["add.cc"], cpp_wrappers=exports)  # doctest: +SKIP
    >>> module.add(10)  # doctest: +SKIP
    14
    """
    used = checked("load_jit", args, locals())
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
) -> Any:
    """Load sources that export functions themselves (``TVM_FFI_DLL_EXPORT_TYPED_FUNC``).

    Each file is a separate translation unit. Arguments, result and exceptions are those of
    ``load_jit``, except that all `args` are parts of the module's name.
    """
    return load_library(checked("load_aot", args, locals())).loaded


def load_library(used: Specialisation) -> Lookup[Any]:
    """Load a module with host functions, as load_jit or load_aot was asked to.

    CUDA code is compiled for the GPU here. Without one it is compiled for each of JITKERN_ARCH, so
    that all of them are in the cache, and the first one's is loaded and returned.
    """
    # Imported here, with the compilers of this route: kernels for a GPU need none of them.
    with gate:
        import tvm_ffi  # noqa: F401

        from jitkern.jit.native import NativeLibrary, has_cuda

    first, *others = target_archs() if has_cuda(used) else (None,)
    for arch in others:
        NativeLibrary(used, arch, load=False).get()
    return NativeLibrary(used, first).get()


def load_device(used: Specialisation) -> DeviceModule:
    """Return the module of device code that load_jit was asked for."""
    options = used.options
    # The compiler checks what is read here, for which it needs C++17.
    files = options["device_files"] if is_cpp17(options.get("extra_cuda_cflags", ())) else ()
    texts = [Path(file).read_text(errors="replace") for file in files]
    # Device code and C++ are recorded and built separately, the C++ when it is first called.
    on_gpu = {name: value for name, value in options.items() if name not in _OF_CPP}
    on_cpu = {name: options[name] for name in (*_OF_CPP, *FOLDERS) if name in options}
    load_cpu = cache(lambda: load_library(used._replace(options=on_cpu)).loaded)
    return DeviceModule()._init(
        used._replace(options=on_gpu),
        params={
            name: parse_params(name, *declared) if declared else read_params(kernel, texts)
            for name, kernel, *declared in options["device_wrappers"]
        },
        cpu=CpuForm(frozenset(name for name, _ in options.get("cpp_wrappers", ())), load_cpu),
    )


# -- arguments -------------------------------------------------------------------------------------


def checked(function: str, args: Sequence[str], arguments: Mapping[str, Any]) -> Specialisation:
    """Check the arguments of load_jit or load_aot; return values that JSON keeps."""
    if not args:
        raise TypeError(f"{function}: args: empty, expected the module's name first")
    for position, arg in enumerate(args):
        if not isinstance(arg, str):
            raise TypeError(
                f"{function}: args[{position}]: {type(arg).__name__}, expected str; "
                "make_cpp_args() turns values into template arguments"
            )
    options = {
        name: _checked(f"{function}: {name}", name, value)
        for name, value in arguments.items()
        if name != "args" and value is not None
    }
    if options.get("device_files"):
        _check_device(options)
    elif options.get("device_wrappers"):
        raise ValueError("load_jit: device_wrappers: given without device_files")
    elif not any(map(options.get, (*FILES, *_WRAPPERS))):
        more = ", device_files, cpp_wrappers, cuda_wrappers" if function == "load_jit" else ""
        names = f"cpp_files, cuda_files{more}"
        raise ValueError(f"{function}: {names}: all empty, expected one of them")
    return Specialisation(function, tuple(args), options, "")


def _checked(argument: str, name: str, value: Any) -> Any:
    """Return one option: a path, or a list of paths, of flags, or of lists of strings."""
    if name == "build_directory":
        if not isinstance(value, (str, PathLike)):
            raise TypeError(f"{argument}: {_shown(value)}, expected a path")
        return os.path.abspath(value)
    if name not in {*FILES, *FOLDERS, *FLAGS, *_WRAPPERS}:  # a record may hold any name
        raise ValueError(f"{argument}: no such argument")
    if isinstance(value, (str, PathLike)) or not isinstance(value, Sequence):
        example = ("scale", "Scale<256>") if name in _WRAPPERS else value
        raise TypeError(f"{argument}: {_shown(value)}, expected a list: [{_shown(example)}]")
    for i, item in enumerate(value):
        if name in _WRAPPERS:
            is_list = isinstance(item, Sequence) and all(isinstance(text, str) for text in item)
            if isinstance(item, str) or not is_list or len(item) not in _WRAPPERS[name]:
                expected = " or ".join(_WRAPPERS[name].values())
                raise TypeError(f"{argument}[{i}]: {_shown(item)}, expected {expected}")
        elif not isinstance(item, (str, PathLike)):
            expected = "a str" if name in FLAGS else "a path"
            raise TypeError(f"{argument}[{i}]: {_shown(item)}, expected {expected}")
    if name in _WRAPPERS:
        return list(map(list, value))
    # Absolute: the process may change its directory before a kernel is needed.
    if name in FILES:
        return [_file(argument, str(file)) for file in value]
    if name in FOLDERS:
        return list(map(os.path.abspath, value))
    words(list(map(str, value)), argument)  # raises for an open quote
    return list(map(str, value))


def _check_device(options: Mapping[str, Any]) -> None:
    """Check the options that go along with ``device_files``."""
    check_options(words(options.get("extra_cuda_cflags", ())), "load_jit: extra_cuda_cflags")
    for folder in options.get("extra_include_paths", ()):
        if is_cuda_headers(Path(folder)):
            reason = "holds CUDA's own headers, expected your own only: NVRTC 13.3 and newer bring "
            reason += "CUDA's; set CUDA_HOME for an older one"
            raise ValueError(f"load_jit: extra_include_paths: {folder} {reason}")
    for name in filter(options.get, ("cuda_files", "cuda_wrappers", "build_directory")):
        raise ValueError(f"load_jit: {name}: given along with device_files")
    kernels = [name for name, *_ in options.get("device_wrappers", ())]
    if not kernels:
        raise ValueError("load_jit: device_wrappers: empty, expected (name, class) pairs")
    functions = [name for name, _ in options.get("cpp_wrappers", ())]
    if not functions and any(map(options.get, _OF_CPP)):
        raise ValueError(
            "load_jit: cpp_wrappers: empty, expected the functions for kernels on the CPU along "
            "with cpp_files or flags for them"
        )
    for name in set(functions) - set(kernels):
        expected = f"the name of a kernel: {', '.join(kernels)}"
        raise ValueError(f"load_jit: cpp_wrappers: {name!r}, expected {expected}")


def _shown(value: Any) -> str:
    text = str(value) if isinstance(value, PathLike) else value
    return repr(text) if isinstance(text, (str, tuple, list)) else type(value).__name__


def _file(argument: str, name: str) -> str:
    path = source_path(name)
    if re.search(r'["\n\\]', str(path)):  # an #include cannot name it
        raise ValueError(f"{argument}: {name!r}, expected a path without quotes and backslashes")
    if os.path.isfile(path):  # Path.is_file raises where a directory cannot be entered
        return str(path)
    problem = "is no file" if os.path.exists(path) else f"does not exist, tried {path}"
    raise FileNotFoundError(f"{argument}: {name!r} {problem}")
