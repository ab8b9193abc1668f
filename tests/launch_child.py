"""The way to a launch, on the driver of fake_driver.c; run by test_launch.py.

Prints which of its checks failed, as JSON. PyTorch has no GPU here: tensors only say that they are
on one.
"""

from __future__ import annotations

import ctypes
import json
import re
import struct
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import tvm_ffi

import jitkern
from jitkern.errors import UnsupportedError
from jitkern.host import module as host
from jitkern.jit import device
from jitkern.jit.device import DeviceModule
from jitkern.jit.record import Specialisation
from jitkern.jit.template import KernelConfig
from jitkern.ops import d2h_scatter, h2d_gather, index, pairs, store

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_log.restype = ctypes.c_char_p
STREAM = 4711


def log() -> str:
    return bytes(driver.fake_log()).decode()


class OnCuda:
    """A tensor in CPU memory that says that it is on a GPU."""

    def __init__(self, tensor: torch.Tensor, number: int = 0) -> None:
        self._tensor = tensor
        self._number = number

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._number

    def __dlpack__(self, **_: object) -> object:
        get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        get_pointer.restype = ctypes.c_void_p
        get_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
        capsule = self._tensor.__dlpack__()
        address = get_pointer(capsule, b"dltensor")
        ctypes.c_int32.from_address(address + 8).value = 2
        ctypes.c_int32.from_address(address + 12).value = self._number
        return capsule


def cuda(*shape: int, dtype: torch.dtype = torch.float32, number: int = 0) -> Any:
    return tvm_ffi.from_dlpack(OnCuda(torch.zeros(*shape, dtype=dtype), number))


class Pointer:
    def __init__(self, value: int) -> None:
        self._value = value

    def data_ptr(self) -> int:
        return self._value


class Interface:
    def __init__(self, value: int) -> None:
        self.__cuda_array_interface__ = {"data": (value, False)}


def module_of(*names: str) -> DeviceModule:
    used = Specialisation("load_jit", ("toy",), {}, "")
    return DeviceModule(used, [], [(name, "Toy") for name in names])


def user(name: str, params_bytes: int, threads: int = 1024) -> DeviceModule:
    driver.fake_kernel(name.encode(), ctypes.c_uint64(params_bytes), threads)
    return module_of(name)


def params(line: str) -> bytes:
    return bytes.fromhex(line.split(" ")[-1])


def refused(kind: type[Exception], text: str, call: Callable[..., object], *args: Any, **how: Any):
    try:
        call(*args, **how)
    except kind as error:
        assert re.fullmatch(text, str(error)), f"{error!r} is not {text!r}"
    else:
        raise AssertionError(f"no {kind.__name__}: {text}")
    assert "grid" not in log(), "launched all the same"


# -- built-in ops ----------------------------------------------------------------------------------


def store_call(row_items: int) -> str:
    cache, rows = cuda(16, row_items), cuda(3, row_items)
    jitkern.store_cache(cache, cuda(16, row_items), cuda(3, dtype=torch.int32), rows, rows)
    return log()


def check_pdl_is_launched_as_it_was_compiled() -> None:
    """What the builder says, the template arguments and the launch are the same."""
    for use_pdl in (True, False):
        store.CONFIG = KernelConfig(64, 4, use_pdl)
        store.kernel.cache_clear()
        items = 164 if use_pdl else 165  # another specialisation: the last one is kept
        said = store_call(items)
        module = store.kernel(row_bytes=4 * items, vec_bytes=16 if use_pdl else 4, index_bytes=4)
        assert module.args[1:4] == ("64", "4", "true" if use_pdl else "false"), module.args
        assert "block 64,1,1" in said, said
        assert (" 6=1 " in said) is use_pdl, said


def check_store_is_launched_in_its_shape() -> None:
    store.CONFIG = KernelConfig(128, 8, True)
    store.kernel.cache_clear()
    said = store_call(2)  # 8 bytes: one lane, two rows in flight
    assert "store of" in said and "grid 1,2,1 block 128,1,1" in said, said
    cache, rows = cuda(1000, 512), cuda(1000, 512)  # 2,048 bytes: two splits
    jitkern.store_cache(cache, cache, cuda(1000, dtype=torch.int64), rows, rows)
    said = log()
    assert "grid 500,2,1" in said, said


