"""Compiles the programs of this directory with sources of the host module, and runs them.

Objects are kept in a folder, under names that are digests of all that goes in. What most sources
include is compiled once, as it is for the host module.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jitkern.compilers.sources import CSRC, include_dirs

HERE = Path(__file__).resolve().parent
FOUND = 97  # exit status of a sanitizer that found something
# Sanitizers wait a second at the end of a process with threads, and have no use for leaks here.
OPTIONS = {
    "TSAN_OPTIONS": f"halt_on_error=1:exitcode={FOUND}:atexit_sleep_ms=0",
    "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

PLAIN = ("-O1",)
TSAN = ("-O1", "-g1", "-fsanitize=thread", "-Wno-tsan")
ASAN = (
    *("-O1", "-g1", "-fsanitize=address,undefined"),
    *("-fno-sanitize=vptr,null,object-size", "-fno-sanitize-recover=all"),
)


@dataclass(frozen=True)
class Program:
    """Sources below ``csrc`` and of this directory; libraries that it finds loaded."""

    name: str
    csrc: Sequence[str]
    own: Sequence[str]
    libraries: Mapping[str, Sequence[str]]
    # Under ThreadSanitizer: instead of this source of csrc, this one of its own.
    instead: tuple[str, str] | None = None


CPU_OPS = Program(
    "ops",
    ("host/[!u]*.cc", "ops/*.cc"),
    ("ops.cc",),
    {"libtorch_cpu.so": ("team.cc",)},
)
STAGING = Program(
    "staging",
    ("host/[!u]*.cc", "ops/pairs*.cc", "ops/*2[dh]_*.cc", "ops/sort.cc", "ops/common.cc"),
    ("staging.cc", "trouble.cc", "calls.cc"),
    {"libcuda.so.1": ("fake_gpu.cc", "fake_kernel.cc")},
    instead=("host/cpu_copy.cc", "plain_copy.cc"),
)


def cxx() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


@cache
def _compiler_version() -> str:
    return subprocess.run([*cxx(), "--version"], capture_output=True, text=True, check=True).stdout


def forget_old(store: Path, age_s: float = 7 * 24 * 3600) -> None:
    """Delete what was compiled longer ago, as sources change and digests with them."""
    for path in store.iterdir():
        if path.suffix == ".lock" or path.stat().st_mtime > time.time() - age_s:
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Two workers of pytest-xdist do not compile the same at the same time."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


class Builder:
    """Builds into ``store``, from ``csrc``, by ``flags``."""

    def __init__(self, store: Path, flags: Sequence[str], csrc: Path = CSRC) -> None:
        from tvm_ffi import __version__, libinfo

        self.store, self.flags, self.csrc = store, flags, csrc
        self.version = __version__
        self.library = Path(libinfo.find_libtvm_ffi()).parent
        folders = [*include_dirs(csrc), HERE]
        tvm_ffi = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
        self.includes = [f"-I{folder}" for folder in (*folders, *tvm_ffi)]
        headers = [*csrc.rglob("*.h"), *HERE.glob("*.h")]
        texts = [path.read_text() for path in sorted(headers, key=lambda path: path.name)]
        self.precompiled = csrc / "host" / "precompiled.h"
        self.common = [_compiler_version(), self.version, *flags, *texts]

    def build(self, program: Program) -> Path:
        """Return the program, compiled as far as it is not there."""
        self.store.mkdir(parents=True, exist_ok=True)
        name = hashlib.sha256(" ".join(self.flags).encode()).hexdigest()[:8]
        with _locked(self.store / f"{name}.lock"):
            return self._build(program)

    def run(self, program: Program, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Return what the program said; its exit status is 0 if it found nothing wrong."""
        return subprocess.run(
            [str(self.build(program)), *args],
            env={**os.environ, **OPTIONS, **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=600,
        )

    def _build(self, program: Program) -> Path:
        sources = {path for pattern in program.csrc for path in self.csrc.glob(pattern)}
        own = {HERE / name for name in program.own}
        if program.instead is not None and "-fsanitize=thread" in self.flags:
            sources.remove(self.csrc / program.instead[0])
            own.add(HERE / program.instead[1])
        libraries = {
            name: [HERE / source for source in names] for name, names in program.libraries.items()
        }
        files = sorted({*sources, *own, *(path for paths in libraries.values() for path in paths)})
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = dict(zip(files, pool.map(self._object, files), strict=True))
        key = " ".join([program.name, *(path.name for path in objects.values())])
        folder = self.store / hashlib.sha256(key.encode()).hexdigest()[:20]
        target = folder / program.name  # linked last
        if target.exists():
            return target
        folder.mkdir(exist_ok=True)
        for name, paths in libraries.items():
            options = ["-shared", f"-Wl,-soname,{name}", "-o", str(folder / name)]
            self._run(*options, *(str(objects[path]) for path in paths))
        made = folder / "made"
        self._run(
            *(str(objects[path]) for path in sorted({*sources, *own})),
            *("-Wl,--no-as-needed", *(str(folder / name) for name in libraries)),
            *(f"-L{self.library}", f"-Wl,-rpath,{self.library}", "-Wl,-rpath,$ORIGIN"),
            *("-ltvm_ffi", "-ldl", "-pthread", "-o", str(made)),
        )
        return made.replace(target)

    def _object(self, source: Path) -> Path:
        name = source.relative_to(self.csrc if source.is_relative_to(self.csrc) else HERE)
        key = json.dumps([*self.common, str(name), source.read_text()])
        target = self.store / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:20]}.o"
        if not target.exists():
            made = target.with_suffix(f".{os.getpid()}")
            before = ("-include", str(self._header()))
            self._run("-fPIC", *self.includes, *before, "-c", str(source), "-o", str(made))
            made.replace(target)
        return target

    def _header(self) -> Path:
        """Return the header that comes first in every source: GCC and Clang find it compiled."""
        text = self.precompiled.read_text()
        key = json.dumps([_compiler_version(), self.version, self.flags, text])
        name = hashlib.sha256(key.encode()).hexdigest()[:20]
        header = self.store / f"precompiled-{name}" / self.precompiled.name
        compiled = header.with_suffix(".h.gch")
        with _locked(self.store / f"precompiled-{name}.lock"):
            if not compiled.exists():
                header.parent.mkdir(exist_ok=True)
                header.write_text(text)
                made = compiled.with_suffix(f".{os.getpid()}")
                options = ("-fPIC", *self.includes, "-x", "c++-header")
                self._run(*options, str(header), "-o", str(made))
                made.replace(compiled)
        return header

    def _run(self, *arguments: str) -> None:
        command = [*cxx(), "-std=c++17", *self.flags, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
