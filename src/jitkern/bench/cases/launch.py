"""The launcher: arguments of a user's kernel to bytes; on a GPU the launch itself, and a graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

import jitkern
from jitkern.bench.case import Case, Context, Impl, Run
from jitkern.bench.cases.common import call_case, copy_module
from jitkern.host import module as host

GRAPH_CALLS = 20


def cases(ctx: Context) -> Iterator[Case]:
    """Yield what the guard measures."""
    # A launcher that is not told of a GPU: it checks sizes, packs, and gives up.
    launch = host.launcher(("none",), lambda _: b"")
    for arguments in ((1, 2.0, 64), (1, 2, 3, 4, 5, 6, 7, 8, 9, 0.5, True)):
        name = f"arguments to bytes, {len(arguments)}"
        call = partial(launch, 0, 1, 256, 0, False, False, None, -1, 0, *arguments)
        yield call_case("launch", name, call, arguments)
    if ctx.device == "cuda":
        yield _users_kernel()
        yield _graph_replay()


def _users_kernel() -> Case:
    module = copy_module()
    src = torch.ones(4096, dtype=torch.uint8, device="cuda")
    dst = torch.empty_like(src)

    def launch() -> None:
        module.launch("copy", dst, src, 256, grid=1)

    return call_case("launch", "launch of a user's kernel", launch, (dst, src))


def _graph_replay() -> Case:
    k_cache, v_cache = torch.zeros(2, 64, 656, dtype=torch.uint8, device="cuda")
    k, v = torch.ones(2, 1, 656, dtype=torch.uint8, device="cuda")
    one = torch.zeros(1, dtype=torch.int32, device="cuda")

    def ours(_: object) -> None:
        jitkern.store_cache(k_cache, v_cache, one, k, v)

    def copy(_: object) -> None:
        k_cache[:1].copy_(k)

    def replay_of(run: Run) -> Run:
        run(None)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(GRAPH_CALLS):
                run(None)
        return lambda _: graph.replay()

    return Case(
        op="launch",
        name=f"replay of a graph of {GRAPH_CALLS} store_cache",
        impls=[
            Impl("jitkern", "ours", lambda: replay_of(ours), check=False),
            Impl("graph of copies", "peer", lambda: replay_of(copy), check=False),
        ],
        clock="host",
    )
