"""What a PeerReducer's calls launch over faults and streams, on the driver of ../fake_driver.c.

Run by ../test_fake_driver.py. PyTorch has no GPU here: tensors only say that they are on a GPU.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
import tvm_ffi
from fake_gpu import report_checks
from launch_fake import STREAM, Fault, cuda, driver, log, params, raises

import jitkern
from jitkern.comm import PeerReducer
from jitkern.errors import CommTimeoutError, EarlierFault
from jitkern.host import library as host
from jitkern.jit.device import DeviceModule

kept: list[Any] = []
PARAMS = "=QQq4I2I2I8QQIIQQ"  # the layout of PeerReduceParams
PARAMS_BYTES = ctypes.c_uint64(struct.calcsize(PARAMS))
driver.fake_kernel(b"jitkern_peer_one_shot_v16_r2_n1_f32", PARAMS_BYTES, 1024)
driver.fake_trace.restype = ctypes.c_char_p


class Reducer:
    """One of two ranks, without the tensor that PyTorch would put on a GPU."""

    def __init__(self) -> None:
        num_bytes = PeerReducer.workspace_bytes_for(2, 64)
        memory = torch.full((2, num_bytes), 0xFF, dtype=torch.uint8)
        kept.append(memory)
        places = [part.data_ptr() for part in memory]
        functions = host.Function("make_peer_reducer")(0, places, 0, num_bytes, 10**9, 1 << 20)
        self._all_reduce, self.reset = functions["all_reduce"], functions["reset"]
        self._barrier = functions["device_barrier"]

    def all_reduce(self, stream: int = STREAM, items: int = 8) -> list[list[str]]:
        """Make a call; return the driver calls that order streams."""
        x = cuda(items)
        driver.fake_trace()
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
            self._all_reduce(x, x, -1)
        return [line.split()[:2] for line in bytes(driver.fake_trace()).decode().splitlines()]

    def barrier(self, word: Any) -> None:
        with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), STREAM):
            self._barrier(word)


class Failing(Reducer):
    def __init__(self) -> None:
        super().__init__()
        log()
        self.all_reduce()
        *_, self.site, failure, fault = struct.unpack(PARAMS, params(log().strip()))
        self.failure, self.fault = map(Fault.from_address, (failure, fault))
        assert self.failure.state == self.fault.state == 0


def num_launches() -> int:
    return log().count("grid")


def check_a_sum_is_made_and_then_the_fault_raised() -> None:
    reducer = Failing()
    for call in (reducer.all_reduce, lambda: reducer.barrier(cuda(1))):
        reducer.fault.be(2, 0, 7, 900, 900)
        error = raises(IndexError, ".*index 900 at position 7.*", call)
        assert isinstance(error, EarlierFault)
        assert num_launches() == 1 and reducer.fault.state == 0
        call()
        assert num_launches() == 1


def check_a_failure_is_raised_by_later_sums_and_by_no_other_op() -> None:
    """Until reset, which forgets no other fault."""
    reducer = Failing()
    late = 2, reducer.site, 0b10, 1, 0
    reducer.failure.be(*late)
    reducer.fault.be(*late)
    for _ in range(2):
        error = raises(CommTimeoutError, ".*", reducer.all_reduce)
        assert error.missing == (1,), error
        assert num_launches() == 0 and reducer.fault.state == 0
    reducer.fault.be(*late)
    reducer.reset()
    assert reducer.failure.state == reducer.fault.state == 0
    reducer.failure.be(*late)
    reducer.fault.be(2, 0, 7, 900, 900)
    reducer.reset()
    assert reducer.failure.state == 0 and reducer.fault.state == 2
    reducer.barrier(None)  # inside another call it raises no fault
    assert num_launches() == 1 and reducer.fault.state == 2
    raises(IndexError, ".*", reducer.all_reduce)
    assert num_launches() == 1


def check_a_late_sum_that_another_call_finds_has_its_facts() -> None:
    reducer = Failing()
    reducer.fault.be(2, reducer.site, 0b110, 5, 0)
    error = raises(CommTimeoutError, ".*found by an earlier call.*", jitkern.check, 0)
    assert isinstance(error, EarlierFault)
    assert (error.op, error.number, error.rank) == ("all_reduce", 5, 0)
    assert error.missing == (1, 2)


def check_another_stream_waits_for_the_last_one() -> None:
    """Also if that is the default stream, or calls without items, of no stream, were in between."""
    reducer = Reducer()
    assert reducer.all_reduce(7) == reducer.all_reduce(7) == []
    assert reducer.all_reduce(8, items=0) == reducer.all_reduce(7) == []
    assert reducer.all_reduce(8) == [["record", "7"], ["wait", "8"]]
    assert reducer.all_reduce(8) == []
    for num_empty in (0, 1, 2):
        reducer = Reducer()
        for _ in range(num_empty):
            assert reducer.all_reduce(0, items=0) == []
        assert reducer.all_reduce(0) == []
        assert reducer.all_reduce(8) == [["record", "0"], ["wait", "8"]], num_empty


if __name__ == "__main__":
    DeviceModule.image = lambda self, arch: f"image of {self.name}".encode()  # type: ignore[method-assign]
    report_checks(globals(), log)