def check_each_kernel_is_loaded_once() -> None:
    assert "module" in store_call(7)
    assert "module" not in store_call(7)


def check_indexing_takes_its_splits_from_python() -> None:
    for row_bytes, splits in ((16, 1), (656, 1), (1024, 1), (1040, 2), (8192, 8)):
        assert index.num_splits(row_bytes) == splits
        kernel = index.kernel(row_bytes, 16, 4)
        assert kernel.args[:2] == (str(row_bytes), str(splits))
        assert kernel.launch_config == (128, 1, 4, splits)
    table, output = cuda(50, 2048), cuda(100, 2048)
    jitkern.indexing(table, cuda(100, dtype=torch.int32), output=output)
    assert "grid 200,1,1 block 128,1,1" in log()  # 100 rows, 8 warps each


def check_h2d_gather_small_and_large() -> None:
    src = torch.zeros(64, 4096, dtype=torch.float32)
    driver.fake_memory(ctypes.c_uint64(src.data_ptr()), ctypes.c_uint64(1 << 20), 1, 0)
    dst = cuda(64, 4096)
    pairs_ = cuda(32, 2, dtype=torch.int64)
    h2d_gather.h2d_gather(src, dst, pairs_)
    small = log()
    assert "block 256,1,1" in small and " 6=" not in small, small
    h2d_gather.h2d_gather(src, dst, pairs_, num_sms=2)
    large = log()
    assert "grid 2,1,1 block 1024,1,1" in large, large
    driver.fake_memory(ctypes.c_uint64(dst.data_ptr()), ctypes.c_uint64(1 << 20), 1, 0)
    host_rows = torch.zeros(64, 4096)
    refused(
        ValueError, "h2d_gather: src: pageable .*", h2d_gather.h2d_gather, host_rows, dst, pairs_
    )
    d2h_scatter.d2h_scatter(cuda(64, 4096), src, pairs_, num_sms=3)
    assert "d2h_scatter of" in (said := log()) and "grid 3,1,1 block 1024,1,1" in said, said
    assert pairs.pair_config(1).num_threads == 1024


def check_wrong_facts_are_errors() -> None:
    """Threads that it was not compiled for, a configuration that lacks one, another struct."""
    driver.fake_kernel(b"index", ctypes.c_uint64(0), 32)
    table, output, rows = cuda(50, 9), cuda(1, 9), cuda(1, dtype=torch.int32)
    text = "indexing: launched as it was not compiled"
    refused(RuntimeError, text, jitkern.indexing, table, rows, output=output)
    driver.fake_kernel(b"index", ctypes.c_uint64(8), 128)
    text = "jitkern: a kernel's parameters are 8 bytes on the device and 88 on the host"
    refused(RuntimeError, text, jitkern.indexing, table, rows, output=output)
    table, output = cuda(50, 11), cuda(1, 11)
    index.kernel(44, 4, 4).launch_config = ()
    text = "indexing: launched as it was not compiled"
    index_kernel, host._builders["indexing"] = (
        host._builders["indexing"],
        lambda **_: index.kernel(44, 4, 4),
    )
    refused(RuntimeError, text, jitkern.indexing, table, rows, output=output)
    host._builders["indexing"] = index_kernel


# -- kernels of users ------------------------------------------------------------------------------


def check_arguments_become_a_struct() -> None:
    x = cuda(4)
    module = user("members", 40)
    module.launch(
        "members", x, 7, True, ctypes.c_int32(-2), 0.5, ctypes.c_float(0.25), grid=1, block=1
    )
    want = struct.pack("<Qq?xxxidf4x", x.data_ptr(), 7, True, -2, 0.5, 0.25)
    assert params(log().splitlines()[-1]) == want

    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int8), ("b", ctypes.c_int64))

    module = user("pair", 32)
    module.launch(
        "pair", ctypes.c_int8(1), Pair(2, -3), ctypes.c_uint64(2**64 - 1), grid=1, block=1
    )
    want = struct.pack("<bxxxxxxxbxxxxxxxqQ", 1, 2, -3, 2**64 - 1)
    assert params(log().splitlines()[-1]) == want


