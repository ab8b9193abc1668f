"""A rank's notice board: what other ranks ask it by, while its own threads may hang in a call.

Each rank serves its own, on a TCP port of its own, so that nobody's death takes the others' words
away. One line of JSON comes in and one goes out. A request carries a random token that only the
ranks have been told, and nothing but what they posted can be asked for.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from pathlib import Path
from types import MethodType
from typing import Any, TypeVar

from jitkern.env import master_address
from jitkern.files import canonical_json, parse_json

T = TypeVar("T")

_MESSAGE_BYTES = 1 << 20
_IDLE_S = 10.0  # a connection that says nothing is no rank's
_NO_DESCRIPTOR_S = 0.05
_ANY_PORT = 1  # a UDP socket that is connected sends nothing: the port does not matter
_FAR_AWAY = ("192.0.2.1", "2001:db8::1")  # nobody's (RFC 5737, 3849): where the default route leads


class GoneError(Exception):
    """Nobody serves the board any more: the process has ended."""


class SilentError(Exception):
    """There was no answer in time."""


@dataclass(frozen=True)
class Card:
    """What a rank tells all others when they meet.

    Parameters
    ----------
    rank
        Its number.
    pid
        Of its process, in that process's PID namespace.
    host
        The name of its machine.
    place
        Equal where two ranks reach each other over loopback: one machine, one network namespace.
    address
        Where ranks of another place reach it.
    port
        Of its board.
    token
        What a request to its board has to carry.
    facts
        What it says of itself; keys that begin with ``_`` may differ between ranks.
    """

    rank: int
    pid: int
    host: str
    place: str
    address: str
    port: int
    token: str
    facts: dict[str, Any]

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self.host})"

    def to_bytes(self) -> bytes:
        """Return it as JSON."""
        return canonical_json(asdict(self))

    @classmethod
    def from_bytes(cls, raw: bytes) -> Card:
        """Parse it; ValueError where these bytes are no card of this version of jitkern."""
        value = parse_json(raw)
        names = {field.name for field in fields(cls)}
        if not isinstance(value, dict) or set(value) != names:
            raise ValueError(f"{raw[:80]!r}, expected a card with {', '.join(sorted(names))}")
        return cls(**value)


class Board:
    """The board of one communicator of this rank. It answers for as long as the process lives.

    All boards of a process share a port. A forked child does not answer for its parent.

    Parameters
    ----------
    state
        Says where this rank is, at any time and from any thread; with ``"ended"`` in it, no value
        will be posted any more.
    """

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self._token = secrets.token_hex(16)
        # What the serving threads know; it must not lead to the owner, who would never be dropped.
        self._shelf = _Shelf(state)
        self._port = _open_shelf(self._token, self._shelf)

    def card(self, rank: int, facts: Mapping[str, Any], seen_from: str | None = None) -> Card:
        """Return what the other ranks need to ask this board.

        `seen_from` is a host that they reach, such as the store's, to find the address by which
        they reach this one.
        """
        host, address = socket.gethostname(), _own_address(seen_from)
        return Card(
            rank, os.getpid(), host, _place(), address, self._port, self._token, dict(facts)
        )

    def post(self, key: str, value: Any, num_readers: int) -> None:
        """Show a value until `num_readers` ranks have read it."""
        with self._shelf.changed:
            self._shelf.values[key] = (value, set(), num_readers)
            self._shelf.changed.notify_all()

    def wait_read(self, timeout_s: float = 2.0) -> None:
        """Return when all that is posted has been read, or the time is over.

        For a rank that may end now: others are to have what it told, and not that it has ended.
        """
        with self._shelf.changed:
            self._shelf.changed.wait_for(lambda: not self._shelf.values, timeout=timeout_s)

    def wake(self) -> None:
        """Have those that wait for a value look at the state again."""
        self._shelf.state()  # what is told of it when its owner is dropped
        with self._shelf.changed:
            self._shelf.changed.notify_all()

    def drop(self) -> None:
        """Say from now on that the owner is no more; what was posted can still be read."""
        last = self._shelf.state()
        if "ended" not in last:
            last = {"ended": "dropped it"}
        self._shelf.state = lambda: last


def ask(card: Card, request: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
    """Return what a rank's board answers.

    Parameters
    ----------
    card
        The rank's.
    request
        ``{}`` for where it is; with ``"key"``, ``"reader"`` and ``"wait_s"``: for the value posted
        under the key, as ``"value"``, if it is or will be within that many seconds.
    timeout_s
        Seconds to connect, and to wait for the answer.

    Raises
    ------
    GoneError
        The process has ended: nobody listens, or it closed without an answer.
    SilentError
        Nothing came within `timeout_s`; it says how far that went.
    """
    deadline = time.monotonic() + timeout_s
    where = ("127.0.0.1" if card.place == _place() else card.address, card.port)
    line = canonical_json({**request, "token": card.token}) + b"\n"
    try:
        with socket.create_connection(where, timeout=timeout_s) as connection:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.sendall(line)
            raw = _read_line(connection, deadline)
    except TimeoutError:
        raise SilentError(f"at {where[0]} port {where[1]} within {timeout_s:g} s") from None
    except (ConnectionError, EOFError) as error:
        raise GoneError(str(error)) from None
    except OSError as error:
        raise SilentError(f"at {where[0]} port {where[1]}: {error}") from None
    try:
        answer = parse_json(raw)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise GoneError("another program has taken its port")
    return answer


def weakly(function: Callable[[], T], last: T) -> Callable[[], T]:
    """Return a function that does not keep the object that `function` is bound to.

    When that is gone, or raises, it returns what came last, at first `last`.
    """
    find = weakref.WeakMethod(function) if isinstance(function, MethodType) else lambda: function

    def call() -> T:
        nonlocal last
        found = find()
        if found is not None:
            with suppress(Exception):  # an object that is half made, or half gone
                last = found()
        return last

    return call


# -- the serving threads ---------------------------------------------------------------------------


class _Shelf:
    """What is posted on one board, and who has read it."""

    def __init__(self, state: Callable[[], Mapping[str, Any]]) -> None:
        self.state = state
        self.changed = threading.Condition()  # guards the values
        self.values: dict[str, tuple[Any, set[int], int]] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = {}
        key = request.get("key")
        if key is not None:
            with self.changed:
                self.changed.wait_for(
                    lambda: key in self.values or "ended" in self.state(),
                    timeout=float(request["wait_s"]),
                )
                if key in self.values:
                    answer["value"] = self.values[key][0]
        return {**self.state(), **answer}

    def has_read(self, request: dict[str, Any]) -> None:
        key = request.get("key")
        with self.changed:
            if key in self.values:
                _, readers, num_readers = self.values[key]
                readers.add(request["reader"])
                if len(readers) >= num_readers:
                    del self.values[key]
                    self.changed.notify_all()


class _Process:
    """What this process serves: the listener is there when the first board is."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.listener: socket.socket | None = None
        self.shelves: dict[str, _Shelf] = {}


