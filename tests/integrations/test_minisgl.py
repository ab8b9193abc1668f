"""``integrations.minisgl`` in a stand-in for the engine, which has its plug-in points only."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from needs import needs_cxx
from torch import Tensor

import jitkern
from jitkern import integrations
from jitkern.errors import UnsupportedError
from jitkern.integrations import minisgl

sys.path.append(str(Path(__file__).parents[1] / "nn"))
from embedding_ranks import Meeting, ThreadComm, each


class Kernel(ModuleType):
    """The replaced functions of ``minisgl.kernel``, commit 20fcd7f, with their parameters."""

    def __init__(self) -> None:
        super().__init__("minisgl.kernel")
        self.store_cache: Any = lambda k_cache, v_cache, indices, k, v: None
        self.indexing: Any = lambda weights, indices, *, output=None, vocab_range=None: None
        self.fast_compare_key: Any = lambda x, y: None
        self.init_pynccl: Any = lambda *, tp_rank, tp_size, tp_cpu_group, max_size_bytes=0: None


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put a stand-in for the engine in place; ``log`` has its and its communicators' steps."""
    done: list[str] = []

    class GraphRunner:
        def destroy_cuda_graphs(self) -> None:
            done.append("graphs destroyed")

    class VocabParallelEmbedding:
        def forward(self, x: Tensor) -> str:
            return "own"

    class Comm:
        def __init__(self, name: str, *_: Any, **options: Any) -> None:
            self.name, self.options = name, options

        def close(self) -> None:
            done.append(f"{self.name} closed")

    kernel, graph, layers = Kernel(), ModuleType("graph"), ModuleType("layers")
    graph.GraphRunner, layers.VocabParallelEmbedding = GraphRunner, VocabParallelEmbedding  # type: ignore[attr-defined]
    root = ModuleType("minisgl")
    root.kernel = kernel  # type: ignore[attr-defined]
    modules = {"": root, ".kernel": kernel, ".engine": ModuleType("engine")}
    modules |= {".engine.graph": graph, ".layers": layers}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"minisgl{name}", module)
    made = SimpleNamespace(
        init_pynccl=lambda **options: Comm("nccl", **options),
        PeerCommunicator=lambda *of: Comm("peer", *of),
    )
    monkeypatch.setattr(minisgl, "ranks", made)
    monkeypatch.setattr(minisgl, "_open", [])
    monkeypatch.setattr(integrations, "_logged", set())
    return SimpleNamespace(
        kernel=kernel, runner=GraphRunner(), embedding=VocabParallelEmbedding, log=done
    )


def test_the_kernels_are_jitkerns_and_it_is_logged_once(
    engine: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "minisgl.jitkern"):
        minisgl.enable()
    assert engine.kernel.store_cache is jitkern.store_cache
    assert engine.kernel.indexing is jitkern.indexing
    assert engine.kernel.fast_compare_key is jitkern.fast_compare_key
    (record,) = caplog.records
    assert "replaces store_cache(k_cache" in record.getMessage()
    assert record.getMessage().endswith("; ranks use nccl")


def test_another_interface_is_refused(engine: SimpleNamespace, use: Callable[..., None]) -> None:
    own = engine.kernel.store_cache
    engine.kernel.fast_compare_key = lambda x, y, page_size: None
    expected = (
        r"jitkern.integrations.minisgl: minisgl fast_compare_key\(x, y, page_size\), expected "
        r"fast_compare_key\(x, y\); JITKERN_ANY_ENGINE=1 takes any version"
    )
    with pytest.raises(UnsupportedError, match=expected):
        minisgl.enable()
    assert engine.kernel.store_cache is own
    use(ANY_ENGINE=1)
    minisgl.enable()
    assert engine.kernel.store_cache is jitkern.store_cache


