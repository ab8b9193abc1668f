"""OffloadEngine against caches in PyTorch that are moved block by block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import BLOCKS, KINDS, LAYERS, SLOTS, TOKENS, Model, engine_of, sync
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jitkern.offload import PinnedPool, SlotPipeline


@pytest.fixture(params=KINDS, ids="-".join)
def model(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Model]:
    kind, layout = request.param
    with engine_of(device, kind, layout=layout) as engine:
        yield Model(engine)


def test_shapes(device: torch.device) -> None:
    tail = (TOKENS, 2, 8)
    with engine_of(device) as engine:
        assert engine.cpu_k.shape == engine.cpu_v.shape == (LAYERS, BLOCKS, *tail)
        assert engine.gpu_k.shape == engine.gpu_v.shape == (LAYERS, SLOTS, *tail)
        assert engine.cpu_cache.shape == (2, LAYERS, BLOCKS, *tail)
        assert engine.gpu_cache.shape == (2, LAYERS, SLOTS, *tail)
        assert engine.cpu_k.is_contiguous() and engine.gpu_v.is_contiguous()
        assert engine.cpu_k.dtype == engine.gpu_k.dtype == torch.bfloat16
        assert engine.gpu_k.device.type == device.type
        assert engine.cpu_k.is_pinned() == (device.type == "cuda")
        assert not engine.cpu_cache.any() and not engine.gpu_cache.any()
        assert engine.cpu_v.data_ptr() == engine.cpu_cache[1].data_ptr()
    with engine_of(device, layout="block_first") as engine:
        assert engine.cpu_k.shape == engine.cpu_v.shape == (BLOCKS, LAYERS, *tail)
        assert engine.cpu_cache[3].is_contiguous()  # a block is, over K, V and the layers
        assert engine.gpu_k.shape == (LAYERS, SLOTS, *tail)
    with engine_of(device, "mla") as engine:
        assert engine.cpu_cache.shape == (LAYERS, BLOCKS, TOKENS, 24)
        assert engine.gpu_cache.shape == (LAYERS, SLOTS, TOKENS, 24)
    with engine_of(device, "mla", layout="block_first") as engine:
        assert engine.cpu_cache.shape == (BLOCKS, LAYERS, TOKENS, 24)


@pytest.mark.parametrize("layer", [None, 0, LAYERS - 1])
def test_one_block(model: Model, layer: int | None) -> None:
    engine = model.engine
    if layer is None:
        engine.load_to_slot_all_layers(SLOTS - 1, BLOCKS - 1)
    else:
        engine.load_to_slot(SLOTS - 1, BLOCKS - 1, layer=layer)
    model.load(SLOTS - 1, BLOCKS - 1, layer)
    model.check()
    engine.offload_slot_to_cpu(0, 4, layer=layer)
    model.offload(0, 4, layer)
    model.check()


@pytest.mark.parametrize("tokens", [1, 7, TOKENS])
@pytest.mark.parametrize("layer", [None, 1])
def test_a_block_that_decode_fills(model: Model, layer: int | None, tokens: int) -> None:
    model.engine.offload_decode_slot(2, 5, tokens, layer=layer)
    model.offload(2, 5, layer, tokens)
    model.check()
    model.engine.load_decode_slot(1, 6, tokens, layer=layer)
    model.load(1, 6, layer, tokens)
    model.check()


def forms(device: torch.device, numbers: list[int]) -> list[Any]:
    """What a batch may come as: all on the host, and on the GPU where there is one."""
    on_host = [numbers, tuple(numbers), torch.tensor(numbers), torch.tensor(numbers).int()]
    if device.type == "cpu":
        return on_host
    return [
        *on_host,
        torch.tensor(numbers, device=device),
        torch.tensor(numbers, device=device).int(),
    ]


@pytest.mark.parametrize("layer", [None, 2])
def test_many_blocks(model: Model, layer: int | None) -> None:
    engine, device = model.engine, model.engine.device
    for blocks, slots in (([7, 2, 3], [3, 0, 1]), ([9], [2]), ([0, 1, 2, 3], [0, 1, 2, 3])):
        for cpu_blocks, gpu_slots in zip(forms(device, blocks), forms(device, slots), strict=True):
            model.engine.gpu_cache.normal_()
            model.gpu = model.now()[1]
            if layer is None:
                engine.load_cpu_blocks_to_gpu_slots_all_layers(cpu_blocks, gpu_slots)
            else:
                engine.load_cpu_blocks_to_gpu_slots(cpu_blocks, gpu_slots, layer=layer)
            for block, slot in zip(blocks, slots, strict=True):
                model.load(slot, block, layer)
            model.check()
            engine.gpu_cache.normal_()
            model.gpu = model.now()[1]
            if layer is None:
                engine.offload_gpu_slots_to_cpu_blocks_all_layers(gpu_slots, cpu_blocks)
            else:
                engine.offload_gpu_slots_to_cpu_blocks(gpu_slots, cpu_blocks, layer=layer)
            for block, slot in zip(blocks, slots, strict=True):
                model.offload(slot, block, layer)
            model.check()


def test_a_batch_of_one_number_and_of_none(model: Model) -> None:
    engine = model.engine
    engine.load_cpu_blocks_to_gpu_slots_all_layers(6, 1)
    model.load(1, 6)
    model.check()
    for nothing in forms(engine.device, []):
        if isinstance(nothing, Tensor):
            nothing = nothing.to(torch.int64)
        engine.load_cpu_blocks_to_gpu_slots_all_layers(nothing, nothing)
        engine.offload_gpu_slots_to_cpu_blocks_all_layers(nothing, nothing)
    model.check()


class Scalar:
    """As NumPy's ints are: an array that has no length."""

    ndim = 0

    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value

    def __array__(self) -> object:
        raise AssertionError("nobody needs it")


