"""Every kernel compiles for every supported architecture, through the loader and its cache."""

from __future__ import annotations

import re
import struct

import pytest
from stems import ON_GPU, STEMS, own_tests

from jitkern import load_jit
from jitkern.arch import SUPPORTED_ARCHS, Arch
from jitkern.compilers.find_nvrtc import find_nvrtc
from jitkern.errors import ToolchainError
from jitkern.ops import device_ops

ARCHS = list(map(str, SUPPORTED_ARCHS))
# One row size for each vector width from 16 bytes down to 1, and the largest.
# Where an op is sized by the elements of a head, as many of those.
ROW_BYTES = [656, 40, 12, 6, 657, 8192]
FEW = 4


def row_bytes_of(arch: str) -> list[int]:
    """All for 9.0; half of them in turn for the others."""
    return ROW_BYTES if arch == "9.0" else ROW_BYTES[ARCHS.index(arch) % 2 :: 2]


@pytest.fixture(scope="module", autouse=True)
def nvrtc() -> None:
    try:
        find_nvrtc()
    except ToolchainError as error:
        pytest.skip(str(error))


def arch_of(image: bytes) -> int:
    """Return the SM version that a cubin says it is for: 90 for sm_90."""
    assert image[:4] == b"\x7fELF"
    abi = image[8]
    flags = struct.unpack_from("<I", image, 48)[0]
    # The newer ABI of CUDA 13 moved the version up by a byte.
    return flags >> 8 & 0xFF if abi >= 8 else flags & 0xFF


def chosen(specs: list[tuple[int, ...]], arch: str) -> list[tuple[int, ...]]:
    """All kernels of a size, but of an op that has many of them a few, where 9.0 has all."""
    if arch == "9.0" or len(specs) <= 2 * FEW:
        return specs
    return specs[:: len(specs) // FEW]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", ON_GPU)
def test_every_row_size_compiles(op: str, arch: str) -> None:
    module = device_ops()[op]
    wanted = Arch.parse(arch)
    sizes = row_bytes_of(arch)
    for row_bytes in sizes:
        specs = module.specialisations(row_bytes)
        assert specs
        for spec in chosen(specs, arch) if row_bytes == sizes[0] else specs[:1]:
            kernel = module.kernel(*spec)
            image = kernel.image(wanted)
            assert arch_of(image) == wanted.major * 10 + wanted.minor
            for export in kernel.exports:
                assert b".text." + export.encode() + b"\0" in image  # found by its plain C name


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("op", ON_GPU)
def test_what_all_row_sizes_share_compiles(op: str, arch: str) -> None:
    for kernel in getattr(device_ops()[op], "shared_kernels", list)():
        image = kernel.image(Arch.parse(arch))
        assert all(b".text." + export.encode() + b"\0" in image for export in kernel.exports)


@pytest.mark.parametrize("op", ON_GPU)
def test_a_profiler_tells_kernels_apart(op: str) -> None:
    """By op, index type and what else a call may use, and row size where that is compiled in."""
    module = device_ops()[op]
    specs = {spec for row_bytes in ROW_BYTES for spec in module.specialisations(row_bytes)}
    names = {module.kernel(*spec).exports[0] for spec in specs}
    assert len(names) == len(specs)
    for name in names:
        assert re.match(rf"jitkern_{op}_(\d+B_)?v\d+", name)


@pytest.mark.parametrize("op", ON_GPU)
def test_no_kernel_spills(op: str) -> None:
    """A spilled register would be memory traffic of its own; ptxas tells."""
    module = device_ops()[op]
    for spec in module.specialisations(656):
        kernel = module.kernel(*spec)
        arch = Arch.parse("9.0")
        verbose = load_jit(
            op,
            *kernel.args,
            device_files=[f"jitkern:ops/{file}" for file in kernel.key(arch).describe["files"]],
            device_wrappers=kernel.wrappers,
            extra_cuda_cflags=["--ptxas-options=-v"],
        )
        log = verbose.lookup(arch).entry.meta["log"]
        spilled = [int(count) for count in re.findall(r"(\d+) bytes spill", log)]
        assert spilled, log
        assert max(spilled) <= getattr(own_tests(STEMS[op]), "ALLOWED_SPILL_BYTES", 0), log
