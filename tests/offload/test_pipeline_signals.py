"""SlotPipeline where a signal's handler raises: at every single operation of Python in turn."""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from pipelines import bring, host_blocks, take

from jitkern.offload import SlotPipeline, pipeline, runs, session, slots, streams
from jitkern.offload.streams import CudaStreams, Streams

OURS = {module.__file__ for module in (pipeline, runs, session, slots, streams)}
# Where the first steps of these are cut short nobody is left who would end `with`.
LEFT_OUT = {"__exit__"}
CALLER, COMPUTES, LOADS, STORES = "the caller's", "compute", "load", "store"
RETURN = dis.opmap["RETURN_VALUE"]
CPU = torch.device("cpu")


class Machine:
    current = CALLER


class NamedStreams(CudaStreams):
    """Those of a GPU, with names for streams, on the CPU."""

    def __init__(self, num_streams: int, capacity: int, every: int) -> None:
        self.compute, self.loads, self.stores, self._ordinal = COMPUTES, [LOADS], [STORES], 0

        def setter(name: str) -> Callable[[], None]:
            return lambda: setattr(Machine, "current", name)

        self._setters = {name: setter(name) for name in (COMPUTES, LOADS, STORES)}
        self._connect(-1, 0, [0], [0], capacity, every)
        enter = self._enter
        self._enter = lambda handle: enter(0)

    def is_current(self) -> bool:
        return Machine.current == COMPUTES

    def add_slot(self, *args: Any) -> torch.Tensor:
        return Streams.add_slot(self, *args)


@pytest.fixture(autouse=True)
def named_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    def current(_: object) -> Any:
        return SimpleNamespace(cuda_stream=0, name=Machine.current)

    monkeypatch.setattr(pipeline, "Streams", NamedStreams)
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(
        torch.cuda, "set_stream", lambda stream: setattr(Machine, "current", stream.name)
    )
    # One that is dropped is ended by its finaliser, whose exceptions nobody gets.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    Machine.current = CALLER


@cache
def looks_at_signals(code: CodeType) -> set[int]:
    """Operations in front of which CPython itself does: behind calls, and the first one."""
    found, last = set(), "CALL"
    for operation in dis.get_instructions(code):
        if last.startswith("CALL"):
            found.add(operation.offset)
        last = operation.opname
    return found


class Signal:
    """Raises at one of the operations of what is below it, and notes which one that was."""

    def __init__(self, kind: type[BaseException], at: int) -> None:
        self.kind, self.left = kind, at
        self.where, self.is_real = "", False

    def trace(self, frame: FrameType, event: str, _: object) -> Any:
        code = frame.f_code
        if code.co_filename not in OURS or code.co_name in LEFT_OUT:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and code.co_code[frame.f_lasti] != RETURN:
            if self.left == 0:
                self.where = f"{code.co_name}:{frame.f_lineno}, operation {frame.f_lasti}"
                self.is_real = frame.f_lasti in looks_at_signals(code)
                raise self.kind("of a signal")
            self.left -= 1
        return self.trace

    @contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            yield
        finally:
            sys.settrace(before)


def of_three(ends: str) -> Callable[[SlotPipeline, str, bool], None]:
    """A run over three blocks by two slots."""

    def go(pipeline: SlotPipeline, kind: str, in_with: bool) -> None:
        blocks = host_blocks(3, CPU)
        both = {"load": bring, "store": take}
        how = both if kind == "update" else {"copy": both[kind]}
        with pipeline if in_with else nullcontext():
            try:
                for number, _ in enumerate(getattr(pipeline, kind)(blocks, **how)):
                    assert Machine.current == COMPUTES
                    if number == 1 and ends == "early":
                        break
            finally:
                assert not in_with or Machine.current == COMPUTES

    return go


def check_next_runs(pipeline: SlotPipeline) -> None:
    """They see the right blocks, no slot is missing or is there twice."""
    for _ in range(2):
        seen = []
        for slot in pipeline.load(host_blocks(7, CPU), copy=bring):
            assert Machine.current == COMPUTES
            seen.append(slot.tensor[1, 2].item())
        assert seen == list(range(1, 8))
        assert Machine.current == CALLER
        free = list(pipeline._slots.free)
        assert sorted(slot.index for slot in free) == [0, 1]
        assert {id(slot) for slot in free} == {id(slot) for slot in pipeline._slots._all}
        assert all(slot.block is None for slot in free)
    pipeline.close()


@pytest.mark.parametrize("in_with", [False, True], ids=["alone", "under-with"])
@pytest.mark.parametrize("ends", ["early", "over"])
@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("load", KeyboardInterrupt),
        ("load", TimeoutError),
        ("store", KeyboardInterrupt),
        ("update", TimeoutError),
    ],
)
def test_a_signal_at_every_operation(
    kind: str, ends: str, in_with: bool, error: type[BaseException]
) -> None:
    go = of_three(ends)
    for at in itertools.count():
        pipeline = SlotPipeline(num_slots=2, slot_shape=(3, 5), dtype=torch.float32, device="cpu")
        signal = Signal(error, at)
        try:
            with signal.on():
                go(pipeline, kind, in_with)
        except error:
            pass
        if not signal.where:
            break
        try:
            assert Machine.current == CALLER or not signal.is_real
            check_next_runs(pipeline)
        except BaseException as failed:
            raise AssertionError(f"a signal at {signal.where}") from failed
    assert at > 500
