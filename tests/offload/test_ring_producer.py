"""Producers of a DescriptorRing in C++, beside and instead of Python; and rings that are wrong."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from emulate.proof import unproved_of_the_host
from headers import load
from needs import needs_cxx, needs_nvrtc
from ring_mutants import OF_THE_CONSUMER, OF_THE_PROTOCOL
from rings import EXAMPLE, MESSAGE_BYTES, Memory, compiled, message, ring_word, take_next
from slot_mutants import Mutant
from threads.program import Builder, forget_old

from jitkern import unpack
from jitkern.arch import Arch
from jitkern.compilers.sources import CSRC
from jitkern.host import module as host
from jitkern.offload import DescriptorRing

PROTOCOL_MUTANTS = unproved_of_the_host("ring", OF_THE_PROTOCOL)
CONSUMER_MUTANTS = unproved_of_the_host("ring", OF_THE_CONSUMER)

pytestmark = needs_cxx

HERE = Path(__file__).resolve().parent
TSAN = ("-O1", "-g1", "-fsanitize=thread")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("producer") / "libproducer.so"
    return compiled(EXAMPLE, target, ("-O2", "-shared", "-fPIC"))


def test_in_a_thread(example: Path) -> None:
    """10,000 rounds of random sizes; either side rests at times: the ring is full, and empty."""
    produce = ctypes.CDLL(str(example)).produce
    rounds, seen = 10_000, set()
    bounce, dst = torch.zeros(2, 5 * MESSAGE_BYTES, dtype=torch.uint8)
    pause = torch.randint(64, (rounds,), generator=torch.Generator().manual_seed(1)).tolist()
    with DescriptorRing(5, 37, device="cpu") as ring:
        pointers = (ctypes.c_void_p(ring.address), ctypes.c_void_p(bounce.data_ptr()))
        thread = threading.Thread(target=produce, args=(*pointers, rounds, 1))
        thread.start()
        for ticket in range(rounds):
            if pause[ticket] == 0:
                time.sleep(2e-4)
            seen.add(ring.num_pushed - ticket)
            assert take_next(dst, bounce, ring, ticket)
            part = dst.view(5, MESSAGE_BYTES)[ticket % 5]
            assert torch.equal(part, message(ticket)), f"message {ticket}"
            part.zero_()
        thread.join()
        assert ring.num_pushed == rounds and ring.done(rounds - 1)
        # Python goes on where C++ ended.
        assert ring.push(torch.tensor([[0, 0, 1]])) == rounds
    assert seen <= set(range(6))  # how often it is empty, or full, is up to the scheduler


def test_no_ring_there(example: Path) -> None:
    memory = (ctypes.c_uint64 * 64)()
    assert ctypes.CDLL(str(example)).produce(memory, memory, 1, 1) == -1


# Maps the memory that it has inherited, and says so once it has begun.
IN_ANOTHER_PROCESS = """
import ctypes, mmap, os, sys, threading
library, ring_fd, bounce_fd, seed = sys.argv[1], *map(int, sys.argv[2:])
maps = [mmap.mmap(fd, 0) for fd in (ring_fd, bounce_fd)]
places = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in maps]
produce = ctypes.CDLL(library).produce
pointers = [ctypes.c_void_p(place) for place in places]
print("begins", flush=True)
produce(*pointers, 1 << 30, seed)
"""


def test_killed_in_another_process(example: Path) -> None:
    """Wherever it is in a push, what the consumer sees is whole, and the next one goes on."""
    memory = os.memfd_create("bounce")
    os.ftruncate(memory, 5 * MESSAGE_BYTES)
    bounce = torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.uint8)
    dst = torch.zeros(5 * MESSAGE_BYTES, dtype=torch.uint8)
    ticket = 0
    with DescriptorRing(5, 37, device="cpu") as ring:
        fds = (ring.fileno(), memory)
        for seed in range(12):
            child = subprocess.Popen(
                [sys.executable, "-c", IN_ANOTHER_PROCESS, str(example), *map(str, fds), str(seed)],
                pass_fds=fds,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert child.stdout is not None and child.stdout.readline() == "begins\n"
            kill = threading.Timer(0.002 + 0.003 * seed, child.send_signal, (signal.SIGKILL,))
            kill.start()
            before = ticket
            while True:
                if not take_next(dst, bounce, ring, ticket, timeout_s=0.1):
                    if child.poll() is None:
                        continue
                    if ring.num_pushed == ticket:
                        break
                    continue
                part = dst.view(5, MESSAGE_BYTES)[ticket % 5]
                assert torch.equal(part, message(ticket)), f"message {ticket}"
                ticket += 1
            kill.join()
            child.communicate()
            assert ticket > before and ring.num_pushed == ticket
        assert ring.push(torch.tensor([[0, 0, 8]])) == ticket
        unpack(dst, bounce, ring)
        assert ring.done(ticket)
    os.close(memory)


@needs_nvrtc
def test_kernels_may_include_the_headers(tmp_path: Path) -> None:
    """And see the layout that the host sees."""
    body = (
        "jitkern::RingHeader h = jitkern::ring_layout(16, 2048); "
        "static_assert(jitkern::ring_count(jitkern::ring_word(5, 7)) == 7, \"\"); "
        "jitkern::Descriptor d, e(h.head_at, 2, 3); d = {e.src_off, 2, 3, e.count, 5, 6}; "
        "*p.out = (int)(h.num_bytes + h.done_at(18) + h.descriptors_at(19) + h.generation(20)); "
        "*p.out += (int)(d.src_off + d.count)"
    )  # fmt: skip
    module = load(tmp_path, "<jitkern/both/ring.h>", body=body)
    assert module.image(Arch(9, 0)).startswith(b"\x7fELF")


# -- rings that are wrong --------------------------------------------------------------------------


def race(folder: Path, csrc: Path) -> subprocess.CompletedProcess[str]:
    program = compiled(HERE / "ring_race.cc", folder / "race", TSAN, csrc / "include")
    env = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1:exitcode=97:atexit_sleep_ms=0"}
    return subprocess.run([str(program)], env=env, capture_output=True, text=True, timeout=60)


def name_of(mutant: Mutant) -> str:
    return mutant.mistake.replace(" ", "-")


def copy_of(csrc: Path, mutant: Mutant) -> Path:
    shutil.copytree(CSRC, csrc)
    mutant.apply(csrc)
    return csrc


def test_the_protocol_is_free_of_races(tmp_path: Path) -> None:
    done = race(tmp_path, CSRC)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mutant", PROTOCOL_MUTANTS, ids=name_of)
def test_a_protocol_that_is_wrong_is_caught(tmp_path: Path, mutant: Mutant) -> None:
    done = race(tmp_path, copy_of(tmp_path / "csrc", mutant))
    assert done.returncode != 0, f"nobody noticed: {mutant.old} -> {mutant.new}"
    assert "FAILED:" in done.stderr or "ThreadSanitizer" in done.stderr, done.stderr


class Library(Builder):
    """Builds the ring of the host module as a library of its own."""

    def link(self, target: Path) -> Path:
        # What else there is of the host module knows no ring: that is compiled once.
        others = Builder(self.store, self.flags)
        paths = [*sorted(CSRC.glob("host/[!u]*.cc")), *sorted(CSRC.glob("ops/unpack*.cc"))]
        objects = [str(others._object(path)) for path in paths]
        objects.append(str(self._object(self.csrc / "offload" / "ring.cc")))
        libraries = [f"-L{self.library}", "-ltvm_ffi", "-ldl", "-pthread"]
        self._run("-shared", *objects, *libraries, "-o", str(target))
        return target


@pytest.fixture(scope="module")
def store(request: pytest.FixtureRequest) -> Path:
    store = Path(request.config.cache.mkdir("ring"))
    forget_old(store)
    return store


def raises(call: Callable[[], object], kind: type[Exception]) -> bool:
    try:
        call()
    except kind:
        return True
    return False


def mistakes_of(module: Any) -> list[str]:
    """What a consumer of this module gets wrong of one push."""
    num_bytes, _, _ = module["ring_layout"](2, 5)
    bytes_ = torch.zeros(num_bytes, dtype=torch.uint8)
    push, _, _, _, await_done, consume, following, _ = module["make_ring"](bytes_, 2, 5)
    memory = Memory(bytes_)
    src, dst = torch.arange(1, 65, dtype=torch.uint8), torch.zeros(100, dtype=torch.uint8)
    window = dst[16:80]  # of which the margins stay as they are
    wrong: list[str] = []
    ticket = 0

    def expect(what: str, ok: object) -> None:
        if not ok:
            wrong.append(what)

    def takes() -> bool:
        consume(window, src, -1, 1)
        return bool(await_done(ticket, 0))

    def with_values(*values: int) -> int:
        """Push one descriptor, and write it over as no push would."""
        push(torch.tensor([[0, 0, 1]]))
        at = memory._at + memory.descriptor_at(ticket % 2, 0)
        for i, value in enumerate(values):
            (ctypes.c_uint32 if i in (2, 3) else ctypes.c_int64).from_address(
                at + (0, 8, 16, 20, 32, 40)[i]
            ).value = value
        return ticket

    far = 2**63 - 1
    for values, fits in (
        ((0, 0, 64, 1, 0, 0), True),
        ((0, 0, 65, 1, 0, 0), False),
        ((0, 1, 64, 1, 0, 0), False),
        ((1, 0, 64, 1, 0, 0), False),
        ((0, 0, 8, 8, 8, 8), True),
        ((0, 0, 8, 9, 7, 8), False),
        ((0, 0, 8, 9, 8, 7), False),
        ((-1, 0, 1, 1, 0, 0), False),
        ((0, -1, 1, 1, 0, 0), False),
        ((8, 0, 1, 9, -1, 1), True),
        ((8, 0, 1, 10, -1, 1), False),
        ((0, 8, 1, 9, 1, -1), True),
        ((0, 8, 1, 10, 1, -1), False),
        ((far, 0, 64, 1, 0, 0), False),
        ((2, 0, 1, 3, far, 0), False),
    ):
        with_values(*values)
        dst.zero_()
        expect(str(values), raises(takes, IndexError) != fits)
        expect(f"{values}: margins", not dst[:16].any() and not dst[80:].any())
        expect(f"{values}: copied", bool(window.any()) == fits)
        expect(f"{values}: completed", await_done(ticket, 0))
        if not await_done(ticket, 0):
            return wrong
        ticket += 1

    refused = raises(lambda: push(torch.tensor([[0, 0, -1]])), ValueError)
    expect("a negative length is pushed", refused)
    if not refused:
        return wrong
    push(torch.tensor([[0, 0, 1], [1, 1, 1]]))
    slot, good = ticket % 2, memory.word(ticket % 2).value
    seals = [seal for i in range(2) for seal in memory.seals(slot, i)]
    expect("seals", [seal.value for seal in seals] == 4 * [good])
    for word in (good - 1, good + 1, good + 4, good - (1 << 16), good + (1 << 16)):
        memory.word(slot).value = word
        if word == good + 4:  # 6 descriptors, where there is room for 5, with seals
            for seal in (one for i in range(6) for one in memory.seals(slot, i)):
                seal.value = word
        expect(f"word {word - good:+}", not takes())
        for seal in seals:
            seal.value = good
    memory.word(slot).value = good
    for i, seal in enumerate(seals):
        seal.value = good - (1 << 16)
        expect(f"seal {i}", not takes())
        seal.value = good
    memory.head().value = ticket
    expect("the next ticket", following() == ticket + 1)
    memory.head().value = ticket + 1
    expect("a good word", takes())
    assert good == ring_word(ticket // 2 + 1, 2)
    return wrong


def mistakes_of_turns(module: Any) -> list[str]:
    """And of several: push t writes byte t, so that what is written says what was taken."""
    num_bytes, _, _ = module["ring_layout"](3, 5)
    bytes_ = torch.zeros(num_bytes, dtype=torch.uint8)
    push, *_, consume, following, _ = module["make_ring"](bytes_, 3, 5)
    src, dst = torch.arange(1, 65, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)

    def take(pushes: int, slot: int, num_slots: int) -> list[int]:
        for _ in range(pushes):
            ticket = following()
            push(torch.tensor([[ticket, ticket, 1]]))
        dst.zero_()
        consume(dst, src, slot, num_slots)
        return dst.nonzero().flatten().tolist()

    wrong: list[str] = []
    for pushes, slot, num_slots, taken in (
        (0, -1, 3, []),
        (2, -1, 1, [0]),
        (0, -1, 3, [1]),
        (3, 1, 1, [4]),
        (0, 1, 1, []),  # once
        (0, 2, 3, [2, 3]),  # around the ring, until one is not there
        (3, 0, 2, [6, 7]),
        (0, -1, 2, [5]),  # and looks at 8, which is not there
        (2, 0, 1, [9]),
        (1, 1, 1, [10]),
        (0, -1, 3, [8]),
        (3, 0, 1, [12]),
        (0, -1, 1, [11]),
        (0, -1, 1, [13]),  # of those that are left, one
        (3, 2, 3, [14, 15, 16]),  # generations ahead of those in turn
        (3, 2, 3, [17, 18, 19]),
        (1, -1, 1, [20]),
        (2, 2, 3, []),  # that of slot 2 is not there, those behind it are
        (0, -1, 3, [21, 22]),
    ):
        found = take(pushes, slot, num_slots)
        if found != taken:
            wrong.append(f"slot {slot}, {num_slots} slots: {found}, expected {taken}")
    if wrong:
        return wrong
    push(torch.tensor([[64, 0, 1]]))
    if not raises(lambda: consume(dst, src, -1, 1), IndexError) or take(1, -1, 2) != [24]:
        wrong.append("a push that was refused is taken again")
    return wrong


def is_right(store: Path, target: Path, csrc: Path = CSRC) -> bool:
    """Tell, of a child: a ring that is wrong may copy from anywhere."""
    import tvm_ffi

    library = str(Library(store, ("-O1",), csrc).link(target))
    child = os.fork()
    if child == 0:
        status = 2
        try:
            signal.alarm(20)  # one that is wrong may go on for ever
            module = tvm_ffi.load_module(library)
            found = mistakes_of(module) or mistakes_of_turns(module)
            print("\n".join(found), flush=True)
            status = 1 if found else 0
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 1, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGALRM)
    return status == 0


def test_the_consumer_makes_no_mistake() -> None:
    assert [*mistakes_of(host.module()), *mistakes_of_turns(host.module())] == []


@pytest.mark.parametrize("flag", unproved_of_the_host("ring", ["-O1"]))
def test_the_part_that_mutants_are_made_of_is_right(store: Path, tmp_path: Path, flag: str) -> None:
    assert is_right(store, tmp_path / "right.so")


@pytest.mark.parametrize("mutant", CONSUMER_MUTANTS, ids=name_of)
def test_a_consumer_that_is_wrong_is_caught(store: Path, tmp_path: Path, mutant: Mutant) -> None:
    csrc = copy_of(tmp_path / "csrc", mutant)
    assert not is_right(store, tmp_path / "wrong.so", csrc)
