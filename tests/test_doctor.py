"""What ``jitkern doctor`` says of machines that are not this one."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from needs import needs_cxx

from jitkern.arch import Arch
from jitkern.cli import doctor, machine, main
from jitkern.cli.machine import Check
from jitkern.errors import ToolchainError, UnsupportedError

WHAT = {"system", "host memory", "huge pages", "locked memory", "cache", "shipped cache"}
ROUTES = ("the ops, device_files", "cpp_files", "cuda_files")


def test_a_report_has_it_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    checks = {check["what"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert WHAT | {f"compiling {route}" for route in ROUTES} <= set(checks)
    assert "cores" in checks["system"]["found"]
    for check in checks.values():
        # Whatever is not as it should be says what to do.
        assert check["state"] == "ok" or check["fix"], check


@pytest.mark.parametrize(
    ("enabled", "state"),
    [("always [madvise] never", "ok"), ("[always] madvise never", "ok"), ("[never]", "note")],
)
def test_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, enabled: str, state: str
) -> None:
    monkeypatch.setattr(machine, "_PAGES", tmp_path)
    (tmp_path / "enabled").write_text(enabled)
    (tmp_path / "shmem_enabled").write_text("always [advise] never")
    found = machine._huge_pages()
    assert (found.state, found.found.startswith("private ")) == (state, True)
    assert "shared advise" in found.found
    assert ("echo madvise" in found.fix) == (state == "note")


def test_a_kernel_without_huge_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PAGES", tmp_path)
    assert machine._huge_pages().found == "this kernel has no transparent ones"


def test_bytecode(tmp_path: Path) -> None:
    """Files of this test's own; what doctor says to type makes them."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # as where the files' directory is another user's

    def python(*arguments: str) -> str:
        command = [sys.executable, "-W", "ignore", *arguments]
        return subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True
        ).stdout

    look = (
        "import dataclasses, json, jitkern, tvm_ffi; from jitkern.cli import machine;"
        "print(json.dumps(dataclasses.asdict(machine.bytecode())))"
    )
    lacks = Check(**json.loads(python("-c", look)))
    assert lacks.state == "note"
    of = re.match(r"(\d+) of (\d+) modules have none: ", lacks.found)
    assert of and of[1] == of[2]
    program, *arguments = lacks.fix.split()
    assert program == "python"
    python(*arguments)
    has = Check(**json.loads(python("-c", look)))
    assert (has.state, has.found) == ("ok", f"of all {of[1]} modules of jitkern and tvm_ffi")


@pytest.mark.parametrize(("limit", "text"), [(-1, "limit unlimited"), (1 << 16, "limit 64.0 KiB")])
def test_the_limit_of_locked_memory(monkeypatch: pytest.MonkeyPatch, limit: int, text: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert machine._locked_limit().found.startswith(f"{text} (")


@needs_cxx
@pytest.mark.parametrize("lacks", ["find_cxx", "find_nvcc", "find_ninja", "find_nvrtc"])
def test_a_route_that_is_closed_says_why(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    from jitkern.compilers import find, find_cuda, find_nvrtc

    def none() -> None:
        raise ToolchainError(f"{lacks} found nothing; install it")

    def some() -> Any:
        class Tool:
            id = "some-1"

        return Tool

    for module in (find, find_cuda, find_nvrtc):
        for name in ("find_cxx", "find_nvcc", "find_ninja", "find_nvrtc"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, none if name == lacks else some)
    found = {check.what.removeprefix("compiling "): check for check in machine.routes(has_gpu=True)}
    closed = {
        "find_cxx": {"cpp_files", "cuda_files"},
        "find_ninja": {"cpp_files", "cuda_files"},
        "find_nvcc": {"cuda_files"},
        "find_nvrtc": {"the ops, device_files"},
    }[lacks]
    for route in ROUTES:
        if route in closed:
            assert found[route].found == f"{lacks} found nothing"
            assert found[route].fix == "install it"
            assert found[route].state == ("broken" if lacks == "find_nvrtc" else "note")
        else:
            assert found[route].state == "ok"


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], bool]], None]:
    def make(reach: Callable[[int, int], bool]) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", reach)
        monkeypatch.setattr("jitkern.comm.nccl.load", lambda: 22809)

    return make


def test_links(four_gpus: Any) -> None:
    four_gpus(lambda i, j: True)
    assert list(machine.links(4)) == [
        Check("peer access", "all 6 pairs of GPUs"),
        Check("NCCL", "2.28.9"),
    ]
    four_gpus(lambda i, j: {i, j} != {1, 3})
    peers, _ = machine.links(4)
    assert (peers.found, peers.state) == ("none of 3-1, of all 6 pairs of GPUs", "note")
    assert "PeerMemory" in peers.fix


def test_no_nccl(four_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> int:
        raise UnsupportedError("init_pynccl: no usable NCCL: no file; pip install nvidia-nccl-cu13")

    four_gpus(lambda i, j: True)
    monkeypatch.setattr("jitkern.comm.nccl.load", none)
    *_, found = machine.links(4)
    fix = "pip install nvidia-nccl-cu13"
    assert found == Check("NCCL", "no usable NCCL: no file", "note", fix)


@pytest.mark.parametrize(("archs", "state"), [("7.5 9.0", "note"), ("8.0 8.0", "ok")])
def test_the_arch_of_a_gpu(monkeypatch: pytest.MonkeyPatch, archs: str, state: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "A GPU")
    monkeypatch.setattr(doctor, "gpu_archs", lambda: list(map(Arch.parse, archs.split())))
    found = doctor._gpu(2)
    assert found.state == state
    assert found.found.startswith(f"2 x A GPU, arch {', '.join(dict.fromkeys(archs.split()))}")
    assert ("8.0 or newer" in found.fix) == (state == "note")


def test_without_a_gpu_nothing_is_said_of_links() -> None:
    assert list(machine.links(0)) == []
