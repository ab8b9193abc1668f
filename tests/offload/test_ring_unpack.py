"""jitkern.unpack of a DescriptorRing: autograd, tracing, damaged memory, wrong arguments."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from rings import bytes_0_to, memory_of, ring_word, rows
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from jitkern import unpack
from jitkern.offload import DescriptorRing

MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"max_pushes": 3}, ValueError, "max_pushes: 3, expected 1 to 2"),
    ({"max_pushes": None}, TypeError, "max_pushes: None, expected an int"),
    ({"count": torch.tensor(1)}, ValueError, "count: given, expected None: a push of a ring has"),
    ({"dst": 3}, TypeError, "dst: int, expected a tensor"),
]


@pytest.mark.parametrize(("how", "kind", "text"), MISTAKES, ids=lambda value: str(value)[:30])
def test_mistakes(how: dict[str, Any], kind: type[Exception], text: str) -> None:
    src, dst = bytes_0_to(32), torch.zeros(32, dtype=torch.uint8)
    with DescriptorRing(2, 5, device="cpu") as ring:
        ring.push(rows((1, 1, 1)))
        with pytest.raises(kind, match=f"^unpack: {re.escape(text)}"):
            unpack(**{"src": src, "dst": dst, "descriptors": ring, **how})
        assert not ring.is_done(0) and not dst.any()
        unpack(src, dst, ring)
        assert ring.is_done(0) and dst[1] == 1


def test_rules_of_writing() -> None:
    """Rules of autograd and inference mode; a refused call consumes nothing."""
    with torch.inference_mode():
        inner = torch.zeros(8)
    src, dst, leaf = torch.ones(8), torch.zeros(8), torch.zeros(8, requires_grad=True)
    with DescriptorRing(2, 5, device="cpu") as ring, forward_ad.dual_level():
        ring.push(rows((0, 0, 32)))
        for sides, text in (
            ((src, leaf), "dst: requires a gradient, exp"),
            ((leaf, dst), "src: requires a gradient, exp"),
            ((src, forward_ad.make_dual(dst, src)), "dst: has a tangent of forward-mode"),
            ((src, inner), "dst: made in inference mode, expected a"),
        ):
            with pytest.raises(RuntimeError, match=f"^unpack: {text}"):
                unpack(*sides, ring)
        assert not ring.is_done(0)

        # What a backward pass has kept counts as changed.
        product = torch.ones(8, requires_grad=True) * dst
        version = dst._version
        with torch.no_grad():
            unpack(leaf.detach() + 1, dst, ring)
        assert ring.is_done(0) and dst._version == version + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()
        ring.push(rows((0, 0, 32)))
        with torch.inference_mode():
            unpack(src, inner, ring)
        assert inner.tolist() == [1.0] * 8


def test_inside_of_torch_compile() -> None:
    """Works between two graphs; with fullgraph=True it raises and consumes nothing."""
    torch._dynamo.reset()
    src, dst = bytes_0_to(8), torch.zeros(8, dtype=torch.uint8)
    with DescriptorRing(2, 5, device="cpu") as ring:

        def run(dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
            doubled = src * 2
            unpack(doubled, dst, ring, max_pushes=2)
            return dst + 1

        ring.push(rows((0, 0, 4)))
        ring.push(rows((6, 6, 1)))
        with pytest.raises(Exception, match="unpack: descriptors: DescriptorRing, expected a tens"):
            torch.compile(run, backend="eager", fullgraph=True)(dst, src)
        assert not ring.is_done(0)
        torch._dynamo.reset()
        copied = torch.compile(run, backend="eager")(dst, src)
        assert copied.tolist() == [1, 3, 5, 7, 1, 1, 13, 1]
        assert ring.is_done(1)


class Watcher(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_would_see_nothing_of_it() -> None:
    src, dst = bytes_0_to(8), torch.zeros(8, dtype=torch.uint8)
    with DescriptorRing(2, 5, device="cpu") as ring:
        ring.push(rows((0, 0, 8)))
        text = "^unpack: cannot run inside torch.jit.trace or a TorchDispatchMode"
        with pytest.raises(RuntimeError, match=text), Watcher():
            unpack(src, dst, ring)

        assert not dst.any() and not ring.is_done(0)


def test_never_torn_or_stale() -> None:
    """Words and seals that no producer can have written."""
    src, dst = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    with DescriptorRing(2, 8, device="cpu") as ring:
        memory = memory_of(ring)

        def is_there() -> bool:
            completed = memory.done(slot).value
            unpack(src, dst, ring)
            return memory.done(slot).value != completed

        for ticket in range(6):
            slot, generation = ticket % 2, ticket // 2 + 1
            before = memory.word(slot).value
            assert before >> 16 == generation - 1
            assert not is_there()
            assert ring.push(rows((0, 0, 4), (8, 8, 4), (16, 16, 4))) == ticket
            good = memory.word(slot).value
            assert good == ring_word(generation, 3)
            for wrong in (
                before,
                0,
                ring_word(generation - 1, 3),
                ring_word(generation + 1, 3),
                ring_word(generation, 2),  # the count of another push: the seals say so
                ring_word(generation, 4),
                ring_word(generation, 9),  # more than a slot has
                ring_word(generation, 0xFFFF),
                good & 0xFFFF,  # halves of it
                generation,
                (1 << 64) - 1,
            ):
                memory.word(slot).value = wrong
                assert not is_there(), hex(wrong)
                assert not ring.is_done(ticket)
            memory.word(slot).value = good
            for seal in (future for i in range(3) for future in memory.seals(slot, i)):
                for wrong in (0, before, good - (1 << 16), good + 1):
                    seal.value = wrong
                    assert not is_there()
                    seal.value = good
            assert not dst.any()
            assert is_there() and ring.is_done(ticket)
            assert torch.equal(dst[8:12], src[8:12])
            dst.zero_()


OUT_OF_RANGE = [
    ((0, 0, 61), "src: bytes up to 61", "at most 60"),
    ((0, 5, 60), "dst: bytes up to 65", "at most 64"),
    ((1, 0, 20, 3, 20, 0), "src: bytes up to 61", "at most 60"),
    ((0, 0, 1, 2**32 - 1, 1, 0), "src: bytes up to 4294967295", "at most 60"),
    ((0, 2**62, 1, 3, 0, 2**62), f"dst: bytes up to {2**63 - 1}", "at most 64"),
]


@pytest.mark.parametrize(("wrong", "came", "limit"), OUT_OF_RANGE, ids=str)
def test_out_of_range(wrong: tuple[int, ...], came: str, limit: str) -> None:
    """Nothing of the slot is copied; it counts as consumed, and the ring continues."""
    src, dst = torch.arange(1, 61, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    fits = (0, 0, 60, 1, 2**40, 2**40)
    with DescriptorRing(3, 8, device="cpu") as ring:
        ring.push(rows((0, 0, 0, 0, 0, 0)))
        ring.push(rows(fits, fits, (*wrong, 1, 0, 0)[:6]))
        ring.push(rows((0, 4, 60)))
        text = f"{came} in descriptor 2 of slot 1, expected {limit}"
        message = f"unpack: {text}; nothing of the slot was copied"
        with pytest.raises(IndexError, match=f"^{re.escape(message)}$"):
            unpack(src, dst, ring, max_pushes=3)
        assert not dst.any()
        assert [ring.is_done(ticket) for ticket in range(3)] == [True, True, False]
        unpack(src, dst, ring)
        assert torch.equal(dst[4:], src)