def test_an_int_of_another_library(model: Model) -> None:
    engine = model.engine
    engine.load_cpu_blocks_to_gpu_slots_all_layers(Scalar(6), Scalar(1))
    model.load(1, 6)
    parts = [2] if engine.kind == "kv" else []
    tensor = torch.zeros([*parts, 1, TOKENS, *engine.token_shape], device=engine.device)
    tensor = tensor.to(engine.dtype)
    engine.load_blocks_into(tensor, Scalar(6), layer=2)
    model.check()
    found = tensor.cpu().select(len(parts), 0)
    assert torch.equal(found.view(model.cpu[:, 2, 6].shape), model.cpu[:, 2, 6])


def test_dtypes_of_numbers_may_differ(model: Model) -> None:
    device = model.engine.device
    blocks = torch.tensor([8, 3], dtype=torch.int32, device=device)
    slots = torch.tensor([1, 3], dtype=torch.int64, device=device)
    model.engine.load_cpu_blocks_to_gpu_slots_all_layers(blocks, slots)
    model.load(1, 8)
    model.load(3, 3)
    model.check()


@pytest.mark.parametrize("layer", [None, 1])
def test_memory_of_the_caller(model: Model, layer: int | None) -> None:
    engine, device = model.engine, model.engine.device
    parts = [2] if engine.kind == "kv" else []
    layers = [LAYERS] if layer is None else []
    shape = [*parts, *layers, 5, TOKENS, *engine.token_shape]
    for blocks in forms(device, [9, 1, 4]):
        tensor = torch.randn(shape).to(torch.bfloat16).to(device)
        before = tensor.clone()
        engine.load_blocks_into(tensor, blocks, layer=layer)
        sync(device)
        expected = model.cpu[:, :, [9, 1, 4]] if layer is None else model.cpu[:, layer, [9, 1, 4]]
        dim = len(parts) + len(layers)
        found = tensor.cpu().narrow(dim, 0, 3).reshape(expected.shape)
        assert torch.equal(found, expected)
        assert torch.equal(tensor.narrow(dim, 3, 2), before.narrow(dim, 3, 2))
        engine.store_blocks_from(before, blocks, layer=layer)
        written = before.cpu().narrow(dim, 0, 3).reshape(expected.shape)
        if layer is None:
            model.cpu[:, :, [9, 1, 4]] = written
        else:
            model.cpu[:, layer, [9, 1, 4]] = written
        model.check()


