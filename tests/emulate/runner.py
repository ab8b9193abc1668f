"""Compiles the drivers in this directory for the CPU, with sanitizers, and runs them.

``python tests/emulate/runner.py`` runs every sweep, ``--all`` each specialisation of all row sizes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path

from jitkern.compilers.sources import CSRC, include_dirs
from jitkern.jit.template import KernelConfig
from jitkern.ops import device_ops, pairs

HERE = Path(__file__).resolve().parent
SUPPORT = ("buffers.cc", "fibers.cc", "sweep.cc")

# -Og: kernels run once each, so most of the time is the compiler's; -O1 takes twice as long.
FLAGS = (
    *("-std=c++17", "-Og", "-g1", "-Wall", "-Wextra", "-Wno-unknown-pragmas"),
    *("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer"),
    # What is left out takes a third of the time to compile, and AddressSanitizer finds it as well.
    "-fno-sanitize=null,object-size,vptr,pointer-overflow",
)


def _launch_facts() -> tuple[str, ...]:
    """What the ops say of their launches, for the drivers: the kernels that are run are those.

    `CONFIG` of store.py becomes STORE_CONFIG.
    """
    facts = {}
    for stem, module in {**device_ops(), "pairs": pairs}.items():
        for name, value in vars(module).items():
            if isinstance(value, KernelConfig):
                facts[f"{stem}_{name}"] = value.template_args
            elif name.isupper() and type(value) is int:
                facts[f"{stem}_{name}"] = value
    return tuple(f"-D{name.upper()}={value}" for name, value in facts.items())


@cache
def _own_facts(driver: str) -> tuple[str, ...]:
    """What the module beside a driver says of the kernels that it runs: its DEFINES."""
    if not (HERE / f"{driver}.py").exists():
        return ()
    return getattr(import_module(f"emulate.{driver}"), "DEFINES", ())


def facts_of(driver: str) -> tuple[str, ...]:
    """Return what a driver is compiled with, as options of the compiler."""
    return (*_launch_facts(), *(f"-D{text}" for text in _own_facts(driver)))


@dataclass(frozen=True)
class Sweep:
    """One driver, and the row sizes that it is compiled for."""

    driver: str
    defines: tuple[str, ...] = ()

    def __str__(self) -> str:
        texts = [text.rpartition("=")[2] for text in self.defines]
        return "-".join([self.driver, *(_shown(text) for text in texts)])


def _shown(text: str) -> str:
    parts = text.split(",")
    return text if len(parts) < 8 else f"{parts[0]}..{parts[-1]}"


_SWEPT = re.compile(r"^// (\d+) row sizes to a program", re.MULTILINE)  # what compiles in seconds

# 13 is odd, so that behind the first 40 every alignment comes up, and 76 of the 128 places where a
# row may end in a line; `--all` has every size.
_ROW_SIZES = sorted(
    {*range(1, 41), *range(47, 701, 13), 127, 128, 129, 255, 256, 257, 511, 512, 513}
)
_LARGE_ROW_SIZES = (1024, 2048, 7168, 8192, 65536)


def sweeps(every: bool = False) -> list[Sweep]:
    """Row sizes of 1 to 700 bytes and the large ones, in parts that compile in seconds."""
    more = ("SWEEP_ALL",) if every else ()
    sizes = list(range(1, 701)) if every else _ROW_SIZES
    found = []
    for path in sorted(HERE.glob("*.cc")):
        driver, swept = path.stem, _SWEPT.search(path.read_text())
        if swept is None:
            found += [] if path.name in (*SUPPORT, "self_test.cc") else [Sweep(driver)]
            continue
        step = int(swept[1])
        parts = [sizes[begin : begin + step] for begin in range(0, len(sizes), step)]
        for part in (_LARGE_ROW_SIZES, *parts):
            found.append(Sweep(driver, (f"SWEEP_ROWS={','.join(map(str, part))}", *more)))
    return found


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


@cache
def _version() -> str:
    return subprocess.run([*compiler(), "--version"], capture_output=True, text=True).stdout


def forget_old(store: Path, age_s: float = 7 * 24 * 3600) -> None:
    """Delete programs that were compiled longer ago, as sources change and digests with them."""
    for path in store.iterdir():
        if path.is_file() and path.stat().st_mtime < time.time() - age_s:
            path.unlink(missing_ok=True)


@dataclass(frozen=True)
class Runner:
    """Compiles into ``store``, under names that are digests of all that goes in."""

    store: Path
    csrc: Path = CSRC
    flags: Sequence[str] = field(default=FLAGS)

    def build(self, sweep: Sweep) -> Path:
        """Return the program of one driver, compiled unless it is there already."""
        objects = _support(self.store, tuple(self.flags))
        own = [f"-D{text}" for text in sweep.defines]
        defines = [*facts_of(sweep.driver), *own]
        return self._compile(f"{sweep.driver}.cc", defines, "", objects)

    def run(self, sweep: Sweep, *args: str) -> subprocess.CompletedProcess[str]:
        """Return what the driver said; its exit status is 0 if it found nothing wrong."""
        return self.start(self.build(sweep), *args)

    @staticmethod
    def start(program: Path, *args: str) -> subprocess.CompletedProcess[str]:
        """Do what :meth:`run` does, of a program that is there."""
        # Leaks are no matter here, and looking for them needs ptrace, which containers forbid.
        env = {
            **os.environ,
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
        }
        return subprocess.run(
            [str(program), *args], env=env, capture_output=True, text=True, timeout=900
        )

    def _compile(
        self, source: str, options: Sequence[str], suffix: str, objects: Sequence[Path]
    ) -> Path:
        command = [*compiler(), *self.flags, *options]
        paths = [
            *(f"-I{folder}" for folder in (*include_dirs(self.csrc), HERE)),
            *("-include", str(HERE / "cuda_on_cpu.h"), str(HERE / source)),
        ]
        # The preprocessed text is all that the compiler sees.
        text = _checked([*command, "-E", "-P", *paths])
        key = json.dumps([_version(), command, text, [path.name for path in objects]])
        digest = hashlib.sha256(key.encode()).hexdigest()[:20]
        target = self.store / f"{Path(source).stem}-{digest}{suffix}"
        if target.exists():
            return target
        self.store.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.store) as scratch:
            made = Path(scratch) / target.name
            _checked([*command, *paths, *map(str, objects), "-o", str(made)])
            made.replace(target)  # another process may have made the same meanwhile
        return target


@cache
def _support(store: Path, flags: tuple[str, ...]) -> list[Path]:
    """What all drivers are linked with, whatever is wrong with the kernels."""
    runner = Runner(store, flags=flags)
    return [runner._compile(name, ["-c"], ".o", []) for name in SUPPORT]


def _checked(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stderr}")
    return done.stdout


def main() -> int:
    sys.path.insert(0, str(HERE.parent))  # of the modules beside this one
    parser = argparse.ArgumentParser(description="Run the kernels on the CPU, under sanitizers.")
    parser.add_argument("--all", action="store_true", help="every specialisation")
    parser.add_argument("--store", type=Path, help="where compiled programs are kept")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        runner = Runner(args.store or Path(scratch))
        total = {"specialisations": 0, "runs": 0, "threads": 0, "faults": 0}
        failed = 0
        runner.build(Sweep("self_test"))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for sweep, done in zip(
                sweeps(args.all), pool.map(runner.run, sweeps(args.all)), strict=True
            ):
                print(sweep, done.stdout.strip() or done.stderr[-2000:], flush=True)
                failed += done.returncode != 0
                said = json.loads(done.stdout) if done.returncode == 0 else {}
                for name in total:
                    total[name] += said.get(name, 0)
    print(f"total {json.dumps(total)}, {failed} sweeps failed")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
