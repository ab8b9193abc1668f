"""SlotPipeline: the order of a run's steps, its ends, and wrong uses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pipelines import SHAPE, bring, check_is_ready, host_blocks, pipeline_of, runs, sync, take
from ref import refusals
from torch import Tensor

from jitkern.offload import SlotPipeline

DEPTHS = (1, 2, 3, 8)


@pytest.fixture
def pipeline(device: torch.device) -> Iterator[SlotPipeline]:
    """Yield a pipeline, and check that the test left it ready for the next run."""
    new = pipeline_of(device)
    yield new
    check_is_ready(new)


@pytest.mark.parametrize("depth", DEPTHS)
def test_loads(device: torch.device, depth: int) -> None:
    pipeline = pipeline_of(device, depth)
    blocks = host_blocks(20, device)
    seen = torch.zeros(20, device=device)
    for number, slot in enumerate(pipeline.load(blocks, copy=bring)):
        assert slot.block is blocks[number]
        assert slot.index == number % depth
        assert slot.tensor.shape == SHAPE and slot.tensor.device.type == device.type
        assert device.type == "cpu" or torch.cuda.current_stream() == pipeline.compute_stream
        seen[number] = slot.tensor.amax()
    check_is_ready(pipeline)
    assert seen.tolist() == list(range(1, 21))


def test_made_in_inference_mode_and_run_outside_of_it(device: torch.device) -> None:
    with torch.inference_mode():
        pipeline = pipeline_of(device, 2)
    blocks = host_blocks(5, device)
    for slot in pipeline.update(blocks, load=bring, store=take):
        slot.tensor.mul_(2)
    sync(device)
    assert [block.unique().tolist() for block in blocks] == [[2 * n] for n in range(1, 6)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_stores_and_updates(device: torch.device, depth: int) -> None:
    pipeline = pipeline_of(device, depth)
    blocks = host_blocks(20, device, fill=False)
    for number, slot in enumerate(pipeline.store(blocks, copy=take)):
        slot.tensor.fill_(number + 7)
    for _ in range(3):
        for slot in pipeline.update(blocks, load=bring, store=take):
            slot.tensor.mul_(2)
        sync(device)
    assert [block.unique().tolist() for block in blocks] == [[8 * (n + 7)] for n in range(20)]


def test_loads_run_ahead_as_far_as_there_are_slots() -> None:
    """No block is taken before there is a slot for it."""
    events: list[str] = []

    def blocks() -> Iterator[int]:
        for number in range(5):
            events.append(f"take {number}")
            yield number

    def copy(what: str) -> Callable[[Tensor, int], None]:
        return lambda tensor, block: events.append(f"{what} {block}")

    pipeline = pipeline_of(torch.device("cpu"), 2)
    for slot in pipeline.load(blocks(), copy=copy("load")):
        events.append(f"body {slot.block}")
    assert events == [
        *("take 0", "load 0", "take 1", "load 1", "body 0", "take 2", "load 2", "body 1"),
        *("take 3", "load 3", "body 2", "take 4", "load 4", "body 3", "body 4"),
    ]
    events.clear()
    for slot in pipeline.store(blocks(), copy=copy("store")):
        events.append(f"body {slot.block}")
    expected = [[f"take {n}", f"body {n}", f"store {n}"] for n in range(5)]
    assert events == [line for lines in expected for line in lines]
    events.clear()
    for slot in pipeline.update(range(3), load=copy("load"), store=copy("store")):
        events.append(f"body {slot.block}")
    assert events == [
        *("load 0", "load 1", "body 0", "store 0", "load 2", "body 1", "store 1"),
        *("body 2", "store 2"),
    ]


def test_under_with_runs_follow_each_other(pipeline: SlotPipeline) -> None:
    device = pipeline.device
    blocks = host_blocks(8, device)
    total = torch.zeros((), device=device)
    with pipeline:
        for layer in range(4):
            for slot in pipeline.load(blocks, copy=bring):
                total += slot.tensor.sum()
            assert device.type == "cpu" or torch.cuda.current_stream() == pipeline.compute_stream
            total += layer
            pipeline.fork()
    assert total.item() == 4 * 15 * 36 + 6
    with pytest.raises(RuntimeError, match=r"^SlotPipeline\.fork: not inside `with pipeline:`"):
        pipeline.fork()


class WrongError(Exception):
    pass


def copies_until(number: int, copy: Any) -> Any:
    calls = itertools.count()

    def wrong(tensor: Tensor, block: Tensor) -> None:
        if next(calls) == number:
            raise WrongError(number)
        copy(tensor, block)

    return wrong


@pytest.mark.parametrize("kind", range(3), ids=["load", "store", "update"])
@pytest.mark.parametrize("at", [0, 1, 4, 9])
@pytest.mark.parametrize("raises", [False, True], ids=["break", "raise"])
def test_a_body_that_ends_the_run(pipeline: SlotPipeline, kind: int, at: int, raises: bool) -> None:
    """Also if the traceback, with all its frames, is kept."""
    with pytest.raises(WrongError) if raises else nullcontext() as kept:  # noqa: F841
        for number, _ in enumerate(runs(pipeline, host_blocks(10, pipeline.device))[kind]):
            if number == at and raises:
                raise WrongError
            if number == at:
                break
    check_is_ready(pipeline)


def test_an_iterator_that_is_kept_is_ended_by_with(pipeline: SlotPipeline) -> None:
    blocks = host_blocks(10, pipeline.device)
    run = pipeline.load(blocks, copy=bring)
    with pytest.raises(WrongError), run as slots:
        next(slots)
        assert not run.is_done
        raise WrongError
    check_is_ready(pipeline)
    assert run.is_done and next(run, None) is None
    run.close()

    with pytest.raises(WrongError), pipeline:
        held = iter(pipeline.load(blocks, copy=bring))
        next(held)
        raise WrongError
    check_is_ready(pipeline)
    assert next(held, None) is None


@pytest.mark.parametrize("at", [0, 2, 5, 9])
def test_blocks_and_copies_that_raise(pipeline: SlotPipeline, at: int) -> None:
    blocks = host_blocks(10, pipeline.device)

    def until_it_raises() -> Iterator[Tensor]:
        yield from blocks[:at]
        raise WrongError

    for start, num_bodies in (
        (lambda: pipeline.load(until_it_raises(), copy=bring), at),
        (lambda: pipeline.store(until_it_raises(), copy=take), at),
        (lambda: pipeline.update(until_it_raises(), load=bring, store=take), at),
        (lambda: pipeline.load(blocks, copy=copies_until(at, bring)), at),
        (lambda: pipeline.store(blocks, copy=copies_until(at, take)), at + 1),
        (lambda: pipeline.update(blocks, load=copies_until(at, bring), store=take), at),
        (lambda: pipeline.update(blocks, load=bring, store=copies_until(at, take)), at + 1),
    ):
        bodies = []
        with pytest.raises(WrongError):
            for slot in start():
                bodies.append(slot.block)
        assert [id(block) for block in bodies] == [id(block) for block in blocks[:num_bodies]]
        check_is_ready(pipeline)


def test_an_interrupt_in_a_copy_is_raised_at_once(pipeline: SlotPipeline) -> None:
    def copy(tensor: Tensor, block: Tensor) -> None:
        if block[0, 0] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        for _ in pipeline.load(host_blocks(10, pipeline.device), copy=copy):
            pytest.fail("a body has run")


NOT_OVER = (
    "SlotPipeline: a run of it is not over; end it first, or use update() for both directions at "
    "once, or a second pipeline"
)
OTHER_THREAD = "SlotPipeline: in use by another thread; make a pipeline for each thread"


def test_two_runs_at_once(pipeline: SlotPipeline) -> None:
    def refused(text: str, *uses: Callable[[], object]) -> None:
        for use in uses:
            with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
                use()

    blocks = host_blocks(10, pipeline.device)
    both = zip(pipeline.load(blocks, copy=bring), pipeline.store(blocks, copy=take), strict=True)
    refused(NOT_OVER, both.__next__)
    del both
    check_is_ready(pipeline)
    for _ in pipeline.load(blocks, copy=bring):
        again = iter(pipeline.load(blocks, copy=bring))
        refused(NOT_OVER, again.__next__, pipeline.__enter__, pipeline.close)
    check_is_ready(pipeline)
    with pipeline:
        text = "SlotPipeline: inside `with pipeline:` already; leave it, or close() the pipeline"
        refused(text, pipeline.__enter__)
        for _ in pipeline.load(blocks, copy=bring):
            refused(NOT_OVER, lambda: next(iter(pipeline.store(blocks, copy=take))), pipeline.close)


def in_thread(call: Callable[[], object]) -> BaseException | None:
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).exception()


def test_another_thread(pipeline: SlotPipeline) -> None:
    blocks = host_blocks(5, pipeline.device)

    def run() -> object:
        return list(pipeline.load(blocks, copy=bring))

    slots = iter(pipeline.load(blocks, copy=bring))
    seen = [next(slots).block]
    for use in (run, lambda: next(slots)):  # neither a new run nor this one
        error = in_thread(use)
        assert isinstance(error, RuntimeError) and str(error) == OTHER_THREAD
    seen += [slot.block for slot in slots]
    assert [id(block) for block in seen] == [id(block) for block in blocks]
    with pipeline:
        for use in (run, pipeline.close):
            error = in_thread(use)
            assert isinstance(error, RuntimeError) and str(error) == OTHER_THREAD
    assert in_thread(run) is None  # one after the other is fine


def test_a_closed_one(device: torch.device) -> None:
    pipeline = pipeline_of(device)
    blocks = host_blocks(5, device)
    (tensor,) = (slot.tensor.fill_(4) for slot in pipeline.load(blocks[:1], copy=bring))
    assert "SlotPipeline(3 slots of (3, 5), torch.float32, on " in repr(pipeline)
    pipeline.close()
    pipeline.close()
    assert pipeline.num_slots == 0 and "closed" in repr(pipeline)
    text = "SlotPipeline: the pipeline is closed; make another one"
    for use in (*(lambda run=run: list(run) for run in runs(pipeline, blocks)), pipeline.__enter__):
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            use()
    assert tensor.eq(4).all()


@pytest.mark.parametrize("where", ["enter", "start", "leave"])
def test_an_interrupt_inside_leaves_it_broken_at_worst(device: torch.device, where: str) -> None:
    """The next use says so, from any thread, and it can be closed."""
    pipeline, blocks = pipeline_of(device), host_blocks(5, device)
    streams = pipeline._streams
    real = getattr(streams, where)

    def interrupted_once(*_: object) -> None:
        setattr(streams, where, real)
        raise KeyboardInterrupt

    setattr(streams, where, interrupted_once)
    with pytest.raises(KeyboardInterrupt):
        for _ in pipeline.load(blocks, copy=bring):
            pass
    text = "SlotPipeline: an exception has cut a run's begin or end short; close() it and make"
    for use in (*(lambda run=run: list(run) for run in runs(pipeline, blocks)), pipeline.__enter__):
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}"):
            use()
    assert in_thread(pipeline.close) is None
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.default_stream())
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        list(pipeline.load(blocks, copy=bring))


def test_close_ends_a_session_whose_body_never_began(device: torch.device) -> None:
    """Ctrl-C may come between `with pipeline:` and its body: `__exit__` is not called then."""
    pipeline, blocks = pipeline_of(device), host_blocks(5, device)
    pipeline.__enter__()
    pipeline.close()
    assert device.type == "cpu" or torch.cuda.current_stream() == torch.cuda.default_stream()
    with pytest.raises(RuntimeError, match="the pipeline is closed"):
        list(pipeline.load(blocks, copy=bring))
    pipeline = pipeline_of(device)
    with pipeline:  # in a body, and its end does nothing
        list(pipeline.update(blocks, load=bring, store=take))
        pipeline.close()
    assert device.type == "cpu" or torch.cuda.current_stream() == torch.cuda.default_stream()
    with pytest.raises(RuntimeError, match="the pipeline is closed"), pipeline:
        pass


@pytest.mark.parametrize(("name", "how", "text"), [
    ("load", {"blocks": None, "copy": bring}, "blocks: None, expected an iterable"),
    ("store", {"blocks": 3, "copy": bring}, "blocks: int, expected an iterable"),
    ("load", {"blocks": [], "copy": None},
     "copy: None, expected a callable of a tensor and a block"),
    ("update", {"blocks": [], "load": bring, "store": 3},
     "store: int, expected a callable of a tensor and a block"),
])  # fmt: skip
def test_mistakes_of_a_run(name: str, how: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=f"^SlotPipeline.{name}: {text}$"):
        getattr(pipeline_of(torch.device("cpu")), name)(**how)


test_mistakes = refusals(
    SlotPipeline,
    {"num_slots": 2, "slot_shape": (3, 5), "dtype": torch.float32, "device": "cpu"},
    ({"num_slots": 0}, ValueError, "num_slots: 0, expected 1 to 4096"),
    ({"num_slots": 4097}, ValueError, "num_slots: 4097, expected 1 to 4096"),
    ({"num_slots": 2.0}, TypeError, "num_slots: float, expected an int"),
    ({"slot_shape": []}, ValueError, "slot_shape: [], expected sizes of at least 1"),
    ({"slot_shape": (True,)}, TypeError, "slot_shape: [True], expected a sequence of ints"),
    ({"slot_shape": "44"}, TypeError, "slot_shape: str, expected a sequence of ints"),
    ({"dtype": "bfloat16"}, TypeError, "dtype: str, expected a torch.dtype"),
    ({"device": "gpu"}, ValueError, "device: 'gpu', expected 'cpu', 'cuda' or 'cuda:N'"),
    ({"device": "meta"}, ValueError, "device: 'meta', expected 'cpu', 'cuda' or 'cuda:N'"),
    ({"monitor": 3}, TypeError, "monitor: int, expected an OverlapMonitor or None"),
    ({"max_slots": 1}, ValueError, "max_slots: 1, expected 2 to 4096"),
)  # fmt: skip
