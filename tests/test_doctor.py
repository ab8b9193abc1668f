"""``jitkern doctor`` on this machine, and on machines that are not this one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from tiny import Use

from jitkern.arch import Arch
from jitkern.cli import doctor, main
from jitkern.errors import ToolchainError, UnsupportedError
from jitkern.host import module as host

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
ALL = {"system", "python", "jitkern", "torch", "tvm-ffi", "host module", "bytecode", "GPU"}
ALL |= {"NVRTC", "nvcc", "c++", "ninja", "cache", "shipped cache", "jitkern-kernels"}
ALL |= {"huge pages", "indexing on cpu"}


pytestmark = pytest.mark.usefixtures("host_module")


def checks(capsys: Capture, status: int) -> dict[str, dict[str, str]]:
    """The report as JSON, by what was checked."""
    assert main(["doctor", "--json"]) == status
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (list(found), found["schema"], err) == (["schema", "checks", "broken"], 1, "")
    by_name = {check["what"]: check for check in found["checks"]}
    assert found["broken"] == [name for name in by_name if by_name[name]["state"] == "broken"]
    return by_name


def test_a_report_has_it_all_and_a_fix_for_each_problem(capsys: Capture, empty_cache: Path) -> None:
    found = checks(capsys, 0)
    assert set(found) >= ALL
    for check in found.values():
        assert list(check) == ["what", "found", "state", "fix"]
        assert check["state"] == "ok" or (check["state"] == "note" and check["fix"]), check
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for what in ALL:
        assert re.search(rf"^{re.escape(what)} +(ok|note) ", out, re.MULTILINE), what
    assert str(empty_cache) in out and out.endswith("the ops run on this machine\n")


def test_a_note_has_its_fix(capsys: Capture, monkeypatch: Patch, use: Use) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    use(NVRTC="/nowhere/libnvrtc.so", CACHE_DIR="/proc/version/cache")
    found = checks(capsys, 0)
    assert found["NVRTC"]["found"].endswith(" is not a file (compiles kernels for GPUs)")
    assert found["NVRTC"]["fix"] == 'unset it, or pip install "jitkern[cuda]"'
    assert found["cache"]["fix"] == "set JITKERN_CACHE_DIR to a directory of yours"
    assert found["c++"]["found"].startswith("CXX: '/nowhere/c++' was not found")
    assert "install g++" in found["c++"]["fix"]
    monkeypatch.setenv("CXX", "'")  # an open quote: a line of the table, no traceback
    use()
    assert "No closing quotation" in checks(capsys, 0)["c++"]["found"]


def test_without_a_host_module_torch_or_a_right_result_the_ops_are_broken(
    capsys: Capture, monkeypatch: Patch
) -> None:
    def find() -> None:
        raise ToolchainError("no C++ compiler was found; install g++")

    with monkeypatch.context() as patch:
        patch.setattr(host, "find", find)
        assert checks(capsys, 1)["host module"] == {
            "what": "host module",
            "found": "no C++ compiler was found",
            "state": "broken",
            "fix": "install a jitkern wheel, or g++ and ninja to build it here",
        }
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)  # its import is an ImportError then
        found = checks(capsys, 1)
        assert found["torch"]["found"].startswith("import of torch halted")
        assert found["torch"]["fix"] == "pip install torch" and "GPU" not in found
        assert main(["doctor"]) == 1
        assert capsys.readouterr().out.splitlines()[-1].startswith("broken: torch")
    monkeypatch.setattr("jitkern.indexing", lambda table, rows: table[rows] + 1)
    wrong = checks(capsys, 1)["indexing on cpu"]
    assert (wrong["state"], wrong["found"]) == ("broken", "the result differs from PyTorch's")


def test_huge_pages(tmp_path: Path, monkeypatch: Patch) -> None:
    file = tmp_path / "enabled"
    monkeypatch.setattr(doctor, "_HUGE_PAGES", file)
    assert doctor.huge_pages() == "unknown"  # no such kernel
    file.write_text("always [madvise] never")
    assert doctor.huge_pages() == "madvise"
    file.write_text("always madvise [never]")
    with pytest.raises(UnsupportedError, match="as root: echo madvise > "):
        doctor.huge_pages()


def test_bytecode(tmp_path: Path, monkeypatch: Patch) -> None:
    there, modules = tmp_path / "there", {name: type(sys)(name) for name in ("jitkern", "tvm_ffi")}
    for name, module in modules.items():
        module.__file__ = f"/packages/{name}/__init__.py"
        module.__spec__ = type("Spec", (), {"cached": str(there)})  # type: ignore[assignment]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "modules", modules)
        with pytest.raises(UnsupportedError) as lacking:
            doctor.bytecode()
        there.touch()
        assert doctor.bytecode() == "of all 2 modules"
    assert str(lacking.value).startswith("2 of 2 modules have none: ")
    fix = "; python -m compileall -q /packages/jitkern /packages/tvm_ffi"
    assert str(lacking.value).endswith(fix)


@pytest.mark.parametrize(("archs", "state"), [("7.5 9.0", "note"), ("8.0 8.0", "ok")])
def test_the_arch_of_a_gpu(monkeypatch: Patch, archs: str, state: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "A GPU")
    monkeypatch.setattr(doctor, "gpu_archs", lambda: list(map(Arch.parse, archs.split())))
    found = doctor.gpu(2)
    assert found.state == state
    assert found.found.startswith(f"2 x A GPU, arch {', '.join(dict.fromkeys(archs.split()))}")
    assert ("8.0 or newer" in found.fix) == (state == "note")
