"""The protocol of csrc/comm/peer_reduce.h as a model: right, and wrong without any of its rules."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from peer_model import Call, Rules, Setting, WrongError, explore, run

TWO_SHOT = Call(1, two_shot=True)
SETTINGS = {
    "words of a vector": Setting(2, (Call(1),) * 4, words=2),
    "four words": Setting(2, (Call(1),) * 3, words=4),
    "one kernel behind the other": Setting(2, (Call(1),) * 4, words=2, pdl=False),
    "grids": Setting(2, (Call(2, 2), Call(1), Call(3, 3), Call(1), Call(2, 2))),
    "epochs of a kernel": Setting(2, (Call(3), Call(1)), words=2),
    "an epoch of some threads": Setting(2, (Call(3), Call(2)), threads=2, slot=2),
    "three ranks": Setting(3, (Call(1),) * 2),
    "two shots and one": Setting(2, (TWO_SHOT, Call(1), TWO_SHOT, Call(1)), words=2),
    "two shots in epochs": Setting(2, (Call(3, two_shot=True), Call(2)), threads=2, slot=2),
}
# What is left out, where it is found, and as what.
MUTANTS = {
    "one parity": (Rules(parities=1), "words of a vector", "which is not read"),
    "nothing is made unwritten": (Rules(clears=False), "words of a vector", "which is not read"),
    "made unwritten too soon": (Rules(reads_first=False), "words of a vector", "what is not there"),
    "no epochs": (Rules(counts=False), "words of a vector", "which is not read"),
    "sends before it waits": (Rules(waits_first=False), "words of a vector", "which is not read"),
    "sends all ones": (Rules(escapes=False), "words of a vector", "waits for ever"),
    "looks at the first word": (Rules(sees_all_words=False), "words of a vector", "takes None"),
    "one slot of all writers": (Rules(own_slots=False), "three ranks", "which is not read"),
    "no barrier": (Rules(barrier=False), "an epoch of some threads", "which is not read"),
    "no fence": (Rules(fence=False), "epochs of a kernel", "takes"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_order(name: str, record_property: pytest.RecordProperty) -> None:
    states = explore(SETTINGS[name], most=20_000)
    record_property("states", states)
    assert states > 100


@pytest.mark.parametrize("mistake", MUTANTS)
def test_a_rule_that_is_left_out(mistake: str) -> None:
    rules, name, text = MUTANTS[mistake]
    with pytest.raises(WrongError, match=text):
        explore(replace(SETTINGS[name], rules=rules))


def any_call(rng: random.Random, most: int) -> Call:
    vectors = rng.randrange(1, most)
    blocks = rng.randrange(1, min(4, vectors + 1))
    return Call(vectors, blocks, two_shot=rng.random() < 0.4)


def test_some_orders_of_more() -> None:
    rng = random.Random(5)
    for seed in range(50):
        ranks = rng.choice((2, 2, 3, 4, 8))
        calls = rng.randrange(2, 3 if ranks == 8 else 7)
        setting = Setting(
            ranks,
            tuple(any_call(rng, 4 if ranks == 8 else 9) for _ in range(calls)),
            threads=rng.choice((1, 2, 3)),
            slot=rng.randrange(1, 4),
            words=rng.choice((1, 2, 4)),
            pdl=rng.random() < 0.8,
        )
        assert run(setting, seed) > 0
