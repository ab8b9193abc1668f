"""C++ and single-source CUDA to a shared library, by the host's compilers. Knows no cache.

Writes its own build.ninja: tvm_ffi.cpp.build remembers CUDA_HOME for the process, asks nvidia-smi
for the architecture, and leaves its compilers running when the process is killed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jitkern.arch import Arch
from jitkern.compilers.find import find_cxx
from jitkern.compilers.find_cuda import find_cuda_home
from jitkern.compilers.for_nvrtc import words
from jitkern.compilers.ninja import Step, read_deps, run_ninja
from jitkern.compilers.sources import with_defaults
from jitkern.env import settings

CFLAGS = ("-std=c++20", "-O3", "-fPIC")
"""In front of the caller's flags for C++."""

CUDA_CFLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC")
"""In front of the caller's flags for nvcc."""

_CXX_SUFFIXES = (".cc", ".cpp", ".cxx")


@dataclass(frozen=True)
class Library:
    """A shared library.

    `dependencies` is every file that the compilers read, headers of the system too; `objects` the
    compiled form of each source; `log` the commands and what they said.
    """

    path: Path
    dependencies: tuple[Path, ...]
    objects: Mapping[Path, Path]
    log: str


def build(
    name: str,
    *,
    sources: Sequence[Path],
    directory: Path,
    cflags: Sequence[str] = (),
    cuda_cflags: Sequence[str] = (),
    ldflags: Sequence[str] = (),
    include_paths: Sequence[Path] = (),
    precompiled: Path | None = None,
    compiled: Mapping[Path, Path] | None = None,
    arch: Arch | None = None,
) -> Library:
    """Compile sources and link them to ``<directory>/<name>.so``; blocks until done.

    The library needs libtvm_ffi.so and, with CUDA sources, libcudart by their plain names, and
    holds no path of this machine: tvm_ffi has to be imported before it is loaded. Should this
    process be killed, the compilers stop too.

    Parameters
    ----------
    name
        Name of the library.
    sources
        ``.cc``, ``.cpp`` and ``.cxx`` go to the C++ compiler, ``.cu`` to nvcc.
    directory
        Existing directory, private to this build.
    cflags, cuda_cflags, ldflags
        Flags after the default ones, for the C++ compiler, for nvcc, for linking. Each may hold
        several words, quoted as in a shell.
    include_paths
        Directories searched for headers before the default ones.
    precompiled
        A header that is compiled once, and that every ``.cc`` begins with.
    compiled
        `Library.objects` of an earlier build: these sources are linked as they were compiled then,
        and not read.
    arch
        What nvcc compiles for; required where there is a ``.cu``.

    Raises
    ------
    CompileError
        A source does not compile or link; carries the command and the whole log.
    ToolchainError
        ninja, the C++ compiler or nvcc is missing.
    ValueError
        No source, a source of an unknown kind or that does not exist, or CUDA without an arch.
    """
    _check_sources(sources, arch)
    cxx = find_cxx()
    link = _tvm_ffi_ldflags()
    directories = [*(path.resolve() for path in include_paths), *tvm_ffi_include_dirs()]
    includes = [f"-I{path}" for path in directories]
    # A library that is shared by checkouts and machines: __FILE__ is to hold no path of this one.
    roots = dict.fromkeys([*directories, *(source.resolve().parent for source in sources)])
    maps = [f"-fmacro-prefix-map={root}/=" for root in roots]
    given = words(cflags, "extra_cflags")
    cxx_command = [*cxx.command, *with_defaults([*CFLAGS, *maps], given), *includes]
    nvcc_command: list[str] = []
    if arch is not None and any(source.suffix == ".cu" for source in sources):
        cuda = find_cuda_home()
        defaults = [*CUDA_CFLAGS, f"-gencode=arch={arch.compute},code={arch.sm}"]
        if settings().cxx is not None and len(cxx.command) == 1:
            defaults += ["-ccbin", cxx.command[0]]
        # nvcc takes a comma in -Xcompiler for the next option.
        defaults += [f"-Xcompiler={flag}" for flag in maps if "," not in flag]
        flags = with_defaults(defaults, words(cuda_cflags))
        nvcc_command = [str(cuda.nvcc), *flags, *includes]
        # Plain C++ beside it may use the runtime as well.
        cxx_command += [f"-isystem{path}" for path in cuda.include_dirs]
        link += cuda.ldflags

    objects = {
        source: (compiled or {}).get(source, directory / f"{number}.{source.stem}.o")
        for number, source in enumerate(sources)
    }
    missing = {source: made.name for source, made in objects.items() if made.parent == directory}
    steps = _compile_steps(missing, cxx_command, nvcc_command)
    if precompiled is not None and steps:
        steps = _with_precompiled(precompiled, directory, steps, cxx_command)
    library = f"{name}.so"
    link += words(ldflags, "extra_ldflags")
    inputs = tuple(missing.get(source, str(made)) for source, made in objects.items())
    link_command = (*cxx.command, "-shared", *inputs, *link, "-o", library)
    steps.append(Step(library, inputs, link_command))

    log = run_ninja(name, directory, steps)
    return Library(directory / library, read_deps(directory), objects, log)


def _compile_steps(
    outputs: Mapping[Path, str], cxx_command: Sequence[str], nvcc_command: Sequence[str]
) -> list[Step]:
    steps = []
    for source, output in outputs.items():
        path = str(source.resolve())
        # -MMD would leave out headers of the system, which nvcc and the runtime are.
        tail = ("-MD", "-MF", f"{output}.d", "-c", path, "-o", output)
        command = nvcc_command if source.suffix == ".cu" else cxx_command
        steps.append(Step(output, (path,), (*command, *tail), f"{output}.d"))
    return steps


def _with_precompiled(
    header: Path, directory: Path, steps: Sequence[Step], cxx_command: Sequence[str]
) -> list[Step]:
    """Return the steps with one in front that compiles `header`: GCC and Clang both look for .gch.

    A compiler that cannot use what is there includes the copy of the text.
    """
    name = "precompiled.h"
    (directory / name).write_bytes(header.read_bytes())
    compiled = f"{name}.gch"
    made = [Step(compiled, (name,), (*cxx_command, "-x", "c++-header", name, "-o", compiled))]
    for step in steps:
        if step.command[: len(cxx_command)] == tuple(cxx_command):  # and not nvcc's
            command = (*step.command, "-include", name)
            step = replace(step, inputs=(*step.inputs, compiled), command=command)
        made.append(step)
    return made


def _check_sources(sources: Sequence[Path], arch: Arch | None) -> None:
    if not sources:
        raise ValueError("build: sources: none, expected at least one")
    for source in sources:
        if source.suffix not in (*_CXX_SUFFIXES, ".cu"):
            raise ValueError(f"build: sources: {source}, expected .cc, .cpp, .cxx or .cu")
        if not os.path.isfile(source):
            raise ValueError(f"build: sources: {source} does not exist")
        if source.suffix == ".cu" and arch is None:
            raise ValueError(f"build: arch: None, expected an Arch to compile {source.name} for")


def tvm_ffi_include_dirs() -> list[Path]:
    """Return where the headers of tvm-ffi are."""
    # Here and not above: tvm_ffi imports torch where there is one, which takes a second.
    from tvm_ffi import libinfo

    directories = dict.fromkeys([libinfo.find_include_path(), libinfo.find_dlpack_include_path()])
    return [Path(path) for path in directories]


def _tvm_ffi_ldflags() -> list[str]:
    from tvm_ffi import libinfo

    return [f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi"]
