"""Processes that are ranks of a communicator, told what to do line by line; see comm_child.py."""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import forks
from paths import TESTS, python_path

ROOT = Path(__file__).resolve().parent.parent.parent
CHILD = Path(__file__).resolve().parent / "comm_child.py"
PROMPT_S = 60.0  # how long a slow machine may take; far below a default deadline of 600 s
LATE_S = 5.0  # beyond a deadline


class Rank:
    """A process that is a rank, or will be."""

    def __init__(self, child: Path = CHILD, **env: str) -> None:
        env = {**os.environ, "PYTHONPATH": python_path(TESTS), **env}
        self.process = forks.start(child, env=env, stdin=PIPE, stdout=PIPE)
        self.pid = self.process.pid
        self.num_unanswered = 0

    def tell(self, do: str, **config: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **config}).encode() + b"\n")
        self.num_unanswered += 1

    def answer(self, within_s: float = PROMPT_S) -> dict[str, Any]:
        ready, _, _ = select.select([self.process.stdout], [], [], within_s)
        assert ready, f"no answer within {within_s} s"
        line = self.process.stdout.readline()
        assert line, f"the process has ended: {self.process.wait()}"
        self.num_unanswered -= 1
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

    def ask(self, do: str, **config: Any) -> Any:
        self.tell(do, **config)
        return self.value()

    def evaluate(self, code: str) -> Any:
        return self.ask("evaluate", code=code)

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait()

    def is_alive(self) -> bool:
        return self.process.poll() is None


class Pool:
    """Rank processes that tests use one after the other."""

    def __init__(
        self, folder: Callable[[], Path], child: Path = CHILD, num_gpus: int = 0, **env: str
    ) -> None:
        self.num_gpus, self.is_fake = num_gpus, bool(env)
        self.num_starts = 0
        self._ranks: list[Rank] = []
        self._folder, self._child, self._env = folder, child, env

    def take(self, count: int) -> list[Rank]:
        """Return processes as they are after their imports."""
        self._ranks = [rank for rank in self._ranks if rank.is_alive()]
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGCONT)
        lacking = count - len(self._ranks)
        self._ranks += [Rank(self._child, **self._env) for _ in range(lacking)]
        return self._ranks[:count]

    def alone(self, **env: str) -> Rank:
        """Return a process of the test's own, which ends it."""
        return Rank(self._child, **{**self._env, **env})

    def start(self, count: int) -> list[Rank]:
        self.num_starts += 1
        ranks = self.take(count)
        for rank in ranks:
            while rank.num_unanswered:  # of a test that has stopped it
                rank.answer()
            rank.ask("reset")
        return ranks

    def join(self, count: int, **config: Any) -> list[Rank]:
        """Return processes that have a group, and no communicator yet."""
        ranks = self.start(count)
        path = str(self._folder() / "group")
        for number, rank in enumerate(ranks):
            rank.tell("join", path=path, rank=number, size=count, **config)
        for rank in ranks:
            rank.value()
        return ranks

    def make(self, count: int, **config: Any) -> list[Rank]:
        """Return ranks that have a communicator."""
        ranks = self.join(count)
        make(ranks, **config)
        return ranks

    def close(self) -> None:
        for rank in self._ranks:
            rank.process.end()


def make(ranks: list[Rank], **config: Any) -> None:
    for rank in ranks:
        rank.tell("make", **{"timeout_s": 30, **config})
    for rank in ranks:
        rank.value()


def everywhere(ranks: list[Rank], code: str) -> list[Any]:
    for rank in ranks:
        rank.tell("evaluate", code=code)
    return [rank.value() for rank in ranks]


def errors(ranks: list[Rank], within_s: float = PROMPT_S) -> list[dict[str, Any]]:
    return [rank.error(within_s) for rank in ranks]
