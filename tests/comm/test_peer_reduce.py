"""all_reduce over memory that ranks share: bit for bit, and when a rank does not come."""

from __future__ import annotations

import ctypes
import random
import signal
import time
from typing import Any

import pytest
import torch
from needs import needs_cxx
from ref import refusals
from rows_ranks import Ranks, any_call
from torch._subclasses import FakeTensorMode

from jitkern.comm.peer_reduce import PeerReducer
from jitkern.errors import CommTimeoutError

pytestmark = needs_cxx


INTACT_AT = 256  # bytes: PeerControl of csrc/comm/peer_reduce.h


@pytest.mark.parametrize(("size", "calls"), [(2, 2_000), (4, 500)])
def test_ranks_get_the_same_bits(size: int, calls: int) -> None:
    """Random sizes, dtypes, algorithms and alignments, in slots that take several rounds."""
    ranks = Ranks(size, torch.device("cpu"), 60, slot_bytes=500)

    def run(rank: int) -> None:
        rng = random.Random(size)
        for _ in range(calls):
            call = any_call(ranks.reducers[rank], rng)
            call.run()
            call.check()

    ranks.each(run)


def some(size: int = 2, device_timeout_s: float = 0.05) -> tuple[Ranks, PeerReducer, PeerReducer]:
    """Return ranks that are not called at once, and the first two reducers."""
    ranks = Ranks(size, torch.device("cpu"), device_timeout_s, slot_bytes=1000)
    return ranks, *ranks.reducers[:2]


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_a_rank_that_does_not_come(algorithm: Any) -> None:
    ranks, _, own = some(3)
    x = torch.ones(64)
    with pytest.raises(CommTimeoutError, match="ranks 0, 2 did not come in time") as raised:
        own.all_reduce(x, algorithm=algorithm)
    error = raised.value
    assert (error.op, error.number, error.rank) == ("all_reduce", 1, 1)
    assert error.missing == (0, 2)
    before = ranks.memory.clone()
    with pytest.raises(CommTimeoutError, match=r"call 1 of rank 1.*until reset\(\)"):
        own.reduce_scatter(torch.ones(4), torch.ones(12))
    assert torch.equal(ranks.memory, before)
    own.reset()
    with pytest.raises(CommTimeoutError, match="reduce_scatter: call 3 of rank 1"):
        own.reduce_scatter(torch.ones(4), torch.ones(12))


def test_what_another_rank_has_sent_stays() -> None:
    """It gave up too soon, and this one comes late: it gets its value, and nothing in the next."""
    _, other, own = some()
    with pytest.raises(CommTimeoutError):
        other.all_reduce(torch.full((5,), 2.0))
    own.all_reduce(x := torch.ones(5))
    assert x.tolist() == [3.0] * 5
    with pytest.raises(CommTimeoutError) as raised:
        own.all_reduce(torch.ones(5))
    assert raised.value.missing == (0,) and raised.value.number == 2


@pytest.mark.parametrize("algorithm", ["one_shot", "two_shot"])
def test_who_has_come_is_not_missing(algorithm: Any) -> None:
    """Rank 0 has sent, and waits for rank 2 as well: it has not given up, and says nothing yet."""
    ranks, other, own = some(3)
    with pytest.raises(CommTimeoutError):
        other.all_reduce(torch.ones(64), algorithm=algorithm)
    intact = ctypes.c_uint32.from_address(ranks.addresses[0] + INTACT_AT)
    assert intact.value == 0b110
    intact.value = 0xFFFFFFFF
    with pytest.raises(CommTimeoutError, match="rank 2 did not come in time") as raised:
        own.all_reduce(torch.ones(64), algorithm=algorithm)
    assert raised.value.missing == (2,)


def test_who_has_given_up_names_whom_it_waited_for() -> None:
    """Rank 0 has not come either, as it waited for rank 2 in vain before."""
    ranks, _, own = some(3)
    ctypes.c_uint32.from_address(ranks.addresses[0] + INTACT_AT).value = 0b100
    with pytest.raises(CommTimeoutError, match="rank 2 did not come in time"):
        own.all_reduce(torch.ones(64))


