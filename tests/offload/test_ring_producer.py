"""C++ producers of a DescriptorRing: killed in another process, and free of races."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from needs import needs_cxx
from rings import EXAMPLE, MESSAGE_BYTES, message, take_next
from threads.program import compiled, race

from jitkern import unpack
from jitkern.offload import DescriptorRing

pytestmark = needs_cxx


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("producer") / "libproducer.so"
    return compiled(EXAMPLE, target=target, flags=("-O2", "-shared", "-fPIC"))


# Maps the inherited memory, and prints a line when it begins.
IN_ANOTHER_PROCESS = """
import ctypes, mmap, sys
library, *fds, seed = sys.argv[1], *map(int, sys.argv[2:])
maps = [mmap.mmap(fd, 0) for fd in fds]
pointers = [ctypes.byref(ctypes.c_char.from_buffer(memory)) for memory in maps]
produce = ctypes.CDLL(library).produce
print("begins", flush=True)
produce(*pointers, 1 << 30, seed)
"""


def test_killed_in_another_process(example: Path) -> None:
    """At any point of a push the consumer sees whole pushes only; another producer continues."""
    memory = os.memfd_create("bounce")
    os.ftruncate(memory, 5 * MESSAGE_BYTES)
    bounce = torch.frombuffer(mmap.mmap(memory, 0), dtype=torch.uint8)
    dst = torch.zeros(5 * MESSAGE_BYTES, dtype=torch.uint8)
    ticket = 0
    with DescriptorRing(5, 37, device="cpu") as ring:
        fds = (ring.fileno(), memory)
        for seed in range(4):
            code = [sys.executable, "-c", IN_ANOTHER_PROCESS, str(example)]
            command = [*code, *map(str, fds), str(seed)]
            child = subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, text=True)
            assert child.stdout is not None and child.stdout.readline() == "begins\n"
            kill = threading.Timer(0.002 + 0.009 * seed, child.send_signal, (signal.SIGKILL,))
            kill.start()
            before = ticket
            while child.poll() is None or ring.num_pushed > ticket:
                if not take_next(dst, bounce, ring, ticket, timeout_s=0.1):
                    continue
                part = dst.view(5, MESSAGE_BYTES)[ticket % 5]
                assert torch.equal(part, message(ticket)), f"message {ticket}"
                ticket += 1
            kill.join()
            child.communicate()
            assert ticket > before and ring.num_pushed == ticket
        assert ring.push(torch.tensor([[0, 0, 8]])) == ticket
        unpack(bounce, dst, ring)
        assert ring.is_done(ticket)
    os.close(memory)


def test_the_protocol_is_free_of_races(tmp_path: Path) -> None:
    done = race(Path(__file__).with_name("ring_race.cc"), EXAMPLE, target=tmp_path / "race")
    assert done.returncode == 0, done.stderr
