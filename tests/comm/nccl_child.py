"""A rank over the NCCL and the driver of fake_nccl.cc. As rank_child.py.

PyTorch has no GPU here: tensors on the CPU only say that they are on a GPU.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import rank_child
import torch
import tvm_ffi
from fake_gpu import OnCuda, address_of

from jitkern.comm import nccl

Address, Count = ctypes.c_void_p, ctypes.c_int64
lib = ctypes.CDLL(os.environ["JITKERN_NCCL"])
lib.fake_stream.restype = Address
for with_count in (lib.fake_nccl_queue_limit, lib.fake_nccl_graphs):
    with_count.argtypes = [Count]

number = 0  # the current GPU
is_capturing = False
kept: list[torch.Tensor] = []  # queued operations have their addresses


def set_device(device: torch.device) -> None:
    global number
    number = device.index


def on_gpu(tensor: torch.Tensor, on: int | None = None) -> Any:
    return tvm_ffi.from_dlpack(OnCuda(tensor, number if on is None else on))


def taken(tensor: torch.Tensor) -> Any:
    kept.append(tensor)
    return on_gpu(tensor)


def of_memory(memory: Any) -> torch.Tensor:
    there = (ctypes.c_ubyte * memory.shape[0]).from_address(address_of(memory))
    there.owner = memory
    return torch.frombuffer(there, dtype=torch.uint8)


def zeros(count: int, dtype: str, _: torch.device) -> Any:
    tensor = torch.zeros(count, dtype=getattr(torch, dtype))
    return taken(tensor) if count else tensor


torch.cuda.set_device = set_device
torch.cuda.current_device = lambda: number
torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 4
torch.cuda.is_current_stream_capturing = lambda: is_capturing
nccl._zeros, nccl.as_torch = zeros, of_memory


def ones(*shape: int, dtype: torch.dtype = torch.float32, on: Any = None) -> Any:
    tensor = torch.ones(shape, dtype=dtype)
    if on == "cpu":
        return tensor
    return taken(tensor) if on is None else on_gpu(tensor, torch.device(on).index)


class OverCpu:
    """The communicator, with tensors of the CPU that are the GPU's while it is called."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.rank, self.world_size = inner, inner.rank, inner.world_size

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._inner, name)

        def call(*args: Any) -> None:
            function(*[on_gpu(arg) if isinstance(arg, torch.Tensor) else arg for arg in args])
            lib.fake_synchronize()

        return call


def make_nccl(**config: Any) -> None:
    rank = rank_child.dist.get_rank()
    stream = lib.fake_stream(rank)
    # Never left: nothing else in this process has a stream.
    tvm_ffi.use_raw_stream(tvm_ffi.device("cuda", rank), stream).__enter__()
    of_all_kinds(**config)


def wait_for_gpu() -> None:
    lib.fake_synchronize()


def lives() -> bool:
    wait_for_gpu()
    return True


def capture(is_on: bool) -> None:
    global is_capturing
    is_capturing = is_on
    lib.fake_capturing(is_on)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    lib.fake_nccl_forget_graph()
    capture(True)
    work()
    capture(False)
    return lib.fake_nccl_replay


def body(name: str) -> None:
    rank_child.bodies.BODIES[name](OverCpu(rank_child.comm), torch.device("cpu"))


of_all_kinds = rank_child.make_nccl
# fake_nccl.cc reduces no others.
rank_child.bodies.REDUCED[:] = [torch.float32, torch.int32]
rank_child.bodies.REDUCTIONS = {"sum": rank_child.bodies.REDUCTIONS["sum"]}
MINE = (taken, ones, make_nccl, wait_for_gpu, lives, capture, captured, body)
vars(rank_child).update({function.__name__: function for function in MINE}, lib=lib)
