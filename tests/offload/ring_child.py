"""DescriptorRing on the driver of fake_driver.c; see ../test_fake_driver.py.

PyTorch has no GPU here, and is told that it has one, whose memory is the CPU's.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
import weakref
from typing import Any

import torch
import tvm_ffi
from fake_gpu import report_checks
from launch_fake import Fault, OnCuda, driver, log, params, pinned, raises, refused
from rings import LINE, memory_of, rows

from jitkern import unpack
from jitkern.jit.device import DeviceModule
from jitkern.offload import DescriptorRing, memory, ring, ring_server

BYTES = 256 + 3 * LINE + 3 * 4 * LINE  # of 3 slots of 5 descriptors
STREAM = 4711
FAULT_AT = 112  # the address of the record that the kernel may write to, in ConsumeParams
driver.fake_kernel(b"jitkern_unpack_ring", ctypes.c_uint64(232), 512)


class Stream:
    cuda_stream = STREAM

    @staticmethod
    def synchronize() -> None:
        pass

    @staticmethod
    def wait_stream(other: Any) -> None:
        pass


class Event:
    """Behind a server: nothing has happened until somebody waits."""

    is_over = False

    def query(self) -> bool:
        return self.is_over

    def synchronize(self) -> None:
        self.is_over = True


class OwnStream(Stream):
    """Of a handle that the driver gave."""

    def __init__(self, handle: int, device: torch.device) -> None:
        self.cuda_stream = handle

    def record_event(self) -> Event:
        return Event()


words = iter(pinned(torch.zeros(64, dtype=torch.int32)).split(1))


def check_registered_with_the_gpu_and_given_back() -> None:
    made = DescriptorRing(3, 5)
    assert log() == f"register {BYTES}, flags 3, on 0\n"
    assert repr(made) == "DescriptorRing(3 slots of 5 descriptors on cuda:0, 0 pushed)"
    assert made.device == torch.device("cuda", 0)
    made.push(rows((0, 0, 1)))
    with made.reserve(1) as slot:
        slot.len[:] = 1
    assert made.done(0) is False
    assert log() == "", "a push asked the driver for something"
    made.close()
    assert log() == f"synchronize 0\nunregister {BYTES}\n"


def check_not_registered_is_raised_and_nothing_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    driver.fake_refusal(0)
    raises(RuntimeError, "PinnedPool: .* were not registered: .*", DescriptorRing, 3, 5)
    assert len(os.listdir("/proc/self/fd")) == before


def on_gpu(tensor: torch.Tensor) -> Any:
    return tvm_ffi.from_dlpack(OnCuda(tensor))


def sides() -> tuple[Any, Any, torch.Tensor]:
    """A source and a destination on the GPU, and pinned memory."""
    src, dst, host = torch.zeros(3, 1 << 20, dtype=torch.uint8)
    return on_gpu(src), on_gpu(dst), pinned(host)


def check_a_call_is_one_launch() -> None:
    """Also of no pushes, while a graph is captured, and for pinned host memory."""
    src, dst, host = sides()
    on_host = tvm_ffi.from_dlpack(host)
    with DescriptorRing(3, 5) as made:
        unpack(src, dst, made)  # loads the kernel
        log()
        for capturing in (0, 1):
            driver.fake_capture(capturing)
            for given, num_slots in (
                *(((src, dst), 1), ((src, dst), 3)),
                *(((on_host, dst), 2), ((src, on_host), 1)),
            ):
                unpack(*given, made, num_slots=num_slots)
                (line,) = log().splitlines()
                assert line.startswith("jitkern_unpack_ring of "), line
        driver.fake_capture(0)
        assert [made.num_pushed, memory_of(made).done(0).value] == [0, 0]


def check_a_call_is_made_and_then_an_earlier_fault_raised() -> None:
    """A call that launched nothing would leave its push to the next one, and so on for ever."""
    src, dst, host = sides()
    with DescriptorRing(3, 5) as made:
        unpack(src, dst, made)
        (line,) = (line for line in log().splitlines() if line.startswith("jitkern_unpack_ring of"))
        fault = Fault.from_address(*struct.unpack_from("=Q", params(line), FAULT_AT))
        assert fault.state == 0
        for target in (dst, host):
            fault.be(2, 0, 7, 900, 900)
            version = host._version
            raises(IndexError, ".*index 900 at position 7.*", unpack, src, target, made)
            assert log().count("jitkern_unpack_ring of") == 1 and fault.state == 0
            assert host._version == version + (target is host)
            unpack(src, target, made)
            assert log().count("jitkern_unpack_ring of") == 1
        # What is refused is not made, and leaves the fault to the next call.
        fault.state, version = 2, host._version
        refused(ValueError, "unpack: dst: overlaps .*", unpack, host, host, made)
        assert fault.state == 2 and host._version == version
        fault.state = 0


def check_a_server_keeps_the_rules_of_writing() -> None:
    src, dst = torch.zeros(2, 64)
    with DescriptorRing(3, 5) as made:
        text = "DescriptorRing.serve: dst: requires a gradient, expected none: .*"
        refused(RuntimeError, text, made.serve, src, dst.clone().requires_grad_())
        with torch.inference_mode():
            inside = torch.zeros(64)
        text = "DescriptorRing.serve: dst: made in inference mode, .*"
        refused(RuntimeError, text, made.serve, src, inside)


def served(made: DescriptorRing) -> Any:
    return made.serve(*sides()[:2])


def check_servers_have_a_stream_that_nobody_else_gets() -> None:
    """Torch hands out the same 32 in turn: what others queue there would wait for the server."""
    handles = set()
    for _ in range(2):
        with DescriptorRing(3, 5) as made:
            log()
            with served(made) as server:
                (line,) = (line for line in log().splitlines() if "_serve of" in line)
                handles.add(re.search(r"stream (\d+)", line)[1])
                assert server._stream.cuda_stream == int(*handles)
    assert len(handles) == 1 and not handles & {"0", str(STREAM)}


def check_close_ends_the_server_that_runs() -> None:
    made = DescriptorRing(3, 5)
    one, other = served(made), served(made)
    with one:
        made.close()
        assert one._stop == 1 and not one.is_running
    assert other._stop == 0


def check_a_server_keeps_its_ring_until_it_has_ended() -> None:
    made = DescriptorRing(3, 5)
    server, ring_of = served(made), weakref.ref(made)
    del made
    with server:
        assert ring_of() is not None
    assert ring_of() is None, "a cycle"


def pretend() -> None:
    DeviceModule.image = lambda self, arch: f"image of {self.name}".encode()  # type: ignore[method-assign]
    fake: Any = torch.cuda
    fake.is_available = lambda: True
    fake.device_count = lambda: 1
    fake.current_device = lambda: 0
    fake.current_stream = lambda device: Stream
    memory._node_of_gpu = lambda: None
    ring._zeros_on = lambda _, num_bytes: torch.zeros(num_bytes, dtype=torch.uint8)
    fake.Stream = None
    fake.ExternalStream = OwnStream
    fake.get_device_capability = lambda _: (9, 0)
    fake.is_current_stream_capturing = lambda: False
    ring_server._pinned_zero = lambda: next(words)


def end_while_a_server_runs() -> None:
    """Say at the exit, when pools are unregistered, whether the server was told to stop."""

    def told_close() -> None:
        print(f"pools are closed: stop is {server._stop.item()}", flush=True)
        close()

    made = DescriptorRing(3, 5)
    close, made._memory.close = made._memory.close, told_close
    server = served(made)
    server.__enter__()
    assert server.is_running and server._stop.item() == 0


if __name__ == "__main__":
    pretend()
    if sys.argv[1] == "exit":
        end_while_a_server_runs()
    else:
        report_checks(globals(), log)
