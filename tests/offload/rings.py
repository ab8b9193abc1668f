"""Access to the memory of a DescriptorRing, laid out as in both/ring.h; random descriptors."""

from __future__ import annotations

import ctypes
import struct
import time
from pathlib import Path

import torch
from ref import ref_unpack

import jitkern
from jitkern.offload import DescriptorRing

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ring_producer.cc"
MESSAGE_BYTES = 4096  # of the example
LINE = 128
SEALS_AT = (24, 56)  # in a descriptor


class Memory:
    """Reads and writes a ring's words by slot."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._at = memory.data_ptr()
        magic, version, *header = struct.unpack("<8s4I6q", ctypes.string_at(self._at, 72))
        assert (magic, version) == (b"jitkring", 2)
        self.num_slots, self.max_descriptors, self.descriptor_bytes, *places = header
        self.head_at, self.dones_at, self.done_bytes, self.slots_at, self.slot_bytes = places[:5]
        self.num_bytes = places[5]

    def _word(self, at: int) -> ctypes.c_uint64:
        return ctypes.c_uint64.from_address(self._at + at)

    def head(self) -> ctypes.c_uint64:
        return self._word(self.head_at)

    def done(self, slot: int) -> ctypes.c_uint64:
        return self._word(self.dones_at + slot * self.done_bytes)

    def word(self, slot: int) -> ctypes.c_uint64:
        return self._word(self.slots_at + slot * self.slot_bytes)

    def descriptor(self, slot: int, i: int) -> tuple[int, ...]:
        """(src_off, dst_off, len, count, src_stride, dst_stride, seal, seal)"""
        values = ctypes.string_at(self._at + self.descriptor_at(slot, i), 64)
        (*first, first_seal, src_stride, dst_stride, _, seal) = struct.unpack("<2q2IQ2q2Q", values)
        return (*first, src_stride, dst_stride, first_seal, seal)

    def descriptor_at(self, slot: int, i: int) -> int:
        return self.slots_at + slot * self.slot_bytes + LINE + i * 64

    def seals(self, slot: int, i: int) -> list[ctypes.c_uint64]:
        return [self._word(self.descriptor_at(slot, i) + at) for at in SEALS_AT]


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as lines:
        ranges = (line.split()[0].split("-") for line in lines)
        return any(int(a, 16) <= address < int(b, 16) for a, b in ranges)


def rows(*values: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def memory_of(ring: DescriptorRing) -> Memory:
    return Memory(ring._bytes)


def ring_word(generation: int, count: int) -> int:
    return generation << 16 | count


def message(ticket: int) -> torch.Tensor:
    at = torch.arange(MESSAGE_BYTES)
    return (ticket * 31 + at * 7 + at // 256).to(torch.uint8)


def bytes_0_to(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.uint8)


def take_next(
    dst: torch.Tensor, src: torch.Tensor, ring: DescriptorRing, ticket: int, timeout_s: float = 60
) -> bool:
    """Consume the push `ticket` on the CPU as soon as it is there; False after the timeout.

    Polls by consuming only, so that it reads while the producer writes.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        is_late = time.monotonic() >= deadline
        jitkern.unpack(src, dst, ring)
        if ring.num_pushed > ticket and ring.is_done(ticket):
            return True
        if is_late:
            return False
        time.sleep(0)  # another thread may want the GIL


class Sides:
    """A source, a destination with guard bytes around it, and the expected destination."""

    def __init__(self, device: object, num_bytes: int, *, src_at: int = 0, dst_at: int = 0) -> None:
        source = torch.randint(256, (num_bytes + src_at,), dtype=torch.uint8)
        self._wanted_whole = torch.randint(256, (num_bytes + dst_at + 512,), dtype=torch.uint8)
        self._src_on_cpu, self.src = source[src_at:], source.to(device)[src_at:]
        self._whole = self._wanted_whole.to(device, copy=True)
        inner = slice(256 + dst_at, 256 + dst_at + num_bytes)
        self.dst, self._wanted = self._whole[inner], self._wanted_whole[inner]

    def expect(self, descriptors: torch.Tensor) -> None:
        ref_unpack(self._src_on_cpu, self._wanted, descriptors)

    def are_right(self) -> bool:
        if self._whole.is_cuda:
            torch.cuda.synchronize()
            jitkern.check()
        return torch.equal(self._whole.cpu(), self._wanted_whole)


def random_rows(
    generator: torch.Generator, columns: int, count: int, num_bytes: int = 4096
) -> torch.Tensor:
    """Return descriptors for `num_bytes` on each side; row i writes to its own part."""

    def below(bound: int) -> int:
        return int(torch.randint(bound, (1,), generator=generator))

    descriptors, part = [], num_bytes // max(1, count)
    for i in range(count):
        length, repeats = below(part // 3 + 1), 1 if columns == 3 else below(4)
        dst_stride = length + below(2)
        if length + max(0, repeats - 1) * dst_stride > part:
            repeats = 1
        src_stride = below(num_bytes // 4)
        src_off = below(num_bytes - length - max(0, repeats - 1) * src_stride + 1)
        descriptors.append([src_off, i * part, length, repeats, src_stride, dst_stride][:columns])
    return torch.tensor(descriptors, dtype=torch.int64).view(count, columns)
