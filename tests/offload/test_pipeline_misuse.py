"""SlotPipeline used wrongly: what is said, and that it works afterwards."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pipelines import bring, check_is_ready, current, host_blocks, pipeline_of, runs, take

from jitkern.offload import SlotPipeline

GOOD = {"num_slots": 2, "slot_shape": (3, 5), "dtype": torch.float32, "device": "cpu"}

NOT_OVER = (
    "SlotPipeline: a run of it is not over; end it first, or use update() for both directions at "
    "once, or a second pipeline"
)


def test_two_runs_at_once(device: torch.device) -> None:
    pipeline, before = pipeline_of(device), current(device)
    blocks = host_blocks(10, device)
    both = zip(pipeline.load(blocks, copy=bring), pipeline.store(blocks, copy=take), strict=True)
    with pytest.raises(RuntimeError, match=f"^{re.escape(NOT_OVER)}$"):
        next(both)
    del both
    check_is_ready(pipeline, device, before)
    for _ in pipeline.load(blocks, copy=bring):
        with pytest.raises(RuntimeError, match=f"^{re.escape(NOT_OVER)}$"):
            next(iter(pipeline.load(blocks, copy=bring)))
        with pytest.raises(RuntimeError, match=f"^{re.escape(NOT_OVER)}$"), pipeline:
            pass
        with pytest.raises(RuntimeError, match=f"^{re.escape(NOT_OVER)}$"):
            pipeline.close()
    check_is_ready(pipeline, device, before)
    with pipeline:
        text = "SlotPipeline: inside `with pipeline:` already; leave it first"
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"), pipeline:
            pass
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            pipeline.close()
        for _ in pipeline.load(blocks, copy=bring):
            with pytest.raises(RuntimeError, match=f"^{re.escape(NOT_OVER)}$"):
                next(iter(pipeline.store(blocks, copy=take)))
    check_is_ready(pipeline, device, before)


def in_thread(call: Callable[[], object]) -> BaseException | None:
    found: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0] if found else None


def test_another_thread(device: torch.device) -> None:
    pipeline, before = pipeline_of(device), current(device)
    blocks = host_blocks(5, device)

    def run() -> int:
        return sum(1 for _ in pipeline.load(blocks, copy=bring))

    text = "SlotPipeline: in use by another thread; make a pipeline for each thread"
    for _ in pipeline.load(blocks, copy=bring):
        error = in_thread(run)
        assert isinstance(error, RuntimeError) and str(error) == text
    with pipeline:
        error = in_thread(run)
        assert isinstance(error, RuntimeError) and str(error) == text
    assert in_thread(run) is None  # one after the other is fine
    check_is_ready(pipeline, device, before)


def test_a_closed_one(device: torch.device) -> None:
    pipeline = pipeline_of(device)
    blocks = host_blocks(5, device)
    (tensor,) = (slot.tensor.fill_(4) for slot in pipeline.load(blocks[:1], copy=bring))
    assert "SlotPipeline(3 slots of (3, 5), torch.float32, on " in repr(pipeline)
    pipeline.close()
    pipeline.close()
    assert pipeline.depth == 0 and "closed" in repr(pipeline)
    text = "SlotPipeline: the pipeline is closed; make another one"
    for use in (*(lambda run=run: list(run) for run in runs(pipeline, blocks)), pipeline.__enter__):
        with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
            use()
    assert tensor.eq(4).all()


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_slots": 0}, ValueError, "num_slots: 0, expected at least 1"),
    ({"num_slots": -3}, ValueError, "num_slots: -3, expected at least 1"),
    ({"num_slots": 2.0}, TypeError, "num_slots: float, expected an int"),
    ({"num_slots": True}, TypeError, "num_slots: bool, expected an int"),
    ({"num_streams": 0}, ValueError, "num_streams: 0, expected 1 to 8"),
    ({"num_streams": 9}, ValueError, "num_streams: 9, expected 1 to 8"),
    ({"num_streams": None}, TypeError, "num_streams: NoneType, expected an int"),
    ({"slot_shape": []}, ValueError, "slot_shape: [], expected sizes of at least 1"),
    ({"slot_shape": (4, 0)}, ValueError, "slot_shape: [4, 0], expected sizes of at least 1"),
    ({"slot_shape": (-4,)}, ValueError, "slot_shape: [-4], expected sizes of at least 1"),
    ({"slot_shape": (4.0,)}, TypeError, "slot_shape: [4.0], expected a sequence of ints"),
    ({"slot_shape": (True,)}, TypeError, "slot_shape: [True], expected a sequence of ints"),
    ({"slot_shape": 4}, TypeError, "slot_shape: int, expected a sequence of ints"),
    ({"slot_shape": "44"}, TypeError, "slot_shape: str, expected a sequence of ints"),
    ({"dtype": "bfloat16"}, TypeError, "dtype: str, expected a torch.dtype"),
    ({"dtype": None}, TypeError, "dtype: NoneType, expected a torch.dtype"),
    ({"device": "gpu"}, ValueError, "device: gpu, expected cpu"),
    ({"device": "meta"}, ValueError, "device: meta, expected cpu"),
    ({"device": "cuda:77"}, ValueError, "device: cuda:77, expected cpu"),
    ({"device": 1.0}, TypeError, "device: float, expected a torch.device, a str or an int"),
]


@pytest.mark.parametrize(("how", "kind", "text"), MISTAKES, ids=lambda value: str(value)[:30])
def test_mistakes(how: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^SlotPipeline: {re.escape(text)}"):
        SlotPipeline(**{**GOOD, **how})


def test_mistakes_in_a_run() -> None:
    """At the call, not when the run begins."""
    pipeline = pipeline_of(torch.device("cpu"))
    for method, how, text in (
        ("load", {"blocks": 3, "copy": bring}, "blocks: int, expected an iterable"),
        ("store", {"blocks": None, "copy": take}, "blocks: NoneType, expected an iterable"),
        ("load", {"blocks": [], "copy": 3}, "copy: int, expected a function"),
        ("store", {"blocks": [], "copy": None}, "copy: NoneType, expected a function"),
        ("update", {"blocks": [], "load": 3, "store": take}, "load: int, expected a function"),
        ("update", {"blocks": [], "load": bring, "store": ""}, "store: str, expected a function"),
    ):
        with pytest.raises(TypeError, match=f"^SlotPipeline.{method}: {re.escape(text)}$"):
            getattr(pipeline, method)(**how)
