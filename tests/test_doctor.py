"""``jitkern doctor`` on this machine, and on machines that are not this one."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tiny import Use

from jitkern.arch import Arch
from jitkern.cli import doctor, main
from jitkern.errors import ToolchainError
from jitkern.host import library as host

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
ALL = {
    "system",
    "python",
    "jitkern",
    "variables",
    "torch",
    "tvm-ffi",
    "host module",
    "GPU",
    "NVRTC",
    "nvcc",
}
ALL |= {"c++", "ninja", "JITKERN_CACHE_DIR", "shipped", "jitkern-kernels", "indexing on cpu"}


pytestmark = pytest.mark.usefixtures("host_module")


def checks(capsys: Capture, status: int) -> dict[str, tuple[str, str]]:
    """Return the state and the text of each check."""
    assert main(["doctor"]) == status
    out, err = capsys.readouterr()
    assert err == ""
    *lines, last = out.splitlines()
    assert last.startswith("broken: " if status else "the ops run on this machine")
    rows = [re.fullmatch(r"(.{18,}?) +(ok|note|broken) +(.+)", line) for line in lines]
    return {row[1].strip(): (row[2], row[3]) for row in rows if row}


def test_a_report_has_it_all(capsys: Capture, empty_cache: Path) -> None:
    report = checks(capsys, 0)
    assert set(report) >= ALL
    assert {state for state, _ in report.values()} <= {"ok", "note"}
    assert str(empty_cache) in report["JITKERN_CACHE_DIR"][1]
    assert f"JITKERN_CACHE_DIR={empty_cache}" in report["variables"][1]


def test_a_note_says_what_to_do(capsys: Capture, monkeypatch: Patch, use: Use) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    use(NVRTC="/nowhere/libnvrtc.so", CACHE_DIR="/proc/version/cache", CACHE_PATH="/nowhere")
    use(NCCL="/nowhere/libnccl.so", FAULT="warn")
    report = checks(capsys, 0)
    for what, texts in {
        "variables": ("JITKERN_FAULT: no setting of this ", "; did you mean JITKERN_FAULTS?"),
        "NCCL": ("/nowhere/libnccl.so: cannot open ", "JITKERN_NCCL names it; unset that "),
        "NVRTC": (" is not a file; ", 'unset it, or pip install "jitkern[cuda]"'),
        "JITKERN_CACHE_DIR": ("; set JITKERN_CACHE_DIR to a directory of yours",),
        "JITKERN_CACHE_PATH": ("/nowhere: no such directory; make it",),
        "c++": ("CXX: '/nowhere/c++' was not found", "install g++"),
    }.items():
        state, found = report[what]
        assert state == "note" and all(text in found for text in texts), found
    monkeypatch.setenv("CXX", "'")  # an open quote: a line of the table, no traceback
    use(ARCH="foo")
    report = checks(capsys, 0)
    assert "No closing quotation" in report["c++"][1]
    state, found = report["variables"]
    assert state == "note" and found.startswith("JITKERN_ARCH: 'foo', expected one of 8.0, ")


def test_without_a_host_module_torch_or_a_right_result_the_ops_are_broken(
    capsys: Capture, monkeypatch: Patch
) -> None:
    def find() -> None:
        warnings.warn("jitkern: a cache cannot be written", RuntimeWarning, stacklevel=1)
        raise ToolchainError("no C++ compiler was found; install g++")

    with monkeypatch.context() as patch:
        patch.setattr(host, "find", find)
        report = checks(capsys, 1)
        assert report["host module"] == ("broken", "no C++ compiler was found; install g++")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)  # its import is an ImportError then
        report = checks(capsys, 1)
        state, found = report["torch"]
        assert state == "broken" and found.endswith("; pip install torch") and "GPU" not in report
    monkeypatch.setattr("jitkern.indexing", lambda table, rows: table[rows] + 1)
    state, found = checks(capsys, 1)["indexing on cpu"]
    assert state == "broken" and found.startswith("the result differs from PyTorch's")


@pytest.mark.parametrize(("archs", "state"), [("7.5 9.0", "note"), ("8.0 8.0", "ok")])
def test_the_arch_of_a_gpu(monkeypatch: Patch, archs: str, state: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "A GPU")
    monkeypatch.setattr(doctor, "gpu_archs", lambda: list(map(Arch.parse, archs.split())))
    check = doctor.gpu(2)
    assert check.state == state
    assert check.text.startswith(f"2 x A GPU, arch {', '.join(dict.fromkeys(archs.split()))}")
