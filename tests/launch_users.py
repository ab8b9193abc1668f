"""Launches of users' kernels on the fake driver; run by launch_child.py."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import torch
import tvm_ffi
from fake_gpu import address_of
from launch_fake import (
    STREAM,
    OnCuda,
    cuda,
    declared,
    driver,
    log,
    module_of,
    params,
    real_device_and_stream,
    refused,
    user,
)

from jitkern.errors import UnsupportedError
from jitkern.jit import device as launch
from jitkern.jit.device import CpuForm, DeviceModule

ONE = {"grid": 1, "block": 1}


def launched(module: DeviceModule, name: str, *args: Any) -> bytes:
    """Launch a kernel, and return its parameters."""
    module.launch(name, *args, **ONE)
    return params(log().splitlines()[-1])


def check_arguments_become_a_struct() -> None:
    x = cuda(4)
    module = user("members", 40)
    args = (x, 7, True, ctypes.c_int32(-2), 0.5, ctypes.c_float(0.25))
    want = struct.pack("<Qq?xxxidf4x", address_of(x), 7, True, -2, 0.5, 0.25)
    assert launched(module, "members", *args) == want

    class Pair(ctypes.Structure):
        _fields_ = (("a", ctypes.c_int8), ("b", ctypes.c_int64))

    args = (ctypes.c_int8(1), Pair(2, -3), ctypes.c_uint64(2**64 - 1))
    want = struct.pack("<bxxxxxxxbxxxxxxxqQ", 1, 2, -3, 2**64 - 1)
    assert launched(user("pair", 32), "pair", *args) == want


def check_sizes_that_do_not_match_are_refused() -> None:
    module = user("sized", 16)
    x = cuda(4)
    text = "launch: args: {} bytes in all, expected 16 bytes, the members of the kernel's Params"
    refused(ValueError, text.format("3 of 24"), module.launch, "sized", x, 1, 2, **ONE)
    refused(ValueError, text.format("1 of 8"), module.launch, "sized", x, **ONE)
    launched(module, "sized", x, 1)
    launched(module, "sized", x, ctypes.c_int32(1))  # with the padding behind it
    user("nothing", 1).launch("nothing", **ONE)


def check_wrong_values_are_refused() -> None:
    module = user("wrong", 16)
    x = cuda(4)

    def bad(kind: type[Exception], text: str, *args: Any, **how: Any) -> None:
        refused(kind, "launch: " + text, module.launch, "wrong", *args, **{**ONE, **how})

    big = "int of more than 64 bits"
    any_type = "expected a tensor, an int of 64 bits, a float, a bool or a ctypes value"
    bad(TypeError, rf"args\[1\]: {big}, {any_type}", x, 2**64 + 5)
    bad(TypeError, rf"args\[1\]: str, {any_type}", x, "x")
    bad(TypeError, r"args\[0\]: None, expected a tensor.*", None, 1)
    in_0 = "{}: {} in dimension 0, expected 1 to {}"
    for kind, text, how in (
        *((ValueError, in_0.format("grid", n, 2147483647), {"grid": n}) for n in (0, -1, 2**31)),
        (TypeError, f"grid: {big}, expected an int", {"grid": 2**64 + 1}),
        (ValueError, "grid: 65536 in dimension 1, expected 1 to 65535", {"grid": (1, 65536)}),
        (ValueError, "grid: 4 sizes, expected one to three", {"grid": (1, 1, 1, 1)}),
        (ValueError, "grid: 0 sizes, expected one to three", {"grid": ()}),
        (TypeError, "grid: bool, expected an int", {"grid": True}),
        (TypeError, "block: float, expected an int", {"block": 1.0}),
        (ValueError, in_0.format("block", 1025, 1024), {"block": 1025}),
        (ValueError, "block: 2048 threads, expected at most 1024 .*", {"block": (1024, 2)}),
        (ValueError, "shared_bytes: -1, expected 0 or more", {"shared_bytes": -1}),
        (ValueError, "shared_bytes: 231425, expected at most .*", {"shared_bytes": 231425}),
        (TypeError, "shared_bytes: bool, expected an int", {"shared_bytes": True}),
        (TypeError, "use_pdl: int, expected a bool", {"use_pdl": 1}),
        (
            ValueError,
            "cluster: 2 .*, expected a divisor of the grid's 3",
            {"grid": 3, "cluster": 2},
        ),
        (ValueError, in_0.format("cluster", 17, 16), {"grid": 17, "cluster": 17}),
    ):
        bad(kind, text, x, 1, **how)


def check_declared_numbers_become_what_is_declared() -> None:
    """Also where the driver cannot tell the size of the kernel's parameters."""
    text = "float* x, float a, double b, int c, int8 d, uint8 e, bool f, long long g, uint64 h"
    want = "<QfxxxxdibB?xqQ"
    driver.fake_kernel(b"numbers", ctypes.c_uint64(struct.calcsize(want)), 1024)
    module = declared("numbers", text)
    x = cuda(4)
    ints = (2, 2, -3, -128, 255, True, -(2**63), 2**63 - 1)
    assert launched(module, "numbers", x, *ints) == struct.pack(want, address_of(x), *ints)
    ct = (ctypes.c_float(0.5), ctypes.c_double(2), ctypes.c_int(1), ctypes.c_int8(1))
    ct += (ctypes.c_uint8(1), ctypes.c_bool(True), ctypes.c_int64(1), ctypes.c_uint64(2**64 - 1))
    got = launched(module, "numbers", ctypes.c_void_p(address_of(x)), *ct)
    assert got == struct.pack(want, address_of(x), 0.5, 2.0, 1, 1, 1, True, 1, 2**64 - 1)

    class Pair(ctypes.Structure):
        _fields_ = (("low", ctypes.c_int32), ("high", ctypes.c_int32))

    # Of 8 bytes, aligned as the member is and not as it is itself.
    got = launched(module, "numbers", x, *ct[:6], Pair(5, 0), ct[7])
    assert got[-16:-8] == struct.pack("<q", 5)
    launched(module, "numbers", x, float("inf"), 1e300, 1, 1, 1, False, 1, 1)


