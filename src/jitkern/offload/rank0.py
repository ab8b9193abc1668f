"""Rank 0 of a shared pool: the memory, and the thread that knows who came and tells everybody."""

from __future__ import annotations

import math
import os
import selectors
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import Any

from jitkern.offload import wire


class Host:
    """What rank 0 does for all: one thread of it hears them from the start until it is closed.

    So they hear of a rank's end, of a deadline, and whoever attaches gets the memory, also while
    rank 0 itself is busy. Its arguments are as of `Meeting`.
    """

    def __init__(
        self, prefix: str, name: str, num_ranks: int, num_bytes: int, timeout_s: float
    ) -> None:
        self._num_ranks, self._num_bytes, self._timeout_s = num_ranks, num_bytes, timeout_s
        self._changed = threading.Condition()  # guards all of the following
        self._rank_of: dict[socket.socket, int | None] = {}  # None: has not said it, or is no rank
        self._is_complete = num_ranks == 1  # all have come at some time
        self._left: set[int] = set()  # those that have closed the pool
        self._failure: str | None = None  # the first; it is for good
        self._step: str | None = None  # what some ranks wait in
        self._arrived: set[int] = set()
        self._limit = (math.inf, 0.0)  # when they no longer do, and how many seconds that were
        self._place = "after it had connected"
        self._is_closed = False
        self._selector = selectors.PollSelector()  # a forked child would share an epoll
        with ExitStack() as undo:
            self.fd: int = wire.make_memory(name, num_bytes)
            undo.callback(os.close, self.fd)
            self._listener = undo.enter_context(wire.listen(prefix, name, num_ranks + 64))
            self._wake, self._woken = map(undo.enter_context, socket.socketpair())
            self._wake.setblocking(False)
            for end in (self._listener, self._woken):
                end.setblocking(False)
                self._selector.register(end, selectors.EVENT_READ)
            thread_name = f"{wire.MAGIC}-{name}"
            self._thread = threading.Thread(target=self._serve, name=thread_name, daemon=True)
            self._thread.start()
            self._resources = undo.pop_all()

    def arrive(self, step: str, failure: str | None) -> None:
        """Say that rank 0 has come to a step."""
        with self._changed:
            self._arrive(0, step, failure, self._timeout_s)
        self._wake_up()

    def outcome(self, step: str) -> str | None:
        """Wait for the others; return why the step has failed, None if it has not."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure is not None or 0 not in self._arrived)
            # All have passed the step, though one of them may have gone away right behind it.
            return self._failure if 0 in self._arrived else None

    def close(self) -> None:
        """Stop answering."""
        with self._changed:
            self._fail("rank 0 has closed the pool")
            self._is_closed = True
        self._wake_up()
        self._thread.join()
        self.abandon()

    def abandon(self) -> None:
        """Close the descriptors only: in a forked child all else is still the parent's."""
        for end in list(self._rank_of):
            end.close()
        self._resources.close()

    def _wake_up(self) -> None:
        with suppress(BlockingIOError):  # so many wait to be read that it wakes up anyway
            self._wake.send(b"!")

    def _serve(self) -> None:
        try:
            while not self._is_closed:
                with self._changed:
                    was_full = self._is_full()
                    left_s = 0.0 if was_full else self._limit[0] - time.monotonic()
                ready = self._selector.select(None if left_s == math.inf else max(left_s, 0.0))
                with self._changed:
                    # Ranks first: one that leaves this pool and comes to the next, leaves first.
                    ends: list[Any] = [key.fileobj for key, _ in ready]
                    for end in sorted(ends, key=lambda end: self._rank_of.get(end) is None):
                        self._hear(end)
                    if self._is_full():
                        # Only when nothing is left to hear of what ranks said, or that one went
                        # away, before the last one came.
                        if was_full and not ready:
                            self._finish_step()
                    elif time.monotonic() >= self._limit[0]:
                        self._miss()
        except Exception as error:
            with self._changed:  # nothing else would end the others' wait
                self._fail(f"rank 0 failed: the thread that answers the others: {error!r}")

    def _is_full(self) -> bool:
        return self._failure is None and len(self._arrived) == self._num_ranks

    def _finish_step(self) -> None:
        self._arrived.clear()
        self._tell_all("go", step=self._step)
        self._place, self._step, self._limit = f"after step {self._step!r}", None, (math.inf, 0.0)

    def _miss(self) -> None:
        came = {0, *self._rank_of.values()}
        missing = [
            f"rank {rank}" + ("" if rank in came else " (never connected)")
            for rank in range(self._num_ranks)
            if rank not in self._arrived
        ]
        place = f"step {self._step!r} within {self._limit[1]:g} s"
        self._fail(
            f"{', '.join(missing)} did not come to {place}; see its log for the reason, and if it "
            "is only slow, give a larger timeout_s"
        )

    def _hear(self, end: socket.socket) -> None:
        if end is self._woken:
            end.recv(64)
        elif end is self._listener:
            self._accept()
        else:
            try:
                message = wire.receive(end)
            except ValueError as error:
                self._refuse(end, str(error))
                return
            rank = self._rank_of[end]
            if message is None:
                self._drop(end)
                if rank is not None:
                    place = f"at step {self._step!r}" if self._step else self._place
                    self._fail(f"rank {rank} went away {place}: its process has ended; see its log")
            elif rank is None:
                self._greet(end, message)
            elif message["kind"] == "step":
                self._arrive(rank, message["step"], message["failure"], message["timeout_s"])
            else:
                self._drop(end)
                self._left.add(rank)
                self._fail(f"rank {rank} has closed the pool")

    def _accept(self) -> None:
        try:
            end, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left: it waits in the queue, and poll() does not
            time.sleep(0.05)
            return
        end.setblocking(False)
        self._rank_of[end] = None
        self._selector.register(end, selectors.EVENT_READ)
        pid, uid = wire.peer(end)
        if uid != os.geteuid():
            who = f"{wire.process_text(pid)} is of uid {uid}"
            self._refuse(end, f"{who}, expected uid {os.geteuid()} as rank 0")

    def _greet(self, end: socket.socket, message: dict[str, Any]) -> None:
        if message["kind"] == "attach":
            if message.get("num_bytes") == self._num_bytes:
                wire.send(end, "memory", fd=self.fd)
                self._drop(end)
            else:
                came = f"num_bytes {message.get('num_bytes')} in the handle"
                self._refuse(end, f"{came}, expected {self._num_bytes} as in the pool")
            return
        rank = message.get("rank")
        if message["kind"] != "join" or not isinstance(rank, int):
            self._refuse(end, f"{message}, expected a rank or a handle")
            return
        if self._left and (self._is_complete or rank in self._left):
            self._drop(end)  # it comes for the next pool of this name, and will try again
            return
        wrong = self._trouble_with(end, rank, message)
        if wrong is not None:
            if not self._is_complete:  # else it is a stranger, and no matter to those who have met
                self._fail(wrong)
            self._refuse(end, wrong)
        elif self._failure is not None:
            self._refuse(end, self._failure)
        else:
            self._rank_of[end] = rank
            joined = [one for one in self._rank_of.values() if one is not None]
            self._is_complete |= len(joined) == self._num_ranks - 1
            wire.send(end, "memory", fd=self.fd)

    def _trouble_with(self, end: socket.socket, rank: int, message: dict[str, Any]) -> str | None:
        """Return why a process cannot be the rank that it says it is, None if it can."""
        who = f"rank {rank} ({wire.process_text(wire.peer(end)[0])})"
        for key, expected in {"num_ranks": self._num_ranks, "num_bytes": self._num_bytes}.items():
            if message.get(key) != expected:
                return f"{who}: {key} {message.get(key)}, expected {expected} as in rank 0"
        for other, taken in self._rank_of.items():
            if taken == rank:
                holder = wire.process_text(wire.peer(other)[0])
                return f"{who}: {holder} is rank {rank} already, expected one process of each rank"
        return None

    def _arrive(self, rank: int, step: str, failure: str | None, timeout_s: float) -> None:
        self._arrived.add(rank)
        if failure is not None:
            self._fail(f"rank {rank} failed at step {step!r}: {failure}")
        elif self._step not in (None, step):
            self._fail(f"rank {rank} came to step {step!r}, expected {self._step!r} as others did")
        elif self._failure is None:  # else everybody has been told
            self._step = step
            self._limit = min(self._limit, (time.monotonic() + timeout_s, timeout_s))

    def _fail(self, text: str) -> None:
        if self._failure is None:  # what comes later is but a consequence
            self._failure, self._limit = text, (math.inf, 0.0)
            self._tell_all("failure", text=text)

    def _tell_all(self, kind: str, **fields: Any) -> None:
        for end, rank in self._rank_of.items():
            if rank is not None:
                wire.send(end, kind, **fields)
        self._changed.notify_all()

    def _refuse(self, end: socket.socket, text: str) -> None:
        wire.send(end, "failure", text=text)
        self._drop(end)

    def _drop(self, end: socket.socket) -> None:
        self._selector.unregister(end)
        del self._rank_of[end]
        end.close()
