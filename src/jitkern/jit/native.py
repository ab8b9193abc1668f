"""The C++ and the single-source CUDA route: sources to a loaded library, through the cache.

The key holds the content of the user's sources, of the headers that they include and of the
archives that they link; flags (those in CXX too), wrappers, arch and ABI; and what the environment
adds to a build. The variant is the version of the compilers. Headers of the system are in neither.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jitkern.arch import Arch
from jitkern.cache.entry import Entry, Key, new_entry
from jitkern.cache.get import Buildable, Lookup, find, get_or_build
from jitkern.cache.lock import build_folder
from jitkern.cache.store import NO_USE
from jitkern.compilers import cxx
from jitkern.compilers.find import is_cuda_headers
from jitkern.compilers.load import load_library, platform_abi
from jitkern.compilers.sources import INCLUDE_DIRS, Closure, include_closure, words
from jitkern.env import compiler_environment, settings
from jitkern.errors import JitkernError
from jitkern.fs import digest, sha256, slug, write_whole
from jitkern.jit.device import record_hint
from jitkern.jit.record import FLAGS, Specialisation, record

if TYPE_CHECKING:
    from tvm_ffi import Module

NATIVE_ABI = 4

# The headers that tvm_ffi.cpp.load_inline includes; mini-sglang's kernels rely on them.
PRELUDE = (
    *("tvm/ffi/container/tensor.h", "tvm/ffi/dtype.h", "tvm/ffi/error.h"),
    *("tvm/ffi/extra/c_env_api.h", "tvm/ffi/function.h"),
)


def has_cuda(used: Specialisation) -> bool:
    """Tell whether a library holds code for a GPU, so that it is built for one arch."""
    return bool(used.options.get("cuda_files") or used.options.get("cuda_wrappers"))


class NativeLibrary(Buildable["Module | None"]):
    """A library: `get` finds or builds it, `find` only finds it.

    `used` holds the checked arguments of load_jit or load_aot. `arch` is the target of its CUDA
    code, None if it has none. Without `load` it is built and published, and none of its code runs.
    """

    def __init__(self, used: Specialisation, arch: Arch | None, *, load: bool = True) -> None:
        options = dict(used.options)
        paths: dict[str, list[str]] = {}
        linked: dict[str, list[str]] = {}
        flags = {
            name: _with_absolute_paths(words(options.get(name, ()), name), by_option)
            for name, by_option in zip(FLAGS, (paths, paths, linked), strict=True)
        }
        # -I flags are include directories, whose paths are in no key: checkouts share a library.
        folders = [*options.get("extra_include_paths", ()), *paths.get("-I", ())]
        options |= {name: list(map(shlex.quote, flags[name])) for name in FLAGS}
        options["extra_include_paths"] = list(dict.fromkeys(folders))
        self._used = used._replace(options=options, arch="" if arch is None else str(arch))
        self._name = "_".join(used.args)
        self._arch = arch
        self._load = load
        self._archives = _archives(flags["extra_ldflags"], linked)
        self._includes = _includes(
            [*paths.get("-include", ()), *self._files("cpp_files", "cuda_files")]
        )
        searched = [folder for name in _SEARCHED for folder in paths.get(name, ())]
        searched = [*options["extra_include_paths"], *searched]
        self._searched = [folder for folder in map(Path, searched) if not is_toolchain(folder)]
        self._closure = self._read()
        self.key: Key = self._key(self._closure)
        self.variant: str = cxx.toolchain_id(cuda=has_cuda(used))
        if self.variant and (
            native := cxx.native_id([*flags["extra_cflags"], *flags["extra_cuda_cflags"]])
        ):
            self.variant += f"+{native}"

    def _files(self, *names: str) -> list[str]:
        return [file for name in names for file in self._used.options.get(name, ())]

    def _read(self) -> Closure:
        """Read the sources and the headers that they may include, except the toolchain's."""
        folders = [*self._searched, *INCLUDE_DIRS]
        return include_closure(self._includes, include_dirs=folders, computed=True)

    def _key(self, closure: Closure) -> Key:
        import tvm_ffi

        options = self._used.options
        is_cuda = has_cuda(self._used)
        route = "cuda" if is_cuda else "cxx"
        describe: dict[str, Any] = {
            "op": self._used.args[0],
            "args": list(self._used.args[1:]),
            "arch": self._used.arch,
            "files": [os.path.basename(file) for file in self._files("cpp_files", "cuda_files")],
            **{name.removeprefix("extra_"): options[name] for name in FLAGS},
        }
        environment = compiler_environment(cuda=is_cuda, links=bool(options["extra_ldflags"]))
        if environment:  # a machine that sets none of them has the keys of any other such machine
            describe["environment"] = environment
        abi = [NATIVE_ABI, f"tvm-ffi {tvm_ffi.__version__}", *platform_abi()]
        if any(map(is_toolchain, map(Path, options["extra_include_paths"]))):
            with suppress(PackageNotFoundError):
                abi.append(f"torch {version('torch')}")
        flags_in_cxx = [word for word in (settings().cxx or "").split() if word.startswith("-")]
        content = {
            "route": route,
            "abi": abi,
            "describe": describe,
            "defaults": [cxx.CFLAGS, cxx.CUDA_CFLAGS if is_cuda else (), flags_in_cxx],
            "sources": closure.digest,
            "wrappers": [options.get("cpp_wrappers", ()), options.get("cuda_wrappers", ())],
            "function": self._used.function,
            "linked": [[file, sha256(Path(file).read_bytes())] for file in self._archives],
        }
        return Key(route, self._name, digest(content), describe)

    def find(self) -> Lookup[Any] | None:
        lookup = find(self)
        return None if lookup is None else self._kept(lookup)

    def get(self) -> Lookup[Any]:
        return self._kept(get_or_build(self))

    def _kept(self, lookup: Lookup[Any]) -> Lookup[Any]:
        """Put the library in the build directory, and record it."""
        folder = self._used.options.get("build_directory")
        if folder is not None:
            file, data = Path(folder, lookup.entry.artefact_name), lookup.entry.data
            if not file.exists() or file.read_bytes() != data:
                write_whole(file, data)
        record(self._used)
        return lookup

    def rank(self, meta: Mapping[str, Any]) -> int:
        is_native = "+native-" in meta["toolchain"]
        # Built for the processor of another machine, perhaps.
        return NO_USE if is_native and meta["toolchain"] != self.variant else super().rank(meta)

    def load(self, entry: Entry) -> Module | None:
        if not self._load:
            return None
        return load_library(self._name, entry.artefact or entry.data, cuda=has_cuda(self._used))

    def hint(self) -> str:
        return f"load it before freezing, or {record_hint()}"

    def build(self) -> Entry:
        options = self._used.options
        with build_folder(options.get("build_directory")) as folder:
            library = cxx.build(
                slug(self._name),
                sources=self._translation_units(folder),
                directory=folder,
                cflags=options["extra_cflags"],
                cuda_cflags=options["extra_cuda_cflags"],
                ldflags=options["extra_ldflags"],
                include_paths=[*map(Path, options["extra_include_paths"]), *INCLUDE_DIRS],
                arch=self._arch,
            ).read_bytes()
        # An editor may have saved a file during the build: the key would name other content.
        if self._key(self._read()).digest != self.key.digest:
            raise JitkernError(f"{self._name}: a source changed while it was built; load it again")
        return new_entry(self.key, self.variant, {f"{slug(self._name)}.so": library})

    def _translation_units(self, folder: Path) -> list[Path]:
        """Return the files to compile; load_jit has one of C++ and one of CUDA, with exports."""
        if self._used.function == "load_aot":
            return list(map(Path, self._files("cpp_files", "cuda_files")))
        units = []
        for name, kind in (("main.cc", "cpp"), ("cuda.cu", "cuda")):
            files = self._files(f"{kind}_files")
            wrappers = self._used.options.get(f"{kind}_wrappers", ())
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


