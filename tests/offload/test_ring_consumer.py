"""A consumer of a DescriptorRing takes nothing torn or stale, and nothing that is out of range."""

from __future__ import annotations

import re

import pytest
import torch
from rings import memory_of, ring_word, rows

from jitkern import unpack
from jitkern.offload import DescriptorRing


@pytest.mark.parametrize("by_slot", [False, True])
def test_never_torn_or_stale(by_slot: bool) -> None:
    """Words and seals that a producer cannot have written, put there by hand."""
    src, dst = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    with DescriptorRing(2, 8, device="cpu") as ring:
        memory = memory_of(ring)

        def is_there() -> bool:
            completed = memory.done(slot).value
            unpack(src, dst, ring, slot=slot if by_slot else None)
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
                assert not ring.done(ticket)
            memory.word(slot).value = good
            for seal in (one for i in range(3) for one in memory.seals(slot, i)):
                for wrong in (0, before, good - (1 << 16), good + 1):
                    seal.value = wrong
                    assert not is_there()
                    seal.value = good
            assert not dst.any()
            assert is_there() and ring.done(ticket)
            assert torch.equal(dst[8:12], src[8:12])
            dst.zero_()


def test_a_producer_that_died_in_the_middle_of_a_push() -> None:
    """Before the word nothing was pushed; behind it, all was."""
    src, dst = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    with DescriptorRing(2, 8, device="cpu") as ring:
        memory = memory_of(ring)
        for generation in (1, 2, 3):
            # All but the word, as the consumer waits for it.
            slot = ring.reserve(2)
            slot.len[:] = 8
            for i in range(2):
                for seal in memory.seals(slot.index, i):
                    seal.value = ring_word(generation, 2)
            unpack(src, dst, ring, num_slots=2)
            assert memory.done(slot.index).value == generation - 1 and not dst.any()
            slot.cancel()
            ticket = ring.push(rows((3, 3, 2)))
            assert ticket == 2 * generation - 2
            # All but the head: the next producer goes on behind it.
            memory.head().value = ticket
            assert ring.num_pushed == ticket + 1
            assert ring.push(rows((5, 5, 1))) == ticket + 1
            memory.head().value = ticket + 1
            unpack(src, dst, ring, num_slots=2)
            assert dst.tolist()[:7] == [0, 0, 0, 3, 4, 5, 0]
            dst.zero_()


OUT_OF_RANGE = [
    ((0, 0, 61), "src: bytes up to 61", "at most 60"),
    ((60, 0, 1), "src: bytes up to 61", "at most 60"),
    ((61, 0, 1), "src: bytes up to 62", "at most 60"),
    ((0, 64, 1), "dst: bytes up to 65", "at most 64"),
    ((0, 5, 60), "dst: bytes up to 65", "at most 64"),
    ((1, 0, 20, 3, 20, 0), "src: bytes up to 61", "at most 60"),
    ((0, 0, 1, 2**32 - 1, 1, 0), "src: bytes up to 4294967295", "at most 60"),
    ((0, 5, 20, 3, 0, 20), "dst: bytes up to 65", "at most 64"),
    ((2**63 - 1, 0, 1), f"src: bytes up to {2**63 - 1}", "at most 60"),
    ((0, 0, 1, 3, 2**63 - 1, 0), f"src: bytes up to {2**63 - 1}", "at most 60"),
    ((0, 2**62, 1, 3, 0, 2**62), f"dst: bytes up to {2**63 - 1}", "at most 64"),
]


@pytest.mark.parametrize(("wrong", "came", "limit"), OUT_OF_RANGE, ids=str)
def test_out_of_range(wrong: tuple[int, ...], came: str, limit: str) -> None:
    """Nothing of the slot is copied, it counts as consumed, and the next one is."""
    src, dst = torch.arange(1, 61, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    fits = (0, 0, 60, 1, 2**40, 2**40)
    with DescriptorRing(3, 8, device="cpu") as ring:
        ring.push(rows((0, 0, 0, 0, 0, 0)))
        ring.push(rows(fits, fits, (*wrong, 1, 0, 0)[:6]))
        ring.push(rows((0, 4, 60)))
        text = f"{came} in descriptor 2 of slot 1, expected {limit}"
        message = f"unpack: {text}; nothing of the slot was copied"
        with pytest.raises(IndexError, match=f"^{re.escape(message)}$"):
            unpack(src, dst, ring, num_slots=3)
        assert not dst.any()
        assert [ring.done(ticket) for ticket in range(3)] == [True, True, False]
        unpack(src, dst, ring)
        assert torch.equal(dst[4:], src)
