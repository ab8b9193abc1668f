"""PeerCommunicator: what a communicator does, with small sums over memory of the ranks."""

from __future__ import annotations

import os
import time

import pytest
import torch
from bodies import BODIES
from comm_ranks import LATE_S, Pool, Rank, everywhere
from nccl_ranks import CUDA, all_do
from needs import needs_cxx
from shared_gpu import IS_SHARED, num_gpus

from jitkern.comm import Communicator, PeerCommunicator
from jitkern.host import module as host

pytestmark = needs_cxx
MANY_S = 300.0  # for 100,000 calls, of four ranks


def make(ranks: list[Rank], **config: object) -> None:
    for rank in ranks:
        rank.tell("make_peer", **config)
    for rank in ranks:
        rank.value()


@pytest.fixture(scope="module", params=["cpu", CUDA])
def kind(request: pytest.FixtureRequest) -> str:
    host.module()  # built once, and not by each rank
    return str(request.param)


@pytest.fixture(scope="module", params=[2, 4])
def joined(pool: Pool, kind: str, request: pytest.FixtureRequest) -> list[Rank]:
    if kind == "cuda" and num_gpus() < request.param:
        pytest.skip(f"needs {request.param} GPUs")
    return pool.join(request.param)


@pytest.fixture(scope="module")
def ranks(joined: list[Rank], kind: str) -> list[Rank]:
    make(joined, on_gpus=kind == "cuda", max_bytes=1 << 40)
    return joined


@pytest.mark.parametrize("name", BODIES)
def test_body(ranks: list[Rank], name: str) -> None:
    all_do(ranks, "body", name=name)


def test_items_have_the_same_bits_beside_any_others(pool: Pool, kind: str) -> None:
    two = pool.join(2)
    make(two, on_gpus=kind == "cuda", max_bytes=1 << 30)
    found = all_do(two, "prefixes")
    assert found[0] == found[1] and all(found[0])


@pytest.fixture
def two(pool: Pool, kind: str) -> list[Rank]:
    two = pool.join(2)
    make(two, on_gpus=kind == "cuda", deadline_s=1.0)
    return two


def test_small_sums_take_no_other_communicator(two: list[Rank]) -> None:
    assert everywhere(two, "[comm.rank, comm.size]") == [[0, 2], [1, 2]]
    assert two[0].evaluate("isinstance(comm, Communicator)")
    assert "sums up to 4194304 bytes by peer memory" in two[0].evaluate("repr(comm)")
    everywhere(two, "setattr(comm, '_comm', None)")
    x = "(lambda x: comm.all_reduce(x) or x.tolist())(ones(5, dtype=torch.{0}))"
    for dtype in ("float32", "float16", "bfloat16"):
        assert everywhere(two, x.format(dtype)) == [[2.0] * 5] * 2
    for call in ("all_reduce(ones(5), 'max')", "all_reduce(ones(5, dtype=torch.int32))"):
        two[0].tell("evaluate", code=f"comm.{call}")
        assert two[0].error()["error"].startswith("AttributeError")
    assert two[0].evaluate("comm.max_bytes") == 4 << 20


def test_a_late_rank_and_all_go_on(two: list[Rank]) -> None:
    two[0].tell("sum_late")
    assert two[0].error(1.0 + LATE_S)["missing"] == [1]
    two[1].evaluate("comm.all_reduce(ones(5))")  # what the other one has sent is there
    two[0].tell("sum_late")
    assert "until reset()" in two[0].error()["error"]
    everywhere(two, "comm.reset()")
    everywhere(two, "comm.all_reduce(ones(5))")


def test_a_late_gpu_and_all_go_on(two: list[Rank], kind: str) -> None:
    """What its rank queued long before is over before the others forget it."""
    if kind == "cpu":
        pytest.skip("its calls wait by themselves")
    # All kernels are loaded: to load one would wait for what the GPU has to do.
    everywhere(two, "torch.cuda._sleep(1) or comm.all_reduce(ones(5) * 7)")
    two[1].evaluate("[torch.cuda._sleep(2_000_000_000) for _ in range(4)]")  # a second each
    two[1].tell("evaluate", code="comm.all_reduce(ones(5) * 7)")
    two[0].tell("sum_late")
    assert two[0].error(1.0 + LATE_S)["missing"] == [1]
    two[1].value()
    everywhere(two, "comm.reset()")
    for _ in range(4):
        code = "(lambda x: comm.all_reduce(x) or x.tolist())(ones(5))"
        assert everywhere(two, code) == [[2.0] * 5] * 2


def test_closed(two: list[Rank]) -> None:
    """Sums go to the communicator."""
    everywhere(two, "[comm.close(), comm.close()] and None")
    assert everywhere(two, "comm.all_reduce(ones(5))") == [None, None]
    assert everywhere(two, "comm.reset()") == [None, None]


