"""jitkern in mini-sglang: call ``enable`` before its engine is made.

Tried with commit 20fcd7f. It imports kernels where it calls them, so a new one is used at once.
"""

from __future__ import annotations

from functools import partial, partialmethod
from importlib import import_module
from inspect import signature
from typing import Any, Literal

from torch import Tensor

import jitkern
from jitkern import comm as ranks
from jitkern.args import choice_arg
from jitkern.errors import UnsupportedError
from jitkern.integrations import log_once, refuse

# The engine's functions by their parameters: all of its commits are version 0.1.0.
TRIED = (
    "store_cache(k_cache, v_cache, indices, k, v)",
    "indexing(weights, indices, output, vocab_range)",
    "fast_compare_key(x, y)",
    "init_pynccl(tp_rank, tp_size, tp_cpu_group, max_size_bytes)",
)

_open: list[Any] = []  # the ranks' group and its communicators, the last one in use


def enable(comm: Literal["nccl", "peer"] = "nccl") -> None:
    """Replace mini-sglang's kernels and communicator in this process. Call it once.

    Ranks sum by ``init_pynccl``, or with ``comm="peer"`` by a ``PeerCommunicator`` on top of it;
    then they split embeddings too, and each keeps a second copy of its rows, which all ranks read.

    Raises UnsupportedError, and replaces nothing, if the engine lacks a name or its functions have
    other parameters; RuntimeError on a second call.
    """
    choice_arg("enable", "comm", comm, ("nccl", "peer"))
    for tried in TRIED:
        name = tried.partition("(")[0]
        function = _of_engine("kernel", name)
        if function is getattr(jitkern, name, None):
            raise RuntimeError("enable: called a second time in this process, expected once")
        parameters = ", ".join(signature(function).parameters)
        if f"{name}({parameters})" != tried:
            refuse("minisgl", f"minisgl {name}({parameters}), expected {tried}")
    destroy = _of_engine("engine.graph", "GraphRunner", "destroy_cuda_graphs")
    if comm == "peer":
        _of_engine("layers", "VocabParallelEmbedding", "forward")

    kernel = _of_engine("kernel")
    for function in (jitkern.store_cache, jitkern.indexing, jitkern.fast_compare_key):
        setattr(kernel, function.__name__, function)
    kernel.init_pynccl = partial(_init_pynccl, comm == "peer")
    graph_runner = _of_engine("engine.graph", "GraphRunner")
    graph_runner.destroy_cuda_graphs = partialmethod(_end, destroy)
    log_once("minisgl", f"jitkern replaces {', '.join(TRIED)}; ranks use {comm}")


def _of_engine(module: str, *names: str) -> Any:
    """Return a module of the engine, or what is there by name. Raises UnsupportedError."""
    import minisgl  # noqa: F401 - without the engine, the error is ModuleNotFoundError

    path = f"minisgl.{module}"
    try:
        value: Any = import_module(path)
        for name in names:
            path += f".{name}"
            value = getattr(value, name)
    except (ModuleNotFoundError, AttributeError) as error:
        text = f"jitkern.integrations.minisgl: {path}: {error}, expected mini-sglang 20fcd7f"
        raise UnsupportedError(text) from error
    return value


def _init_pynccl(is_peer: bool, *, tp_cpu_group: Any, **options: Any) -> Any:
    _open[:] = [tp_cpu_group, ranks.init_pynccl(tp_cpu_group=tp_cpu_group, **options)]
    if is_peer:
        _of_engine("layers", "VocabParallelEmbedding").forward = _embed
        _open.append(ranks.PeerCommunicator(_open[-1], tp_cpu_group))
    return _open[-1]


def _end(self: Any, destroy: Any) -> None:
    """Close communicators, which the engine does not: after their graphs, before their group."""
    destroy(self)
    while len(_open) > 1:
        _open.pop().close()


def _embed(self: Any, x: Tensor) -> Tensor:
    """Look up rows in a table that all ranks read, in the place of a sum over ranks."""
    if not hasattr(self, "_split"):  # the first call comes once the weights are loaded
        from jitkern.nn import TPEmbedding

        table = self.weight.new_empty(self.tp_size * len(self.weight), self.weight.shape[1])
        _open[-1].all_gather(table, self.weight)
        table = table[: self.num_embeddings]
        how: dict[str, Any] = {"comm": _open[-1], "group": _open[0], "algorithm": "peer"}
        self._split = TPEmbedding.from_pretrained(table, **how)
    return self._split(x)  # type: ignore[no-any-return]