def test_through_a_pipeline(model: Model) -> None:
    """Blocks of each layer in turn, more of them than there is room for, changed in place."""
    engine, device = model.engine, model.engine.device
    parts = [2] if engine.kind == "kv" else []
    shape = [*parts, 2, TOKENS, *engine.token_shape]
    pipeline = SlotPipeline(num_slots=2, slot_shape=shape, dtype=torch.bfloat16, device=device)
    groups = [[10, 3], [0, 7], [5, 1]]
    work = [(layer, group) for layer in range(LAYERS) for group in groups]

    def load(tensor: Tensor, block: tuple[int, list[int]]) -> None:
        engine.load_blocks_into(tensor, block[1], layer=block[0])

    def store(tensor: Tensor, block: tuple[int, list[int]]) -> None:
        engine.store_blocks_from(tensor, block[1], layer=block[0])

    for slot in pipeline.update(work, load=load, store=store):
        slot.tensor.mul_(2)
    model.cpu[:, :, [number for group in groups for number in group]] *= 2
    model.check()


@pytest.mark.parametrize("first", [0, 3, BLOCKS - SLOTS])
def test_all_slots(
    model: Model, first: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In steps of three blocks: the last one is shorter."""
    engine = model.engine
    slot_bytes = engine.gpu_cache.nbytes // SLOTS
    monkeypatch.setattr("jitkern.offload.mover._STEP_BYTES", 3 * slot_bytes + 1)
    engine.offload_all(first)
    for slot in range(SLOTS):
        model.offload(slot, first + slot)
    model.check()
    engine.gpu_cache.zero_()
    engine.load_all(first, progress=True)
    model.check()
    said = capsys.readouterr()
    assert "OffloadEngine: loading" in said.err and not said.out


@settings(max_examples=60)
@given(data=st.data())
def test_random_moves(device: torch.device, data: st.DataObject) -> None:
    kind, layout = data.draw(st.sampled_from(KINDS))
    slot, block = st.integers(0, SLOTS - 1), st.integers(0, BLOCKS - 1)
    layers, tokens = st.none() | st.integers(0, LAYERS - 1), st.integers(1, TOKENS)
    with engine_of(device, kind, layout=layout) as engine:
        model = Model(engine, seed=7)
        for _ in range(data.draw(st.integers(1, 12))):
            layer, is_load = data.draw(layers), data.draw(st.booleans())
            if data.draw(st.booleans()):
                one = data.draw(slot), data.draw(block), data.draw(tokens)
                (engine.load_decode_slot if is_load else engine.offload_decode_slot)(
                    *one, layer=layer
                )
                (model.load if is_load else model.offload)(*one[:2], layer, one[2])
                continue
            slots = data.draw(st.lists(slot, unique=True))
            blocks = data.draw(st.permutations(range(BLOCKS)))[: len(slots)]
            form = data.draw(st.integers(0, len(forms(device, [0])) - 1))
            here, there = forms(device, slots)[form], forms(device, blocks)[form]
            if isinstance(here, Tensor) and not slots:
                here, there = here.int(), there.int()
            if is_load and layer is None:
                engine.load_cpu_blocks_to_gpu_slots_all_layers(there, here)
            elif is_load:
                engine.load_cpu_blocks_to_gpu_slots(there, here, layer=layer)
            elif layer is None:
                engine.offload_gpu_slots_to_cpu_blocks_all_layers(here, there)
            else:
                engine.offload_gpu_slots_to_cpu_blocks(here, there, layer=layer)
            for i, j in zip(slots, blocks, strict=True):
                (model.load if is_load else model.offload)(i, j, layer)
        model.check()


@pytest.mark.parametrize("method", ["auto", "sm", "engine"])
@pytest.mark.parametrize("item", [1, 3, 656])
def test_methods_and_sizes(device: torch.device, item: int, method: str) -> None:
    how = {"token_shape": [item], "dtype": torch.uint8, "method": method, "num_sms": 3}
    for layout in ("layer_first", "block_first"):
        with engine_of(device, layout=layout, block_size=5, **how) as engine:
            cpu = torch.randint(255, engine.cpu_cache.shape, dtype=torch.uint8)
            engine.cpu_cache.copy_(cpu)
            engine.load_cpu_blocks_to_gpu_slots_all_layers([8, 9, 2], [0, 1, 3])
            engine.offload_decode_slot(1, 3, 2)
            sync(device)
            assert torch.equal(engine.gpu_k[:, 1].cpu(), cpu_block(engine.cpu_k, 9, layout))
            assert torch.equal(engine.gpu_v[:, 3].cpu(), cpu_block(engine.cpu_v, 2, layout))
            new = cpu_block(engine.cpu_v, 3, layout)
            assert torch.equal(new[:, :2], engine.gpu_v[:, 1, :2].cpu())
            old = cpu[1][:, 3] if layout == "layer_first" else cpu[3][1]
            assert torch.equal(new[:, 2:], old[:, 2:])


def cpu_block(cache: Tensor, block: int, layout: str) -> Tensor:
    return cache[:, block] if layout == "layer_first" else cache[block]


def test_a_pool_of_the_caller(device: torch.device) -> None:
    """Two engines and a tensor of one pool, which stays open."""
    sizes = [2 * LAYERS * BLOCKS * TOKENS * 16 * 2, LAYERS * BLOCKS * TOKENS * 24 * 2]
    with PinnedPool(sum(sizes) + 512) as pool:
        first = engine_of(device, pool=pool)
        second = engine_of(device, "mla", pool=pool)
        assert first.cpu_cache.data_ptr() + sizes[0] <= second.cpu_cache.data_ptr()
        first.close()
        second.cpu_cache.fill_(3)
        second.load_to_slot_all_layers(0, 0)
        sync(device)
        assert second.gpu_cache[:, 0].eq(3).all()
        second.close()
        assert pool.tensor(8).shape == (8,)


def test_made_in_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        engine = engine_of(device)
        engine.load_to_slot_all_layers(0, 1)
    engine.offload_slot_to_cpu(0, 1)
    engine.gpu_k.add_(1)
    with torch.inference_mode():
        engine.offload_decode_slot(0, 1, 3)
    sync(device)
    assert engine.cpu_k[:, 1, :3].eq(1).all()
    engine.close()


def test_close(device: torch.device) -> None:
    engine = engine_of(device)
    assert repr(engine).startswith("OffloadEngine(kv, 3 layers of torch.bfloat16, 11 blocks of 16 ")
    cache = engine.cpu_k.fill_(5)
    engine.load_to_slot_all_layers(2, 2)
    engine.close()
    engine.close()
    assert repr(engine) == "OffloadEngine(closed)"
    assert cache.eq(5).all()
    text = "the engine is closed; make another one"
    for name, use in {
        "load_to_slot_all_layers": lambda: engine.load_to_slot_all_layers(0, 0),
        "offload_slot_to_cpu": lambda: engine.offload_slot_to_cpu(0, 0, layer=1),
        "load_decode_slot": lambda: engine.load_decode_slot(0, 0, 1),
        "load_blocks_into": lambda: engine.load_blocks_into(torch.zeros(1), []),
        "offload_all": lambda: engine.offload_all(),
        "cpu_v": lambda: engine.cpu_v,
        "gpu_cache": lambda: engine.gpu_cache,
    }.items():
        with pytest.raises(RuntimeError, match=f"^OffloadEngine.{name}: {text}$"):
            use()


def test_no_cache_without_its_kind(device: torch.device) -> None:
    with engine_of(device, "mla") as engine:
        text = "^OffloadEngine.cpu_k: not of kind mla; see cpu_cache$"
        with pytest.raises(AttributeError, match=text):
            engine.cpu_k  # noqa: B018
        assert not hasattr(engine, "gpu_v")


def test_every_number_of_a_small_cache(device: torch.device) -> None:
    with engine_of(device, num_layers=1) as engine:
        for slot, block in itertools.product(range(SLOTS), range(BLOCKS)):
            engine.cpu_k[:, block] = 100 + block
            engine.load_to_slot_all_layers(slot, block)
            sync(device)
            assert engine.gpu_k[:, slot].eq(100 + block).all()
