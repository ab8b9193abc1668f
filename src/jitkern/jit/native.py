"""The C++ and the single-source CUDA route: sources to a loaded library, through the cache.

An entry's family covers the main sources, flags, wrappers, arch and the ABI. What else the compiler
read is in the entry's manifest, as the compiler itself reported it: an entry is good only while
every file in it has its content, so a family holds one entry per state of the headers.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.arch import Arch
from jitkern.cache.entry import Entry, Key
from jitkern.cache.get import Built, is_frozen, obtain
from jitkern.cache.lock import build_lock
from jitkern.compilers import cxx, depends
from jitkern.compilers import identity as compilers
from jitkern.compilers.load import LOAD_ERRORS, load_library, platform_abi
from jitkern.compilers.sources import INCLUDE_DIRS, include_closure
from jitkern.env import settings
from jitkern.errors import CompileError
from jitkern.jit.record import Specialisation, record
from jitkern.names import digest, slug

if TYPE_CHECKING:
    from tvm_ffi import Module

NATIVE_ABI = 1

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
    its wrappers exported; otherwise each file is one.
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

    @property
    def route(self) -> str:
        """``"cuda"`` where nvcc takes part, else ``"cxx"``."""
        return "cuda" if self.cuda_files or self.cuda_wrappers else "cxx"

    @property
    def roots(self) -> list[Path]:
        """Directories that files read by the build are named relative to."""
        folders = [file.parent for file in (*self.cpp_files, *self.cuda_files)]
        return list(dict.fromkeys([*folders, *self.include_dirs, *INCLUDE_DIRS]))


def load_native(
    build: NativeBuild, *, build_directory: Path | None, recorded: Specialisation
) -> Module:
    """Load the library of `build`, from the cache or newly built; see jitkern.load_jit."""
    if not (build.cpp_files or build.cuda_files or build.cpp_wrappers or build.cuda_wrappers):
        raise ValueError(f"{recorded.function}: cpp_files, cuda_files: both empty")
    build = _without_include_flags(build)
    arch = compilers.target_arch() if build.route == "cuda" else None
    loaded = _Loader(build, arch, build_directory).load()
    record(replace(recorded, arch="" if arch is None else str(arch)))
    return loaded


class _Loader:
    """One load: what the steps share."""

    def __init__(self, build: NativeBuild, arch: Arch | None, build_directory: Path | None) -> None:
        self.build = build
        self.arch = arch
        self.build_directory = build_directory
        self.library_name = f"{slug(build.name)}.so"
        self.key = _key(build, arch)
        self._module: Module | None = None
        self._toolchain: str | None = None

    def load(self) -> Module:
        found = self._obtain(self._accept)
        if self._module is None:
            try:
                self._module = load_library(found.artefact, cuda=self.arch is not None)
            except LOAD_ERRORS:
                # It was evicted a moment ago, or made on a machine with newer system libraries.
                self._obtain(lambda _meta: False)
        if self._module is None:
            raise CompileError(f"{self.build.name}: not loaded", command="dlopen", log="")
        if self.build_directory is not None:
            _put(self.build_directory / self.library_name, found.data)
        return self._module

    def _obtain(self, accept: Callable[[Mapping[str, Any]], bool]) -> Entry:
        return obtain(
            self.key,
            self._build,
            accept=accept,
            verify=self._verify,
            inputs=self._inputs,
            cure="load it before freezing, or record a run with JITKERN_RECORD=FILE and build it "
            "beforehand with: jitkern warm --replay FILE",
        ).entry

    # -- looking up ------------------------------------------------------------------------------

    def _accept(self, meta: Mapping[str, Any]) -> bool:
        return self._same_toolchain(meta) and depends.holds(
            meta.get("depends", {}), self.build.roots
        )

    def _same_toolchain(self, meta: Mapping[str, Any]) -> bool:
        # The same program files are the same compilers: no process is started to ask for versions.
        stamps = compilers.stamps(self.build.route)
        if stamps is not None and meta.get("compilers") == stamps:
            return True
        name = self._toolchain_id()
        return not name or is_frozen() or str(meta["toolchain"]).split("+deps-")[0] == name

    def _toolchain_id(self) -> str:
        if self._toolchain is None:
            self._toolchain = compilers.toolchain_id(self.build.route)
        return self._toolchain

    # -- building --------------------------------------------------------------------------------

    def _inputs(self) -> str:
        """Digest of all that a failing build may have read; the compiler reports nothing then."""
        text = "\n".join(
            f'#include "{file}"' for file in (*self.build.cpp_files, *self.build.cuda_files)
        )
        include_dirs = [*self.build.include_dirs, *INCLUDE_DIRS]
        try:
            closure = include_closure(text, include_dirs=include_dirs)
        except ValueError:
            return f"unknown {os.getpid()} {time.time_ns()}"  # a computed include: never the same
        return digest([closure.digest, self._toolchain_id()])

    def _build(self) -> Built:
        if self.build_directory is None:
            with tempfile.TemporaryDirectory(prefix="jitkern-build-") as folder:
                return self._build_in(Path(folder))
        folder_path = self.build_directory
        folder_path.mkdir(parents=True, exist_ok=True)
        lock = folder_path / "jitkern.lock"
        with build_lock(lock, timeout_s=settings().lock_timeout_s, poll=lambda: False):
            return self._build_in(folder_path)

    def _build_in(self, folder: Path) -> Built:
        start = time.perf_counter()
        route = self.build.route
        # A second try if somebody saved a file meanwhile: what was compiled is then not what would
        # be hashed. Not a third one: a file server's clock may run ahead of ours for good.
        for _ in range(2):
            started_unix_s = time.time()
            (folder / ".ninja_log").unlink(missing_ok=True)  # without it, everything is built
            library, read = self._compile(folder)
            if not depends.changed_since(read, started_unix_s):
                break
        manifest = depends.manifest(
            read, self.build.roots, covered=compilers.covered_directories(route)
        )
        toolchain = f"{self._toolchain_id()}+deps-{digest(manifest)[:12]}"
        key = replace(_key(self.build, self.arch), toolchain=toolchain)
        meta = {
            "depends": manifest,
            "compilers": compilers.stamps(route),
            "build_ms": round((time.perf_counter() - start) * 1e3, 3),
            "built_unix_s": round(time.time(), 3),
        }
        return Built(key, {self.library_name: library}, meta)

    def _compile(self, folder: Path) -> tuple[bytes, list[Path]]:
        """Return the library and the files that were read, those in `folder` left out."""
        built = cxx.build(
            slug(self.build.name),
            sources=_translation_units(self.build, folder),
            directory=folder,
            cflags=self.build.cflags,
            cuda_cflags=self.build.cuda_cflags,
            ldflags=self.build.ldflags,
            include_paths=[*self.build.include_dirs, *INCLUDE_DIRS],
            arch=self.arch,
        )
        inside = folder.resolve()
        read = [path for path in built.dependencies if inside not in path.parents]
        return built.library.read_bytes(), read

    def _verify(self, staged: Path) -> None:
        """Load the library before anybody else can see it, and use what was loaded."""
        library = staged / self.library_name
        try:
            self._module = load_library(library, cuda=self.arch is not None)
        except LOAD_ERRORS as error:
            raise CompileError(
                f"{self.build.name}: the library was built but does not load",
                command=f"dlopen {self.library_name}",
                log=str(error).replace(f"{staged}/", ""),
            ) from error


def _key(build: NativeBuild, arch: Arch | None) -> Key:
    import tvm_ffi

    flags = {"cflags": build.cflags, "cuda_cflags": build.cuda_cflags, "ldflags": build.ldflags}
    describe = {
        "op": build.args[0],
        "args": list(build.args[1:]),
        "arch": "" if arch is None else str(arch),
        "files": [file.name for file in (*build.cpp_files, *build.cuda_files)],
        **{name: list(value) for name, value in flags.items()},
    }
    family = digest(
        {
            "route": build.route,
            "abi": [NATIVE_ABI, f"tvm-ffi {tvm_ffi.__version__}", *platform_abi()],
            "describe": describe,
            "defaults": [cxx.CFLAGS, cxx.CUDA_CFLAGS if arch is not None else ()],
            "sources": [
                [file.name, hashlib.sha256(file.read_bytes()).hexdigest()]
                for file in (*build.cpp_files, *build.cuda_files)
            ],
            "wrappers": [build.cpp_wrappers, build.cuda_wrappers],
            "inline": build.inline,
            "include_dirs": len(build.include_dirs),
        }
    )
    return Key(build.route, build.name, family, "", describe)


def _translation_units(build: NativeBuild, folder: Path) -> list[Path]:
    if not build.inline:
        return [*build.cpp_files, *build.cuda_files]
    units = []
    for name, files, wrappers in (
        ("main.cc", build.cpp_files, build.cpp_wrappers),
        ("cuda.cu", build.cuda_files, build.cuda_wrappers),
    ):
        if not files and not wrappers:
            continue
        lines = [f"#include <{header}>" for header in PRELUDE]
        lines += [f'#include "{file}"' for file in files]
        lines += [
            f"TVM_FFI_DLL_EXPORT_TYPED_FUNC({export}, ({expression}));"
            for export, expression in wrappers
        ]
        unit = folder / name
        unit.write_text("\n".join(lines) + "\n")
        units.append(unit)
    return units


def _without_include_flags(build: NativeBuild) -> NativeBuild:
    """Move -I flags to the include directories: paths have no place in a key."""
    include_dirs = list(build.include_dirs)
    kept: dict[str, tuple[str, ...]] = {}
    for field, flags in (("cflags", build.cflags), ("cuda_cflags", build.cuda_cflags)):
        words = [word for flag in flags for word in shlex.split(flag)]
        rest: list[str] = []
        while words:
            word = words.pop(0)
            if not word.startswith("-I"):
                rest.append(shlex.quote(word))
            elif word[2:] or words:
                include_dirs.append(Path(word[2:] or words.pop(0)))
        kept[field] = tuple(rest)
    unique = tuple(dict.fromkeys(path.absolute() for path in include_dirs))
    return replace(
        build, include_dirs=unique, cflags=kept["cflags"], cuda_cflags=kept["cuda_cflags"]
    )


def _put(file: Path, data: bytes) -> None:
    """Write `file` by a rename: another process may be running the old one."""
    if file.exists() and file.read_bytes() == data:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.write_bytes(data)
    os.replace(partial, file)
