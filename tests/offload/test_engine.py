"""OffloadEngine against a model in PyTorch that copies block by block; wrong arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import no_synchronisation, sync
from ref import refusals
from torch import Tensor

import jitkern
from jitkern.offload import OffloadEngine, PinnedPool

LAYERS, BLOCKS, SLOTS, TOKENS = 3, 11, 4, 16
KINDS = [(kind, layout) for kind in ("kv", "mla") for layout in ("layer_first", "block_first")]


GOOD = {
    "num_layers": LAYERS,
    "num_cpu_blocks": BLOCKS,
    "num_slots": SLOTS,
    "block_size": TOKENS,
    "token_shape": (2, 8),
    "dtype": torch.bfloat16,
}


def engine_of(device: torch.device, kind: str = "kv", **how: Any) -> OffloadEngine:
    if kind == "mla":
        how["token_shape"] = (24,)
    return OffloadEngine(**{**GOOD, "kind": kind, "device": device, **how})


class Model:
    """Both caches as ``[parts, layers, blocks, tokens, ...]``, filled with random numbers."""

    def __init__(self, engine: OffloadEngine, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.engine = engine
        cpu, gpu = engine.cpu_cache, engine.gpu_cache
        cpu.copy_(torch.randn(cpu.shape))
        gpu.copy_(torch.randn(gpu.shape))
        self.cpu, self.gpu = self.now()

    def now(self) -> tuple[Tensor, Tensor]:
        cpu, gpu = self.engine.cpu_cache.clone(), self.engine.gpu_cache.cpu()
        if self.engine.kind == "mla":
            cpu, gpu = cpu.unsqueeze(0 if self.engine.layout == "layer_first" else 1), gpu[None]
        if self.engine.layout == "block_first":
            cpu = cpu.movedim(0, 2)
        return cpu, gpu

    def load(self, slot: int, block: int, layer: int | None = None, tokens: int = TOKENS) -> None:
        at = slice(None) if layer is None else layer
        self.gpu[:, at, slot, :tokens] = self.cpu[:, at, block, :tokens]

    def store(self, slot: int, block: int, layer: int | None = None, tokens: int = TOKENS) -> None:
        at = slice(None) if layer is None else layer
        self.cpu[:, at, block, :tokens] = self.gpu[:, at, slot, :tokens]

    def check(self) -> None:
        sync(self.engine.device)
        cpu, gpu = self.now()
        assert torch.equal(cpu, self.cpu)
        assert torch.equal(gpu, self.gpu)


@pytest.fixture(params=KINDS, ids="-".join)
def model(request: pytest.FixtureRequest, device: torch.device) -> Iterator[Model]:
    kind, layout = request.param
    with engine_of(device, kind, layout=layout) as engine:
        yield Model(engine)


SHAPES = {
    ("kv", "layer_first"): (2, LAYERS, BLOCKS, TOKENS, 2, 8),
    ("kv", "block_first"): (BLOCKS, 2, LAYERS, TOKENS, 2, 8),
    ("mla", "layer_first"): (LAYERS, BLOCKS, TOKENS, 24),
    ("mla", "block_first"): (BLOCKS, LAYERS, TOKENS, 24),
}


@pytest.mark.parametrize(("kind", "layout"), KINDS)
def test_shapes(device: torch.device, kind: str, layout: str) -> None:
    with engine_of(device, kind, layout=layout) as engine:
        assert engine.cpu_cache.shape == SHAPES[kind, layout]
        tail = (LAYERS, SLOTS, TOKENS, *engine.token_shape)
        assert engine.gpu_cache.shape == (tail if kind == "mla" else (2, *tail))
        assert engine.gpu_cache.device.type == device.type
        assert engine.cpu_cache.is_pinned() == torch.cuda.is_available()
        assert not engine.cpu_cache.any() and not engine.gpu_cache.any()
        assert hasattr(engine, "gpu_v") == (kind == "kv")
        if kind == "kv":
            part = 0 if layout == "layer_first" else 1
            engine.cpu_v.fill_(1)
            assert engine.cpu_cache.select(part, 1).all() and not engine.cpu_k.any()
            assert engine.gpu_k.shape == engine.gpu_v.shape == tail


@pytest.mark.parametrize("layer", [None, 1])
def test_the_names_of_other_engines(model: Model, layer: int | None) -> None:
    engine = model.engine
    engine.load_to_slot_all_layers(SLOTS - 1, BLOCKS - 1)
    model.load(SLOTS - 1, BLOCKS - 1)
    engine.offload_slot_to_cpu(0, numpy.int64(6), layer=layer)  # an array that has no length
    model.store(0, 6, layer)
    engine.offload_decode_slot(2, 5, 7, layer=layer)
    model.store(2, 5, layer, 7)
    engine.load_cpu_blocks_to_gpu_slots_all_layers([7, 2], [3, 1])
    model.load(3, 7)
    model.load(1, 2)
    model.check()


def forms(device: torch.device, numbers: list[int]) -> list[Any]:
    """Return numbers as each accepted type: on the host, and on the GPU if there is one."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    kinds = [numbers, tuple(numbers), tensor, tensor.int()]
    return kinds if device.type == "cpu" else [*kinds, tensor.to(device), tensor.int().to(device)]


