"""A gate between forks and what no child may inherit half done: imports, loads, compiles.

A child has only the thread that forked. If another one held a lock of importlib, of the dynamic
loader or of NVRTC, the child's first import or compile would wait for it forever.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from types import TracebackType

_FORK_WAIT_S = 30.0  # a fork waits so long for other threads; a large kernel compiles in seconds


class _Gate:
    """Threads inside keep others from forking; a fork in progress keeps them from entering.

    It may be entered again by a thread that is inside. It is held from before a fork until after
    it: at-fork hooks of others run meanwhile, and let threads run.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: Counter[int] = Counter()  # how often each thread has entered
        self._forking = 0  # the thread that forks
        self._is_torn = False  # in a child: another thread was inside when this process was forked

    def __enter__(self) -> None:
        if self._is_torn:
            raise RuntimeError(
                "jitkern: this process was forked while another thread was compiling or importing; "
                "start it with multiprocessing's spawn or forkserver, or fork before that"
            )
        me = threading.get_ident()
        with self._changed:
            while self._forking not in (0, me) and not self._inside[me]:
                self._changed.wait()
            self._inside[me] += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._inside[threading.get_ident()] -= 1
            self._changed.notify_all()

    def _others(self) -> bool:
        me = threading.get_ident()
        return any(count for thread, count in self._inside.items() if thread != me)

    def before_fork(self) -> None:
        until_s = time.monotonic() + _FORK_WAIT_S
        with self._changed:
            while self._forking:
                self._changed.wait()
            self._forking = threading.get_ident()
            while self._others() and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)

    def after_in_parent(self) -> None:
        with self._changed:
            self._forking = 0
            self._inside = +self._inside  # forgets threads that have left
            self._changed.notify_all()

    def after_in_child(self) -> None:
        self._is_torn = self._is_torn or self._others()
        self._changed = threading.Condition()
        me = threading.get_ident()
        self._inside = Counter({me: self._inside[me]})
        self._forking = 0


gate = _Gate()
os.register_at_fork(
    before=gate.before_fork,
    after_in_parent=gate.after_in_parent,
    after_in_child=gate.after_in_child,
)
