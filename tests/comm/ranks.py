"""Processes that are ranks: they run what tests tell them; see rank_child.py.

On the CPU; over NCCL on GPUs, or over the NCCL of fake_nccl.cc; over the driver of ../fake_vmm.c.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import forks
import pytest
from fake_gpu import build_driver, environment, needs_fake_gpu
from filelock import FileLock
from needs import needs_cxx
from paths import TESTS, python_path
from shared_gpu import IS_SHARED, num_gpus
from threads.program import compiled

from jitkern.host import library as host

HERE = Path(__file__).resolve().parent
PROMPT_S = 60.0  # how long a slow machine may take; far below a default deadline of 600 s
LATE_S = 5.0  # beyond a deadline
NUM_FAKE_GPUS = 4
_LINUX = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="puts a libcuda in place")
NCCL_FAKE = pytest.param("nccl-fake", marks=[needs_cxx, _LINUX])
NCCL = pytest.param("nccl", marks=pytest.mark.multigpu(processes=True))
VMM_FAKE = pytest.param("vmm-fake", marks=needs_fake_gpu)


class Rank:
    def __init__(self, parent: socket.socket, env: Mapping[str, str]) -> None:
        self._end, its = socket.socketpair()
        with its:
            code = "import rank_child; rank_child.be_a_rank()"
            self._child = forks.start(code, env=env, streams=(its, 1, 2), parent=parent)
        self._lines = self._end.makefile("r")
        self.pid, self.wait = self._child.pid, self._child.wait

    def tell(self, code: str) -> None:
        self._end.sendall(json.dumps(code).encode() + b"\n")

    def answer(self, within_s: float = PROMPT_S) -> dict[str, Any]:
        self._end.settimeout(within_s)
        line = self._lines.readline()
        assert line, f"the process has ended: {self.wait(within_s)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def value(self, within_s: float = PROMPT_S) -> Any:
        answer = self.answer(within_s)
        assert "error" not in answer, answer
        return answer["value"]

    def error(self, within_s: float = PROMPT_S) -> dict[str, Any]:
        answer = self.answer()
        assert "error" in answer, answer
        assert answer["seconds"] < within_s, answer
        return answer

    def ask(self, code: str) -> Any:
        self.tell(code)
        return self.value()

    def refuses(self, code: str) -> str:
        self.tell(code)
        text: str = self.error()["error"]
        return text

    def kill(self, number: int = signal.SIGKILL) -> None:
        if number == signal.SIGKILL:
            self._child.end()
        else:
            os.kill(self.pid, number)


def all_tell(ranks: list[Rank], code: str) -> None:
    """Tell all; ``{rank}`` is each one's number in the list."""
    for number, rank in enumerate(ranks):
        rank.tell(code.replace("{rank}", str(number)))


def all_do(ranks: list[Rank], code: str) -> list[Any]:
    all_tell(ranks, code)
    return [rank.value() for rank in ranks]


def errors(ranks: list[Rank], within_s: float = PROMPT_S) -> list[dict[str, Any]]:
    return [rank.error(within_s) for rank in ranks]