@pytest.mark.parametrize("layer", [None, 1])
def test_memory_of_the_caller(model: Model, layer: int | None) -> None:
    engine, device = model.engine, model.engine.device
    parts = [2] if engine.kind == "kv" else []
    layers = [LAYERS] if layer is None else []
    shape = [*parts, *layers, 5, TOKENS, *engine.token_shape]
    dim, at = len(parts) + len(layers), slice(None) if layer is None else layer
    for blocks in forms(device, [9, 1, 4]):
        tensor = torch.randn(shape).to(torch.bfloat16).to(device)
        before = tensor.clone()
        engine.load_blocks_into(tensor, blocks, layer=layer)
        sync(device)
        expected = model.cpu[:, at, [9, 1, 4]]
        assert torch.equal(tensor.cpu().narrow(dim, 0, 3).reshape(expected.shape), expected)
        assert torch.equal(tensor.narrow(dim, 3, 2), before.narrow(dim, 3, 2))
        engine.store_blocks_from(before, blocks, layer=layer)
        model.cpu[:, at, [9, 1, 4]] = before.cpu().narrow(dim, 0, 3).reshape(expected.shape)
        model.check()


@settings(max_examples=40)
@given(data=st.data())
def test_random_moves(device: torch.device, data: st.DataObject) -> None:
    kind, layout = data.draw(st.sampled_from(KINDS))
    layers, tokens = st.none() | st.integers(0, LAYERS - 1), st.integers(1, TOKENS)
    method = data.draw(st.sampled_from(["auto", "sm", "engine"]))
    with engine_of(device, kind, layout=layout, method=method) as engine:
        model = Model(engine, seed=7)
        for _ in range(data.draw(st.integers(1, 12))):
            layer, count, is_load = data.draw(layers), data.draw(tokens), data.draw(st.booleans())
            slots = data.draw(st.lists(st.integers(0, SLOTS - 1), unique=True))
            blocks = data.draw(st.permutations(range(BLOCKS)))[: len(slots)]
            sides = list(zip(forms(device, slots), forms(device, blocks), strict=True))
            on_host = sides[:4]  # the engine takes these only
            here, there = data.draw(st.sampled_from(on_host if method == "engine" else sides))
            move = engine.load if is_load else engine.store
            move(here, there, layer=layer, num_tokens=count)
            for i, j in zip(slots, blocks, strict=True):
                (model.load if is_load else model.store)(i, j, layer, count)
        model.check()


def test_a_pool_of_the_caller(device: torch.device) -> None:
    sizes = [2 * LAYERS * BLOCKS * TOKENS * 16 * 2, LAYERS * BLOCKS * TOKENS * 24 * 2]
    with PinnedPool(sum(sizes) + 512) as pool:
        first, second = engine_of(device, pool=pool), engine_of(device, "mla", pool=pool)
        assert first.cpu_cache.data_ptr() + sizes[0] <= second.cpu_cache.data_ptr()
        first.close()
        second.cpu_cache.fill_(3)
        second.load(0, 0)
        sync(device)
        assert second.gpu_cache[:, 0].eq(3).all()
        second.close()
        assert pool.tensor(8).shape == (8,)
        with pytest.raises(ValueError, match=r"expected at most the \d+ "):
            engine_of(device, pool=pool)
    with pytest.raises(RuntimeError, match=r"the pool is closed$"):
        engine_of(device, pool=pool)