def check_sizes_that_do_not_match_are_refused() -> None:
    module = user("sized", 16)
    x = cuda(4)
    text = (
        r"launch: args: 3 of 24 bytes in all, expected 16 bytes, the members of the kernel's Params"
    )
    refused(ValueError, text, module.launch, "sized", x, 1, 2, grid=1, block=1)
    module.launch("sized", x, 1, grid=1, block=1)
    module.launch("sized", x, ctypes.c_int32(1), grid=1, block=1)  # with the padding behind it
    log()
    text = text.replace("3 of 24", "1 of 8")
    refused(ValueError, text, module.launch, "sized", x, grid=1, block=1)
    user("nothing", 1).launch("nothing", grid=1, block=1)


def check_wrong_values_are_refused() -> None:
    module = user("wrong", 16)
    x = cuda(4)

    def bad(
        kind: type[Exception], text: str, *args: Any, grid: Any = 1, block: Any = 1, **how: Any
    ):
        refused(
            kind, "launch: " + text, module.launch, "wrong", *args, grid=grid, block=block, **how
        )

    big = "int of more than 64 bits"
    bad(
        TypeError, rf"args\[1\]: {big}, expected an int of 64 bits, or a ctypes value", x, 2**64 + 5
    )
    bad(TypeError, rf"args\[1\]: {big}, .*", x, 2**63)
    bad(TypeError, r"args\[1\]: str, expected a tensor, int, float, bool or a ctypes value", x, "x")
    bad(TypeError, r"args\[0\]: bytes, expected a tensor.*", b"x", 1)
    bad(TypeError, r"args\[0\]: NoneType, expected a tensor.*", None, 1)
    for size in (0, -1, 2**31, 2**32):
        bad(ValueError, rf"grid: {size} in dimension 0, expected 1 to 2147483647", x, 1, grid=size)
    bad(TypeError, "grid: int of more than 64 bits, expected an int", x, 1, grid=2**64 + 1)
    bad(ValueError, "grid: 65536 in dimension 1, expected 1 to 65535", x, 1, grid=(1, 65536))
    bad(ValueError, "grid: 4 sizes, expected one to three", x, 1, grid=(1, 1, 1, 1))
    bad(ValueError, "grid: 0 sizes, expected one to three", x, 1, grid=())
    bad(TypeError, "grid: bool, expected an int", x, 1, grid=True)
    bad(TypeError, "block: float, expected an int", x, 1, block=1.0)
    bad(TypeError, "block: bool, expected an int", x, 1, block=(1, True))
    bad(ValueError, "block: 1025 in dimension 0, expected 1 to 1024", x, 1, block=1025)
    bad(ValueError, "block: 2048 threads, expected at most 1024 .*", x, 1, block=(1024, 2))
    bad(ValueError, "shared_bytes: -1, expected 0 or more", x, 1, shared_bytes=-1)
    bad(
        ValueError,
        "shared_bytes: 231425, expected at most 231424 on this GPU",
        x,
        1,
        shared_bytes=231425,
    )
    bad(TypeError, "shared_bytes: bool, expected an int", x, 1, shared_bytes=True)
    bad(TypeError, "use_pdl: int, expected a bool", x, 1, use_pdl=1)
    bad(
        ValueError,
        "cluster: 2 in dimension 0, expected a divisor of the grid's 3",
        x,
        1,
        grid=3,
        cluster=2,
    )
    bad(ValueError, "cluster: 17 in dimension 0, expected 1 to 16", x, 1, grid=17, cluster=17)
    refused(
        ValueError,
        "launch: export: 'nope', expected one of wrong",
        module.launch,
        "nope",
        grid=1,
        block=1,
    )


