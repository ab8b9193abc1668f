"""A line on the terminal about a build that takes longer than a second."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from jitkern.fs import ForkLocal

_log = logging.getLogger("jitkern")

_FIRST_S = 1.0  # before that nobody wonders
_EVERY_S = 0.1

_line = ForkLocal(threading.Lock)  # held by the build that has the line
_quiet = 0


class Progress:
    """How far a build is.

    Attributes
    ----------
    name : str
        What is built.
    done, total : int
        Steps that are done, and of how many; 0 of 0 where that is not known.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.done = self.total = 0
        self._started_s = time.monotonic()

    def __str__(self) -> str:
        steps = f"{self.done}/{self.total} steps, " if self.total else ""
        return f"jitkern: building {self.name}: {steps}{time.monotonic() - self._started_s:.0f} s"


@contextmanager
def shown(name: str) -> Iterator[Progress]:
    """Show on standard error that `name` is built, from one second on and until the body ends.

    Where that is no terminal, there is one line of log instead. Of several builds at once, one is
    shown.
    """
    progress, ended = Progress(name), threading.Event()
    thread = threading.Thread(target=_show, args=(progress, ended), daemon=True)
    thread.start()
    try:
        yield progress
    finally:
        ended.set()
        thread.join()


@contextmanager
def quiet() -> Iterator[None]:
    """Show nothing in the body, for one that has a display of its own on the terminal."""
    global _quiet
    _quiet += 1
    try:
        yield
    finally:
        _quiet -= 1


def _show(progress: Progress, ended: threading.Event) -> None:
    if ended.wait(_FIRST_S):
        return
    terminal = sys.stderr is not None and sys.stderr.isatty()
    if not terminal:
        _log.info("%s", progress)
    line = _line.value
    while terminal and not ended.wait(_EVERY_S):
        if not _quiet and line.acquire(blocking=False):
            try:
                _show_line(progress, ended)
            finally:
                line.release()


def _show_line(progress: Progress, ended: threading.Event) -> None:
    # Imported here: it takes longer than most builds that are found in a cache.
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    def text() -> Text:
        return Text(str(progress), no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True)
    # What others write meanwhile is not redirected: their streams are not ours to replace.
    with Live(
        console=console,
        get_renderable=text,
        refresh_per_second=2,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        while not ended.wait(_EVERY_S) and not _quiet:
            pass
