"""What PinnedPool and DescriptorRing ask of the driver of fake_driver.c.

Run by ../test_fake_driver.py. PyTorch has no GPU here, and is told that it has one, whose memory is
the CPU's.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import struct
import sys
import weakref
from typing import Any

import torch
import tvm_ffi
from fake_gpu import report_checks
from launch_fake import Fault, OnCuda, cuda, driver, log, params, pinned, raises, refused
from rings import is_mapped

import jitkern
from jitkern import unpack
from jitkern.jit.device import DeviceModule
from jitkern.offload import DescriptorRing, PinnedPool, memory
from jitkern.offload import ring as ring_module

# -- PinnedPool

MIB = 1 << 20
STREAMS = [41, 0, 42]  # torch's
CAPTURED = STREAMS[0]
driver.fake_trace.restype = ctypes.c_char_p
SIZE = 8 * MIB
REGISTERED = f"register {SIZE}, flags 3, on 0\n"
FREED = f"synchronize 0\nunregister {SIZE}\n"


def capture(begins: int) -> int:
    return int(driver.fake_capture_of(ctypes.c_void_p(CAPTURED), begins))


def check_registered_once_and_freed_with_its_last_tensor() -> None:
    pool = PinnedPool(SIZE)
    assert log() == REGISTERED
    assert pool.stats().is_registered and "pinned" in repr(pool)
    tensor = pool.tensor([100], torch.int64)
    address = tensor.data_ptr()
    del pool
    gc.collect()
    assert log() == ""
    assert tensor.sum() == 0
    view = tensor[3:5]
    del tensor
    assert log() == "" and is_mapped(address)
    del view
    assert log() == FREED and not is_mapped(address)


def check_closing_unregisters_and_keeps_the_tensors() -> None:
    pool = PinnedPool(SIZE)
    tensor = pool.tensor().view(-1, 64)
    log()
    pool.close()
    assert log() == FREED
    pool.close()
    assert log() == ""
    assert not pool.stats().is_registered and "closed" in repr(pool)
    tensor[:] = 3
    assert tensor.sum() == 3 * SIZE
    raises(RuntimeError, "PinnedPool.tensor: the pool is closed", pool.tensor)
    rows = cuda(5, 64, dtype=torch.uint8)
    text = "h2d_gather: src: pageable host memory, expected pinned .*"
    raises(ValueError, text, jitkern.h2d_gather, tensor, rows, cuda(3, 2, dtype=torch.int32))


def check_what_cuda_does_not_register_is_given_back() -> None:
    driver.fake_refusal(0)
    text = (
        r"PinnedPool: 8 MiB were not registered: jitkern: cuMemHostRegister: ERROR \(fake\); "
        r"RLIMIT_MEMLOCK is .* \(ulimit -l unlimited, .*\), .* of memory are free"
    )
    raises(RuntimeError, text, PinnedPool, SIZE)
    assert "register" not in log()


def check_a_capture_keeps_it_open() -> None:
    pool = PinnedPool(SIZE)
    tensor = pool.tensor()
    address = tensor.data_ptr()
    capture(1)
    try:
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), CAPTURED):
            raises(RuntimeError, "close: a graph is captured on the current stream; .*", pool.close)
            assert "unregister" not in log()
            assert pool.stats().is_registered
            del pool, tensor
            gc.collect()
            assert "unregister" not in log() and is_mapped(address)
    finally:
        capture(0)


def check_another_threads_capture_goes_on() -> None:
    """It waits for all other streams of torch, as cuCtxSynchronize would break the capture."""
    pool = PinnedPool(SIZE)
    log()
    capture(1)
    driver.fake_trace()
    pool.close()
    waited_for = re.findall(r"record (\d+) 0 ", bytes(driver.fake_trace()).decode())
    assert waited_for == [str(stream) for stream in STREAMS if stream != CAPTURED]
    assert log() == f"unregister {SIZE}\n"
    assert capture(0) == 1


def check_a_forked_child_leaves_it_alone() -> None:
    pool = PinnedPool(SIZE)
    tensor = pool.tensor()
    address = tensor.data_ptr()
    log()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert not is_mapped(address)
            raises(RuntimeError, "PinnedPool.tensor: a forked child .*", pool.tensor)
            pool.close()
            # Memory of the child's own where its parent has the pool: anonymous, at this address.
            mmap = ctypes.CDLL(None).mmap
            mmap.restype = ctypes.c_void_p
            mmap.argtypes = (*2 * [ctypes.c_void_p], *3 * [ctypes.c_int], ctypes.c_long)
            assert mmap(address, SIZE, 0, 0x100022, -1, 0) == address
            del tensor, pool
            gc.collect()
            assert log() == "" and is_mapped(address), "the child's memory was freed"
            PinnedPool(SIZE)
            assert log() == REGISTERED + FREED
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tensor[:] = 1
    assert log() == ""
    pool.close()


# -- DescriptorRing


def on_gpu(tensor: torch.Tensor) -> Any:
    return tvm_ffi.from_dlpack(OnCuda(tensor))


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
    def __init__(self, handle: int, device: torch.device) -> None:
        self.cuda_stream = handle

    def record_event(self) -> Event:
        return Event()


words = iter(pinned(torch.zeros(64, dtype=torch.int32)).split(1))


def check_not_registered_is_raised_and_nothing_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    driver.fake_refusal(0)
    raises(RuntimeError, "PinnedPool: .* were not registered: .*", DescriptorRing, 3, 5)
    assert len(os.listdir("/proc/self/fd")) == before


def sides() -> tuple[Any, Any, torch.Tensor]:
    src, dst, host = torch.zeros(3, 1 << 20, dtype=torch.uint8)
    return on_gpu(src), on_gpu(dst), pinned(host)


def check_a_call_is_made_and_then_an_earlier_fault_raised() -> None:
    """A call that launched nothing would leave its push to the next one, and so on for ever."""
    src, dst, host = sides()
    with DescriptorRing(3, 5) as ring:
        unpack(src, dst, ring)
        (line,) = (line for line in log().splitlines() if line.startswith("jitkern_unpack_ring of"))
        fault = Fault.from_address(*struct.unpack_from("=Q", params(line), FAULT_AT))
        assert fault.state == 0
        for target in (dst, host):
            fault.be(2, 0, 7, 900, 900)
            version = host._version
            raises(IndexError, ".*index 900 at position 7.*", unpack, src, target, ring)
            assert log().count("jitkern_unpack_ring of") == 1 and fault.state == 0
            assert host._version == version + (target is host)
            unpack(src, target, ring)
            assert log().count("jitkern_unpack_ring of") == 1
        # What is refused is not made, and leaves the fault to the next call.
        fault.state, version = 2, host._version
        refused(ValueError, "unpack: dst: overlaps .*", unpack, host, host, ring)
        assert fault.state == 2 and host._version == version
        fault.state = 0


def served(ring: DescriptorRing) -> Any:
    return ring.serve(*sides()[:2])


def check_servers_have_a_stream_that_nobody_else_gets() -> None:
    """Torch hands out the same 32 in turn: what others queue there would wait for the server."""
    handles = set()
    for _ in range(2):
        with DescriptorRing(3, 5) as ring:
            log()
            with served(ring) as server:
                (line,) = (line for line in log().splitlines() if "_serve of" in line)
                handles.add(re.search(r"stream (\d+)", line)[1])
                assert server._stream.cuda_stream == int(*handles)
    assert len(handles) == 1 and not handles & {"0", str(STREAM)}


def check_close_ends_the_server_that_runs() -> None:
    ring = DescriptorRing(3, 5)
    first, second = served(ring), served(ring)
    with first:
        ring.close()
        assert first._stop == 1 and not first.is_running
    assert second._stop == 0


def check_a_server_keeps_its_ring_until_it_has_ended() -> None:
    ring = DescriptorRing(3, 5)
    server, ring_of = served(ring), weakref.ref(ring)
    del ring
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
    memory._torch_streams = lambda device: STREAMS
    ring_module._zeros_on = lambda _, num_bytes: torch.zeros(num_bytes, dtype=torch.uint8)
    fake.Stream = None
    fake.ExternalStream = OwnStream
    fake.get_device_capability = lambda _: (9, 0)
    fake.is_current_stream_capturing = lambda: False
    ring_module._pinned_zero = lambda: next(words)


def end_while_a_server_runs() -> None:
    """Say at the exit, when pools are unregistered, whether the server was told to stop."""

    def told_close() -> None:
        print(f"pools are closed: stop is {server._stop.item()}", flush=True)
        close()

    ring = DescriptorRing(3, 5)
    close, ring._memory.close = ring._memory.close, told_close
    server = served(ring)
    server.__enter__()
    assert server.is_running and server._stop.item() == 0


if __name__ == "__main__":
    pretend()
    if sys.argv[1] == "exit":
        end_while_a_server_runs()
    else:
        report_checks(globals(), log)
