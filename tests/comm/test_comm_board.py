"""The notice board, in this process: who may ask, what is answered, and what when nobody does."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from contextlib import suppress

import pytest

from jitkern import env
from jitkern.comm import board
from jitkern.comm.board import Board, Card, GoneError, SilentError, ask, weakly


@pytest.fixture
def state() -> dict[str, object]:
    return {"issued": 3, "op": "all_reduce"}


@pytest.fixture
def shown(state: dict[str, object]) -> Board:
    return Board(lambda: state)


def test_state(shown: Board, state: dict[str, object]) -> None:
    card = shown.card(5, {"a": 1})
    assert ask(card, {}, 5) == state
    state["issued"] = 4
    assert ask(card, {}, 5) == {"issued": 4, "op": "all_reduce"}
    assert str(card) == f"rank 5 (process {os.getpid()} on {socket.gethostname()})"


def test_values_are_there_until_all_have_read_them(shown: Board) -> None:
    card = shown.card(0, {})
    shown.post("a", [1, {"b": None}], num_readers=2)
    request = {"key": "a", "wait_s": 0}
    for reader in (1, 1, 2):
        assert ask(card, {**request, "reader": reader}, 5)["value"] == [1, {"b": None}]
    shown.wait_read(5)
    assert "value" not in ask(card, {**request, "reader": 3}, 5)


def test_a_value_is_waited_for(shown: Board) -> None:
    card = shown.card(0, {})
    threading.Timer(0.2, shown.post, ("a", 7, 1)).start()
    start = time.monotonic()
    assert ask(card, {"key": "a", "reader": 1, "wait_s": 20}, 25)["value"] == 7
    assert time.monotonic() - start < 10
    assert "value" not in ask(card, {"key": "b", "reader": 1, "wait_s": 0.01}, 5)


def test_nobody_waits_for_a_rank_that_has_ended_it(shown: Board, state: dict[str, object]) -> None:
    def end() -> None:
        state["ended"] = "failed"
        shown.wake()

    threading.Timer(0.2, end).start()
    answer = ask(shown.card(0, {}), {"key": "a", "reader": 1, "wait_s": 20}, 25)
    assert answer == {"issued": 3, "op": "all_reduce", "ended": "failed"}


def test_boards_share_a_port_and_not_what_they_say(shown: Board) -> None:
    other = Board(lambda: {"issued": 0})
    cards = [shown.card(0, {}), other.card(0, {})]
    assert cards[0].port == cards[1].port
    assert [ask(card, {}, 5)["issued"] for card in cards] == [3, 0]


def test_strangers_get_no_answer(shown: Board) -> None:
    card = shown.card(0, {})
    with pytest.raises(GoneError):
        ask(dataclasses.replace(card, token="0" * 32), {}, 5)
    lines = (
        b"\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b'{"token": []}\n',
        b'{"token": 1}\n',
        b"{\n",
    )
    for line in (*lines, b"x" * (1 << 21), b"", json.dumps({"token": card.token}).encode()):
        with (
            socket.create_connection(("127.0.0.1", card.port), timeout=5) as connection,
            suppress(OSError),  # closed before all of it was read
        ):
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(100) == b"", line
    assert ask(card, {}, 5)["issued"] == 3


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    card = Card(0, 1, "here", board._place(), "", port, "", {})
    with pytest.raises(GoneError, match="refused"):
        ask(card, {}, 5)


def test_nobody_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        card = Card(0, 1, "here", board._place(), "", port, "", {})
        with pytest.raises(SilentError, match=rf"at 127.0.0.1 port {port} within 0.1 s"):
            ask(card, {}, 0.1)
    elsewhere = Card(0, 1, "there", "another place", "256.0.0.1", port, "", {})
    with pytest.raises(SilentError, match=r"at 256\.0\.0\.1 port"):
        ask(elsewhere, {}, 5)


def test_a_rank_of_another_place_is_asked_at_its_address(shown: Board) -> None:
    card = shown.card(0, {})
    assert ask(dataclasses.replace(card, place="another"), {}, 5)["issued"] == 3


def test_the_address_is_one_that_leads_to_where_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "")
    assert env.master_address() is None
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    assert board._own_address("127.0.0.1").count(".") == 3  # there is always another


def test_a_card_of_another_program() -> None:
    card = Card(0, 1, "here", "place", "address", 1, "token", {"a": 1})
    assert Card.from_bytes(card.to_bytes()) == card
    for raw in (b"", b"{}", b"[1]", b'{"rank": 0}'):
        with pytest.raises(ValueError):
            Card.from_bytes(raw)


def test_a_forked_child_does_not_keep_the_port_open(shown: Board) -> None:
    card = shown.card(0, {})
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            fresh = Board(lambda: {"issued": 99})
            own = fresh.card(0, {})
            os.write(write, json.dumps([own.port != card.port, ask(own, {}, 5)]).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.wait()
    with open(read) as file:
        assert json.load(file) == [True, {"issued": 99}]
    assert ask(card, {}, 5)["issued"] == 3


def test_weakly() -> None:
    class Owner:
        count = 0

        def say(self) -> int:
            self.count += 1
            return 1 // (2 - self.count) + 10

    owner = Owner()
    say = weakly(owner.say, 0)
    assert say() == 11
    assert say() == 11  # it raised
    del owner
    assert say() == 11
    assert weakly(lambda: 4, 0)() == 4