_served = _Process()


def _open_shelf(token: str, shelf: _Shelf) -> int:
    with _served.lock:
        _served.shelves[token] = shelf
        if _served.listener is None:
            _served.listener = _listen()
            args = _served.listener, _served.shelves
            threading.Thread(target=_serve, args=args, name="jitkern-board", daemon=True).start()
        return int(_served.listener.getsockname()[1])


def _serve(listener: socket.socket, shelves: Mapping[str, _Shelf]) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # no descriptor is left
            time.sleep(_NO_DESCRIPTOR_S)
            continue
        thread = threading.Thread(target=_reply, args=(connection, shelves), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, or there are no threads left
            connection.close()


def _reply(connection: socket.socket, shelves: Mapping[str, _Shelf]) -> None:
    # Whoever does not speak our language, or went away, is no matter to this rank.
    with connection, suppress(OSError, EOFError, ValueError, KeyError, TypeError):
        connection.settimeout(_IDLE_S)
        request = parse_json(_read_line(connection, time.monotonic() + _IDLE_S))
        shelf = shelves[request["token"]]
        answer = shelf.answer(request)
        connection.sendall(canonical_json(answer) + b"\n")
        if "value" in answer:
            shelf.has_read(request)


def _read_line(connection: socket.socket, deadline: float) -> bytes:
    parts: list[bytes] = []
    size_bytes = 0
    while not (parts and parts[-1].endswith(b"\n")):
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        parts.append(connection.recv(1 << 16))
        size_bytes += len(parts[-1])
        if not parts[-1] or size_bytes > _MESSAGE_BYTES:
            raise EOFError("closed without an answer" if not parts[-1] else "too long a line")
    return b"".join(parts)


# -- where -----------------------------------------------------------------------------------------


def _listen() -> socket.socket:
    # On all addresses: whether every rank is on this host is known only when they have met.
    if socket.has_dualstack_ipv6():
        with suppress(OSError):  # built with IPv6, and switched off on this machine
            return socket.create_server(
                ("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
            )
    return socket.create_server(("", 0), backlog=1024)


@lru_cache(maxsize=1)
def _place() -> str:
    # Containers of one machine share its boot id, and may have networks of their own.
    boot_id = namespace = ""
    with suppress(OSError):
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    return f"{socket.gethostname()} {boot_id} {namespace}"


def _own_address(seen_from: str | None) -> str:
    """Return the address of the interface that leads to where the ranks meet."""
    # A machine's own name may lead to 127.0.1.1 on itself, as Debian has it.
    for target in (seen_from, master_address(), socket.gethostname(), *_FAR_AWAY):
        with suppress(OSError):
            for family, kind, _, _, where in socket.getaddrinfo(
                target or "", _ANY_PORT, type=socket.SOCK_DGRAM
            ):
                with socket.socket(family, kind) as probe:
                    probe.connect(where)
                    own = str(probe.getsockname()[0])
                if not own.startswith("127.") and own != "::1":
                    return own
    return "127.0.0.1"


# -- forks -----------------------------------------------------------------------------------------


def _renew_in_child() -> None:
    global _served
    # The child's copy would keep the port open when the parent has ended: it would seem to hang.
    if _served.listener is not None:
        _served.listener.close()
    _served = _Process()


os.register_at_fork(after_in_child=_renew_in_child)
