"""What a PeerReducer's calls launch where faults are pending, on the driver of ../fake_driver.c.

Run by test_peer_in_step.py. PyTorch has no GPU here: tensors only say that they are on one.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
import tvm_ffi
from fake_gpu import report_checks
from launch_fake import STREAM, Fault, cuda, driver, log, params

from jitkern.comm import PeerReducer, peer_kernel, peer_reduce
from jitkern.errors import CommTimeoutError
from jitkern.host import module as host
from jitkern.jit.device import DeviceModule

kept: list[Any] = []
PARAMS = "=QQq4I2I2I8QQIIQQ"  # of PeerReduceParams
driver.fake_kernel(
    b"jitkern_peer_one_shot_v16_r2_n1_f32", ctypes.c_uint64(struct.calcsize(PARAMS)), 1024
)


class Reducer:
    """One of two ranks, and the records that its kernels may write to."""

    def __init__(self) -> None:
        num_bytes = PeerReducer.workspace_bytes_for(2, 64)
        memory = torch.full((2, num_bytes), 0xFF, dtype=torch.uint8)
        kept.append(memory)
        shapes = [number for shape in peer_kernel.SHAPES for number in shape]
        places = [one.data_ptr() for one in memory]
        made = host.op("make_peer_reducer")(0, places, 0, num_bytes, 10**9, shapes, 1 << 20)
        self._all_reduce, _, self.reset, self._barrier, _ = made
        log()
        self.all_reduce()
        *_, self.site, failure, fault = struct.unpack(PARAMS, params(log().strip()))
        self.failure, self.fault = map(Fault.from_address, (failure, fault))
        assert self.failure.state == self.fault.state == 0

    def all_reduce(self) -> None:
        x = cuda(8)
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), STREAM):
            self._all_reduce(x, x, -1)

    def barrier(self, word: Any) -> None:
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), STREAM):
            self._barrier(word)


def num_launches() -> int:
    return log().count("grid")


def raised(call: Any, *args: Any) -> Exception | None:
    try:
        call(*args)
    except Exception as error:
        return error
    return None


def check_a_sum_is_made_and_then_the_fault_raised() -> None:
    one = Reducer()
    for call in (one.all_reduce, lambda: one.barrier(cuda(1))):
        one.fault.be(2, 0, 7, 900, 900)
        error = raised(call)
        assert isinstance(error, IndexError) and "index 900 at position 7" in str(error), error
        assert num_launches() == 1 and one.fault.state == 0
        call()
        assert num_launches() == 1


def check_a_barrier_inside_of_another_call_raises_none() -> None:
    one = Reducer()
    one.fault.be(2, 0, 7, 900, 900)
    one.barrier(None)
    assert num_launches() == 1 and one.fault.state == 2
    assert isinstance(raised(one.all_reduce), IndexError)
    num_launches()


def check_a_failure_is_raised_by_later_sums_and_by_no_other_op() -> None:
    one = Reducer()
    late = 2, one.site, 0b10, 1, 0
    one.failure.be(*late)
    one.fault.be(*late)
    for _ in range(2):
        error = raised(one.all_reduce)
        assert isinstance(error, CommTimeoutError) and error.missing == (1,), error
        assert num_launches() == 0 and one.fault.state == 0


def check_reset_forgets_the_failure_and_no_other_fault() -> None:
    one = Reducer()
    late = 2, one.site, 0b10, 1, 0
    one.failure.be(*late)
    one.fault.be(*late)
    one.reset()
    assert one.failure.state == one.fault.state == 0
    one.failure.be(*late)
    one.fault.be(2, 0, 7, 900, 900)
    one.reset()
    assert one.failure.state == 0 and one.fault.state == 2
    log()
    assert isinstance(raised(one.all_reduce), IndexError) and num_launches() == 1


def main() -> None:
    DeviceModule.image = lambda self, arch: f"image of {self.name}".encode()  # type: ignore[method-assign]
    peer_reduce._register_errors()
    report_checks(globals(), log)


if __name__ == "__main__":
    main()
