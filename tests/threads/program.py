"""Compiles the programs of this directory with sources of the host module, and runs them.

Objects are kept in a folder, under names that are digests of all that goes in, so that a mutant
compiles one source. What most sources include is compiled once, as it is for the host module.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from jitkern.compilers.sources import CSRC, include_dirs

HERE = Path(__file__).resolve().parent
PUBLIC = (CSRC / "include",)
FOUND = 97  # exit status of a sanitizer that found something
# Sanitizers wait a second at the end of a process with threads, and have no use for leaks here.
OPTIONS = {
    "TSAN_OPTIONS": f"halt_on_error=1:exitcode={FOUND}:atexit_sleep_ms=0",
    "ASAN_OPTIONS": f"detect_leaks=0:exitcode={FOUND}",
    "UBSAN_OPTIONS": "print_stacktrace=1",
}

TSAN = ("-O1", "-g1", "-fsanitize=thread", "-Wno-tsan")
ASAN = (
    *("-O1", "-g1", "-fsanitize=address,undefined"),
    *("-fno-sanitize=vptr,null,object-size", "-fno-sanitize-recover=all"),
)


@dataclass(frozen=True)
class Program:
    """``name``.cc and sources below ``csrc``, with a library of one source that it finds loaded."""

    name: str
    csrc: Sequence[str]
    library: str
    source: str


CPU_OPS = Program("ops", ("host/[!u]*.cc", "ops/*.cc"), "libtorch_cpu.so", "team.cc")
UPLOADS = Program(
    "uploads",
    ("host/[!u]*.cc", "ops/pairs.cc", "ops/h2d_*.cc", "ops/sort.cc", "ops/common.cc"),
    *("libcuda.so.1", "fake_gpu.cc"),
)


def cxx() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def compiled(
    *sources: Path,
    target: Path,
    flags: Sequence[str],
    folders: Sequence[Path] = PUBLIC,
) -> Path:
    """A library or a program of sources that include headers of these folders, or public ones."""
    command = [*cxx(), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    command += [*(f"-I{folder}" for folder in folders), *map(str, sources), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def race(
    *sources: Path, target: Path, folders: Sequence[Path] = PUBLIC
) -> subprocess.CompletedProcess[str]:
    """Run a program of these sources under ThreadSanitizer."""
    flags = ("-O1", "-g1", "-fsanitize=thread")
    program = str(compiled(*sources, target=target, flags=flags, folders=folders))
    env = {**os.environ, **OPTIONS}
    return subprocess.run([program], env=env, capture_output=True, text=True, timeout=100)


def _digest(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:20]


class Builder:
    """Builds into ``store``, from ``csrc``, by ``flags``."""

    def __init__(self, store: Path, flags: Sequence[str], csrc: Path = CSRC) -> None:
        from tvm_ffi import libinfo

        self.store, self.flags, self.csrc = store, flags, csrc
        self.library = Path(libinfo.find_libtvm_ffi()).parent
        folders = [*include_dirs(csrc), HERE]
        tvm_ffi = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
        self.includes = [f"-I{folder}" for folder in (*folders, *tvm_ffi)]
        headers = [*csrc.rglob("*.h"), *HERE.glob("*.h")]
        texts = [path.read_text() for path in sorted(headers, key=lambda path: path.name)]
        self.precompiled = csrc / "host" / "precompiled.h"
        self.common = [*flags, *texts]
        name = f"precompiled-{_digest(*flags, self.precompiled.read_text())}"
        self.header = store / name / self.precompiled.name

    def build(self, program: Program) -> Path:
        """Return the program, compiled as far as it is not there."""
        self.store.mkdir(parents=True, exist_ok=True)
        with (self.store / f"{_digest(*self.flags)}.lock").open("w") as lock:
            # Two workers of pytest-xdist do not compile the same at the same time.
            fcntl.flock(lock, fcntl.LOCK_EX)
            return self._build(program)

    def run(self, program: Program, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
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
        sources.add(HERE / f"{program.name}.cc")
        files = [*sorted(sources), HERE / program.source]
        self._compile_header()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            *objects, of_library = map(str, pool.map(self._object, files))
        folder = self.store / _digest(program.name, *objects, of_library)
        target, library = folder / program.name, str(folder / program.library)
        if target.exists():  # linked last
            return target
        folder.mkdir(exist_ok=True)
        self._run("-shared", f"-Wl,-soname,{program.library}", of_library, "-o", library)
        self._run(
            *(*objects, "-Wl,--no-as-needed", library),
            *(f"-L{self.library}", f"-Wl,-rpath,{self.library}", "-Wl,-rpath,$ORIGIN"),
            *("-ltvm_ffi", "-ldl", "-pthread", "-o", str(target)),
        )
        return target

    def _object(self, source: Path) -> Path:
        name = source.relative_to(self.csrc if source.is_relative_to(self.csrc) else HERE)
        target = (
            self.store / f"{source.stem}-{_digest(*self.common, str(name), source.read_text())}.o"
        )
        if not target.exists():
            options = ("-fPIC", *self.includes, "-include", str(self.header))
            self._run(*options, "-c", str(source), "-o", str(target))
        return target

    def _compile_header(self) -> None:
        """What comes first in every source: GCC and Clang find it compiled beside it."""
        compiled = self.header.with_suffix(".h.gch")
        if not compiled.exists():
            self.header.parent.mkdir(exist_ok=True)
            self.header.write_text(self.precompiled.read_text())
            options = ("-fPIC", *self.includes, "-x", "c++-header")
            self._run(*options, str(self.header), "-o", str(compiled))

    def _run(self, *arguments: str) -> None:
        command = [*cxx(), "-std=c++17", *self.flags, *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
