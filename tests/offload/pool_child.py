"""PinnedPool on the driver of fake_driver.c; see ../test_fake_driver.py.

PyTorch has no GPU here, and is told that it has one.
"""

from __future__ import annotations

import ctypes
import gc
import os

import torch
from fake_gpu import report_checks
from launch_fake import cuda, driver, log, raises
from rings import is_mapped

import jitkern
from jitkern.jit import device as launch
from jitkern.jit.device import DeviceModule
from jitkern.offload import PinnedPool, memory
from jitkern.offload.memory import PinnedMemory

MIB = 1 << 20
SIZE = 8 * MIB
REGISTERED = f"register {SIZE}, flags 3, on 0\n"
FREED = f"synchronize 0\nunregister {SIZE}\n"


def give_next(begin: int, num_bytes: int) -> None:
    """Have the kernel give out this address, where nothing is mapped, for the next such mapping.

    It takes the highest place that is large enough, at its upper end.
    """
    libc, private = ctypes.CDLL(None), 0x4022  # private, anonymous, nothing reserved
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * [ctypes.c_int], ctypes.c_long)
    with open("/proc/self/maps") as lines:
        above = min(a for line in lines if (a := int(line.split("-")[0], 16)) > begin)
    assert libc.mmap(begin, above - begin, 0, private | 0x10, -1, 0) == begin  # at this place
    while libc.mmap(None, num_bytes, 0, private, -1, 0) > begin:
        pass
    libc.munmap(ctypes.c_void_p(begin), ctypes.c_size_t(num_bytes))


def check_registered_once_and_freed_with_its_last_tensor() -> None:
    pool = PinnedPool(SIZE)
    assert log() == REGISTERED
    assert pool.stats.is_registered and "pinned" in repr(pool)
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
    assert not pool.stats.is_registered and "closed" in repr(pool)
    tensor[:] = 3
    assert tensor.sum() == 3 * SIZE
    raises(RuntimeError, "PinnedPool.tensor: the pool is closed", pool.tensor)
    rows = cuda(5, 64, dtype=torch.uint8)
    text = "h2d_gather: src: memory of a PinnedPool that was closed, expected .*"
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
    driver.fake_capture(1)
    try:
        raises(RuntimeError, "jitkern: cuCtxSynchronize: .*", pool.close)
        assert "unregister" not in log()
        assert pool.stats.is_registered
        del pool, tensor
        gc.collect()
        assert "unregister" not in log() and is_mapped(address)
    finally:
        driver.fake_capture(0)


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
            raises(RuntimeError, "PinnedPool.handle: a forked child .*", lambda: pool.handle)
            pool.close()
            # It wants 2 MiB more for a while. Odd, or the kernel would seek a place for huge pages;
            # so Linux 6.18 gives it the address of the parent's.
            give_next(address, SIZE - 4096)
            other = PinnedMemory(SIZE - 2 * MIB - 4096).tensor
            del tensor, pool
            gc.collect()
            assert log() == "" and is_mapped(other.data_ptr()), "the child's memory was freed"
            other[:10] = 1  # few: torch's threads do not survive a fork
            PinnedPool(SIZE)
            assert log() == REGISTERED + FREED
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    tensor[:] = 1
    assert log() == ""
    pool.close()


if __name__ == "__main__":
    DeviceModule.image = lambda self, arch: b"image"  # type: ignore[method-assign]
    launch.device_and_stream = lambda number: (max(number, 0), 1)
    torch.cuda.is_available = lambda: True  # type: ignore[assignment]
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    memory._node_of_gpu = lambda: None
    report_checks(globals(), log)
