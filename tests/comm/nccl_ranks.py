"""Ranks over NCCL: on GPUs, or over the one of fake_nccl.cc with as many as are wanted."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from comm_ranks import LATE_S, Pool, Rank, everywhere
from filelock import FileLock
from needs import needs_cxx
from shared_gpu import IS_SHARED, num_gpus

from jitkern.host import module as host

HERE = Path(__file__).resolve().parent
THREADS = HERE.parent / "threads"
NUM_FAKE_GPUS = 4
DEADLINE_S = 15.0 if IS_SHARED else 0.5  # of calls: there NCCL takes 4 s for the first one
_MARKS = [
    needs_cxx,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="puts a libcuda in place"),
]
FAKE = pytest.param("fake", marks=_MARKS)
CUDA = pytest.param("cuda", marks=pytest.mark.multigpu(processes=True))


def make(ranks: list[Rank], **config: Any) -> None:
    for rank in ranks:
        rank.tell("make_nccl", **{"timeout_s": 60, **config})
    for rank in ranks:
        rank.value()


def all_do(ranks: list[Rank], do: str, **config: Any) -> list[Any]:
    for rank in ranks:
        rank.tell(do, **config)
    return [rank.value() for rank in ranks]


def calls_done(ranks: list[Rank], count: int) -> None:
    all_do(ranks, "calls", count=count)
    all_do(ranks, "synchronize")


def ranks_of(pool: Pool, size: int, count: int = 3, deadline_s: float = DEADLINE_S) -> list[Rank]:
    """Ranks that have made calls, and whose next ones have a short deadline; the set-up had not."""
    ranks = pool.join(size)
    make(ranks)
    calls_done(ranks, count)
    everywhere(ranks, f"setattr(comm, 'timeout_s', {deadline_s})")
    return ranks


def late(rank: Rank, do: str, texts: Sequence[str] = (), **config: Any) -> None:
    """The rank raises in time, and names rank 1. It was told before if there is nothing to do."""
    if do:
        rank.tell(do, **config)
    answer = rank.error(DEADLINE_S + LATE_S)
    assert answer["error"].startswith("CommTimeoutError: "), answer
    assert answer["missing"] == [1], answer
    for text in texts:
        assert text in answer["error"], answer


def build(folder: Path) -> dict[str, str]:
    """Make the libcuda and the libnccl, once for all workers; return what finds them."""
    cuda, nccl = folder / "libcuda.so.1", folder / "libnccl.so.2"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            made = folder.with_suffix(".made")
            made.mkdir()
            compile_library(made / cuda.name, [THREADS / "fake_gpu.cc", THREADS / "fake_kernel.cc"])
            compile_library(made / nccl.name, [HERE / "fake_nccl.cc", made / cuda.name])
            made.rename(folder)
    path = f"{folder}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}"
    return {"LD_LIBRARY_PATH": path, "JITKERN_NCCL": str(nccl)}


def compile_library(target: Path, sources: list[Path]) -> None:
    from tvm_ffi import libinfo

    from jitkern.compilers.sources import CSRC, include_dirs

    own = [libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    folders = [*include_dirs(CSRC), THREADS, HERE, *own]
    command = [*os.environ.get("CXX", "c++").split(), "-std=c++17", "-O1", "-fPIC", "-shared"]
    command += [f"-I{folder}" for folder in folders] + [str(source) for source in sources]
    command += [f"-Wl,-soname,{target.name}", "-pthread", "-o", str(target)]
    subprocess.run(command, check=True)


@pytest.fixture(scope="session")
def nccl_pools(
    tmp_path_factory: pytest.TempPathFactory, session_cache: Path
) -> Iterator[Callable[[str], Pool]]:
    base, numbers = tmp_path_factory.mktemp("nccl"), itertools.count()
    made: dict[str, Pool] = {}

    def folder() -> Path:
        new = base / str(next(numbers))
        new.mkdir()
        return new

    def pool(kind: str) -> Pool:
        host.module()  # built once, and not by each rank
        if kind not in made and kind == "fake":
            libraries = build(session_cache.parent / "fake_nccl")
            made[kind] = Pool(folder, HERE / "nccl_child.py", NUM_FAKE_GPUS, **libraries)
        elif kind not in made:
            made[kind] = Pool(folder, num_gpus=num_gpus())
        return made[kind]

    yield pool
    for one in made.values():
        one.close()


@pytest.fixture(scope="module", params=[FAKE, CUDA])
def gpus(request: pytest.FixtureRequest, nccl_pools: Callable[[str], Pool]) -> Pool:
    """Processes that are to be ranks, each of a GPU of its own."""
    return nccl_pools(request.param)


@pytest.fixture(params=[FAKE])
def fake_gpus(request: pytest.FixtureRequest, nccl_pools: Callable[[str], Pool]) -> Pool:
    return nccl_pools(request.param)
