"""Compiles the drivers in this directory for the CPU, with sanitizers, and runs them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jitkern.comm.peer_reduce import IN_FLIGHT, WAYS
from jitkern.compilers.sources import CSRC, include_dirs
from jitkern.jit.template import KernelConfig
from jitkern.ops import device_ops, formats, pairs
from jitkern.ops.merge import BlockShape

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SUPPORT = ("buffers.cc", "fibers.cc")

# -Og: kernels run once each, so most of the time is the compiler's; -O1 takes twice as long.
FLAGS = (
    *("-std=c++17", "-Og", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    # What is left out takes a third of the time to compile, and AddressSanitizer finds it as well.
    "-fno-sanitize=null,object-size,vptr,pointer-overflow",
)


@dataclass(frozen=True)
class Sweep:
    """One driver, and the row sizes that it is compiled for."""

    driver: str
    defines: tuple[str, ...] = ()

    def __str__(self) -> str:
        sizes = [text.rpartition("=")[2].split(",") for text in self.defines]
        return "-".join([self.driver, *(f"{part[0]}..{part[-1]}" for part in sizes)])


_SWEPT = re.compile(r"^// (\d+) row sizes to a program", re.MULTILINE)  # what compiles in seconds

# 13 is odd, so that behind the first 40 every alignment comes up, and 76 of the 128 places where a
# row may end in a line.
_ROW_SIZES = sorted(
    {*range(1, 41), *range(47, 701, 13), 127, 128, 129, 255, 256, 257, 511, 512, 513}
)
_LARGE_ROW_SIZES = [1024, 2048, 7168, 8192, 65536]


# The kernels that the drivers of the merge and of the peers' sums run, as their C++ names them.
F32, F16, BF16, E4M3 = range(4)  # _TYPES of jitkern.ops.merge
ONE_SHOT, TWO_SHOT = 0, 1  # as in WAYS of jitkern.comm.peer_reduce

# dim, elements of a vector, types of the partials and the result, partials, plain.
_FEW_MERGES = (
    (3, 1, F32, F32, 2, 0),
    (40, 8, BF16, F32, 4, 0),
    (8, 8, F16, E4M3, 8, 0),
    (3, 1, F16, F16, 2, 1),
    (1102, 2, F16, F16, 2, 1),  # in two steps, with an idle lane in the second
    (96, 8, F16, F16, 8, 1),
)
_MERGES = (
    *_FEW_MERGES,
    (1, 1, F16, F16, 2, 0), (3, 1, BF16, BF16, 4, 1), (5, 1, F32, E4M3, 8, 1),
    (24, 4, F32, BF16, 4, 0), (24, 2, F32, F16, 8, 1), (40, 4, F16, F16, 8, 0),
    (70, 2, BF16, BF16, 8, 0), (96, 8, BF16, E4M3, 2, 1), (128, 8, BF16, BF16, 2, 0),
    (128, 8, F16, F32, 8, 1), (128, 4, F32, F16, 8, 1), (576, 8, BF16, BF16, 8, 0),
    (2100, 4, BF16, E4M3, 4, 0),
)  # fmt: skip


def _merge(*numbers: int) -> str:
    dim, vec_elems, *_ = numbers
    shape = BlockShape.of(dim // vec_elems)
    return f"Kernel<{','.join(map(str, (*numbers, shape.num_threads, *shape)))}>"


def _reductions(ranks: int, *accesses: tuple[int, int, int]) -> list[str]:
    """Return kernels of all ways; an access is a dtype, bytes, vectors in flight."""
    return [
        f"Kernel<{dtype},{ranks},{access},{way},{in_flight}>"
        for way in range(len(WAYS))
        for dtype, access, in_flight in accesses
    ]


_FEW_REDUCTIONS = [
    *_reductions(3, (F32, 4, 2)),
    f"Kernel<{F32},3,16,{TWO_SHOT},1>",
    f"Kernel<{BF16},3,2,{ONE_SHOT},1>",
]
_REDUCTIONS = [
    *_reductions(2, (F32, 4, 1), (F32, 16, IN_FLIGHT[2]), (BF16, 2, IN_FLIGHT[2])),
    *_reductions(3, (F16, 2, IN_FLIGHT[3]), (BF16, 2, 1), (BF16, 8, IN_FLIGHT[3])),
    *_reductions(4, (F32, 4, IN_FLIGHT[4]), (F16, 2, 1)),
    *_reductions(8, (F16, 2, 1), (F16, 16, 1), (F32, 4, 1)),
]

# Defines that a driver is compiled with.
_INSTANCES = {
    "merge": (
        f"FEW_KERNELS={','.join(_merge(*numbers) for numbers in _FEW_MERGES)}",
        f"ALL_KERNELS={','.join(_merge(*numbers) for numbers in _MERGES)}",
    ),
    "peer_reduce": (
        f"FEW_KERNELS={','.join(_FEW_REDUCTIONS)}",
        f"ALL_KERNELS={','.join(_REDUCTIONS)}",
    ),
}


def drivers() -> list[str]:
    names = [path.name for path in sorted(HERE.glob("*.cc"))]
    return [name.removesuffix(".cc") for name in names if name not in (*SUPPORT, "self_test.cc")]


def sweeps_of(driver: str) -> list[Sweep]:
    """Row sizes of 1 to 700 bytes and the large ones, in parts that compile in seconds."""
    swept = _SWEPT.search((HERE / f"{driver}.cc").read_text())
    if swept is None:
        return [Sweep(driver)]
    step = int(swept[1])
    parts = [_ROW_SIZES[begin : begin + step] for begin in range(0, len(_ROW_SIZES), step)]
    sizes = [",".join(map(str, part)) for part in (_LARGE_ROW_SIZES, *parts)]
    return [Sweep(driver, (f"SWEEP_ROWS={text}",)) for text in sizes]


def _facts_of(driver: str) -> list[str]:
    """How the ops launch their kernels: those are run. `CONFIG` of store.py is STORE_CONFIG."""
    facts = {}
    for stem, module in {**device_ops(), "pairs": pairs}.items():
        for name, value in vars(module).items():
            if isinstance(value, KernelConfig):
                facts[f"{stem}_{name}"] = value.template_args
            elif name.isupper() and type(value) is int:
                facts[f"{stem}_{name}"] = value
    for stem, config in formats.CONFIGS.items():
        facts[f"{stem}_CONFIG"] = config.template_args
    launches = [f"{name.upper()}={value}" for name, value in facts.items()]
    return [*launches, *_INSTANCES.get(driver, ())]


@cache
def compiler() -> tuple[str, ...]:
    """The C++ compiler that has the sanitizers; RuntimeError saying why where there is none."""
    command = tuple(shlex.split(os.environ.get("CXX", ""))) or ("c++",)
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"{command[0]} is not installed")
    with tempfile.TemporaryDirectory() as scratch:
        link = [*command, *FLAGS, "-x", "c++", "-", "-o", f"{scratch}/program"]
        done = subprocess.run(link, input="int main() {}", capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{command[0]} has no address and undefined sanitizer")
    return command


def build(sweep: Sweep, folder: Path, csrc: Path = CSRC) -> Path:
    """Return the program of one driver, compiled into a folder."""
    target = folder / sweep.driver
    defines = [f"-D{text}" for text in (*_facts_of(sweep.driver), *sweep.defines)]
    return _compile(f"{sweep.driver}.cc", csrc, [*defines, *_support(folder), "-o", str(target)])


def run(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Return what the driver said; its exit status is 0 if it found nothing wrong."""
    # Leaks are no matter here, and looking for them needs ptrace, which containers forbid.
    options = {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    return subprocess.run(
        [str(program), *args],
        env={**os.environ, **options},
        capture_output=True,
        text=True,
        timeout=900,
    )


@cache
def _support(folder: Path) -> list[str]:
    """What all drivers are linked with, whatever is wrong with the kernels."""
    objects = [folder / f"{name}.o" for name in SUPPORT]
    for name, target in zip(SUPPORT, objects, strict=True):
        _compile(name, CSRC, ["-c", "-o", str(target)])
    return list(map(str, objects))


def _compile(source: str, csrc: Path, options: Sequence[str]) -> Path:
    includes = [f"-I{folder}" for folder in (*include_dirs(csrc), HERE)]
    command = [*compiler(), *FLAGS, *includes, "-include", "cuda_on_cpu.h", str(HERE / source)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    return Path(options[-1])