def test_many_sums_of_ranks_that_are_late(joined: list[Rank], kind: str) -> None:
    make(joined, on_gpus=kind == "cuda")
    count = 100_000 if kind == "cuda" and not IS_SHARED else 1000
    for rank in joined:
        rank.tell("many_sums", count=count)
    assert [rank.value(MANY_S) for rank in joined] == [0] * len(joined)


def test_rows_of_one_pool(joined: list[Rank], kind: str) -> None:
    make(joined, on_gpus=kind == "cuda")
    assert all(all_do(joined, "rows", name=f"jitkern-test-{os.getpid()}"))


def test_a_rank_is_killed_that_others_bring_rows_to(two: list[Rank]) -> None:
    for rank in two:
        rank.tell("rows_late", name=f"jitkern-test-{os.getpid()}")
    answer = two[0].error()  # the pool and the memory are made first
    assert answer["error"].startswith("CommTimeoutError: device_barrier: call 1 of rank 0: rank 1")
    assert answer["missing"] == [1]


def test_a_rank_is_killed_among_sums(two: list[Rank]) -> None:
    for rank in two:
        rank.tell("many_sums", count=10**6)
    time.sleep(0.3)
    two[1].kill()
    answer = two[0].error()
    assert answer["error"].startswith("CommTimeoutError: all_reduce: call "), answer
    assert answer["missing"] == [1]


@pytest.mark.parametrize(
    ("name", "of_both"),
    [
        ("algorithm", ["one_shot", "two_shot"]),
        ("max_bytes", [1 << 30, 1 << 20]),  # of a workspace for 4 MiB, and for one
        ("max_bytes", [8 << 20, 16 << 20]),  # the workspace is the same
    ],
)
def test_ranks_that_want_something_else(
    pool: Pool, kind: str, name: str, of_both: list[object]
) -> None:
    """Each would make its calls by another protocol: wrong sums, or none."""
    two = pool.join(2)
    for rank, value in zip(two, of_both, strict=True):
        rank.tell("make_peer", on_gpus=kind == "cuda", **{name: value})
    for rank in two:
        text = rank.error()["error"]
        say = f"CommError: PeerCommunicator: {name}: differs, expected the same in all ranks:\n"
        assert text.startswith(say)
        for number, value in enumerate(of_both):
            assert f"rank {number} (process {two[number].pid} on " in text
            assert f"  {value}" in text


def test_ranks_that_were_calibrated_apart(pool: Pool, kind: str) -> None:
    two = pool.join(2)
    name = "jitkern.comm.peer_reduce"
    for rank in two:
        code = f"setattr(sys.modules['{name}'], 'measured_one_shot_bytes', lambda *_: {rank.pid})"
        rank.evaluate(code)
        rank.tell("make_peer", on_gpus=kind == "cuda")
    for rank in two:
        assert rank.error()["error"].startswith("CommError: PeerCommunicator: one_shot_bytes: diff")
    for rank in two:
        rank.kill()  # no test after this one is to have it


class Of:
    """A communicator of so many."""

    def __init__(self, size: int) -> None:
        self.rank, self.size = 0, size
        self.calls: list[str] = []
        self.all_gather = self.broadcast = self.send = self.recv = None
        self.all_to_all = self.barrier = None

    def all_reduce(self, *_: object) -> None:
        self.calls.append("all_reduce")


def test_one_rank_has_no_memory() -> None:
    one: Communicator = Of(1)  # type: ignore[assignment]
    with PeerCommunicator(one, None) as comm:
        comm.all_reduce(torch.ones(3))
    assert one.calls == ["all_reduce"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"comm": Of(9)}, ValueError, "comm: 9 ranks, expected at most 8; use it as it is"),
        ({"comm": 5}, TypeError, "comm: int without rank, size, all_reduce, expected a Commun"),
        ({"device": "meta"}, ValueError, "device: meta, expected a GPU or the CPU"),
        ({"deadline_s": 0}, ValueError, "deadline_s: 0, expected above 0"),
        ({"timeout_s": "60"}, TypeError, "timeout_s: str, expected seconds"),
        ({"max_bytes": -1}, ValueError, "max_bytes: -1, expected at least 0"),
        ({"max_bytes": 1.5}, TypeError, "max_bytes: float, expected an int"),
        ({"algorithm": "ring"}, ValueError, "algorithm: 'ring', expected one of auto, one_shot"),
    ],
)
def test_mistakes(change: dict[str, object], kind: type[Exception], text: str) -> None:
    given: dict[str, object] = {"comm": Of(2), "group": None, **change}
    with pytest.raises(kind) as raised:
        PeerCommunicator(**given)  # type: ignore[arg-type]
    assert f"PeerCommunicator: {text}" in str(raised.value)
