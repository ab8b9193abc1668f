"""In which order a PeerReducer puts calls of several streams, on the driver of ../fake_driver.c.

Run by test_peer_streams.py. PyTorch has no GPU here: tensors only say that they are on one.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import tvm_ffi
from fake_gpu import report_checks
from launch_fake import cuda, driver, log

from jitkern.comm import PeerReducer, peer_kernel
from jitkern.host import module as host
from jitkern.jit.device import DeviceModule

driver.fake_trace.restype = ctypes.c_char_p
kept: list[Any] = []


def reducer() -> Any:
    """Its all_reduce, without the tensor that PyTorch would put on a GPU."""
    num_bytes = PeerReducer.workspace_bytes_for(2, 64)
    memory = torch.full((2, num_bytes), 0xFF, dtype=torch.uint8)
    kept.append(memory)
    shapes = [number for shape in peer_kernel.SHAPES for number in shape]
    places = [one.data_ptr() for one in memory]
    return host.op("make_peer_reducer")(0, places, 0, num_bytes, 10**9, shapes, 1 << 20)[0]


def call(all_reduce: Any, stream: int, items: int = 8) -> str:
    """What the driver is told of order by a call on a stream, where 0 is the default one."""
    x = cuda(items)
    with tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", 0), stream):
        all_reduce(x, x, -1)
    return bytes(driver.fake_trace()).decode()


def check_another_stream_comes_behind() -> None:
    all_reduce = reducer()
    assert call(all_reduce, 7) == call(all_reduce, 7) == ""
    assert [line.split()[:2] for line in call(all_reduce, 8).splitlines()] == [
        ["record", "7"],
        ["wait", "8"],
    ]
    assert call(all_reduce, 8) == ""


def check_another_stream_comes_behind_the_default_one() -> None:
    """Also where the first call of all had no items, and was on no stream."""
    for empty_ones in (0, 1, 2):
        all_reduce = reducer()
        for _ in range(empty_ones):
            assert call(all_reduce, 0, items=0) == ""
        assert call(all_reduce, 0) == ""
        said = [line.split()[:2] for line in call(all_reduce, 8).splitlines()]
        assert said == [["record", "0"], ["wait", "8"]], (empty_ones, said)


def check_calls_of_no_items_have_no_stream() -> None:
    all_reduce = reducer()
    assert call(all_reduce, 7) == ""
    assert call(all_reduce, 8, items=0) == ""
    assert call(all_reduce, 7) == ""


def main() -> None:
    DeviceModule.image = lambda self, arch: f"image of {self.name}".encode()  # type: ignore[method-assign]
    driver.fake_trace()
    report_checks(globals(), log)


if __name__ == "__main__":
    main()
