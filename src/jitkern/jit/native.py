"""The C++ and the single-source CUDA route: sources to a loaded library, through the cache.

The key holds the content of the user's sources, of the headers that they include and of the
archives that they link; flags (those in CXX too), wrappers, arch and ABI; and what the environment
adds to a build. The variant is the version of the compilers. Headers of the system are in neither.
"""

from __future__ import annotations

import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.arch import Arch
from jitkern.cache.entry import Entry, Key
from jitkern.cache.get import Buildable, BuildOutput, Lookup, find, get_or_build
from jitkern.cache.lock import build_lock
from jitkern.compilers import cxx
from jitkern.compilers.find import is_cuda_headers
from jitkern.compilers.load import load_library, platform_abi
from jitkern.compilers.sources import INCLUDE_DIRS, Closure, include_closure, words
from jitkern.env import compiler_environment, settings
from jitkern.errors import JitkernError
from jitkern.fs import digest, scratch_folder, sha256, slug, write_whole
from jitkern.jit.device import record_hint
from jitkern.jit.record import Specialisation, record

if TYPE_CHECKING:
    from tvm_ffi import Module

NATIVE_ABI = 3

# What tvm_ffi.cpp.load_inline puts before a source, which mini-sglang's kernels rely on.
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
    its wrappers exported; otherwise each file is one. `included` are the headers that flags name,
    `linked` the archives and other files.
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
    searched: tuple[Path, ...] = ()
    included: tuple[Path, ...] = ()
    linked: tuple[Path, ...] = ()

    @property
    def cuda(self) -> bool:
        """Whether nvcc takes part."""
        return bool(self.cuda_files or self.cuda_wrappers)

    @property
    def files(self) -> tuple[Path, ...]:
        """All sources."""
        return (*self.cpp_files, *self.cuda_files)

    def closure(self) -> Closure:
        """Read the sources and the headers that they may include, but for the compilers' own."""
        folders = [*self.include_dirs, *self.searched, *INCLUDE_DIRS]
        own = [folder for folder in folders if not is_toolchain(folder)]
        text = _includes([*self.included, *self.files])
        return include_closure(text, include_dirs=own, computed=True)


def is_toolchain(folder: Path) -> bool:
    """Tell whether a directory holds headers of CUDA or of torch: versions stand for these."""
    torch = ("ATen/ATen.h", "torch/torch.h")
    return is_cuda_headers(folder) or any(os.path.isfile(folder / mark) for mark in torch)


