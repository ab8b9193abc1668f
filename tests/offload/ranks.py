"""Processes that are ranks of a shared pool, told what to do line by line; see share_child.py."""

from __future__ import annotations

import json
import os
import select
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any

import forks
import pytest
from paths import python_path

ROOT = Path(__file__).resolve().parent.parent.parent
CHILD = Path(__file__).resolve().parent / "share_child.py"
PROMPT_S = 20.0  # far below the 300 s that a rank waits by default
NUM_BYTES = 3 * 4096


class Rank:
    """A process that is a rank, or will be."""

    def __init__(self, name: str) -> None:
        self.name = name
        env = {**os.environ, "PYTHONPATH": python_path()}
        self.process = forks.start(CHILD, env=env, stdin=PIPE, stdout=PIPE)

    def tell(self, do: str, **config: Any) -> None:
        self.process.stdin.write(json.dumps({"do": do, **config}).encode() + b"\n")

    def open(self, rank: int, num_ranks: int, **config: Any) -> None:
        config = {"name": self.name, "num_bytes": NUM_BYTES, **config}
        self.tell("open", rank=rank, num_ranks=num_ranks, **config)

    def answer(self) -> dict[str, Any]:
        ready, _, _ = select.select([self.process.stdout], [], [], PROMPT_S)
        assert ready, f"no answer within {PROMPT_S} s"
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer

    def value(self) -> Any:
        answer = self.answer()
        assert "error" not in answer, answer
        return answer["value"]

    def error(self) -> str:
        error: str = self.answer()["error"]
        return error

    def ask(self, do: str, **config: Any) -> Any:
        self.tell(do, **config)
        return self.value()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def name() -> str:
    return f"test-{uuid.uuid4().hex}"


@pytest.fixture
def start(name: str) -> Iterator[Callable[[int], list[Rank]]]:
    """Start processes that have not opened a pool yet."""
    started: list[Rank] = []

    def start(count: int) -> list[Rank]:
        new = [Rank(name) for _ in range(count)]
        started.extend(new)
        for rank in new:
            rank.ask("descriptors")  # it has imported all, which its timeouts are not to count
        return new

    yield start
    for rank in started:
        rank.process.end()


Start = Callable[[int], list[Rank]]


def meet(ranks: list[Rank], **config: Any) -> None:
    for rank, process in enumerate(ranks):
        process.open(rank, len(ranks), **config)
    for process in ranks:
        process.value()


def step(ranks: list[Rank], name: str) -> None:
    for process in ranks:
        process.tell("step", name=name)
    for process in ranks:
        process.value()


def errors(ranks: list[Rank], step: str) -> list[str]:
    for process in ranks:
        process.tell("step", name=step)
    return [process.error() for process in ranks]


def all_say(texts: list[str], *parts: str) -> None:
    for text in texts:
        assert text.startswith(f"ShareError: {parts[0]}"), text
        assert all(part in text for part in parts), text