def check_declared_arguments_are_refused_by_name() -> None:
    text = "float* x, float a, int n, uint8 u, bool f, void* any, strided half* s"
    module = declared("scale", text)
    names = ["x", "a", "n", "u", "f", "any", "s"]
    good = [cuda(4), 2.0, 3, 4, True, cuda(2), cuda(3, dtype=torch.float16)]

    def bad(kind: type[Exception], text: str, **wrong: Any) -> None:
        args = {**dict(zip(names, good, strict=True)), **wrong}.values()
        refused(kind, "scale: " + text, module.launch, "scale", *args, **ONE)

    text = "scale: args: {} arguments, expected 7: x, a, n, u, f, any, s"
    for args in (good[:-1], [*good, 1], []):
        refused(ValueError, text.format(len(args)), module.launch, "scale", *args, **ONE)
    bad(TypeError, "x: dtype float64, expected float32", x=cuda(4, dtype=torch.float64))
    bad(TypeError, "s: dtype bfloat16, expected float16", s=cuda(4, dtype=torch.bfloat16))
    bad(TypeError, "x: int, expected a tensor of float32", x=1)
    bad(TypeError, "x: None, expected a tensor of float32", x=None)
    bad(TypeError, "any: float, expected a tensor", any=1.0)
    text = (
        r"x: not contiguous \(stride 2 in dimension 0 of shape \[2\]\), expected a contiguous "
        r"tensor; declare it as strided in device_wrappers, or pass \.contiguous\(\) if it is only "
        r"read"
    )
    bad(ValueError, text, x=tvm_ffi.from_dlpack(OnCuda(torch.zeros(4)[::2])))
    bad(TypeError, "a: str, expected float32", a="2")
    bad(TypeError, "a: bool, expected float32", a=True)
    bad(TypeError, "a: Tensor, expected float32", a=cuda(1))
    bad(ValueError, "a: 1000+.*, expected a number that float32 holds", a=1e300)
    bad(TypeError, "n: float, expected int32", n=2.0)
    bad(TypeError, "n: bool, expected int32", n=True)
    bad(ValueError, "n: 2147483648, expected a number that int32 holds", n=2**31)
    bad(ValueError, "n: -2147483649, expected a number that int32 holds", n=-(2**31) - 1)
    bad(TypeError, "n: int of more than 64 bits, expected int32", n=2**64)
    bad(ValueError, "u: 256, expected a number that uint8 holds", u=256)
    bad(ValueError, "u: -1, expected a number that uint8 holds", u=-1)
    bad(ValueError, "n: 8 bytes, expected 4, those of int32", n=ctypes.c_int64(1))
    bad(TypeError, "f: int, expected bool", f=1)
    bad(ValueError, "x: device cpu, expected a CUDA device; .* cpp_files and .*", x=torch.zeros(4))
    bad(ValueError, "any: device cuda:1, expected cuda:0, as the others", any=cuda(1, number=1))
    launched(module, "scale", *good)
    strided = tvm_ffi.from_dlpack(OnCuda(torch.zeros(8, dtype=torch.float16)[::2]))
    launched(module, "scale", *good[:-1], strided)


