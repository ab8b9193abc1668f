"""Kernels compile for every supported architecture, through the loader and its cache."""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from typing import Any

import pytest
from needs import needs_nvrtc
from stems import ON_GPU, STEMS, own_tests

from jitkern import load_jit
from jitkern.arch import SUPPORTED_ARCHS, Arch
from jitkern.jit.device import DeviceModule
from jitkern.ops import device_ops
from jitkern.ops._ops import KERNEL_OPS, op_sizes

pytestmark = needs_nvrtc

# One row size for each vector width from 16 bytes down to 1, and the largest.
# If an op is sized by the elements of a head, as many of those; or all formats.
ROW_BYTES = [656, 40, 12, 6, 657, 8192]
FEW = 4
ALL = [op.stem for op in KERNEL_OPS]


def sizes_of(op: str) -> Sequence[Any]:
    return op_sizes()[op].choices or ROW_BYTES


def kernels(op: str, arch: str) -> list[DeviceModule]:
    """Return all kernels for 9.0, a few of one size for the others."""
    module, (first, *others) = device_ops()[op], sizes_of(op)
    kernels: list[DeviceModule] = module.kernels(first)
    if arch != "9.0":
        return kernels[:: -(-len(kernels) // FEW)]
    return kernels + [module.kernels(size)[0] for size in others]


def own_kernels(op: str, size: Any) -> list[DeviceModule]:
    """Return the op's kernels of this size, without those that it shares with others."""
    return [kernel for kernel in device_ops()[op].kernels(size) if kernel.op == op]


def arch_of(image: bytes) -> int:
    """Return the SM version that a cubin says it is for: 90 for sm_90."""
    assert image[:4] == b"\x7fELF"
    flags = struct.unpack_from("<I", image, 48)[0]
    # The newer ABI of CUDA 13 moved the version up by a byte.
    return flags >> 8 & 0xFF if image[8] >= 8 else flags & 0xFF


def compiles(kernel: DeviceModule, arch: Arch) -> None:
    image = kernel.image(arch)
    assert arch_of(image) == arch.major * 10 + arch.minor
    for export in kernel.exports:
        assert b".text." + export.encode() + b"\0" in image  # found by its plain C name


@pytest.mark.parametrize("op", ALL)
def test_a_kernel_compiles(op: str) -> None:
    compiles(device_ops()[op].kernels(sizes_of(op)[0])[0], Arch(9, 0))


@pytest.mark.slow
@pytest.mark.parametrize("arch", list(map(str, SUPPORTED_ARCHS)))
@pytest.mark.parametrize("op", ALL)
def test_kernels_compile(op: str, arch: str) -> None:
    for kernel in kernels(op, arch):
        compiles(kernel, Arch.parse(arch))


@pytest.mark.parametrize("op", ON_GPU)
def test_a_profiler_tells_kernels_apart(op: str) -> None:
    """Names have the op, index type and options, and the row size if it is compiled in."""
    kernels = {kernel for size in sizes_of(op) for kernel in own_kernels(op, size)}
    names = {kernel.exports[0] for kernel in kernels}
    assert len(names) == len(kernels)
    for name in names:
        assert re.match(rf"jitkern_{op}_(\d+B_|\w+_)?v\d+", name)


@pytest.mark.slow
@pytest.mark.parametrize("op", ON_GPU)
def test_no_kernel_spills(op: str) -> None:
    """A spilled register would be memory traffic of its own; ptxas tells."""
    arch = Arch.parse("9.0")
    for kernel in own_kernels(op, sizes_of(op)[0]):
        verbose = load_jit(
            op,
            *kernel.args,
            device_files=[f"jitkern:ops/{file}" for file in kernel._key(arch).describe["files"]],
            device_wrappers=kernel.wrappers,
            extra_cuda_cflags=["--ptxas-options=-v"],
        )
        log = verbose._lookup(arch).entry.meta["log"]
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
        assert spilled, log
        assert max(spilled) <= getattr(own_tests(STEMS[op]), "ALLOWED_SPILL_BYTES", 0), log