@pytest.mark.parametrize(
    ("module", "name"),
    [
        *(("kernel", tried.partition("(")[0]) for tried in minisgl.TRIED),
        ("engine.graph", "GraphRunner.destroy_cuda_graphs"),
        ("layers", "VocabParallelEmbedding.forward"),
    ],
)
def test_a_missing_name_is_refused_and_nothing_replaced(
    engine: SimpleNamespace, module: str, name: str
) -> None:
    *owner, last = name.split(".")
    delattr(getattr(sys.modules[f"minisgl.{module}"], *owner) if owner else engine.kernel, last)
    before = dict(vars(engine.kernel))
    with pytest.raises(UnsupportedError, match=rf"minisgl: minisgl\.{module}\.{name}: .*{last}"):
        minisgl.enable("peer")
    assert vars(engine.kernel) == before


def test_a_second_call_is_refused(engine: SimpleNamespace) -> None:
    minisgl.enable()
    with pytest.raises(RuntimeError, match="enable: called a second time in this process"):
        minisgl.enable("peer")
    engine.runner.destroy_cuda_graphs()
    assert engine.log == ["graphs destroyed"]


def test_another_communicator_is_refused(engine: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match="enable: comm: 'gloo', expected 'nccl' or 'peer'"):
        minisgl.enable("gloo")  # type: ignore[arg-type]


@pytest.mark.parametrize("comm", ["nccl", "peer"])
def test_the_engine_gets_a_communicator_that_ends_after_its_graphs(
    engine: SimpleNamespace, comm: Any
) -> None:
    minisgl.enable(comm)
    options = {"tp_rank": 0, "tp_size": 2, "tp_cpu_group": "group", "max_size_bytes": 64}
    made = engine.kernel.init_pynccl(**options)
    assert made.name == comm
    assert minisgl._open[1].options == options
    assert (engine.embedding.forward is minisgl._embed) == (comm == "peer")
    engine.runner.destroy_cuda_graphs()
    ended = ["peer closed"] * (comm == "peer") + ["nccl closed"]
    assert engine.log == ["graphs destroyed", *ended]


def test_one_gpu_has_no_communicator_to_end(engine: SimpleNamespace) -> None:
    minisgl.enable("peer")
    engine.runner.destroy_cuda_graphs()
    assert engine.log == ["graphs destroyed"]


class PerThread(threading.local):
    """``_open`` of ranks that are threads."""

    def __getitem__(self, at: int) -> Any:
        return self.values[at]


@needs_cxx
def test_ranks_look_up_the_rows_of_all(
    engine: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    minisgl.enable("peer")
    engine.kernel.init_pynccl(tp_rank=0, tp_size=2, tp_cpu_group=None)
    places = PerThread()
    monkeypatch.setattr(minisgl, "_open", places)
    meeting, num_rows, dim = Meeting(2), 20_001, 64
    whole = torch.randn(num_rows, dim)
    ids = torch.randint(0, num_rows, (100,), dtype=torch.int32)
    per_rank = -(-num_rows // 2)  # as the engine splits them: the last rank's end is never read

    class Comm(ThreadComm):
        def all_gather(self, output: Tensor, x: Tensor) -> None:
            self.meeting.inputs[self.rank] = x
            self.meeting.barrier.wait(60)
            torch.cat(self.meeting.inputs, out=output)
            self.meeting.barrier.wait(60)

    def look_up(rank: int) -> Tensor:
        places.values = [meeting.store, Comm(meeting, rank)]
        layer = engine.embedding()
        layer.tp_size, layer.num_embeddings = 2, num_rows
        layer.weight = torch.full((per_rank, dim), torch.nan)
        rows = whole[rank * per_rank : (rank + 1) * per_rank]
        layer.weight[: len(rows)] = rows
        with torch.inference_mode():
            first, second = layer.forward(ids), layer.forward(ids.flip(0))
        assert torch.equal(first, second.flip(0))
        assert places[1].sent == []  # no sum
        assert layer._split.num_embeddings == num_rows
        found: Tensor = first
        return found

    for found in each(range(2), look_up, meeting):
        assert torch.equal(found, whole[ids.long()])