class Pool:
    def __init__(self, kind: str, folder: Path, env: Mapping[str, str], num_gpus: int) -> None:
        self.kind, self.num_gpus = kind, num_gpus
        self.ranks: list[Rank] = []
        self._folder, self._numbers = folder, itertools.count()
        modules = "nccl_child, rank_child" if kind == "nccl-fake" else "rank_child"
        # tvm_ffi asks whether there is a GPU: CUDA's answer would leave none to those forked.
        fixed = {"PYTHONPATH": python_path(TESTS, HERE), "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        self._env = {**os.environ, **env, **fixed}
        self._orders, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            code = f"import {modules}; rank_child.main()"
            forks.start(code, env=self._env, streams=(its, 1, 2))

    def path(self) -> str:
        return str(self._folder / f"store-{next(self._numbers)}")

    def start(self, count: int) -> list[Rank]:
        ranks = [Rank(self._orders, self._env) for _ in range(count)]
        self.ranks += ranks
        return ranks

    def join(self, count: int) -> list[Rank]:
        ranks = self.start(count)
        all_do(ranks, f"join({self.path()!r}, {{rank}}, {count})")
        return ranks

    def make(self, count: int, args: str = "") -> list[Rank]:
        ranks = self.join(count)
        all_do(ranks, f"make{'_nccl' if self.kind.startswith('nccl') else ''}({args})")
        return ranks

    def tell_share(self, ranks: list[Rank], args: str = "") -> None:
        """Have them make a peer memory, which may raise."""
        all_tell(ranks, f"share({{rank}}, {len(ranks)}, {self.path()!r}, {args})")

    def share(self, ranks: int | list[Rank], args: str = "") -> list[Rank]:
        ranks = self.start(ranks) if isinstance(ranks, int) else ranks
        self.tell_share(ranks, args)
        for rank in ranks:
            rank.value()
        return ranks

    def end(self, begin: int = 0) -> None:
        """End the ranks of a test, which began with so many."""
        for rank in self.ranks[begin:]:
            rank.kill()
        del self.ranks[begin:]

    def close(self) -> None:
        self.end()
        self._orders.close()  # which ends their parent


def build(folder: Path) -> dict[str, str]:
    """Make the libnccl, which is the libcuda too, once for all workers; return what finds it."""
    library = folder / "libcuda.so.1"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            staging = folder.with_suffix(".made")
            staging.mkdir()
            name = "libfake_driver.so"
            driver = build_driver(staging, f"-Wl,-soname,{name}", name=name)
            flags = ("-O1", "-fPIC", "-shared", f"-Wl,-soname,{library.name},--no-as-needed")
            sources = (HERE / "fake_nccl.cc", driver)
            compiled(*sources, target=staging / library.name, flags=flags)
            staging.rename(folder)
    path = f"{folder}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}"
    return {"LD_LIBRARY_PATH": path, "JITKERN_NCCL": str(library), "FAKE_NCCL": "1"}


MADE: dict[str, Pool] = {}


@pytest.fixture(scope="session")
def pools(
    tmp_path_factory: pytest.TempPathFactory, session_cache: Path
) -> Iterator[Callable[[str], Pool]]:
    def pool(kind: str) -> Pool:
        host.module()  # built once, and not by each rank
        if kind not in MADE:
            folder, env, gpus = tmp_path_factory.mktemp(kind), {}, num_gpus()
            if kind == "nccl-fake":
                env, gpus = build(session_cache.parent / "fake_nccl"), NUM_FAKE_GPUS
            elif kind == "vmm-fake":
                build_driver(folder)
                env, gpus = {**environment(folder), "FAKE_GPUS": "4"}, NUM_FAKE_GPUS
            MADE[kind] = Pool(kind, folder, env, gpus)
        return MADE[kind]

    yield pool
    for started in MADE.values():
        started.close()


@pytest.fixture(autouse=True)
def ranks_end() -> Iterator[None]:
    """End the ranks that a test has started, and not those of its module."""
    before = {kind: len(pool.ranks) for kind, pool in MADE.items()}
    yield
    for kind, pool in MADE.items():
        pool.end(before.get(kind, 0))


def processes_of(*kinds: Any, scope: Any = "function") -> Any:
    @pytest.fixture(params=kinds, scope=scope)
    def pool(request: pytest.FixtureRequest, pools: Callable[[str], Pool]) -> Pool:
        return pools(request.param)

    return pool


@pytest.fixture(scope="session")
def pool(pools: Callable[[str], Pool]) -> Pool:
    return pools("cpu")


# Ranks of NCCL, each of a GPU of its own; ranks that share memory, on the CPU and on fake GPUs.
gpus, fake_gpus = processes_of(NCCL_FAKE, NCCL, scope="module"), processes_of(NCCL_FAKE)
hosts, fake_vmm = processes_of("cpu", VMM_FAKE), processes_of(VMM_FAKE)
some = processes_of("cpu", NCCL_FAKE, NCCL)  # ranks that make communicators

CALL_S = 15.0 if IS_SHARED else 0.3  # a deadline of calls: on one GPU NCCL takes 4 s for the first
