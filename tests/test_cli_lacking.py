"""The commands where something is missing: they do what they can, and say what it is."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import jitkern
from jitkern.bench import Case, Impl
from jitkern.cli import demo, main
from jitkern.env import settings
from jitkern.host import module as host

Capture = pytest.CaptureFixture[str]

MISSING = (
    'JITKERN_NVRTC: /nowhere/libnvrtc.so is not a file; unset it, or pip install "jitkern[cuda]"'
)


@pytest.fixture(scope="module", autouse=True)
def host_module(session_cache: Path) -> None:
    host.module()


@pytest.fixture
def no_nvrtc(
    session_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """No compiler for kernels, and none compiled."""
    monkeypatch.setenv("JITKERN_NVRTC", "/nowhere/libnvrtc.so")
    monkeypatch.setenv("JITKERN_CACHE_DIR", str(tmp_path / "cache"))
    settings.cache_clear()
    yield
    monkeypatch.undo()
    settings.cache_clear()


@pytest.fixture
def small_case(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One small case instead of the demo's own; the devices that it was asked for."""
    devices: list[str] = []

    def cases(ctx: object) -> list[Case]:
        devices.append(ctx.device)  # type: ignore[attr-defined]
        ours = Impl("jitkern", "ours", lambda: lambda b: b[1].copy_(b[0]))
        theirs = Impl("clone", "peer", lambda: lambda b: b[0].clone(), returns=True)
        one = Case(
            op="store",
            name="64 B",
            impls=[ours, theirs],
            bytes_moved=128,
            make=lambda _: (torch.ones(64).byte(), torch.empty(64).byte()),
            outputs=lambda b: (b[1],),
            reference=lambda b: (b[0],),
        )
        return [one]

    monkeypatch.setattr(demo, "_cases", cases)
    return devices


@pytest.mark.usefixtures("no_nvrtc")
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_demo_without_nvrtc_runs_on_the_cpu(capsys: Capture, small_case: list[str]) -> None:
    assert main(["demo"]) == 0
    out, err = capsys.readouterr()
    assert small_case == ["cpu"]
    assert re.search(r"^store_cache +64 B +ok ", out, re.MULTILINE)
    assert f"CUDA kernels were not compiled: {MISSING}\n" in out
    assert ("failed" in out, err) == (False, "")


@pytest.mark.usefixtures("no_nvrtc")
def test_warm_without_nvrtc_says_it_once(capsys: Capture) -> None:
    assert main(["warm", "--element-size", "656,1024", "--arch", "9.0"]) == 1
    assert capsys.readouterr() == ("", f"jitkern: error: {MISSING}\n")


@pytest.mark.cuda
@pytest.mark.usefixtures("no_nvrtc")
def test_demo_without_nvrtc_fails_beside_a_gpu(fresh_python, small_case: list[str]) -> None:
    """In a process of its own: this one may have the kernel in memory."""
    code = """
import sys
from jitkern.cli import demo, main
demo._compare = lambda ctx: print(ctx.device) or []
sys.exit(main(["demo"]))
"""
    done = fresh_python(code, check=False)
    assert (done.returncode, done.stdout.splitlines()[2]) == (1, "cpu")
    assert done.stderr == f"jitkern: error: {MISSING}\n"


@pytest.fixture
def no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # what makes its import an ImportError


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("command", ["demo", "bench --ci", "warm --element-size 656"])
def test_without_torch_one_line_says_what_to_install(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.delenv("JITKERN_ARCH", raising=False)
    settings.cache_clear()
    assert main(command.split()) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"jitkern: error: torch: import of torch .*; pip install torch\n", err)


@pytest.mark.usefixtures("no_torch")
def test_doctor_without_torch(capsys: Capture) -> None:
    assert main(["doctor", "--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    checks = {check["what"]: check for check in found["checks"]}
    assert ("torch" in found["broken"], "GPU" in checks, err) == (True, False, "")
    assert checks["torch"]["found"].startswith("import of torch halted")
    assert checks["torch"]["fix"] == "pip install torch"
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert re.search(r"^torch +broken +import of torch .* pip install torch *$", out, re.MULTILINE)
    assert (out.splitlines()[-1].startswith("broken: torch"), err) == (True, "")


@pytest.mark.parametrize("lacks", [False, True])
def test_doctor_as_json(
    capsys: Capture, session_cache: Path, monkeypatch: pytest.MonkeyPatch, lacks: bool
) -> None:
    def find() -> None:
        raise jitkern.ToolchainError("no C++ compiler was found; install g++")

    if lacks:
        monkeypatch.setattr(host, "find", find)
    status = main(["doctor", "--json"])
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert (status, err) == (int(lacks), "")
    assert list(found) == ["schema", "checks", "broken"]
    assert found["schema"] == 1
    assert found["broken"] == (["host module"] if lacks else [])
    checks = {check["what"]: check for check in found["checks"]}
    assert {"python", "torch", "NVRTC", "c++", "cache", "host module"} <= set(checks)
    for check in checks.values():
        assert list(check) == ["what", "found", "state", "fix"]
        assert check["state"] in ("ok", "note", "broken")
    if lacks:
        assert checks["host module"] == {
            "what": "host module",
            "found": "no C++ compiler was found; install g++",
            "state": "broken",
            "fix": "install a jitkern wheel, or g++ and ninja to build it here",
        }
