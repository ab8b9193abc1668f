"""jitkern.unpack of a DescriptorRing: which pushes a call takes, and what it refuses."""

from __future__ import annotations

import random
import re
import threading
from typing import Any

import pytest
import torch
from rings import bytes_0_to, memory_of, rows
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import jitkern
from jitkern import unpack
from jitkern.offload import DescriptorRing

SIZE = 200


class Taken:
    """A ring whose push t copies byte t, and what calls have taken of it."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.ring = DescriptorRing(num_slots, 4, device)
        self._src = torch.arange(1, SIZE + 1, dtype=torch.uint8, device=device)
        self._dst = torch.zeros(SIZE, dtype=torch.uint8, device=device)

    def push(self, count: int) -> None:
        for _ in range(count):
            at = self.ring.num_pushed
            assert self.ring.try_push(rows((at, at, 1))) == at

    def _by_one(self, num_slots: int, slot: int | None) -> list[int]:
        self._dst.zero_()
        assert unpack(self._src, self._dst, self.ring, slot=slot, num_slots=num_slots) is None
        if self._dst.is_cuda:
            torch.cuda.synchronize()
            jitkern.check()
        taken: list[int] = self._dst.nonzero().flatten().tolist()
        return taken

    def by(self, num_slots: int = 1, slot: int | None = None) -> list[int]:
        """Return the tickets that a call takes, all of which are completed and no others.

        A call in turn on a GPU that has taken something ends in front of a slot that a call has
        named before: another one goes on.
        """
        before = [self.ring.done(ticket) for ticket in range(self.ring.num_pushed)]
        taken = self._by_one(num_slots, slot)
        while slot is None and self._dst.is_cuda and 0 < len(taken) < num_slots:
            more = self._by_one(num_slots - len(taken), slot)
            if not more:
                break
            taken += more
        for ticket, was_done in enumerate(before):
            assert self.ring.done(ticket) == (was_done or ticket in taken)
            assert not (was_done and ticket in taken)
        return taken


@pytest.mark.parametrize("seed", range(4))
def test_any_calls_take_each_push_once(seed: int, device: torch.device) -> None:
    """Against a list of what each slot holds."""
    draw = random.Random(seed)
    num_slots = 1 + seed
    taken = Taken(num_slots, device)
    holds: list[int | None] = [None] * num_slots
    turn = 0
    while taken.ring.num_pushed < SIZE:
        ticket = taken.ring.num_pushed
        if holds[ticket % num_slots] is None and draw.random() < 0.6:
            taken.push(1)
            holds[ticket % num_slots] = ticket
            continue
        most = draw.randint(1, num_slots)
        wanted: list[int] = []
        if draw.random() < 0.5:
            slot = draw.randrange(num_slots)
            for number in range(slot, slot + most):
                found = holds[number % num_slots]
                if found is None:
                    break
                wanted.append(found)
            assert taken.by(slot=slot, num_slots=most) == sorted(wanted)
        else:
            while turn < ticket and len(wanted) < most:
                if holds[turn % num_slots] == turn:
                    wanted.append(turn)
                turn += 1
            assert taken.by(num_slots=most) == wanted
        holds = [None if held in wanted else held for held in holds]


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"slot": -1}, ValueError, "slot: -1, expected at least 0"),
    ({"slot": 2}, ValueError, "slot: 2, expected below 2"),
    ({"slot": 0.0}, TypeError, "slot: float, expected an int"),
    ({"num_slots": 3}, ValueError, "num_slots: 3, expected 1 to 2"),
    ({"num_slots": None}, TypeError, "num_slots: NoneType, expected an int"),
    ({"count": torch.tensor(1)}, ValueError,
     "count: given, expected None: a push of a ring has its own"),
    ({"dst": 3}, TypeError, "dst: int, expected a tensor"),
    ({"src": torch.zeros(4, 4).t()}, ValueError, "src: not contiguous (stride 4 in"),
    ({"dst": torch.zeros(4, 4)[:, 1:]}, ValueError, "dst: not contiguous (stride 4 in"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "kind", "text"), MISTAKES, ids=lambda value: str(value)[:30])
def test_mistakes(how: dict[str, Any], kind: type[Exception], text: str) -> None:
    """Nothing was taken."""
    src, dst = bytes_0_to(32), torch.zeros(32, dtype=torch.uint8)
    with DescriptorRing(2, 5, device="cpu") as ring:
        ring.push(rows((1, 1, 1)))
        with pytest.raises(kind, match=f"^unpack: {re.escape(text)}"):
            unpack(**{"src": src, "dst": dst, "descriptors": ring, **how})
        assert not ring.done(0) and not dst.any()
        unpack(src, dst, ring)
        assert ring.done(0) and dst[1] == 1


def test_sides_that_share_memory() -> None:
    whole = bytes_0_to(64)
    text = "^unpack: dst: overlaps src, expected memory of its own$"
    with DescriptorRing(2, 5, device="cpu") as ring:
        ring.push(rows((0, 0, 32)))
        for dst, src in ((whole, whole), (whole[:33], whole[32:]), (whole[31:], whole[:32])):
            with pytest.raises(ValueError, match=text):
                unpack(src, dst, ring)
        assert not ring.done(0) and torch.equal(whole, bytes_0_to(64))
        unpack(whole[:32], whole[32:], ring)  # one beside the other
        assert torch.equal(whole, bytes_0_to(32).repeat(2))


def test_gradients() -> None:
    src, dst = torch.ones(8), torch.zeros(8)
    with DescriptorRing(2, 5, device="cpu") as ring:
        ring.push(rows((0, 0, 32)))
        leaf = torch.zeros(8, requires_grad=True)
        for sides, name in (((src, leaf), "dst"), ((leaf, dst), "src")):
            with pytest.raises(RuntimeError, match=f"^unpack: {name}: requires a gradient, exp"):
                unpack(*sides, ring)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(dst, torch.ones(8))
            with pytest.raises(RuntimeError, match=r"^unpack: dst: has a tangent of forward-mode"):
                unpack(src, dual, ring)
        assert not ring.done(0)

        # What a backward pass has kept counts as changed.
        weight = torch.ones(8, requires_grad=True)
        product = weight * dst
        version = dst._version
        with torch.no_grad():
            unpack(leaf.detach() + 1, dst, ring)
        assert ring.done(0) and dst._version == version + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


def test_inference_mode() -> None:
    with torch.inference_mode():
        made = torch.zeros(8)
    src, dst = torch.ones(8), torch.zeros(8)
    with DescriptorRing(2, 5, device="cpu") as ring:
        ring.push(rows((0, 0, 32)))
        with pytest.raises(RuntimeError, match=r"^unpack: dst: made in inference mode, expected a"):
            unpack(src, made, ring)
        assert not ring.done(0)
        unpack(made, dst, ring)
        ring.push(rows((0, 0, 32)))
        version = dst._version
        with torch.inference_mode():
            unpack(src, made, ring)
            ring.push(rows((0, 0, 32)))
            unpack(src, dst, ring)
        assert made.tolist() == dst.tolist() == [1.0] * 8
        assert dst._version == version + 1


def test_inside_of_torch_compile() -> None:
    """Between two graphs; in one graph it is refused, and nothing is taken."""
    torch._dynamo.reset()
    src, dst = bytes_0_to(8), torch.zeros(8, dtype=torch.uint8)
    with DescriptorRing(2, 5, device="cpu") as ring:

        def run(dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
            doubled = src * 2
            unpack(doubled, dst, ring, num_slots=2)
            return dst + 1

        ring.push(rows((0, 0, 4)))
        ring.push(rows((6, 6, 1)))
        with pytest.raises(Exception, match="unpack: descriptors: DescriptorRing, expected a tens"):
            torch.compile(run, backend="eager", fullgraph=True)(dst, src)
        assert not ring.done(0)
        torch._dynamo.reset()
        found = torch.compile(run, backend="eager")(dst, src)
        assert found.tolist() == [1, 3, 5, 7, 1, 1, 13, 1]
        assert ring.done(1)


class Watcher(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_would_see_nothing_of_it() -> None:
    """A mode, a tracer: refused, and nothing is taken."""
    src, dst = bytes_0_to(8), torch.zeros(8, dtype=torch.uint8)
    with DescriptorRing(2, 5, device="cpu") as ring:
        ring.push(rows((0, 0, 8)))
        text = "^unpack: dst: written while a tracer or a dispatch mode of PyTorch is active"
        with pytest.raises(RuntimeError, match=text), Watcher():
            unpack(src, dst, ring)

        def step(dst: torch.Tensor) -> torch.Tensor:
            unpack(src, dst, ring)
            return dst + 1

        with pytest.raises(RuntimeError, match=text):
            torch.jit.trace(step, (dst,))
        assert not dst.any() and not ring.done(0)


@pytest.mark.parametrize("name", ["dst", "src", "descriptors"])
def test_tensors_that_cannot_be_read(name: str) -> None:
    given: dict[str, Any] = {"dst": torch.zeros(8), "src": torch.ones(8)}
    with DescriptorRing(2, 5, device="cpu") as ring:
        if name == "descriptors":
            for push in (ring.push, ring.try_push):
                text = f"^DescriptorRing.{push.__name__}: descriptors: layout sparse_coo, expected"
                with pytest.raises(ValueError, match=text):
                    push(rows((0, 0, 8)).to_sparse())
            return
        ring.push(rows((0, 0, 8)))
        with pytest.raises(ValueError, match=f"^unpack: {name}: layout sparse_coo, expected str"):
            unpack(**{**given, name: given[name].to_sparse()}, descriptors=ring)
        with pytest.raises(ValueError, match=f"^unpack: {name}: device meta, expected cpu or cuda"):
            unpack(**{**given, name: given[name].to("meta")}, descriptors=ring)
        assert not ring.done(0)


def test_many_threads_consume() -> None:
    """In turn and by slots at once: each push goes to one of them."""
    rounds, num_threads, num_slots = 2000, 4, 7
    src = torch.ones(1, dtype=torch.uint8)
    found = torch.zeros(num_threads, rounds, dtype=torch.uint8)
    is_over = threading.Event()
    with DescriptorRing(num_slots, 2, device="cpu") as ring:

        def consume(number: int) -> None:
            draw = random.Random(number)
            while not is_over.is_set():
                slot = draw.randrange(num_slots) if number % 2 else None
                unpack(src, found[number], ring, slot=slot, num_slots=draw.randint(1, 3))

        threads = [threading.Thread(target=consume, args=(i,)) for i in range(num_threads)]
        for thread in threads:
            thread.start()
        try:
            for ticket in range(rounds):
                assert ring.push(rows((0, ticket, 1)), timeout_s=60) == ticket
            for ticket in range(rounds - num_slots, rounds):
                ring.wait(ticket, timeout_s=60)
        finally:
            is_over.set()
            for thread in threads:
                thread.join()
        assert [memory_of(ring).done(i).value for i in range(num_slots)] == [
            (rounds - 1 - i) // num_slots + 1 for i in range(num_slots)
        ]
    assert found.sum(0).tolist() == [1] * rounds