def check_tensors_on_the_cpu_go_to_the_form_for_it() -> None:
    calls: list[Any] = []
    cpu = CpuForm(frozenset({"scale"}), lambda: {"scale": lambda *args: calls.append(args)})
    module = declared("scale", "float* x, double a, int64 n", cpu)
    x = torch.zeros(4)
    module.launch("scale", x, 2, ctypes.c_int64(3), **ONE)
    (got,) = calls
    assert got[0] is x and got[1:] == (2, 3)
    assert log() == "", "the driver was called"
    text = "scale: x: dtype float64, expected float32"
    refused(TypeError, text, module.launch, "scale", x.double(), 2, 3, **ONE)
    text = "launch: grid: 0 in dimension 0, expected 1 to 2147483647"
    refused(ValueError, text, module.launch, "scale", x, 2, 3, grid=0, block=1)
    assert len(calls) == 1
    module.launch("scale", cuda(4), 2, 3, **ONE)
    assert len(calls) == 1 and "grid 1,1,1" in log()
    both = declared("scale", "float* x, float* y", cpu)
    text = "scale: y: device {}, expected {}, as the others"
    refused(ValueError, text.format("cpu", "cuda:0"), both.launch, "scale", cuda(4), x, **ONE)
    refused(ValueError, text.format("cuda:0", "cpu"), both.launch, "scale", x, cuda(4), **ONE)


def check_one_image_for_all_exports_of_a_module() -> None:
    """So that they share __device__ variables; and the limits are asked for once a function."""
    module = module_of("first", "second")
    for name in ("first", "second", "first"):
        module.launch(name, cuda(1), **ONE)
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
    module.launch("how", 1, **ONE)  # no tensor: torch's current device
    assert "on 1\n" in (said := log()) and f"stream {STREAM}" in said, said


def check_a_block_is_what_the_kernel_was_compiled_for() -> None:
    driver.fake_kernel(b"fixed", ctypes.c_uint64(8), 1024)
    driver.fake_block(256)
    module, x = module_of("fixed", "any"), cuda(1)
    text = "launch: block: {} threads, expected 256, the kernel's kNumThreads"
    for block, threads in ((128, 128), (1024, 1024), ((32, 4), 128)):
        refused(ValueError, text.format(threads), module.launch, "fixed", x, grid=1, block=block)
    text = "launch: block: None, expected threads: the kernel's class has no kNumThreads"
    refused(ValueError, text, module.launch, "any", x, grid=1)
    for how, said in (({}, "256,1,1"), ({"block": (32, 8)}, "32,8,1")):
        module.launch("fixed", x, grid=1, **how)
        assert f"grid 1,1,1 block {said} " in log()
    module.launch("any", x, grid=1, block=128)
    assert "grid 1,1,1 block 128,1,1 " in log()


def check_no_gpu_is_said() -> None:
    launch.device_and_stream, kept = real_device_and_stream, launch.device_and_stream
    text = "launch: there is no CUDA device"
    refused(UnsupportedError, text, module_of("a").launch, "a", 1, **ONE)
    launch.device_and_stream = kept