def test_late_by_a_hair() -> None:
    """What comes between the last look and the end of the deadline has come: nobody is missing."""
    _, other, own = some(device_timeout_s=0.2)

    def come(*_: object) -> None:
        time.sleep(0.3)  # in the wait, which asks for signals and then looks at the clock
        other.all_reduce(torch.full((5,), 2.0))

    before = signal.signal(signal.SIGALRM, come)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        own.all_reduce(x := torch.ones(5))
        assert x.tolist() == [3.0] * 5
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_barrier() -> None:
    _, other, own = some()
    with pytest.raises(CommTimeoutError):
        other.device_barrier()
    own.device_barrier()
    with pytest.raises(CommTimeoutError, match="device_barrier: call 2 of rank 1") as raised:
        own.device_barrier()
    assert (raised.value.op, raised.value.missing) == ("device_barrier", (0,))
    with pytest.raises(CommTimeoutError, match="device_barrier: call 2 of rank 1"):
        own.all_reduce(torch.ones(5))


def test_no_items_and_tracers() -> None:
    """No rank is waited for."""
    _, _, own = some()
    own.all_reduce(torch.ones(0))
    own.reduce_scatter(torch.ones(0), torch.ones(0))
    x = torch.ones(5)
    with FakeTensorMode(), pytest.raises(RuntimeError, match="all_reduce: cannot run inside"):
        own.all_reduce(x)


def test_interrupted() -> None:
    _, _, own = some(device_timeout_s=30)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(KeyboardInterrupt):
        own.all_reduce(torch.ones(5))
    with pytest.raises(Exception, match="expected reset\\(\\) on every rank"):
        own.all_reduce(torch.ones(5))


MISTAKES = {
    "all_reduce([1.0])": "TypeError: all_reduce: x: list or tuple, expected a tensor",
    "all_reduce(ones(3).double())": "TypeError: all_reduce: x: dtype float64, expected float32,",
    "all_reduce(ones(4, 4).tril().T)": "ValueError: all_reduce: x: not contiguous",
    "all_reduce(ones(3), output=ones(3).half())": "TypeError: all_reduce: output: dtype float16,",
    "all_reduce(ones(3), output=ones(4))": "ValueError: all_reduce: output: 4 items, expected 3,",
    "all_reduce(x[:4], output=x[1:5])": "ValueError: all_reduce: output: memory of x, expected",
    "all_reduce(ones(3), 'max')": "ValueError: all_reduce: op: 'max', expected 'sum'",
    "all_reduce(ones(3), algorithm='ring')": "ValueError: all_reduce: algorithm: 'ring', expected",
    "all_reduce(ones(3).requires_grad_())": "RuntimeError: all_reduce: x",
    "all_reduce(unaligned)": "ValueError: all_reduce: x: memory that is not aligned",
    "reduce_scatter(ones(3), ones(5))": "ValueError: reduce_scatter: x: 5 items, expected 6,",
    "reduce_scatter(x[:3], x, 'avg')": "ValueError: reduce_scatter: op: 'avg', expected 'sum'",
    "reduce_scatter(x[:3], x)": "ValueError: reduce_scatter: output: memory of x, expected",
}


@pytest.mark.parametrize("code", MISTAKES)
def test_wrong_calls_send_nothing(code: str) -> None:
    (ranks, _, own), x = some(), torch.ones(6)
    before = ranks.memory.clone()
    unaligned = torch.frombuffer(bytearray(9), dtype=torch.float32, offset=1, count=2)
    names = {"r": own, "ones": torch.ones, "x": x, "unaligned": unaligned}
    with pytest.raises(Exception) as raised:
        eval(f"r.{code}", names)
    assert f"{raised.typename}: {raised.value}".startswith(MISTAKES[code])
    assert torch.equal(ranks.memory, before)


test_wrong_reducers = refusals(
    PeerReducer,
    {
        "addresses": [16, 32],
        "rank": 0,
        "world_size": 2,
        "workspace_bytes": 1 << 20,
        "device": "cpu",
    },
    ({"world_size": 9}, ValueError, "world_size: 9, expected 2 to 8"),
    ({"rank": 2}, ValueError, "rank: 2, expected 0 to 1"),
    ({"addresses": [16]}, ValueError, "addresses: [16], expected 2 multiples of 16 bytes"),
    ({"addresses": [16, 24]}, ValueError, "addresses: [16, 24], expected 2 multiples of 16 bytes"),
    ({"workspace_bytes": 1024}, ValueError, "workspace_bytes: 1024, expected at least 9216 for 2"),
    ({"device_timeout_s": 0}, ValueError, "device_timeout_s: 0, expected above 0"),
)
