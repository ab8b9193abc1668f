"""Compiles and runs C++ programs of the tests, one of them with sources of the host module."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jitkern.compilers.sources import CSRC, include_dirs

HERE = Path(__file__).resolve().parent
PUBLIC = (CSRC / "include",)
FOUND = 97  # exit status of a sanitizer that found something
TSAN = ("-O1", "-g1", "-fsanitize=thread", "-Wno-tsan")
# Sanitizers wait a second at the end of a process with threads.
OPTIONS = {"TSAN_OPTIONS": f"halt_on_error=1:exitcode={FOUND}:atexit_sleep_ms=0"}


def cxx() -> list[str]:
    return shlex.split(os.environ.get("CXX", "")) or ["c++"]


def compiled(
    *sources: Path,
    target: Path,
    flags: Sequence[str],
    folders: Sequence[Path] = PUBLIC,
) -> Path:
    """Compile a library or a program; headers are searched in `folders`."""
    command = [*cxx(), "-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", *flags]
    command += [*(f"-I{folder}" for folder in folders), *map(str, sources), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def run(program: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **OPTIONS}
    return subprocess.run([str(program)], env=env, capture_output=True, text=True, timeout=600)


def race(
    *sources: Path, target: Path, folders: Sequence[Path] = PUBLIC
) -> subprocess.CompletedProcess[str]:
    """Run a program of these sources under ThreadSanitizer."""
    return run(compiled(*sources, target=target, flags=TSAN, folders=folders))


def race_ops(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ops.cc, linked with the ops of the host module, under ThreadSanitizer."""
    from tvm_ffi import libinfo

    library = Path(libinfo.find_libtvm_ffi()).parent
    own = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    folders = [*include_dirs(CSRC), *map(Path, own)]
    sources = [path for glob in ("host/[!u]*.cc", "ops/*.cc") for path in CSRC.glob(glob)]

    def compile_one(source: Path) -> Path:
        target = folder / f"{source.parent.name}-{source.stem}.o"
        flags = (*TSAN, "-w", "-c", "-fPIC")
        return compiled(source, target=target, flags=flags, folders=folders)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, [HERE / "ops.cc", *sources]))
    link = [*TSAN, f"-L{library}", f"-Wl,-rpath,{library}", "-Wl,--no-as-needed", "-ltvm_ffi"]
    return run(compiled(*objects, target=folder / "ops", flags=(*link, "-ldl")))