def is_toolchain(folder: Path) -> bool:
    """Tell whether a directory holds headers of CUDA or of torch: versions stand for these."""
    torch = ("ATen/ATen.h", "torch/torch.h")
    return is_cuda_headers(folder) or any(os.path.isfile(folder / mark) for mark in torch)


def _includes(files: Iterable[str]) -> str:
    return "\n".join(f'#include "{file}"' for file in files)


# -- flags -----------------------------------------------------------------------------------------

_SEARCHED = ("-iquote", "-isystem", "-idirafter")
_PATH_FLAG = re.compile(r"(-I|-isystem|-iquote|-idirafter|-include|-L)(?!=)(.*)", re.DOTALL)


def _with_absolute_paths(options: Sequence[str], paths: dict[str, list[str]]) -> list[str]:
    """Return flags with absolute paths, since the build runs in another directory; no ``-I``.

    Adds the paths to `paths` by their option; those of no option, such as an archive,
    ``@flags.txt`` and ``--version-script=exports.map``, by an empty one.
    """
    flags: list[str] = []
    pending = iter(options)
    for word in pending:
        match = _PATH_FLAG.fullmatch(word)
        if match is not None:
            option, path = match[1], match[2] or next(pending, "")
            # A header of -include may be in an include directory.
            if option != "-include" or os.path.isfile(path):
                path = os.path.abspath(path)
            paths.setdefault(option, []).append(path)
            flags += {"-I": [], "-L": [f"-L{path}"]}.get(option, [option, path])
            continue
        parts = [word] if re.match("-(?!Wl,)", word) else re.split("([,=@])", word)
        for i, part in enumerate(parts):
            # "now" in "-z now" is no file, even if there is one of that name.
            if re.search("[./]", part) and os.path.isfile(part):
                parts[i] = os.path.abspath(part)
                paths.setdefault("", []).append(parts[i])
        flags.append("".join(parts))
    return flags


def _archives(flags: Sequence[str], paths: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the objects, archives and linker scripts that a library is linked from."""
    names = (word[2:] for word in flags if word.startswith("-l"))
    libraries = [name[1:] if name.startswith(":") else f"lib{name}.a" for name in names]
    files = list(paths.get("", ()))
    for library in libraries:
        candidates = (os.path.join(folder, library) for folder in paths.get("-L", ()))
        files += [path for path in candidates if os.path.isfile(path)][:1]
    return [file for file in dict.fromkeys(files) if not re.search(r"\.so(\.[\d.]+)?$", file)]
