"""DescriptorRing used wrongly: what is said, and that it works afterwards."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from jitkern import unpack
from jitkern.offload import DescriptorRing

ONE = torch.tensor([[0, 0, 1]])

MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_slots": 0}, ValueError, "num_slots: 0, expected 1 to 65536"),
    ({"num_slots": 65_537}, ValueError, "num_slots: 65537, expected 1 to 65536"),
    ({"num_slots": 2.0}, TypeError, "num_slots: float, expected an int"),
    ({"max_descriptors": True}, TypeError, "max_descriptors: bool, expected an int"),
    ({"max_descriptors": 65_536}, ValueError, "max_descriptors: 65536, expected 1 to 65535"),
    ({"memory": "host"}, ValueError, "memory: 'host', expected \"mapped\" or \"device\""),
    ({"memory": None}, TypeError, "memory: NoneType, expected \"mapped\" or \"device\""),
    ({"memory": "device", "device": "cpu"}, ValueError,
     "memory: 'device' on the CPU, expected \"mapped\""),
    ({"device": "meta"}, ValueError, "device: meta, expected cpu"),
    ({"device": 1.0}, TypeError, "device: float, expected a torch.device, a str or an int"),
]  # fmt: skip


@pytest.mark.parametrize(("how", "kind", "text"), MISTAKES, ids=lambda value: str(value)[:30])
def test_mistakes(how: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^DescriptorRing: {re.escape(text)}"):
        DescriptorRing(**how)


def int64(*shape: int, value: int = 0) -> torch.Tensor:
    return torch.full(shape, value)


def with_value(columns: int, column: int, value: int) -> torch.Tensor:
    made = int64(4, columns)
    made[3, column] = value
    return made


PUSHES: list[tuple[Any, type[Exception], str]] = [
    ([[0, 0, 1]], TypeError, "list, expected a tensor or an array of int64"),
    (None, TypeError, "NoneType, expected a tensor or an array of int64"),
    (b"", TypeError, "items of format 'B', expected int64"),
    (torch.zeros(2, 3), TypeError, "dtype float32, expected int64"),
    (torch.zeros(2, 3, dtype=torch.int32), TypeError, "dtype int32, expected int64"),
    (int64(3), ValueError, "shape [3], expected [n, 3] or [n, 6]"),
    (int64(2, 4), ValueError, "shape [2, 4], expected [n, 3] or [n, 6]"),
    (int64(1, 2, 3), ValueError, "shape [1, 2, 3], expected [n, 3] or [n, 6]"),
    (int64(6, 3), ValueError, "6 of them, expected at most the 5 of a slot"),
    (with_value(3, 0, -1), ValueError, "src_off -1 of descriptor 3, expected 0 or more"),
    (with_value(6, 1, -(2**63)), ValueError,
     f"dst_off {-(2**63)} of descriptor 3, expected 0 or more"),
    (with_value(3, 2, 2**32), ValueError,
     "len 4294967296 of descriptor 3, expected 0 to 4294967295"),
    (with_value(6, 2, -1), ValueError, "len -1 of descriptor 3, expected 0 to 4294967295"),
    (with_value(6, 3, 2**40), ValueError,
     f"count {2**40} of descriptor 3, expected 0 to 4294967295"),
    (with_value(6, 3, -5), ValueError, "count -5 of descriptor 3, expected 0 to 4294967295"),
    (with_value(6, 4, -5), ValueError, "src_stride -5 of descriptor 3, expected 0 or more"),
    (with_value(6, 5, -5), ValueError, "dst_stride -5 of descriptor 3, expected 0 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "kind", "text"), PUSHES, ids=lambda value: str(value)[:30])
def test_mistakes_of_a_push(given: Any, kind: type[Exception], text: str) -> None:
    with DescriptorRing(2, 5, device="cpu") as ring:
        for name in ("push", "try_push"):
            with pytest.raises(
                kind, match=f"^DescriptorRing.{name}: descriptors: {re.escape(text)}$"
            ):
                getattr(ring, name)(given)
        assert ring.num_pushed == 0
        assert ring.push(ONE) == 0


@pytest.mark.cuda
def test_descriptors_on_a_gpu() -> None:
    with DescriptorRing(2, 5) as ring:
        text = "^DescriptorRing.push: descriptors: device cuda:0, expected cpu$"
        with pytest.raises(ValueError, match=text):
            ring.push(ONE.cuda())


def test_mistakes_of_other_calls() -> None:
    with DescriptorRing(2, 5, device="cpu") as ring:
        ring.push(ONE)
        calls: list[tuple[str, dict[str, Any], type[Exception], str]] = [
            ("done", {"ticket": 1}, ValueError, "ticket: 1, expected below the 1 pushes so far"),
            ("wait", {"ticket": -1}, ValueError, "ticket: -1, expected 0 or more"),
            ("wait", {"ticket": 0.0}, TypeError, "ticket: float, expected an int"),
            ("wait", {"ticket": 0, "timeout_s": -1}, ValueError, "timeout_s: -1, expected 0 or"),
            (
                "wait",
                {"ticket": 0, "timeout_s": None},
                TypeError,
                "timeout_s: NoneType, expected a",
            ),
            ("reserve", {"num_descriptors": 0}, ValueError, "num_descriptors: 0, expected 1 to 5"),
            ("reserve", {"num_descriptors": 6}, ValueError, "num_descriptors: 6, expected 1 to 5"),
            ("reserve", {"timeout_s": "1"}, TypeError, "timeout_s: str, expected a number"),
        ]
        for name, how, kind, text in calls:
            with pytest.raises(kind, match=f"^DescriptorRing.{name}: {re.escape(text)}"):
                getattr(ring, name)(**how)
        assert ring.push(ONE) == 1


def test_a_reserved_slot() -> None:
    with DescriptorRing(2, 5, device="cpu") as ring:
        slot = ring.reserve(3)
        own = "this thread has a slot reserved; publish() or cancel() it first"
        for name, arguments in (("push", (ONE,)), ("try_push", (ONE,)), ("reserve", ())):
            with pytest.raises(RuntimeError, match=rf"^DescriptorRing.{name}: {re.escape(own)}$"):
                getattr(ring, name)(*arguments)
        with pytest.raises(ValueError, match=r"^RingSlot.publish: num_descriptors: 4, expected 1 "):
            slot.publish(4)
        assert slot.publish() == 0
        over = "the slot was pushed or cancelled; reserve another one"
        for name, use in (
            (".publish", slot.publish),
            (".cancel", slot.cancel),
            ("", lambda: slot.src_off),
            ("", slot.__enter__),
        ):
            with pytest.raises(RuntimeError, match=f"^RingSlot{name}: {re.escape(over)}$"):
                use()
        assert repr(slot) == "RingSlot(0, ticket 0, pushed or cancelled)"
        assert ring.push(ONE) == 1


def test_a_closed_one() -> None:
    ring = DescriptorRing(2, 5, device="cpu")
    assert re.fullmatch(
        r"DescriptorRing\(2 slots of 5 descriptors, mapped, (pinned|pageable), 0 pushed\)",
        repr(ring),
    )
    slot = ring.reserve(1)
    lengths = slot.len
    ring.close()
    ring.close()
    assert repr(ring) == "DescriptorRing(2 slots of 5 descriptors, closed)"
    buffer = torch.zeros(8, dtype=torch.uint8)
    for use in (
        lambda: ring.push(ONE),
        lambda: ring.try_push(ONE),
        ring.reserve,
        slot.publish,
        lambda: ring.done(0),
        lambda: ring.wait(0),
        ring.fileno,
        lambda: ring.address,
        lambda: ring.num_pushed,
        lambda: unpack(buffer[:4], buffer[4:], ring),
        lambda: unpack(buffer[:4], buffer[4:], ring, slot=1),
        ring.__enter__,
    ):
        with pytest.raises(RuntimeError, match=r"^DescriptorRing: the ring is closed"):
            use()
    lengths[:] = 3  # memory that a view keeps
    assert lengths.tolist() == [3]


@pytest.mark.cuda
@pytest.mark.parametrize("memory", ["mapped", "device"])
def test_a_call_that_raises_what_another_left_takes_its_push(memory: Any) -> None:
    src = torch.randint(256, (4096,), dtype=torch.uint8, device="cuda")
    dst = torch.zeros_like(src)
    wrong = torch.tensor([[4000, 0, 97]], device="cuda")
    with DescriptorRing(2, 4, memory) as ring:
        for at in (0, 100, 200):
            unpack(dst, src, wrong)
            torch.cuda.synchronize()
            ticket = ring.push(torch.tensor([[at, at, 100]]))
            with pytest.raises(IndexError, match="bytes up to 4097 in descriptor 0, expected at"):
                unpack(dst, src, ring)
            ring.wait(ticket)
            assert torch.equal(dst[: at + 100], src[: at + 100])
