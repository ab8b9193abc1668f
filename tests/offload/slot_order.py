"""Random runs of a SlotPipeline on the streams of fake_driver.c, and proof that they are in order.

Queued operations are partially ordered: by their stream, and by events, whose record comes before
their waits. Any two uses of a slot, and the caller's work and a run, have to be ordered; otherwise
a GPU may run them at the same time.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from jitkern.offload import pipeline as pipeline_module
from jitkern.offload.pipeline import SlotPipeline, Streams

driver = ctypes.CDLL("libcuda.so.1")
driver.fake_trace.restype = ctypes.c_char_p
Lane = tuple[int, int]  # a stream, and the number of the capture that it is in
Use = tuple[Lane, int, str]  # lane, position in the lane, kind
CALLERS = (1, 2)
CAPTURING = 3  # torch.cuda.graph has a stream of its own
COMPUTES, LOADS, STORES = 10, 20, 30


class Machine:
    """Torch's current stream, and notes in the trace."""

    current = CALLERS[0]
    is_timed = False  # also without a monitor
    uses = 0

    def note(self, text: str, stream: int | None = None) -> None:
        handle = ctypes.c_void_p(self.current if stream is None else stream)
        driver.fake_note(handle, text.encode())

    def use(self, kind: str, slot: int) -> Iterator[None]:
        """Note a use of a slot: two operations, between which the host works."""
        self.uses += 1
        number = self.uses
        self.note(f"{kind} {slot} {number}")
        yield
        self.note(f"{kind} {slot} {number}")


machine = Machine()


@dataclass
class FakeTensor:
    slot: int


class FakeStreams(Streams):
    def __init__(self, device: torch.device, is_timed: bool, all_timed: bool) -> None:
        self.all = [LOADS, COMPUTES, STORES]
        self.compute = COMPUTES
        self._connect(device.index, self.all, is_timed or machine.is_timed, all_timed)
        self.caller: int | None = None

    def enter(self) -> bool:
        self.caller = machine.current
        is_captured = bool(self._enter(self.caller))
        machine.current = self.compute
        return is_captured

    def leave(self) -> None:
        if self.caller is None:
            return
        try:
            self._leave()
        finally:
            machine.current, self.caller = self.caller, None

    def is_current(self) -> bool:
        return machine.current == self.compute

    def use(self, access: int) -> None:
        machine.current = self.all[access]

    def add_slot(self, index: int, *_: object) -> Any:
        machine.note(f"compute {index} 0", self.compute)  # the memory's previous owner
        self._add_slot(index)
        return FakeTensor(index)


def disorder(trace: str) -> list[str]:
    clocks: dict[Lane, Counter[Lane]] = {}
    events: dict[int, Counter[Lane]] = {}
    uses: dict[int, list[Use]] = {}
    caller: list[Use] = []
    session: list[Use] = []
    fork_point: Use | None = None
    errors = []

    def require(first: Use, text: str) -> None:
        where, count, what = first
        if clock[where] < count:
            errors.append(f"{what!r} is not before {text!r}")

    for line in trace.splitlines():
        what, stream_text, capture, rest = line.split(" ", 3)
        lane = (int(stream_text), int(capture))
        clock = clocks.setdefault(lane, Counter())
        if what == "record":
            events[int(rest)] = clock.copy()
        elif what == "wait":
            clock |= events[int(rest)]
        else:
            clock[lane] += 1
            here = (lane, clock[lane], rest)
            kind, slot, number = rest.split(" ")
            if kind in ("before", "after"):
                for use in session if kind == "after" else ():
                    require(use, rest)
                session.clear()
                fork_point = None
                caller.append(here)
                continue
            if kind == "made":
                fork_point = here
                continue
            if fork_point is not None and kind in ("load", "store"):
                require(fork_point, rest)
            if caller and number != "0" and caller[-1][0][1] == lane[1]:
                require(caller[-1], rest)
            for use in uses.setdefault(int(slot), []):
                same = use[2].split(" ")[2] == number != "0"
                both_read = use[2].startswith("store") and kind == "store"
                if not same and not both_read and use[0][1] == lane[1]:
                    require(use, rest)
            uses[int(slot)].append(here)
            if number != "0":
                session.append(here)
    return errors


