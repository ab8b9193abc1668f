"""JITKERN_NVTX=1: each call is a range in a profiler; otherwise there is nothing in between."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from stems import ON_GPU, STEMS, own_tests

import jitkern
from jitkern.env import settings
from jitkern.errors import UnsupportedError
from jitkern.host import module as host
from jitkern.jit.device import CpuForm, DeviceModule
from jitkern.jit.specialisation import Specialisation


@pytest.fixture(autouse=True)
def settings_of_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is set here is forgotten."""
    yield
    monkeypatch.undo()
    settings.cache_clear()


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a torch with NVTX is told, of which this one may not be."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("end"))
    monkeypatch.setenv("JITKERN_NVTX", "1")
    settings.cache_clear()
    return told


@pytest.fixture(params=ON_GPU)
def op(request: pytest.FixtureRequest) -> Iterator[Any]:
    """An op whose C++ functions are looked up anew, as in a new process."""
    found = STEMS[request.param]
    module = import_module(f"jitkern.ops.{found.stem}")
    looked_up = [value for name, value in vars(module).items() if name.startswith("_op")]
    for each in looked_up:
        each.cache_clear()
    yield found
    for each in looked_up:
        each.cache_clear()


def test_a_call_of_an_op_is_a_range(ranges: list[str], op: Any) -> None:
    call, good = getattr(jitkern, op.function), own_tests(op).good_arguments()
    call(**good)
    assert ranges[-2:] == [f"jitkern.{op.function}", "end"]
    first = next(iter(good))
    with pytest.raises((TypeError, ValueError, IndexError), match=first):
        call(**{**good, first: torch.zeros(())})
    assert ranges[-2:] == [f"jitkern.{op.function}", "end"]


def test_a_launch_is_a_range_of_its_kernels_name(ranges: list[str]) -> None:
    cpu = CpuForm(frozenset({"mine"}), lambda: {"mine": lambda *_: None})
    used = Specialisation("load_jit", ("toy",), {}, "")
    module = DeviceModule(used, [], [("other", "Toy"), ("mine", "Toy")], cpu=cpu)
    module.launch("mine", torch.ones(3), grid=1, block=1)
    assert ranges[2:] == ["jitkern.mine", "end"]


def test_without_it_a_launch_is_the_function_of_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JITKERN_NVTX", raising=False)
    settings.cache_clear()
    function: Any = host.launcher(("mine",), lambda _: b"")
    assert type(function) is type(host.module()["device_count"])


def test_a_torch_without_nvtx_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise RuntimeError("NVTX functions not installed")

    monkeypatch.setattr(torch.cuda.nvtx, "range_push", missing)
    monkeypatch.setenv("JITKERN_NVTX", "1")
    settings.cache_clear()
    with pytest.raises(UnsupportedError, match="JITKERN_NVTX: this torch has no NVTX; install a"):
        host.launcher(("mine",), lambda _: b"")