class NativeLibrary(Buildable["Module | None"]):
    """The library of one build for one arch: `get` finds or builds it, see jitkern.load_jit.

    Parameters
    ----------
    build
        What to build.
    arch
        What its CUDA code is for; None if it has none.
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
        self._build = _with_absolute_paths(build)
        self._closure = self._build.closure()
        self.key: Key = _key(self._build, self._closure, arch)
        self.variant: str = cxx.toolchain_id(cuda=build.cuda)
        self._arch = arch
        self._used = used
        self._build_directory = build_directory
        self._load = load

    def find(self) -> Lookup[Any] | None:
        """Return the library if a cache has it."""
        found = find(self)
        return None if found is None else self._kept(found)

    def get(self) -> Lookup[Any]:
        """Return the library, built if need be."""
        return self._kept(get_or_build(self))

    def _kept(self, found: Lookup[Any]) -> Lookup[Any]:
        if self._build_directory is not None:
            file, data = self._build_directory / found.entry.artefact_name, found.entry.data
            if not file.exists() or file.read_bytes() != data:
                write_whole(file, data)
        record_file = settings().record
        if record_file is not None:
            self._record(record_file)
        return found

    def _record(self, file: Path) -> None:
        build, closure = self._build, self._closure
        options = {
            **self._used.options,
            "cpp_files": list(map(str, build.cpp_files)),
            "cuda_files": list(map(str, build.cuda_files)),
            "extra_include_paths": list(map(str, build.include_dirs)),
            "extra_cflags": list(build.cflags),
            "extra_cuda_cflags": list(build.cuda_cflags),
            "extra_ldflags": list(build.ldflags),
        }
        arch = "" if self._arch is None else str(self._arch)
        texts = dict(zip(map(str, closure.files), closure.texts, strict=True))
        record(self._used._replace(options=options, arch=arch), closure.files, file, texts)

    def load(self, entry: Entry) -> Module | None:
        if not self._load:
            return None
        return load_library(self._build.name, entry.artefact, cuda=self._build.cuda)

    def hint(self) -> str:
        return f"load it before freezing, or {record_hint()}"

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
        build = self._build
        library = cxx.build(
            slug(build.name),
            sources=_translation_units(build, folder),
            directory=folder,
            cflags=build.cflags,
            cuda_cflags=build.cuda_cflags,
            ldflags=build.ldflags,
            include_paths=[*build.include_dirs, *INCLUDE_DIRS],
            arch=self._arch,
        ).read_bytes()
        # What is published is what was compiled: an editor may have saved a file meanwhile.
        if _key(build, build.closure(), self._arch).digest != self.key.digest:
            raise JitkernError(f"{build.name}: a source changed while it was built; load it again")
        notes = {
            "build_ms": round((time.perf_counter() - start) * 1e3, 3),
            "built_unix_s": round(time.time(), 3),
        }
        return BuildOutput(self.variant, {f"{slug(build.name)}.so": library}, notes)


def _key(build: NativeBuild, closure: Closure, arch: Arch | None) -> Key:
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
    abi = [NATIVE_ABI, f"tvm-ffi {tvm_ffi.__version__}", *platform_abi()]
    if any(map(is_toolchain, build.include_dirs)):
        abi.append(_torch_version())
    flags_in_cxx = [word for word in (settings().cxx or "").split() if word.startswith("-")]
    linked = (file for file in build.linked if os.access(file, os.R_OK))
    content = {
        "route": route,
        "abi": abi,
        "describe": describe,
        "defaults": [cxx.CFLAGS, cxx.CUDA_CFLAGS if arch is not None else (), flags_in_cxx],
        "sources": closure.digest,
        "wrappers": [build.cpp_wrappers, build.cuda_wrappers],
        "inline": build.inline,
        "linked": [[str(file), sha256(file.read_bytes())] for file in linked],
    }
    return Key(route, build.name, digest(content), describe)


def _torch_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"torch {version('torch')}"
    except PackageNotFoundError:
        return ""


def _includes(files: Sequence[Path]) -> str:
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
        units.append(folder / name)
        cxx.write_text(units[-1], "\n".join(lines) + "\n")
    return units


# -- flags -----------------------------------------------------------------------------------------

_PATH_FLAG = re.compile(r"(-I|-isystem|-iquote|-idirafter|-include)(.*)", re.DOTALL)


def _with_absolute_paths(build: NativeBuild) -> NativeBuild:
    """Make paths in flags absolute: the build runs in another directory.

    -I flags become include directories, whose paths are in no key: checkouts share a library.
    """
    found: dict[str, list[Path]] = {"-I": list(build.include_dirs), "-include": []}
    cflags = _compile_flags(words(build.cflags, "extra_cflags"), found)
    cuda_cflags = _compile_flags(words(build.cuda_cflags, "extra_cuda_cflags"), found)
    ldflags, linked = _linked(words(build.ldflags, "extra_ldflags"))
    include_dirs, included = found.pop("-I"), found.pop("-include")
    return replace(
        build,
        include_dirs=tuple(dict.fromkeys(path.absolute() for path in include_dirs)),
        searched=tuple(path for folders in found.values() for path in folders),
        included=tuple(included),
        cflags=cflags,
        cuda_cflags=cuda_cflags,
        ldflags=tuple(map(shlex.quote, ldflags)),
        linked=tuple(linked),
    )


def _compile_flags(given: list[str], found: dict[str, list[Path]]) -> tuple[str, ...]:
    """Return flags for a compiler; add the paths in them to `found`, by their option."""
    flags: list[str] = []
    pending = iter(given)
    for word in pending:
        match = _PATH_FLAG.fullmatch(word)
        if match is None:
            flags.append(shlex.quote(word))
            continue
        path = Path(match[2] or next(pending, ""))
        # What -include names may be in an include directory.
        if match[1] != "-include" or path.is_file():
            path = path.absolute()
        found.setdefault(match[1], []).append(path)
        if match[1] != "-I":
            flags += [match[1], shlex.quote(str(path))]
    return tuple(flags)


def _linked(given: Sequence[str]) -> tuple[list[str], list[Path]]:
    """Return the linker's flags with absolute paths, and the files that they name.

    These are archives, objects, ``@flags.txt`` and ``--version-script=exports.map``. A shared
    library is no part of what is linked.
    """
    flags, folders, libraries, files = [], [], [], []
    pending = iter(given)
    for word in pending:
        if word == "-L":
            word += next(pending, "")
        if word.startswith("-L") and not word.startswith("-L="):
            folders.append(os.path.abspath(word[2:]))
            word = f"-L{folders[-1]}"
        elif word.startswith("-l"):
            libraries.append(word[3:] if word[2:3] == ":" else f"lib{word[2:]}.a")
        else:
            parts = re.split("([,=@])", word)
            # "now" in "-z now" is no file, even if there is one of that name.
            named = [re.search("[./]", part) and os.path.isfile(part) for part in parts]
            pairs = zip(parts, named, strict=True)
            parts = [os.path.abspath(part) if is_file else part for part, is_file in pairs]
            files += [part for part, is_file in zip(parts, named, strict=True) if is_file]
            word = "".join(parts)
        flags.append(word)
    for library in libraries:
        found = (os.path.join(folder, library) for folder in folders)
        files += [path for path in found if os.path.isfile(path)][:1]
    archives = (file for file in files if not re.search(r"\.so(\.[\d.]+)?$", file))
    return flags, list(map(Path, dict.fromkeys(archives)))
