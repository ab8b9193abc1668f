"""C++ and single-source CUDA to a shared library, by ninja and the host's compilers.

It writes its own build.ninja: tvm_ffi.cpp.build takes the arch from nvidia-smi or the environment,
needs ninja on PATH, and leaves its compilers running when the process is killed.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from jitkern.arch import Arch
from jitkern.compilers.find import find_cuda_home, find_cxx, find_ninja, find_nvcc, output_of
from jitkern.compilers.sources import with_defaults, words
from jitkern.env import process_environment, settings
from jitkern.errors import CompileError, JitkernError, ToolchainError
from jitkern.fs import digest, slug, write_whole

_log = logging.getLogger("jitkern")

# Defaults, before the caller's flags.
CFLAGS = ("-std=c++20", "-O3", "-fPIC")
# Else a library that is loaded again after an edit has the statics of the old one. GCC's flag.
_NOT_UNIQUE = "-fno-gnu-unique"
CUDA_CFLAGS = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", "-Xcompiler=-fPIC")


def toolchain_id(*, cuda: bool = False) -> str:
    """Return the id of the C++ compiler, and of nvcc with `cuda`; empty if one is missing."""
    try:
        tools = [find_nvcc(), find_cxx()] if cuda else [find_cxx()]
    except ToolchainError:
        return ""
    return "+".join(slug(tool.id) for tool in tools)


def native_id(flags: Sequence[str]) -> str:
    """Name what ``-march=native`` means on this machine; empty if neither flags nor CXX say it.

    The library runs on no other processor: SIGILL.
    """
    compiler = find_cxx().command
    native = re.findall(r"-m(?:arch|cpu)=native\b", " ".join([*flags, *compiler]))
    if not native:
        return ""
    macros = output_of((*compiler, *native, "-dM", "-E", "-x", "c++", os.devnull), "leave it out")
    return f"native-{digest(macros)[:8]}"


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
    unset: Collection[str] = (),
    arch: Arch | None = None,
) -> Path:
    """Compile sources and link them; return the library, ``<directory>/<name>.so``.

    ``.cc``, ``.cpp`` and ``.cxx`` go to the C++ compiler, ``.cu`` to nvcc, for `arch`. If
    `directory` holds an earlier build, ninja makes only what is out of date; no other build may use
    it meanwhile. The library links libtvm_ffi.so and, with CUDA sources, libcudart by their plain
    names, and contains no path of this machine.

    `cflags`, `cuda_cflags` and `ldflags` follow the default flags; each may hold several words,
    quoted as in a shell. Every C++ source starts with the header `precompiled`. The compilers do
    not see the environment variables in `unset`.

    Raises CompileError (with the command and the whole log), ToolchainError if ninja or a compiler
    is missing, ValueError for a source of an unknown kind.
    """
    for source in sources:
        suffixes = (".cc", ".cpp", ".cxx", *([] if arch is None else [".cu"]))
        if source.suffix not in suffixes:
            raise ValueError(f"build: sources: {source}, expected {' or '.join(suffixes)}")

    from tvm_ffi import libinfo

    compiler = find_cxx().command
    directories = [str(path.resolve()) for path in (*include_paths, *tvm_ffi_include_dirs())]
    includes = [f"-I{path}" for path in directories]
    # __FILE__ must not contain a path: checkouts and machines share the library.
    sources = [source.resolve() for source in sources]
    folders = dict.fromkeys([*directories, *(str(source.parent) for source in sources)])
    own_flags = [f"-fmacro-prefix-map={folder}/=" for folder in folders]
    own_flags += [_NOT_UNIQUE] if find_cxx().name == "gcc" else []
    flags = with_defaults([*CFLAGS, *own_flags], words(cflags, "extra_cflags"))
    cxx = [*compiler, *flags, *includes]
    nvcc: list[str] = []
    libraries = [f"-L{Path(libinfo.find_libtvm_ffi()).parent}", "-ltvm_ffi"]
    if any(source.suffix == ".cu" for source in sources) and arch is not None:
        cuda = find_cuda_home()
        defaults = [*CUDA_CFLAGS, f"-gencode=arch={arch.compute},code={arch.sm}"]
        if settings().cxx is not None and len(compiler) == 1:
            defaults += ["-ccbin", compiler[0]]
        # A comma in -Xcompiler separates options.
        defaults += [f"-Xcompiler={flag}" for flag in own_flags if "," not in flag]
        nvcc = [str(cuda.nvcc), *with_defaults(defaults, words(cuda_cflags)), *includes]
        cxx += [f"-isystem{path}" for path in cuda.include_dirs]  # C++ may use the runtime as well
        libraries.append(str(cuda.cudart))

    lines = ["ninja_required_version = 1.10"]
    header: list[str] = []  # an input that $in leaves out
    if precompiled is not None:
        # GCC and Clang use precompiled.h.gch if they can, else they read precompiled.h.
        write_text(directory / "precompiled.h", f'#include "{precompiled.resolve()}"\n')
        lines += _compile_rule("header", [*cxx, "-x", "c++-header"])
        lines.append("build precompiled.h.gch: header precompiled.h")
        header = ["|", "precompiled.h.gch"]
        cxx += ["-include", "precompiled.h"]
    lines += [*_compile_rule("cxx", cxx), *_compile_rule("nvcc", nvcc)]
    objects = [f"{slug(source.stem)}-{digest(str(source))[:8]}.o" for source in sources]
    for source, name_of_object in zip(sources, objects, strict=True):
        escaped = re.sub(r"([$ :])", r"$\1", str(source))
        inputs = ["nvcc", escaped] if source.suffix == ".cu" else ["cxx", escaped, *header]
        lines.append(f"build {name_of_object}: {' '.join(inputs)}")
    link = [*compiler, "-shared", "$in", *libraries, *words(ldflags, "extra_ldflags"), "-o", "$out"]
    lines += ["rule link", f"  command = {_quoted(link)}", "  description = $out"]
    lines.append(f"build {name}.so: link {' '.join(objects)}")
    write_text(directory / "build.ninja", "".join(f"{line}\n" for line in lines))
    run_ninja(name, directory, unset)
    return directory / f"{name}.so"


def _compile_rule(name: str, command: Sequence[str]) -> list[str]:
    # Not -MMD, which leaves out system headers: CUDA's runtime is among them.
    whole = [*command, "-MD", "-MF", "$out.d", "-c", "$in", "-o", "$out"]
    lines = [f"rule {name}", f"  command = {_quoted(whole)}", "  description = $out"]
    return [*lines, "  depfile = $out.d", "  deps = gcc"]


def _quoted(command: Sequence[str]) -> str:
    """Return a command for a rule. ninja itself replaces and quotes ``$in`` and ``$out``."""
    own = ("$in", "$out", "$out.d")
    return " ".join(w if w in own else shlex.quote(w).replace("$", "$$") for w in command)


def tvm_ffi_include_dirs() -> list[Path]:
    """Return the include directories of tvm-ffi."""
    from tvm_ffi import libinfo  # imports torch if there is one, which takes a second

    directories = dict.fromkeys([libinfo.find_include_path(), libinfo.find_dlpack_include_path()])
    return [Path(path) for path in directories]


def write_text(file: Path, text: str) -> None:
    """Write a file unless it already holds `text`: a newer file would be built again."""
    data = text.encode("utf-8", "surrogateescape")
    if not file.exists() or file.read_bytes() != data:
        write_whole(file, data)


# No compiler outlives this process: ninja kills its jobs on SIGTERM. Linux sends that signal when
# this process dies, if there is a setpriv to ask for it, and run_ninja when it is interrupted.
# ninja has a process group of its own: a Ctrl-C must not look like an error in the sources.
_DIE_WITH_PARENT = ("--pdeathsig", "TERM")
_STOP_TIMEOUT_S = 10.0


def run_ninja(name: str, directory: Path, unset: Collection[str] = ()) -> str:
    """Run the build.ninja of a directory; return the log.

    CompileError, with the command and the output of the step that failed. JitkernError if a signal
    ended ninja.
    """
    ninja = [str(find_ninja().path), "-C", str(directory.resolve())]
    _log.info("jitkern: building %s", name)
    status, log = _run_in(directory, ninja, unset)
    if status is None:
        is_done = "no work to do" in _run_in(directory, [*ninja, "-n"], unset)[1]
        status = 0 if is_done else 1 if "\nFAILED: " in log or "\nninja: " in log else -1
    if status < 0:
        raise JitkernError(f"{name}: ninja was killed; the next call builds again")
    if status > 0:
        # ninja prints `FAILED: [code=1] output`, the command, and what it has printed.
        failed = re.search(
            r"^FAILED: .*\n(.+)\n((?:.*\n)*?)(?=\[\d+/\d+\] |FAILED: |ninja: )", log, re.MULTILINE
        )
        command, log = failed.groups() if failed else (shlex.join(ninja), log)
        raise CompileError(f"{name}: build failed", command=command, log=log)
    return log


def _run_in(
    directory: Path, command: Sequence[str], unset: Collection[str]
) -> tuple[int | None, str]:
    """Run a command; return its status and its output.

    The status is None where the host program ignores SIGCHLD or reaps all children. The output goes
    to a file: a pipe has no end while a process that was forked meanwhile lives.
    """
    setpriv = shutil.which("setpriv")
    command = [*((setpriv, *_DIE_WITH_PARENT) if setpriv else ()), *command]
    environment = {key: v for key, v in process_environment().items() if key not in unset}
    log = directory / "ninja.log"
    pid = os.posix_spawn(  # not sys.executable: the host program need not be Python
        command[0],
        command,
        # Killed compilers leave their temporary files in the build directory.
        {**environment, "TMPDIR": str(directory.resolve())},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setpgroup=0,
        setsigdef=[signal.SIGCHLD, signal.SIGPIPE],
    )
    try:
        status = os.waitstatus_to_exitcode(_wait(pid, log))
    except ChildProcessError:
        return None, _text(log)
    except BaseException:
        _stop(pid)
        raise
    return status, _text(log)


def _wait(pid: int, log: Path) -> int:
    """Wait for the end of ninja; return its status. On a terminal, show how far it has come."""
    if sys.stderr is None or not sys.stderr.isatty():
        return os.waitpid(pid, 0)[1]
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            sys.stderr.write("\r\x1b[K")  # clears the line
            return status
        steps = re.findall(r"^\[(\d+)/(\d+)\] ", _text(log), re.MULTILINE)
        if steps:
            sys.stderr.write(f"\rjitkern: built {' of '.join(steps[-1])} files")
            sys.stderr.flush()
        time.sleep(0.1)


def _text(log: Path) -> str:
    return log.read_bytes().decode("utf-8", "replace")


def _stop(pid: int) -> None:
    """Send SIGTERM, not SIGKILL: ninja has to kill its jobs."""
    with suppress(ChildProcessError, ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        until_s = time.monotonic() + _STOP_TIMEOUT_S
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            if time.monotonic() > until_s:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