def check_every_pointer_is_on_the_device() -> None:
    module = user("pointers", 16)
    here, there, pinned = 0x10000000, 0x20000000, 0x30000000
    for begin, kind, number in ((here, 2, 0), (there, 2, 1), (pinned, 1, 0)):
        driver.fake_memory(ctypes.c_uint64(begin), ctypes.c_uint64(4096), kind, number)
    x = cuda(4)
    for make in (Pointer, Interface):
        module.launch("pointers", x, make(here + 8), grid=1, block=1)
        assert params(log().splitlines()[-1])[8:] == struct.pack("<Q", here + 8)
        module.launch("pointers", x, make(pinned), grid=1, block=1)
        module.launch("pointers", x, make(0), grid=1, block=1)
        log()
        text = r"launch: args\[1\]: memory of cuda:1, expected memory of cuda:0"
        refused(ValueError, text, module.launch, "pointers", x, make(there), grid=1, block=1)
        text = r"launch: args\[1\]: memory that no GPU can read, expected memory of cuda:0"
        refused(ValueError, text, module.launch, "pointers", x, make(0x777), grid=1, block=1)
    # A ctypes value is what it says.
    module.launch("pointers", x, ctypes.c_void_p(there), grid=1, block=1)
    log()
    text = r"launch: args\[1\]: device cuda:1, expected cuda:0, as the others"
    refused(ValueError, text, module.launch, "pointers", x, cuda(4, number=1), grid=1, block=1)
    refused(
        ValueError, text, module.launch, "pointers", x, OnCuda(torch.zeros(4), 1), grid=1, block=1
    )
    text = r"launch: args\[0\]: device cpu, expected a CUDA device"
    refused(ValueError, text, module.launch, "pointers", torch.zeros(4), 1, grid=1, block=1)


def check_one_image_for_all_exports_of_a_module() -> None:
    """So that they share __device__ variables; and the limits are asked for once a function."""
    module = module_of("first", "second")
    for name in ("first", "second", "first"):
        module.launch(name, cuda(1), grid=1, block=1)
    lines = log().splitlines()
    assert sum("module" in line for line in lines) == 1, lines
    assert sum("attribute 8 = 231424" in line for line in lines) == 2, lines
    module.launch("second", cuda(1, number=1), grid=1, block=1, shared_bytes=200_000)
    lines = log().splitlines()
    assert sum("module" in line and "on 1" in line for line in lines) == 1, lines
    assert "shared 200000" in lines[-1]


def check_how_it_is_launched() -> None:
    module = module_of("how")
    x = cuda(1)
    module.launch("how", x, grid=(4, 2), block=(32, 2, 2))
    assert f"grid 4,2,1 block 32,2,2 shared 0 stream {STREAM} \n" in log()
    module.launch("how", x, grid=4, block=32, use_pdl=True)
    assert f"stream {STREAM} 6=1 \n" in log()
    module.launch("how", x, grid=[4, 2], block=32, cluster=(2, 1), cooperative=True)
    assert f"grid 4,2,1 block 32,1,1 shared 0 stream {STREAM} 2=1 4=2,1,1 \n" in log()
    how = {"grid": 4, "block": 32, "use_pdl": True, "cluster": 4, "cooperative": True}
    module.launch("how", x, **how)
    assert " 2=1 4=4,1,1 6=1 \n" in log()
    module.launch("how", 1, grid=1, block=1)  # no tensor: torch's current device
    assert "on 1\n" in (said := log()) and f"stream {STREAM}" in said, said


def check_no_gpu_is_said() -> None:
    device.device_and_stream, kept = real_device_and_stream, device.device_and_stream
    refused(
        UnsupportedError,
        "launch: there is no CUDA device",
        module_of("a").launch,
        "a",
        1,
        grid=1,
        block=1,
    )
    device.device_and_stream = kept


# -- elsewhere than on an H200 ---------------------------------------------------------------------


def old_pdl_is_for_gpus_that_know_it() -> None:
    """Before 9.0 nothing waits for it, and nothing is launched with it."""
    assert " 6=" not in store_call(2)
    module_of("how").launch("how", cuda(1), grid=1, block=1, use_pdl=True)
    assert " 6=" not in log()


def old_clusters_are_refused() -> None:
    text = r"launch: cluster: given, expected None on a GPU before compute capability 9\.0"
    refused(ValueError, text, module_of("c").launch, "c", cuda(1), grid=2, block=1, cluster=2)


def old_without_parameter_sizes_all_is_launched() -> None:
    module_of("any").launch("any", cuda(1), 1, 2, 3, grid=1, block=1)
    assert "grid 1,1,1" in log()


def main() -> None:
    DeviceModule.image = lambda self, arch: f"image of {self.name}".encode()  # type: ignore[method-assign]
    device.device_and_stream = lambda number: (1 if number < 0 else number, STREAM)
    failed = {}
    names = [name for name in globals() if name.startswith(sys.argv[1])]
    for name in names:
        log()
        try:
            globals()[name]()
            failed[name] = ""
        except Exception:
            failed[name] = traceback.format_exc()
    print(json.dumps(failed))


real_device_and_stream = device.device_and_stream
if __name__ == "__main__":
    main()
