"""OffloadEngine used wrongly: what is said, and that nothing was moved."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from jitkern.offload import OffloadEngine, PinnedPool

GOOD: dict[str, Any] = {
    "num_layers": 3,
    "num_cpu_blocks": 11,
    "num_slots": 4,
    "block_size": 16,
    "token_shape": (2, 8),
    "dtype": torch.bfloat16,
    "device": "cpu",
}

MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"num_layers": 0}, ValueError, "num_layers: 0, expected at least 1"),
    ({"num_cpu_blocks": -1}, ValueError, "num_cpu_blocks: -1, expected at least 1"),
    ({"num_slots": 2.0}, TypeError, "num_slots: float, expected an int"),
    ({"block_size": True}, TypeError, "block_size: bool, expected an int"),
    ({"token_shape": 128}, TypeError, "token_shape: int, expected a sequence of ints"),
    ({"token_shape": "128"}, TypeError, "token_shape: str, expected a sequence of ints"),
    ({"token_shape": (2, 0)}, ValueError, "token_shape: [2, 0], expected sizes of at least 1"),
    ({"token_shape": (2, None)}, TypeError, "token_shape: [2, None], expected a sequence of ints"),
    ({"token_shape": []}, ValueError, "token_shape: [], expected sizes of at least 1"),
    ({"dtype": "bfloat16"}, TypeError, "dtype: str, expected a torch.dtype"),
    ({"device": "gpu"}, ValueError, "device: gpu, expected cpu"),
    ({"device": None}, TypeError, "device: NoneType, expected a torch.device, a str or an int"),
    ({"kind": "gqa"}, ValueError, 'kind: "gqa", expected "kv" or "mla"'),
    ({"kind": None}, TypeError, "kind: NoneType, expected a str"),
    ({"layout": "x"}, ValueError, 'layout: "x", expected "layer_first" or "block_first"'),
    ({"method": "cpu"}, ValueError, 'method: "cpu", expected "auto", "sm" or "engine"'),
    ({"num_sms": 0}, ValueError, "num_sms: 0, expected at least 1"),
    ({"pool": 1 << 20}, TypeError, "pool: int, expected a PinnedPool or None"),
]


@pytest.mark.parametrize(("wrong", "error", "text"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes(wrong: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^OffloadEngine: {re.escape(text)}"):
        OffloadEngine(**{**GOOD, **wrong})


def test_positional_arguments() -> None:
    with pytest.raises(TypeError, match="positional"):
        OffloadEngine(3, 11, 4)  # type: ignore[call-arg,misc]


def test_pools() -> None:
    with PinnedPool(1000) as small, pytest.raises(ValueError, match="expected at most the 1000 "):
        OffloadEngine(**GOOD, pool=small)
    with pytest.raises(RuntimeError, match=r"^PinnedPool.tensor: the pool is closed$"):
        OffloadEngine(**GOOD, pool=small)


Call = Callable[[OffloadEngine], object]


def many(cpu_blocks: Any, slots: Any) -> Call:
    return lambda e: e.load_cpu_blocks_to_gpu_slots_all_layers(cpu_blocks, slots)


def back(slots: Any, cpu_blocks: Any) -> Call:
    return lambda e: e.offload_gpu_slots_to_cpu_blocks(slots, cpu_blocks, layer=1)


def into(cpu_blocks: Any, layer: int | None = 1, **how: Any) -> Call:
    def call(engine: OffloadEngine) -> object:
        shape = how.get("shape", (2, 2, 16, 2, 8))
        tensor = torch.zeros(shape, dtype=how.get("dtype", engine.dtype), device=engine.device)
        return engine.load_blocks_into(tensor, cpu_blocks, layer=layer)

    return call


NUMBERS = "an int, a sequence of ints or a tensor"
LOAD, BACK = "load_cpu_blocks_to_gpu_slots_all_layers", "offload_gpu_slots_to_cpu_blocks"
INTO = "load_blocks_into"
WRONG: list[tuple[Call, type[Exception], str]] = [
    (
        lambda e: e.load_to_slot_all_layers(4, 0),
        IndexError,
        "load_to_slot_all_layers: slot: 4, expected 0 to 3",
    ),
    (
        lambda e: e.offload_slot_to_cpu(0, -1),
        IndexError,
        "offload_slot_to_cpu: cpu_block: -1, expected 0 to 10",
    ),
    (
        lambda e: e.load_to_slot(0, 0, layer=3),
        IndexError,
        "load_to_slot: layer: 3, expected 0 to 2",
    ),
    (
        lambda e: e.load_to_slot(0, 0, layer=None),
        TypeError,
        "load_to_slot: layer: NoneType, expected an int",
    ),
    (
        lambda e: e.load_to_slot_all_layers(True, 0),
        TypeError,
        "load_to_slot_all_layers: slot: bool, expected an int",
    ),
    (
        lambda e: e.load_to_slot_all_layers(torch.tensor(1, device=e.device), 0),
        TypeError,
        "load_to_slot_all_layers: slot: Tensor, expected an int",
    ),
    (
        lambda e: e.load_to_slot_all_layers(0, 1.0),
        TypeError,
        "load_to_slot_all_layers: cpu_block: float, expected an int",
    ),
    (
        lambda e: e.offload_decode_slot(0, 0, 17),
        ValueError,
        "offload_decode_slot: num_tokens: 17, expected 1 to 16",
    ),
    (
        lambda e: e.load_decode_slot(0, 0, 0),
        ValueError,
        "load_decode_slot: num_tokens: 0, expected 1 to 16",
    ),
    (
        lambda e: e.offload_decode_slot(0, 0, 3, layer=-1),
        IndexError,
        "offload_decode_slot: layer: -1, expected 0 to 2",
    ),
    (many([1, 11], [0, 1]), IndexError, f"{LOAD}: cpu_blocks: 11 at position 1, expected 0 to 10"),
    (many([1, 2], [-1, 1]), IndexError, f"{LOAD}: slots: -1 at position 0, expected 0 to 3"),
    (many(torch.tensor([1, 9]), torch.tensor([0, 4])), IndexError, f"{LOAD}: slots: 4 at position"),
    (
        many([2**70], [0]),
        IndexError,
        f"{LOAD}: cpu_blocks: {2**70} at position 0, expected 0 to 10",
    ),
    (
        many([1, 2, 3], [0, 1, 0]),
        ValueError,
        f"{LOAD}: slots: 0 at positions 0 and 2, expected each number once",
    ),
    (back([0, 1], [5, 5]), ValueError, f"{BACK}: cpu_blocks: 5 at positions 0 and 1, expected"),
    (many([3, 3], [0, 1]), ValueError, f"{LOAD}: cpu_blocks: 3 at positions 0 and 1, expected"),
    (many([1, 2], [0]), ValueError, f"{LOAD}: slots: 1 numbers, expected 2, as many as cpu_blocks"),
    (back([], [5]), ValueError, f"{BACK}: cpu_blocks: 1 numbers, expected 0, as many as slots"),
    (back(0, [5, 6]), ValueError, f"{BACK}: cpu_blocks: 2 numbers, expected 1, as many as slots"),
    (many([1.0], [0]), TypeError, f"{LOAD}: cpu_blocks: float, expected {NUMBERS}"),
    (many([0], [False]), TypeError, f"{LOAD}: slots: bool, expected {NUMBERS}"),
    (many("1", [0]), TypeError, f"{LOAD}: cpu_blocks: str, expected {NUMBERS}"),
    (many(None, [0]), TypeError, f"{LOAD}: cpu_blocks: NoneType, expected {NUMBERS}"),
    (many({1, 2}, [0, 1]), TypeError, f"{LOAD}: cpu_blocks: set, expected {NUMBERS}"),
    (many(torch.ones(2), [0, 1]), TypeError, f"{LOAD}: cpu_blocks: dtype float32, expected int32 "),
    (
        many([0], torch.tensor([True])),
        TypeError,
        f"{LOAD}: slots: dtype bool, expected int32 or int64",
    ),
    (
        back(torch.tensor([[0]]), [0]),
        ValueError,
        f"{BACK}: slots: shape [1, 1], expected one dimension",
    ),
    (
        lambda e: e.load_blocks_into([0], [0]),
        TypeError,
        f"{INTO}: tensor: list, expected a Tensor",
    ),
    (
        into([0], dtype=torch.float16),
        TypeError,
        f"{INTO}: tensor: dtype float16, expected bfloat16",
    ),
    (
        into([0], shape=(2, 2, 16, 2, 4)),
        ValueError,
        f"{INTO}: tensor: shape [2, 2, 16, 2, 4], expected [2, n, 16, 2, 8]",
    ),
    (
        into([0], None),
        ValueError,
        f"{INTO}: tensor: shape [2, 2, 16, 2, 8], expected [2, 3, n, 16, 2, 8]",
    ),
    (
        into([5, 6, 7]),
        ValueError,
        f"{INTO}: cpu_blocks: 3 numbers, expected at most 2, the blocks of tensor",
    ),
    (into([5, 11]), IndexError, f"{INTO}: cpu_blocks: 11 at position 1, expected 0 to 10"),
    (
        lambda e: e.store_blocks_from(
            torch.zeros(2, 2, 16, 2, 8, dtype=e.dtype, device=e.device), [5, 5], layer=0
        ),
        ValueError,
        "store_blocks_from: cpu_blocks: 5 at positions 0 and 1, expected each number once",
    ),
    (
        lambda e: e.load_blocks_into(
            torch.zeros(3, 2, 2, 16, 2, 8, dtype=e.dtype, device=e.device).transpose(0, 1), [0]
        ),
        ValueError,
        f"{INTO}: tensor: strides ",
    ),
    (
        lambda e: e.offload_all(8),
        IndexError,
        "offload_all: first_cpu_block: 3 blocks from 8 on, expected 4, as many as slots",
    ),
    (lambda e: e.load_all(-1), IndexError, "load_all: first_cpu_block: -1, expected 0 to 10"),
    (
        lambda e: e.load_to_slot_all_layers(0, 0, stream=7),
        TypeError,
        "load_to_slot_all_layers: stream: int, expected a torch.cuda.Stream or None",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_calls(device: torch.device, call: Call, error: type[Exception], text: str) -> None:
    with OffloadEngine(**{**GOOD, "device": device}) as engine:
        for cache, number in ((engine.cpu_cache, 1), (engine.gpu_cache, 2)):
            cache.fill_(number)
        with pytest.raises(error, match=f"^OffloadEngine.{re.escape(text)}"):
            call(engine)
        if device.type == "cuda":
            torch.cuda.synchronize()
        assert engine.cpu_cache.eq(1).all() and engine.gpu_cache.eq(2).all()


@pytest.mark.cuda
def test_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    how = {**GOOD, "device": "cuda"}
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        pool = PinnedPool(1 << 20)
    text = "OffloadEngine: pool: pageable memory, expected an open pool, made where CUDA is"
    with pytest.raises(ValueError, match=f"^{text}$"):
        OffloadEngine(**how, pool=pool)
    pool.close()
    closed_later = PinnedPool(1 << 20)
    engine = OffloadEngine(**how, pool=closed_later)
    closed_later.close()
    with pytest.raises(ValueError, match=r": src: "):
        engine.load_to_slot_all_layers(0, 0)
    engine.close()


@pytest.mark.cuda
def test_numbers_of_which_one_side_is_on_the_gpu() -> None:
    with OffloadEngine(**{**GOOD, "device": "cuda:0"}) as engine:
        on_gpu, name = torch.tensor([1, 2], device="cuda"), f"OffloadEngine.{LOAD}"
        for other, where in (([0, 1], "numbers on the host"), (torch.tensor([0, 1]), "cpu")):
            text = f"{name}: slots: {where}, expected a tensor on cuda:0"
            with pytest.raises(ValueError, match=f"^{text}$"):
                engine.load_cpu_blocks_to_gpu_slots_all_layers(on_gpu, other)
            text = f"{name}: cpu_blocks: {where}, expected a tensor on cuda:0"
            with pytest.raises(ValueError, match=f"^{text}$"):
                engine.load_cpu_blocks_to_gpu_slots_all_layers(other, on_gpu)
        text = f"{name}: slots: 3 numbers, expected 2, as many as cpu_blocks"
        with pytest.raises(ValueError, match=f"^{text}$"):
            engine.load_cpu_blocks_to_gpu_slots_all_layers(on_gpu, torch.arange(3, device="cuda"))


@pytest.mark.cuda
def test_a_stream_where_there_is_none() -> None:
    with OffloadEngine(**GOOD) as engine:
        text = "OffloadEngine.load_to_slot_all_layers: stream: of cuda:0, expected None"
        with pytest.raises(ValueError, match=f"^{text}$"):
            engine.load_to_slot_all_layers(0, 0, stream=torch.cuda.Stream())


@pytest.mark.multigpu
def test_another_gpu() -> None:
    with OffloadEngine(**{**GOOD, "device": "cuda:0"}) as engine:
        engine.cpu_cache.fill_(3)
        text = "OffloadEngine.load_to_slot_all_layers: stream: of cuda:1, expected one of cuda:0"
        with pytest.raises(ValueError, match=f"^{text}$"):
            engine.load_to_slot_all_layers(0, 0, stream=torch.cuda.Stream(1))
        with pytest.raises(ValueError, match=r"slots: cuda:1, expected a tensor on cuda:0$"):
            engine.load_cpu_blocks_to_gpu_slots_all_layers(
                torch.tensor([0], device="cuda:0"), torch.tensor([0], device="cuda:1")
            )
        with torch.cuda.device(1):  # the engine's own GPU is the one that counts
            engine.load_to_slot_all_layers(0, 0)
        torch.cuda.synchronize(0)
        assert engine.gpu_k[:, 0].eq(3).all()


def test_numbers_that_another_thread_changes() -> None:
    """What is checked is what is used: each call takes them as they were, or raises."""
    wrong = 1 << 60
    numbers = torch.arange(4)
    over = threading.Event()

    def change() -> None:
        while not over.is_set():
            numbers[2] = wrong
            numbers[2] = 2

    thread = threading.Thread(target=change)
    thread.start()
    found = {True: 0, False: 0}  # calls that raised, and others
    with OffloadEngine(**GOOD) as engine:
        try:
            for _ in range(1_000_000):
                try:
                    engine.load_cpu_blocks_to_gpu_slots_all_layers(numbers, range(4))
                    found[False] += 1
                except IndexError as error:
                    found[True] += 1
                    assert f"cpu_blocks: {wrong} at position 2, expected 0 to 10" in str(error)
                if min(found.values()) >= 1000:
                    break
        finally:
            over.set()
            thread.join()
    assert min(found.values()) > 0, found
