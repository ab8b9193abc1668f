"""SlotPipeline: what a run gives and in which order, and how it ends; on both devices."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pipelines import (
    SHAPE,
    bring,
    check_is_ready,
    current,
    host_blocks,
    pipeline_of,
    runs,
    sync,
    take,
)
from torch import Tensor

DEPTHS = (1, 2, 3, 8)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("num_streams", [1, 3])
def test_loads(device: torch.device, depth: int, num_streams: int) -> None:
    pipeline = pipeline_of(device, depth, num_streams=num_streams)
    blocks = host_blocks(20, device)
    before = current(device)
    seen = torch.zeros(20, device=device)
    for number, slot in enumerate(pipeline.load(blocks, copy=bring)):
        assert slot.block is blocks[number]
        assert slot.index == number % depth
        assert slot.tensor.shape == SHAPE and slot.tensor.device.type == device.type
        assert current(device) == pipeline.compute_stream
        seen[number] = slot.tensor.amax()
    assert current(device) == before
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
def test_stores(device: torch.device, depth: int) -> None:
    pipeline = pipeline_of(device, depth)
    blocks = host_blocks(20, device, fill=False)
    for number, slot in enumerate(pipeline.store(blocks, copy=take)):
        slot.tensor.fill_(number + 7)
    sync(device)
    assert [block.unique().tolist() for block in blocks] == [[n + 7] for n in range(20)]


@pytest.mark.parametrize("depth", DEPTHS)
def test_updates(device: torch.device, depth: int) -> None:
    pipeline = pipeline_of(device, depth)
    blocks = host_blocks(20, device)
    for _ in range(3):
        for slot in pipeline.update(blocks, load=bring, store=take):
            slot.tensor.mul_(2)
    sync(device)
    assert [block.unique().tolist() for block in blocks] == [[8 * (n + 1)] for n in range(20)]


@pytest.mark.parametrize("count", [0, 1, 2])
def test_fewer_blocks_than_slots(device: torch.device, count: int) -> None:
    pipeline = pipeline_of(device, 4)
    blocks = host_blocks(count, device)
    assert [slot.block for slot in pipeline.load(blocks, copy=bring)] == blocks
    assert [slot.block for slot in pipeline.store(blocks, copy=take)] == blocks
    assert [slot.block for slot in pipeline.update(blocks, load=bring, store=take)] == blocks


def test_loads_run_ahead_as_far_as_there_are_slots() -> None:
    """And no block is taken before there is a slot for it."""
    said: list[str] = []

    def blocks() -> Iterator[int]:
        for number in range(5):
            said.append(f"take {number}")
            yield number

    def copy(what: str) -> Callable[[Tensor, int], None]:
        return lambda tensor, block: said.append(f"{what} {block}")

    pipeline = pipeline_of(torch.device("cpu"), 2)
    for slot in pipeline.load(blocks(), copy=copy("load")):
        said.append(f"body {slot.block}")
    assert said == [
        *("take 0", "load 0", "take 1", "load 1", "body 0", "take 2", "load 2", "body 1"),
        *("take 3", "load 3", "body 2", "take 4", "load 4", "body 3", "body 4"),
    ]
    said.clear()
    for slot in pipeline.store(blocks(), copy=copy("store")):
        said.append(f"body {slot.block}")
    expected = [[f"take {n}", f"body {n}", f"store {n}"] for n in range(5)]
    assert said == [line for lines in expected for line in lines]
    said.clear()
    for slot in pipeline.update(range(3), load=copy("load"), store=copy("store")):
        said.append(f"body {slot.block}")
    assert said == [
        *("load 0", "load 1", "body 0", "store 0", "load 2", "body 1", "store 1"),
        *("body 2", "store 2"),
    ]


def test_a_run_may_be_gone_over_again(device: torch.device) -> None:
    run = pipeline_of(device).load(host_blocks(4, device), copy=bring)
    for _ in range(2):
        assert [slot.tensor[0, 0].item() for slot in run] == [1, 2, 3, 4]


def test_blocks_are_let_go(device: torch.device) -> None:
    pipeline = pipeline_of(device)
    for slot in pipeline.load(host_blocks(7, device), copy=bring):
        kept = slot
        if slot.block[0, 0] == 3:
            break
    assert kept.block is None
    assert all(slot.block is None for slot in pipeline._slots._all)


# -- the caller's stream ---------------------------------------------------------------------------


def test_under_with_runs_follow_each_other(device: torch.device) -> None:
    pipeline = pipeline_of(device)
    blocks = host_blocks(8, device)
    before = current(device)
    total = torch.zeros((), device=device)
    with pipeline:
        for layer in range(4):
            for slot in pipeline.load(blocks, copy=bring):
                total += slot.tensor.sum()
            assert current(device) == pipeline.compute_stream
            total += layer
            pipeline.fork()
    assert current(device) == before
    assert total.item() == 4 * 15 * 36 + 6
    with pytest.raises(RuntimeError, match=r"^SlotPipeline\.fork: not inside `with pipeline:`"):
        pipeline.fork()


# -- runs that end early ---------------------------------------------------------------------------


class WrongError(Exception):
    pass


def copies_until(number: int, copy: Any) -> Any:
    """A copy that raises at its call `number`."""
    calls = 0

    def wrong(tensor: Tensor, block: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == number + 1:
            raise WrongError(number)
        copy(tensor, block)

    return wrong


@pytest.mark.parametrize("kind", range(3), ids=["load", "store", "update"])
@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_a_body_that_raises(device: torch.device, kind: int, at: int) -> None:
    """Also where the traceback is kept, with all its frames."""
    pipeline, before = pipeline_of(device), current(device)
    run = runs(pipeline, host_blocks(10, device))[kind]
    with pytest.raises(WrongError) as kept:
        for number, _ in enumerate(run):
            if number == at:
                raise WrongError
    assert kept.value.__traceback__ is not None
    check_is_ready(pipeline, device, before)


@pytest.mark.parametrize("kind", range(3), ids=["load", "store", "update"])
def test_break_and_return(device: torch.device, kind: int) -> None:
    pipeline, before = pipeline_of(device), current(device)

    def first() -> Tensor:
        for slot in runs(pipeline, host_blocks(10, device))[kind]:
            return slot.tensor
        raise AssertionError

    for _ in runs(pipeline, host_blocks(10, device))[kind]:
        break
    check_is_ready(pipeline, device, before)
    first()
    check_is_ready(pipeline, device, before)


def test_an_iterator_that_is_kept_is_ended_by_with(device: torch.device) -> None:
    pipeline, before = pipeline_of(device), current(device)
    blocks = host_blocks(10, device)
    run = pipeline.load(blocks, copy=bring)
    with pytest.raises(WrongError), run as slots:
        kept = iter(slots)
        next(kept)
        raise WrongError
    check_is_ready(pipeline, device, before)
    assert next(kept, None) is None
    run.close()

    with pytest.raises(WrongError), pipeline:
        held = iter(pipeline.load(blocks, copy=bring))
        next(held)
        raise WrongError
    check_is_ready(pipeline, device, before)
    assert next(held, None) is None


def test_an_iterator_that_is_dropped(device: torch.device) -> None:
    pipeline, before = pipeline_of(device), current(device)
    slots = iter(pipeline.load(host_blocks(10, device), copy=bring))
    next(slots)
    del slots
    gc.collect()
    check_is_ready(pipeline, device, before)


def test_one_that_is_dropped_in_another_thread(device: torch.device) -> None:
    pipeline = pipeline_of(device)
    slots = [iter(pipeline.load(host_blocks(10, device), copy=bring))]
    next(slots[0])
    thread = threading.Thread(target=slots.clear)
    thread.start()
    thread.join()
    assert len(pipeline._slots.free) == pipeline.depth
    if device.type == "cuda":  # of the thread that began it
        torch.cuda.set_stream(torch.cuda.default_stream())
    check_is_ready(pipeline, device, current(device))


@pytest.mark.parametrize("at", [0, 2, 5, 9])
def test_blocks_that_raise(device: torch.device, at: int) -> None:
    """After the bodies of the blocks that came before."""
    pipeline, before = pipeline_of(device), current(device)

    def blocks() -> Iterator[Tensor]:
        for number, block in enumerate(host_blocks(10, device)):
            if number == at:
                raise WrongError
            yield block

    for kind in range(3):
        bodies = []
        with pytest.raises(WrongError):
            for slot in runs(pipeline, blocks())[kind]:
                bodies.append(slot.tensor[0, 0].clone())
        assert len(bodies) == at
        if kind != 1:
            assert [one.item() for one in bodies] == list(range(1, at + 1))
        check_is_ready(pipeline, device, before)


@pytest.mark.parametrize("at", [0, 2, 5, 9])
def test_copies_that_raise(device: torch.device, at: int) -> None:
    pipeline, before = pipeline_of(device), current(device)
    blocks = host_blocks(10, device)
    for start, num_bodies in (
        (lambda: pipeline.load(blocks, copy=copies_until(at, bring)), at),
        (lambda: pipeline.store(blocks, copy=copies_until(at, take)), at + 1),
        (lambda: pipeline.update(blocks, load=copies_until(at, bring), store=take), at),
        (lambda: pipeline.update(blocks, load=bring, store=copies_until(at, take)), at + 1),
    ):
        bodies = 0
        with pytest.raises(WrongError):
            for _ in start():
                bodies += 1
        assert bodies == num_bodies
        check_is_ready(pipeline, device, before)


def test_an_interrupt_in_a_copy_is_raised_at_once(device: torch.device) -> None:
    pipeline, before = pipeline_of(device), current(device)

    def copy(tensor: Tensor, block: Tensor) -> None:
        if block[0, 0] == 2:
            raise KeyboardInterrupt
        bring(tensor, block)

    bodies = 0
    with pytest.raises(KeyboardInterrupt):
        for _ in pipeline.load(host_blocks(10, device), copy=copy):
            bodies += 1
    assert bodies == 0
    check_is_ready(pipeline, device, before)
