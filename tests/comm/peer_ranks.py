"""Processes that are ranks of a PeerMemory, on the CPU or on fake GPUs; see peer_child.py."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from children import wait_until
from fake_gpu import build_driver, environment, needs_fake_gpu

CHILD = Path(__file__).resolve().parent / "peer_child.py"
PROMPT_S = 40.0
NUM_GPUS = 4


class Rank:
    """A process that is a rank, or will be."""

    def __init__(self, server: Path, folder: Path) -> None:
        self._end = socket.socket(socket.AF_UNIX)
        self._end.connect(str(server))
        self._end.settimeout(PROMPT_S)
        self._lines = self._end.makefile("rw")
        self.ask(f"os.environ.update(TEST_FOLDER={str(folder)!r})")
        self.pid: int = self.ask("os.getpid()")

    def tell(self, code: str) -> None:
        self._lines.write(json.dumps(code) + "\n")
        self._lines.flush()

    def answer(self) -> dict[str, Any]:
        line = self._lines.readline()
        assert line, "the process has ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def value(self) -> Any:
        answer = self.answer()
        assert "error" not in answer, answer
        return answer["value"]

    def error(self) -> str:
        answer = self.answer()
        assert "error" in answer, answer
        error: str = answer["error"]
        return error

    def ask(self, code: str) -> Any:
        self.tell(code)
        return self.value()

    def refuses(self, code: str) -> str:
        self.tell(code)
        return self.error()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._lines.close()
        self._end.close()


class Ranks:
    """Those of one test."""

    def __init__(self, server: Path, folder: Path) -> None:
        self._server, self._folder = server, folder
        self.all: list[Rank] = []

    def start(self, count: int) -> list[Rank]:
        new = [Rank(self._server, self._folder) for _ in range(count)]
        self.all += new
        return new

    def tell_make(self, ranks: list[Rank], args: str = "") -> None:
        """Have them meet, whatever comes of it."""
        number = len(list(self._folder.iterdir()))
        (self._folder / f"store-{number:04}").touch()
        for rank, process in enumerate(ranks):
            process.tell(f"make({rank}, {len(ranks)}, {args})")

    def meet(self, count: int, args: str = "") -> list[Rank]:
        ranks = self.start(count)
        self.tell_make(ranks, args)
        for process in ranks:
            process.value()
        return ranks

    def errors(self, ranks: list[Rank], args: str = "") -> list[str]:
        self.tell_make(ranks, args)
        return [process.error() for process in ranks]


def together(ranks: list[Rank], code: str) -> list[Any]:
    for process in ranks:
        process.tell(code)
    return [process.value() for process in ranks]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """What forks ranks, on the CPU or on fake GPUs: one for the session, as torch takes seconds."""
    running: dict[str, tuple[subprocess.Popen[bytes], Path]] = {}
    # Not pytest's, whose path may be longer than that of a socket.
    short = Path(tempfile.mkdtemp(prefix="jitkern-"))

    def server(kind: str) -> Path:
        if kind not in running:
            folder = tmp_path_factory.mktemp("driver")
            env = {**environment(folder)}
            if kind == "cuda":
                build_driver(folder)
                env["FAKE_GPUS"] = str(NUM_GPUS)
            at = short / kind
            process = subprocess.Popen([sys.executable, str(CHILD), str(at)], env=env)
            running[kind] = process, at
            wait_until(lambda: listens(at) or process.poll() is not None, timeout_s=240)
        return running[kind][1]

    yield server
    for process, at in running.values():
        process.kill()
        process.wait()
        at.unlink(missing_ok=True)
    short.rmdir()


def listens(at: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as end, suppress(OSError):
        end.connect(str(at))
        return True
    return False


def ranks_of(kind: str, servers: Callable[[str], Path], folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(servers(kind), folder)
    yield ranks
    for one in ranks.all:
        one.kill()


CUDA = pytest.param("cuda", marks=needs_fake_gpu)


@pytest.fixture(params=["cpu", CUDA])
def any_ranks(
    request: pytest.FixtureRequest, servers: Callable[[str], Path], tmp_path: Path
) -> Iterator[Ranks]:
    """Ranks on the CPU, and on fake GPUs."""
    yield from ranks_of(request.param, servers, tmp_path)


@pytest.fixture
def cpu_ranks(servers: Callable[[str], Path], tmp_path: Path) -> Iterator[Ranks]:
    yield from ranks_of("cpu", servers, tmp_path)


@pytest.fixture(params=[CUDA])
def gpu_ranks(servers: Callable[[str], Path], tmp_path: Path) -> Iterator[Ranks]:
    yield from ranks_of("cuda", servers, tmp_path)
