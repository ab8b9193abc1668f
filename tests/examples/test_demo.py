"""The demo: without NVRTC, and the whole as a user runs it."""

from __future__ import annotations

import re

import demo
import pytest
import torch
from needs import needs_cxx, needs_nvrtc
from processes import run_example

import jitkern

NO_NVRTC = 'pip install "jitkern[cuda]"'


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "ROWS", dict.fromkeys(demo.ROWS, dict.fromkeys(demo.ROW_BYTES, 20)))
    monkeypatch.setattr(demo, "compile_kernels", lambda: None)


@pytest.mark.usefixtures("small", "host_module")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_without_nvrtc_it_runs_on_the_cpu_and_fails_beside_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_gpu: bool
) -> None:
    def missing(*_: object) -> None:
        raise jitkern.ToolchainError(NO_NVRTC)

    compare = demo.compare
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(demo, "compile_kernels", missing)
    monkeypatch.setattr(demo, "compare", lambda *a: missing() if a[0] == "cuda" else compare(*a))
    status = demo.main([])
    out, err = capsys.readouterr()
    assert "CPU threads" in out
    assert (status, err) == ((1, f"the GPU was not used: {NO_NVRTC}\n") if has_gpu else (0, ""))
    assert (f"CUDA kernels were not compiled: {NO_NVRTC}\n" in out) != has_gpu


@needs_cxx
@needs_nvrtc
def test_a_user_runs_it(device: torch.device, session_cache: object) -> None:
    done = run_example("demo.py", device)
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r" ok .*x$", done.stdout, re.MULTILINE)) == len(demo.ROW_BYTES)
    if device.type == "cpu":
        assert re.search(r"^\d+ CUDA kernels for 8.0, 9.0, ", done.stdout, re.MULTILINE)