def test_made_in_inference_mode(device: torch.device) -> None:
    with torch.inference_mode():
        engine = engine_of(device)
        engine.load(0, 1)
    engine.store(0, 1)
    engine.gpu_k.add_(1)
    with torch.inference_mode():
        engine.store(0, 1, num_tokens=3)
    sync(device)
    assert engine.cpu_k[:, 1, :3].eq(1).all()
    engine.close()


def test_close(device: torch.device) -> None:
    engine = engine_of(device)
    assert repr(engine).startswith("OffloadEngine(kv, 3 layers of torch.bfloat16, 11 blocks of 16 ")
    cache = engine.cpu_k.fill_(5)
    engine.load(2, 2)
    engine.close()
    engine.close()
    assert repr(engine) == "OffloadEngine(closed)" and not hasattr(engine, "gpu_k")
    assert cache.eq(5).all()
    for name, args in (("load", (0, 0)), ("load_blocks_into", (cache, []))):
        text = f"^OffloadEngine.{name}: the engine is closed; make another one$"
        with pytest.raises(RuntimeError, match=text):
            getattr(engine, name)(*args)


test_mistakes = refusals(
    OffloadEngine,
    {**GOOD, "device": "cpu"},
    ({"num_layers": 0}, ValueError, "num_layers: 0, expected 1 to 2147483647"),
    ({"num_cpu_blocks": -1}, ValueError, "num_cpu_blocks: -1, expected 1 to 2147483647"),
    ({"num_slots": 2.0}, TypeError, "num_slots: float, expected an int"),
    ({"token_shape": (2, 0)}, ValueError, "token_shape: [2, 0], expected sizes of at least 1"),
    ({"token_shape": (2, None)}, TypeError, "token_shape: [2, None], expected a sequence of ints"),
    ({"dtype": "bfloat16"}, TypeError, "dtype: str, expected a torch.dtype"),
    ({"kind": "gqa"}, ValueError, "kind: 'gqa', expected 'kv' or 'mla'"),
    ({"layout": None}, TypeError, "layout: None, expected 'layer_first' or 'block_first'"),
    ({"method": "cpu"}, ValueError, "method: 'cpu', expected 'auto', 'sm' or 'engine'"),
    ({"kind": numpy.array(["kv", "mla"])}, TypeError, "kind: ndarray, expected 'kv' or 'mla'"),
    ({"pool": 1 << 20}, TypeError, "pool: int, expected a PinnedPool or None"),
)


def into(blocks: Any, layer: int | None = 1, dtype: Any = torch.bfloat16, **how: Any) -> Any:
    def call(engine: OffloadEngine) -> object:
        tensor = torch.zeros(how.get("shape", (2, 2, 16, 2, 8)), dtype=dtype, device=engine.device)
        return engine.load_blocks_into(tensor, blocks, layer=layer)

    return call


def loads(slots: Any, blocks: Any, **how: Any) -> Callable[[OffloadEngine], object]:
    return lambda engine: engine.load(slots, blocks, **how)


