"""Running ninja so that nothing outlives us: neither kill -9 nor Ctrl-C leaves a compiler behind.

ninja starts each job in a process group of its own and, on SIGTERM, kills those groups; so what has
to be seen to is that ninja gets a SIGTERM. The kernel sends it when this process dies
(PR_SET_PDEATHSIG), and `run_ninja` sends it when it is interrupted.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from jitkern.compilers.find import find_ninja
from jitkern.compilers.progress import Progress, shown
from jitkern.env import process_environment
from jitkern.errors import CompileError, JitkernError, ToolchainError
from jitkern.fs import write_whole

_INTERRUPTED = "ninja: build stopped: interrupted by user."
# Runs between fork and ninja, as a program of its own: preexec_fn is not safe with threads. The
# parent may die before prctl, hence the comparison. -I -S: 20 ms instead of 60.
_LAUNCHER = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_STOP_TIMEOUT_S = 10.0

_STATUS = re.compile(rb"\[(\d+)/(\d+)\] ")  # as NINJA_STATUS asks for it


@dataclass(frozen=True)
class Step:
    """One step of a build: a command that makes `output`, relative to the build directory.

    The compiler reports what it has read in `depfile`, in make's syntax.
    """

    output: str
    inputs: tuple[str, ...]
    command: tuple[str, ...]
    depfile: str | None = None


def ninja_text(steps: Sequence[Step]) -> str:
    """Write a build.ninja."""
    # Imported here: the package costs 18 ms, and a process that loads what is built needs none.
    from ninja.ninja_syntax import Writer

    text = io.StringIO()
    # Lines are not to be folded: a space inside quotes would become another number of them.
    writer = Writer(text, width=10**9)  # type: ignore[arg-type] # any text file will do
    writer.variable("ninja_required_version", "1.10")
    for number, step in enumerate(steps):
        writer.newline()
        writer.rule(
            f"r{number}",
            _literal(shlex.join(step.command)),
            depfile=None if step.depfile is None else _literal(step.depfile),
            deps=None if step.depfile is None else "gcc",
        )
        writer.build([_path(step.output)], f"r{number}", list(map(_path, step.inputs)))
    return text.getvalue()


def _literal(text: str) -> str:
    return text.replace("$", "$$")


def _path(text: str) -> str:
    """Escape what Writer leaves: it sees to colons, spaces, and a ``$`` in front of a space."""
    return re.sub(r"\$(?! )", "$$", text)


def run_ninja(
    name: str, directory: Path, steps: Sequence[Step], unset: Collection[str] = ()
) -> str:
    """Build in a directory; blocks until done, and shows how far it is.

    Parameters
    ----------
    name
        What is built, for messages.
    directory
        Receives build.ninja, the outputs and ninja's own records. Must exist.
    steps
        The steps.
    unset
        Variables of the environment that they are not to see.

    Returns
    -------
    str
        The log: every command and what it said.

    Raises
    ------
    CompileError
        A step failed; carries its command and the whole log.
    JitkernError
        A signal ended it.
    ToolchainError
        There is no ninja.
    """
    ninja = find_ninja()
    text = ninja_text(steps)
    write_whole(directory / "build.ninja", text.encode("utf-8", "surrogateescape"))
    with shown(name) as progress:
        status, log = _run([*ninja.command, "-v"], directory, progress, unset)
    if status < 0 or log.rstrip().endswith(_INTERRUPTED):
        # A Ctrl-C reaches ninja too. It is no fault of the source, and not to be kept as one.
        raise JitkernError(f"{name}: the build was interrupted; it begins anew with the next call")
    if status != 0:
        command = _failed_command(log) or shlex.join(ninja.command)
        raise CompileError(f"{name}: build failed", command=command, log=log)
    return log


def read_deps(directory: Path) -> tuple[Path, ...]:
    """Every file that the compilers of a finished build reported to have read, sorted.

    Raises
    ------
    CompileError
        ninja kept no record.
    """
    command = [*find_ninja().command, "-t", "deps"]
    status, listing = _run(command, directory)
    if status != 0:
        raise CompileError("ninja -t deps failed", command=shlex.join(command), log=listing)
    names = {line[4:] for line in listing.splitlines() if line.startswith("    ")}
    return tuple(sorted((directory / name).resolve() for name in names))


def _run(
    command: list[str],
    directory: Path,
    progress: Progress | None = None,
    unset: Collection[str] = (),
) -> tuple[int, str]:
    if not sys.executable:
        raise ToolchainError("sys.executable is empty; start Python by its full path")
    inherited = process_environment().items()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command],
        cwd=directory,
        # Temporary files of compilers that are killed stay with the build, which is thrown away.
        env={
            **{name: value for name, value in inherited if name not in unset},
            "NINJA_STATUS": "[%f/%t] ",
            "TMPDIR": str(directory.resolve()),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    lines = []
    try:
        for line in process.stdout or ():
            lines.append(line)
            step = _STATUS.match(line)
            if step is not None and progress is not None:
                progress.done, progress.total = int(step[1]), int(step[2])
        process.wait()
    except BaseException:
        # SIGTERM, not the SIGKILL of subprocess.run: ninja has to kill its jobs.
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
    finally:
        if process.stdout is not None:
            process.stdout.close()
    return process.returncode, b"".join(lines).decode("utf-8", "replace")


def _failed_command(log: str) -> str | None:
    """ninja prints `FAILED: [code=1] output` and below it the command."""
    match = re.search(r"^FAILED: .*\n(.+)$", log, re.MULTILINE)
    return match[1] if match is not None else None