class StopError(Exception):
    """A body's."""


def copy(kind: str, fails_at: int) -> Callable[[FakeTensor, int], None]:
    def run(tensor: FakeTensor, block: int) -> None:
        use = machine.use(kind, tensor.slot)
        next(use)
        if block == fails_at:
            raise StopError
        next(use, None)

    return run


def one_run(pipeline: SlotPipeline, rng: random.Random) -> None:
    count = rng.randrange(rng.choice((12, 12, 12, 12, 60)))  # some are sampled
    stop, fail = (rng.randrange(20) for _ in range(2))
    blocks: Any = range(count)
    if rng.random() < 0.3:
        blocks = iter(blocks)
    kind = rng.choice(("load", "store", "update"))
    if kind == "update":
        load, store = copy("load", fail), copy("store", rng.randrange(20))
        run = pipeline.update(blocks, load=load, store=store)
    else:
        run = getattr(pipeline, kind)(blocks, copy=copy(kind, fail))
    try:
        for slot in run:
            use = machine.use("compute", slot.index)
            next(use)
            if slot.block == stop:
                if rng.random() < 0.5:
                    break
                raise StopError
            next(use, None)
    except StopError:
        pass


def scenario(seed: int) -> str:
    """Return the trace of some runs of one pipeline, under errors, captures and `with`."""
    rng = random.Random(seed)
    machine.current = CALLERS[0]
    machine.is_timed = rng.random() < 0.5
    driver.fake_trace()
    pipeline = SlotPipeline(
        num_slots=rng.choice((1, 2, 3, 5)), slot_shape=[8], dtype=torch.uint8, device="cuda"
    )
    for _ in range(rng.randrange(1, 6)):
        is_captured = rng.random() < 0.25
        machine.current = CAPTURING if is_captured else rng.choice(CALLERS)
        if is_captured:
            driver.fake_capture_of(ctypes.c_void_p(CAPTURING), 1)
        machine.note("before 0 0")
        in_with = rng.random() < 0.4
        with pipeline if in_with else nullcontext():
            for _ in range(rng.randrange(1, 4) if in_with else 1):
                one_run(pipeline, rng)
                if in_with and rng.random() < 0.3:
                    machine.note("made 0 0")
                    pipeline.fork()
        machine.note("after 0 0")
        if is_captured:
            driver.fake_capture_of(ctypes.c_void_p(CAPTURING), 0)
    pipeline.close()
    return bytes(driver.fake_trace()).decode()


def role(stream: str) -> str:
    return "caller" if int(stream) in (*CALLERS, CAPTURING) else stream


def kinds_of_waits(trace: str) -> list[tuple[str, tuple[str, str]]]:
    """Return the trace's lines, and for each wait the waiting and the recording stream."""
    kinds, recorded = [], {}
    for line in trace.splitlines():
        what, stream, _, event = line.split(" ", 3)
        if what == "record":
            recorded[event] = role(stream)
        is_wait = what == "wait"
        kinds.append((line, (role(stream), recorded[event]) if is_wait else ("", "")))
    return kinds


def set_up() -> None:
    pipeline_module.Streams = FakeStreams  # type: ignore[misc]
    pipeline_module.device_arg = lambda *_: torch.device("cuda", 0)


def problems(num_seeds: int) -> list[str]:
    """Return uses that are not ordered in random runs, and kinds of waits that are not needed."""
    traces = [scenario(seed) for seed in range(num_seeds)]
    machine.is_timed = False
    errors = [f"seed {n}: {text}" for n, trace in enumerate(traces) for text in disorder(trace)]
    lines = [kinds_of_waits(trace) for trace in traces[:300]]
    # A store comes after a body, which has waited for the caller.
    not_needed = {("", ""), (str(STORES), "caller")}
    for kind in sorted({kind for trace in lines for _, kind in trace} - not_needed):
        rest = ("\n".join(line for line, wait in trace if wait != kind) for trace in lines)
        if not any(map(disorder, rest)):
            errors.append("nobody notices that {} does not wait for {}".format(*kind))
    return errors