NUMBERS, INTO = "an int, a sequence of ints or a tensor", "load_blocks_into"
WRONG: list[tuple[Callable[[OffloadEngine], object], type[Exception], str]] = [
    (loads(4, 0), IndexError, "load: slots: 4 at position 0, expected 0 to 3"),
    (loads([0, 1], [1, 11]), IndexError, "load: blocks: 11 at position 1, expected 0 to 10"),
    (loads(torch.tensor([0, 4]), torch.tensor([1, 9])), IndexError, "load: slots: 4 at position 1"),
    (loads([0], [2**70]), IndexError, f"load: blocks: {2**70}, expected 0 to 10"),
    (loads([0, 1, 0], [1, 2, 3]), ValueError, "load: slots: 0 twice, expected each number once"),
    (lambda e: e.store([0, 1], [5, 5]), ValueError, "store: blocks: 5 twice, exp"),
    (loads([0], [1, 2]), ValueError, "load: blocks: 2 numbers, expected 1, as many as slots"),
    (loads(None, 0), TypeError, f"load: slots: NoneType, expected {NUMBERS}"),
    (loads(0, torch.tensor([0], device="meta")), TypeError,
     "load: blocks: a tensor without readable memory, expected an int"),
    (loads([0], [1.0]), TypeError, f"load: blocks: float, expected {NUMBERS}"),
    (loads([False], [0]), TypeError, f"load: slots: bool, expected {NUMBERS}"),
    (loads([0], "1"), TypeError, f"load: blocks: str, expected {NUMBERS}"),
    (loads(torch.ones(2), [0, 1]), TypeError, f"load: slots: float, expected {NUMBERS}"),
    (loads(0, 0, layer=3), IndexError, "load: layer: 3, expected 0 to 2"),
    (loads(0, 0, layer=True), TypeError, "load: layer: bool, expected an int"),
    (loads(0, 0, num_tokens=17), ValueError, "load: num_tokens: 17, expected 1 to 16"),
    (lambda e: e.load_blocks_into([0], [0]), TypeError,  # type: ignore[arg-type]
     f"{INTO}: tensor: list, expected a Tensor"),
    (into([0], dtype=torch.float16), ValueError,
     f"{INTO}: tensor: torch.float16 [2, 2, 16, 2, 8] on "),
    (into([0], shape=(2, 2, 16, 2, 4)), ValueError,
     f"{INTO}: tensor: torch.bfloat16 [2, 2, 16, 2, 4] on "),
    (into([0], None), ValueError,
     f"{INTO}: tensor: torch.bfloat16 [2, 2, 16, 2, 8] on "),
    (into([5, 6, 7]), ValueError,
     f"{INTO}: blocks: 3 numbers, expected at most 2, the blocks of tensor"),
    (lambda e: e.load_blocks_into(
        torch.zeros(3, 2, 2, 16, 2, 8, dtype=e.dtype, device=e.device).transpose(0, 1), [0]),
     ValueError, f"{INTO}: tensor: strides "),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "text"), WRONG, ids=[text for _, _, text in WRONG])
def test_wrong_calls(
    device: torch.device, call: Callable[[OffloadEngine], object], error: Any, text: str
) -> None:
    with engine_of(device) as engine:
        engine.cpu_cache.fill_(1)
        engine.gpu_cache.fill_(2)
        with pytest.raises(error, match=f"^OffloadEngine.{re.escape(text)}"):
            call(engine)
        sync(device)
        assert engine.cpu_cache.eq(1).all() and engine.gpu_cache.eq(2).all()


@pytest.mark.cuda
def test_numbers_on_both_sides() -> None:
    with engine_of(torch.device("cuda")) as engine:
        numbers = torch.tensor([0], device="cuda")
        for slots, blocks, name in ((numbers, [0], "blocks"), (0, numbers, "slots")):
            with pytest.raises(TypeError, match=f"load: {name}: .* on the host, expected both or"):
                engine.load(slots, blocks)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["pool", "engine"])
def test_closing_leaves_a_capture_of_another_thread_alone(kind: str) -> None:
    closed: Any = PinnedPool(1 << 20) if kind == "pool" else engine_of(torch.device("cuda"))
    x = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        ThreadPoolExecutor(1) as threads,
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        x.add_(1)
        threads.submit(closed.close).result(60)
        x.add_(1)
    graph.replay()
    assert x.eq(2).all()


@pytest.mark.cuda
@pytest.mark.parametrize("layout", ["layer_first", "block_first"])
def test_nothing_waits(layout: str) -> None:
    device = torch.device("cuda")
    with engine_of(device, layout=layout) as engine:
        on_gpu = torch.tensor([3, 1], device=device)
        stream = torch.cuda.Stream()

        def moves() -> None:
            for where in (None, stream):
                with torch.cuda.stream(where):
                    engine.load(0, 1, layer=1)
                    engine.store(0, 1, num_tokens=5)
                    engine.load([2, 3], [5, 1])
                    engine.load(on_gpu, on_gpu)
                    engine.store(on_gpu, on_gpu, layer=2)

        moves()  # compiles
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        asleep = torch.cuda.current_stream().record_event()
        with no_synchronisation():
            moves()
            assert not asleep.query()
        torch.cuda.synchronize()
        jitkern.check(device)


@pytest.mark.cuda
@pytest.mark.multigpu
def test_another_gpu() -> None:
    with engine_of(torch.device("cuda:0")) as engine:
        engine.cpu_cache.fill_(3)
        with pytest.raises(ValueError, match="cuda:1"):
            engine.load(torch.tensor([0], device="cuda:0"), torch.tensor([0], device="cuda:1"))
        with torch.cuda.device(1):  # the engine's own GPU is the one that counts
            engine.load(0, 0)
        torch.cuda.synchronize(0)
        assert engine.gpu_k[:, 0].eq(3).all()
