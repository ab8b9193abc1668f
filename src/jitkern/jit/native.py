"""The C++ and the single-source CUDA route: sources to a loaded library, through the cache.

The key covers the main sources, flags (those in CXX too), wrappers, arch, the ABI, and what brings
flags and headers from the environment. What else the compiler read is in the entry's manifest, as
the compiler itself reported it, and what the linker's flags name: an entry is good only while every
file in it has its content, so a key has one variant per compiler and state of these files.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.arch import Arch
from jitkern.cache.entry import Entry, Key
from jitkern.cache.get import Buildable, BuildOutput, Lookup, find, get_or_build, is_frozen
from jitkern.cache.lock import build_lock
from jitkern.compilers import cxx, depends
from jitkern.compilers.find import cxx_flags
from jitkern.compilers.for_nvrtc import words
from jitkern.compilers.identity import program_stats, toolchain_directories, toolchain_id
from jitkern.compilers.load import load_library, platform_abi
from jitkern.compilers.sources import INCLUDE_DIRS, include_closure
from jitkern.env import compiler_environment, settings
from jitkern.fs import digest, scratch_folder, sha256, slug, write_whole
from jitkern.jit.device import record_hint
from jitkern.jit.record import Specialisation, record

if TYPE_CHECKING:
    from tvm_ffi import Module

NATIVE_ABI = 2

# What tvm_ffi.cpp.load_inline puts in front of a source, which mini-sglang's kernels rely on.
PRELUDE = (
    "tvm/ffi/container/tensor.h",
    "tvm/ffi/dtype.h",
    "tvm/ffi/error.h",
    "tvm/ffi/extra/c_env_api.h",
    "tvm/ffi/function.h",
)


@dataclass(frozen=True)
class NativeBuild:
    """What to build: files are absolute, the rest as load_jit was given it.

    With `inline`, all C++ files form one translation unit and all CUDA files another, each with
    its wrappers exported; otherwise each file is one. `linked` are the files that `ldflags` name.
    """

    name: str
    args: tuple[str, ...]
    cpp_files: tuple[Path, ...] = ()
    cuda_files: tuple[Path, ...] = ()
    cpp_wrappers: tuple[tuple[str, str], ...] = ()
    cuda_wrappers: tuple[tuple[str, str], ...] = ()
    inline: bool = False
    cflags: tuple[str, ...] = ()
    cuda_cflags: tuple[str, ...] = ()
    ldflags: tuple[str, ...] = ()
    include_dirs: tuple[Path, ...] = ()
    linked: tuple[Path, ...] = ()

    @property
    def cuda(self) -> bool:
        """Whether nvcc takes part."""
        return bool(self.cuda_files or self.cuda_wrappers)

    @property
    def files(self) -> tuple[Path, ...]:
        """All sources."""
        return (*self.cpp_files, *self.cuda_files)

    @property
    def roots(self) -> list[Path]:
        """Directories that files read by the build are named relative to."""
        folders = [file.parent for file in self.files]
        return list(dict.fromkeys([*folders, *self.include_dirs, *INCLUDE_DIRS]))


class NativeLibrary(Buildable["Module | None"]):
    """The library of one build for one arch: `get` finds or builds it, see jitkern.load_jit.

    Parameters
    ----------
    build
        What to build.
    arch
        What its CUDA code is for; None where it has none.
    used
        What load_jit or load_aot was given.
    build_directory
        Where to build and keep the files, if anywhere.
    load
        Without it, the library is only built and published: none of its code runs.
    """

    def __init__(
        self,
        build: NativeBuild,
        arch: Arch | None,
        used: Specialisation,
        build_directory: Path | None = None,
        *,
        load: bool = True,
    ) -> None:
        build = _with_absolute_paths(build)
        self.key: Key = _key(build, arch)
        self._build = build
        self._arch = arch
        self._used = used
        self._build_directory = build_directory
        self._load = load

    def find(self) -> Lookup[Any] | None:
        """Return the library where a cache has it."""
        found = find(self)
        return None if found is None else self._kept(found)

    def get(self) -> Lookup[Any]:
        """Return the library, built if need be."""
        return self._kept(get_or_build(self))

    def _kept(self, found: Lookup[Any]) -> Lookup[Any]:
        if self._build_directory is not None:
            _put(self._build_directory / found.entry.artefact_name, found.entry.data)
        file = settings().record
        if file is not None:
            self._record(found.entry, file)
        return found

    def _record(self, entry: Entry, file: Path) -> None:
        # The compiler names what it has read with links resolved, so all directories are.
        build = self._build
        folders = list(map(os.path.realpath, build.include_dirs))
        cpp, cuda = (
            [os.path.join(os.path.realpath(path.parent), path.name) for path in files]
            for files in (build.cpp_files, build.cuda_files)
        )
        options = {
            **self._used.options,
            "cpp_files": cpp,
            "cuda_files": cuda,
            "extra_include_paths": folders,
            "extra_cflags": list(build.cflags),
            "extra_cuda_cflags": list(build.cuda_cflags),
            "extra_ldflags": list(build.ldflags),
        }
        links: list[str] = []
        with suppress(ValueError):  # a computed include
            # What is found by a link has to be found by the same name again.
            include_dirs = [*map(Path, folders), *INCLUDE_DIRS]
            found = include_closure(_includes([*cpp, *cuda]), include_dirs=include_dirs).files
            links = [str(path) for path in found if str(path) != os.path.realpath(path)]
        read = depends.sources(entry.meta["depends"], build.roots, links)
        arch = "" if self._arch is None else str(self._arch)
        record(self._used._replace(options=options, arch=arch), map(Path, read), file)

    def load(self, entry: Entry) -> Module | None:
        if not self._load:
            return None
        return load_library(self._build.name, entry.data, entry.artefact, cuda=self._build.cuda)

    def hint(self) -> str:
        return f"load it before freezing, or {record_hint()}"

    # -- looking up ------------------------------------------------------------------------------

    def accepts(self, meta: Mapping[str, Any]) -> bool:
        return self._same_toolchain(meta) and depends.holds(
            meta.get("depends", {}), self._build.roots, self._is_all_there_is
        )

    def _same_toolchain(self, meta: Mapping[str, Any]) -> bool:
        # The same program files are the same compilers: no process is started to ask for versions.
        programs = program_stats(cuda=self._build.cuda)
        if programs is not None and meta.get("compilers") == programs:
            return True
        if self._is_all_there_is():
            return True
        return bool(meta["toolchain"] == _variant(self._toolchain, meta.get("depends", {})))

    def _is_all_there_is(self) -> bool:
        """Tell whether nothing else could be had than what is found."""
        return is_frozen() or not self._toolchain

    @cached_property
    def _toolchain(self) -> str:
        return toolchain_id(cuda=self._build.cuda)

    # -- building --------------------------------------------------------------------------------

    def inputs(self) -> str:
        """Digest of all that a failing build may have read; the compiler reports nothing then."""
        include_dirs = [*self._build.include_dirs, *INCLUDE_DIRS]
        try:
            closure = include_closure(_includes(self._build.files), include_dirs=include_dirs)
        except ValueError:
            return f"unknown {os.getpid()} {time.time_ns()}"  # a computed include: never the same
        found = (file for file in self._build.linked if os.access(file, os.R_OK))
        linked = [sha256(file.read_bytes()) for file in found]
        return digest([closure.digest, self._toolchain, linked])

    def build(self) -> BuildOutput:
        if self._build_directory is None:
            with scratch_folder("build") as folder:
                return self._build_in(folder)
        self._build_directory.mkdir(parents=True, exist_ok=True)
        lock = self._build_directory.resolve() / "jitkern.lock"
        with build_lock(lock, timeout_s=settings().lock_timeout_s, done=lambda: False):
            return self._build_in(self._build_directory)

    def _build_in(self, folder: Path) -> BuildOutput:
        start = time.perf_counter()
        cuda = self._build.cuda
        # A second try if somebody saved a file meanwhile: what was compiled is then not what would
        # be hashed. Not a third one: a file server's clock may run ahead of ours for good.
        for _ in range(2):
            started_unix_s = time.time()
            (folder / ".ninja_log").unlink(missing_ok=True)  # without it, everything is built
            library, read = self._compile(folder)
            if not depends.changed_since([*read, *self._build.linked], started_unix_s):
                break
        directories = toolchain_directories(cuda=cuda)
        manifest = depends.manifest(read, self._build.roots, directories, self._build.linked)
        notes = {
            "depends": manifest,
            "compilers": program_stats(cuda=cuda),
            "build_ms": round((time.perf_counter() - start) * 1e3, 3),
            "built_unix_s": round(time.time(), 3),
        }
        files = {f"{slug(self._build.name)}.so": library}
        return BuildOutput(_variant(self._toolchain, manifest), files, notes)

    def _compile(self, folder: Path) -> tuple[bytes, list[Path]]:
        """Return the library and the files that were read, those in `folder` left out."""
        built = cxx.build(
            slug(self._build.name),
            sources=_translation_units(self._build, folder),
            directory=folder,
            cflags=self._build.cflags,
            cuda_cflags=self._build.cuda_cflags,
            ldflags=self._build.ldflags,
            include_paths=[*self._build.include_dirs, *INCLUDE_DIRS],
            arch=self._arch,
        )
        inside = folder.resolve()
        read = [path for path in built.dependencies if inside not in path.parents]
        return built.path.read_bytes(), read


def _variant(toolchain: str, manifest: depends.Manifest) -> str:
    return f"{toolchain}+deps-{digest(manifest)[:12]}"


def _key(build: NativeBuild, arch: Arch | None) -> Key:
    import tvm_ffi

    route = "cuda" if build.cuda else "cxx"
    flags = {"cflags": build.cflags, "cuda_cflags": build.cuda_cflags, "ldflags": build.ldflags}
    describe: dict[str, Any] = {
        "op": build.args[0],
        "args": list(build.args[1:]),
        "arch": "" if arch is None else str(arch),
        "files": [file.name for file in build.files],
        **{name: list(value) for name, value in flags.items()},
    }
    environment = compiler_environment(cuda=build.cuda, links=bool(build.ldflags))
    if environment:  # a machine that sets none of them has the keys of any other such machine
        describe["environment"] = environment
    content = {
        "route": route,
        "abi": [NATIVE_ABI, f"tvm-ffi {tvm_ffi.__version__}", *platform_abi()],
        "describe": describe,
        "defaults": [cxx.CFLAGS, cxx.CUDA_CFLAGS if arch is not None else (), cxx_flags()],
        "sources": [[file.name, sha256(file.read_bytes())] for file in build.files],
        "wrappers": [build.cpp_wrappers, build.cuda_wrappers],
        "inline": build.inline,
        "include_dirs": len(build.include_dirs),
        "linked": list(map(str, build.linked)),  # a library may come up in another directory
    }
    return Key(route, build.name, digest(content), describe)


def _includes(files: Sequence[Path | str]) -> str:
    return "\n".join(f'#include "{file}"' for file in files)


def _translation_units(build: NativeBuild, folder: Path) -> list[Path]:
    if not build.inline:
        return list(build.files)
    units = []
    for name, files, wrappers in (
        ("main.cc", build.cpp_files, build.cpp_wrappers),
        ("cuda.cu", build.cuda_files, build.cuda_wrappers),
    ):
        if not files and not wrappers:
            continue
        lines = [f"#include <{header}>" for header in PRELUDE]
        lines.append(_includes(files))
        lines += [
            f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({export}, ({expression}));"
            for export, expression in wrappers
        ]
        unit = folder / name
        write_whole(unit, ("\n".join(lines) + "\n").encode("utf-8", "surrogateescape"))
        units.append(unit)
    return units


def _with_absolute_paths(build: NativeBuild) -> NativeBuild:
    """Move -I flags to the include directories, for paths have no place in a key; see `linked`."""
    include_dirs = list(build.include_dirs)
    kept: dict[str, tuple[str, ...]] = {}
    for field, flags in (("cflags", build.cflags), ("cuda_cflags", build.cuda_cflags)):
        pending = words(flags, f"extra_{field}")
        rest: list[str] = []
        while pending:
            word = pending.pop(0)
            if not word.startswith("-I"):
                rest.append(shlex.quote(word))
            elif word[2:] or pending:
                include_dirs.append(Path(word[2:] or pending.pop(0)))
        kept[field] = tuple(rest)
    unique = tuple(dict.fromkeys(path.absolute() for path in include_dirs))
    ldflags, linked = depends.linked(words(build.ldflags, "extra_ldflags"))
    return replace(
        build,
        include_dirs=unique,
        cflags=kept["cflags"],
        cuda_cflags=kept["cuda_cflags"],
        ldflags=tuple(map(shlex.quote, ldflags)),
        linked=tuple(linked),
    )


def _put(file: Path, data: bytes) -> None:
    """Have `file` hold `data`; it is left alone where it does."""
    if not file.exists() or file.read_bytes() != data:
        write_whole(file, data)
