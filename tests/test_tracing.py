"""The ops in PyTorch: registered as it asks, under all that traces or wraps tensors."""

from __future__ import annotations

import io
import re
import subprocess
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
import torch._inductor.config
from needs import needs_cxx
from ref import same_bits
from stems import own_tests
from torch import Tensor
from torch._inductor.utils import run_and_get_code
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import jitkern
import jitkern.torch_ops
from jitkern.host import library as host_module
from jitkern.host.library import torch_state
from jitkern.ops._ops import OPS as TABLE

OPS = torch.ops.jitkern
SLOTS = 40
torch._inductor.config.cpp_cache_precompile_headers = False  # twenty seconds, on a new machine


@pytest.fixture(autouse=True)
def no_compiled_code() -> None:
    torch.compiler.reset()


def slots(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Distinct slots, in no order, the second one skipped."""
    chosen = torch.randperm(SLOTS, device=device)[:count].to(dtype)
    if count > 1:
        chosen[1] = -1
    return chosen


def test_opcheck(device: torch.device) -> None:
    """Every op that is one for PyTorch, with the calls that its own tests name."""
    on: Any = {"device": device}
    for op in TABLE:
        module = import_module(f"jitkern.ops.{op.stem}")
        assert op.has_kernels == hasattr(module, "OVERLOADS") == hasattr(OPS, op.function)
        if not op.has_kernels:
            continue
        where = slots(6, torch.int32, device)
        calls = own_tests(op).opchecks(lambda n: torch.randn(n, 3, 5, **on), SLOTS, where)
        for overload, args, kwargs in calls:
            opcheck(getattr(getattr(OPS, op.function), overload), args, kwargs)


class Step(torch.nn.Module):
    """Every op that is one for PyTorch, once; what it returns depends on what each has written."""

    def forward(
        self, k_cache: Tensor, v_cache: Tensor, where: Tensor, k: Tensor, host: Tensor
    ) -> Tensor:
        old_row = (k_cache[7] + 1).view(2, 4)
        jitkern.store_cache(k_cache, v_cache, where, k, k + 1)
        pairs = torch.stack([where, where.flip(0)], dim=1)
        jitkern.h2d_gather(host, v_cache, pairs)
        jitkern.d2h_scatter(k_cache, host, pairs)
        jitkern.copy_blocks(k_cache[None], v_cache[None], pairs)
        jitkern.unpack(k, v_cache, torch.stack([where, where, where % 5], dim=1))
        rows, scales = k.new_zeros(SLOTS, 2, 4, dtype=torch.int8), k_cache[:, :2] * 0
        in_format: Any = {"format": "int8_per_token_head", "scales": scales}
        jitkern.store_rows(rows, where, k.view(4, 2, 4), **in_format)
        gathered = torch.empty_like(k)
        jitkern.gather_rows(rows, where, gathered.view(4, 2, 4), **in_format)
        output = torch.empty_like(k)
        jitkern.indexing(v_cache, where, output=output)
        output = output + jitkern.indexing(k_cache, where, vocab_range=(2, SLOTS - 2))
        values, logs = output.view(4, 2, 4), k.view(4, 2, 4)[..., 0]
        merged, _ = jitkern.merge_states([values, values + 1], [logs, logs * 2])
        jitkern.merge_state(values, logs, merged, logs, output=merged)
        return merged + old_row + gathered.view(4, 2, 4)


OPS_OF_STEP = ["store_cache", "h2d_gather", "d2h_scatter", "copy_blocks", "unpack"]
OPS_OF_STEP += ["store_rows", "gather_rows"]
OPS_OF_STEP += ["indexing", "indexing", "merge_states", "merge_states"]


def inputs(device: torch.device) -> tuple[Tensor, ...]:
    # Apart: inductor of torch 2.11 counts the offset of an input twice in `v_cache[None]`, which an
    # op writes (pytorch#139628).
    k_cache, v_cache = (torch.randn(SLOTS, 8, device=device) for _ in "kv")
    where = torch.tensor([7, 0, 3, 11], device=device)
    host = torch.randn(SLOTS, 8, pin_memory=device.type == "cuda")
    return k_cache, v_cache, where, torch.randn(4, 8, device=device), host


def copies(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.clone().pin_memory() if t.is_pinned() else t.clone() for t in tensors)


def assert_does_the_same(step: Callable[..., Tensor], device: torch.device) -> None:
    """Run `step` and `Step` on inputs that `step` has not been traced with."""
    ours = inputs(device)
    theirs = copies(ours)
    result, wanted = step(*ours), Step()(*theirs)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert same_bits(result, wanted)
    assert all(map(same_bits, ours, theirs))


def ops_in(graph: torch.fx.Graph) -> list[str]:
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name.split(".")[1] for name in targets if name.startswith("jitkern.")]


@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_make_fx(device: torch.device, mode: str) -> None:
    traced = make_fx(Step(), tracing_mode=mode)(*inputs(device))
    assert ops_in(traced.graph) == OPS_OF_STEP
    assert_does_the_same(traced, device)


def test_export_and_load(device: torch.device) -> None:
    program = torch.export.export(Step(), inputs(device), strict=False)
    assert ops_in(program.graph) == OPS_OF_STEP
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    assert_does_the_same(torch.export.load(file).module(), device)


# A compile by inductor takes seconds, ten on a new machine.
_INDUCTOR = pytest.param("inductor", marks=[needs_cxx, pytest.mark.slow])


# Not aot_eager, whose graph copies the pinned memory of d2h_scatter into what is not pinned.
@pytest.mark.parametrize("backend", ["eager", _INDUCTOR])
def test_compile(device: torch.device, backend: str) -> None:
    assert_does_the_same(torch.compile(Step(), fullgraph=True, backend=backend), device)


@pytest.mark.parametrize("backend", ["aot_eager", _INDUCTOR])
def test_dynamic_shapes_compile_once(backend: str, device: torch.device) -> None:
    """Of ops that write to what a later one reads; each way to call a merge."""

    def step(
        k_cache: Tensor, v_cache: Tensor, where: Tensor, k: Tensor, v: Tensor,
        outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        old_row = k_cache[where[:1]] + 1
        jitkern.store_cache(k_cache, v_cache, where, k, v)
        found = jitkern.indexing(k_cache, where, vocab_range=(0, where.shape[0])) + old_row
        first = jitkern.merge_states(outs, lses)
        jitkern.merge_states([first[0], out], [first[1], lse], output=out, lse=lse, base="2")
        how = {"output": out, "lse": lse, "prefill_tokens_with_context": 3}
        jitkern.merge_state(outs[0], lses[0], out, lse, **how)
        small, scale = torch.empty_like(out, dtype=torch.float8_e4m3fn), lse.new_full((1,), 0.5)
        jitkern.merge_states([out, outs[1]], [lse, lses[1]], output=small, lse=False, scale=scale)
        alone, none = jitkern.merge_state(out, lse.clone(), small.float(), lse, lse=False)
        assert none is None
        return found, alone + first[0]

    run = torch.compile(step, fullgraph=True, backend=backend, dynamic=True)
    for count in (5, 9, 17):
        shapes = [(SLOTS, 8)] * 2 + [(count, 8)] * 2
        shapes += [(3, count, 2, 4), (3, count, 2), (count, 2, 4), (count, 2)]
        ours = [torch.randn(shape, device=device) for shape in shapes]
        ours.insert(2, slots(count, torch.int64, device))
        theirs = copies(tuple(ours))
        with torch.compiler.set_stance("default" if count == 5 else "fail_on_recompile"):
            result = run(*ours)
        torch.testing.assert_close(result, step(*theirs), rtol=1e-6, atol=1e-6)
        assert all(map(same_bits, ours[:5], theirs[:5]))
        torch.testing.assert_close(ours[5:], list(theirs[5:]), rtol=1e-6, atol=1e-6)


# How engines lay K and V out; where they share an allocation, inductor by itself would copy it.
LAYOUTS: dict[str, Callable[..., Any]] = {
    "separate": lambda **on: (torch.zeros(SLOTS, 8, **on), torch.zeros(SLOTS, 8, **on)),
    "halves": lambda **on: torch.zeros(2, SLOTS, 8, **on).unbind(0),
    "interleaved": lambda **on: torch.zeros(SLOTS, 2, 8, **on).unbind(1),
}
_EVERY_TIME = ("halves", torch.inference_mode)
_CASES = [
    pytest.param(layout, mode, marks=[] if (layout, mode) == _EVERY_TIME else [pytest.mark.slow])
    for layout in LAYOUTS
    for mode in (torch.enable_grad, torch.inference_mode)
]


@needs_cxx
@pytest.mark.parametrize(("layout", "grad_mode"), _CASES)
def test_inductor_copies_no_cache(
    device: torch.device,
    layout: str,
    grad_mode: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def step(k_cache: Tensor, v_cache: Tensor, where: Tensor, k: Tensor, v: Tensor) -> Tensor:
        jitkern.store_cache(k_cache, v_cache, where, k, v)
        return jitkern.indexing(v_cache, where)

    # Code that is kept on disk is not told apart by what shares an allocation.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compiled = torch.compile(step, fullgraph=True)
    with grad_mode():
        caches = LAYOUTS[layout](device=device)
        k, v = torch.randn(2, 4, 8, device=device)
        where = torch.tensor([7, 0, 3, 11], device=device)
        result, (code,) = run_and_get_code(compiled, *caches, where, k, v)
        assert same_bits(result, v)
    for cache, rows in zip(caches, (k, v), strict=True):
        wanted = torch.zeros(SLOTS, 8, device=device)
        wanted[where] = rows
        assert same_bits(cache.contiguous(), wanted)
    stores = re.findall(r"torch\.ops\.jitkern\.(store_cache\.\w+)", code)
    apart = {"store_cache.default", "store_cache.v"}
    assert set(stores) == ({"store_cache.default"} if layout == "separate" else apart)
    assert not re.findall(r"= empty_strided_\w+\(", code)


def rows_of_one_allocation(kv: Tensor, where: Tensor, rows: Tensor, output: Tensor) -> None:
    jitkern.store_rows((kv[:, 0], kv[:, 1]), where, (rows, rows + 1))
    packed = torch.zeros(SLOTS, 132 + 64, dtype=torch.uint8, device=kv.device)
    values = rows.repeat(1, 128 // rows.shape[1])
    jitkern.store_rows(packed, where, (values, values[:, :16]), format="fp8_ds_mla")
    jitkern.gather_rows(packed, where, (output[:, :128], output[:, 128:]), format="fp8_ds_mla")


@pytest.mark.parametrize("backend", ["aot_eager", _INDUCTOR])
def test_rows_of_one_allocation(device: torch.device, backend: str) -> None:
    """K and V in one tensor; values and the rest of a row in one workspace."""
    kv, where = torch.zeros(SLOTS, 2, 8, device=device), torch.tensor([3, 1], device=device)
    rows, output = torch.randn(2, 8, device=device), torch.zeros(2, 144, device=device)
    expected = kv.clone(), where, rows, output.clone()
    rows_of_one_allocation(*expected)
    torch.compile(rows_of_one_allocation, backend=backend, fullgraph=True)(kv, where, rows, output)
    assert same_bits(kv, expected[0]) and same_bits(output, expected[3])


MISTAKES: dict[str, dict[str, Any]] = {
    "index": {"where": torch.tensor([0, SLOTS])},
    "dtype": {"where": torch.tensor([0.0, 1.0])},
    "rows": {"k": torch.zeros(3, 8)},
    "vocab_range": {"vocab_range": (0, SLOTS + 1)},
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_an_error_is_that_of_eager(mistake: str) -> None:
    def step(where: Tensor, k: Tensor, vocab_range: tuple[int, int] | None) -> Tensor:
        jitkern.store_cache(cache, cache.clone(), where, k, torch.zeros(2, 8))
        return jitkern.indexing(cache, where, vocab_range=vocab_range)

    cache = torch.zeros(SLOTS, 8)
    good = {"where": torch.tensor([0, 1]), "k": torch.zeros(2, 8), "vocab_range": None}
    arguments = {**good, **MISTAKES[mistake]}
    with pytest.raises((TypeError, ValueError, IndexError)) as eager:
        step(**arguments)
    with pytest.raises(type(eager.value), match=re.escape(str(eager.value))):
        torch.compile(step, fullgraph=True, backend="aot_eager")(**arguments)


def test_a_plain_call_registers_nothing(
    forked_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    forked_python("""
import sys, torch, jitkern
jitkern.store_cache(*torch.zeros(2, 4, 8), torch.tensor([1]), *torch.ones(2, 1, 8))
assert "jitkern.torch_ops" not in sys.modules and "torch._dynamo" not in sys.modules
import jitkern.torch_ops
assert "torch._dynamo" not in sys.modules  # a second of import
""")


@pytest.mark.slow
def test_the_first_call_may_be_a_compiled_one_of_a_module(
    fresh_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """The op is imported before PyTorch is, so that nothing is bound yet."""
    fresh_python("""
from jitkern.ops.index import indexing
import torch
weights = torch.randn(9, 4)
lookup = torch.compile(lambda i: indexing(weights, i), fullgraph=True, backend="eager")
assert torch.equal(lookup(torch.tensor([2, 1])), weights[[2, 1]])
""")


@pytest.mark.parametrize("tool", ["compile", "fake"])
def test_nothing_has_to_be_imported(
    forked_python: Callable[..., subprocess.CompletedProcess[str]], tool: str
) -> None:
    code = """
import sys, torch, jitkern
from torch._subclasses import FakeTensorMode

class Look(torch.nn.Module):
    def forward(self, w, i):
        return jitkern.indexing(w, i) * 1

def fake():
    with FakeTensorMode() as mode:
        assert look(mode.from_tensor(w), mode.from_tensor(i)).shape == (2, 4)
    return w[i]

look, w, i = Look(), torch.randn(9, 4), torch.tensor([2, 1])
tools = {
    "compile": lambda: torch.compile(look, fullgraph=True, backend="eager")(w, i),
    "fake": fake,
}
assert torch.equal(tools[sys.argv[1]](), w[i])
"""
    forked_python(code, tool)


class Log(TorchDispatchMode):
    """Notes the ops of jitkern, as loggers and counters of operations are made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("jitkern."):
            self.seen.append(str(func).split(".")[1])
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_ops(device: torch.device) -> None:
    tensors = inputs(device)
    with Log() as outer, Log() as inner:
        Step()(*tensors)
    assert outer.seen == inner.seen == OPS_OF_STEP


def test_a_pytorch_that_is_unknown_sees_every_call(device: torch.device) -> None:
    """It may have renamed what says whether something traces; then nothing is taken for plain."""
    set_torch_state = host_module.module()["set_torch_state"]
    _, table, where, *_ = inputs(device)
    jitkern.indexing(table, where)
    assert all(torch_state()[:2])  # this one is known
    for state in (torch_state(), (0, 0, 0)):
        set_torch_state(*state)
        try:
            found = jitkern.indexing(table, where)
            with Log() as log:
                jitkern.indexing(table, where)
        finally:
            set_torch_state(*torch_state())
        assert same_bits(found, table[where])
        assert log.seen == ["indexing"]


def test_fake_tensors(device: torch.device) -> None:
    """In their mode and, as a compiler keeps them, outside of it."""
    mode = FakeTensorMode()
    tensors = [mode.from_tensor(tensor) for tensor in inputs(device)]
    with mode:
        assert Step()(*tensors).shape == (4, 2, 4)
    assert Step()(*tensors).shape == (4, 2, 4)


def test_tensors_without_memory_beside_others() -> None:
    """PyTorch takes a call with one on the meta device for one of shapes: nothing would run."""
    weights = torch.ones(5, 4)
    where = torch.tensor([1, 2])
    with pytest.raises(ValueError, match="indexing: indices: device meta, expected cpu or cuda"):
        jitkern.indexing(weights, where.to("meta"))
    with pytest.raises(ValueError, match="store_cache: k: device meta, expected cpu or cuda"):
        torch.ops.jitkern.store_cache(torch.ones(5, 4), None, where, torch.ones(2, 4).to("meta"))
    shapes = OPS.indexing(weights.to("meta"), where.to("meta"))
    assert shapes.shape == (2, 4) and shapes.device.type == "meta"


def test_a_subclass_takes_itself_apart(device: torch.device) -> None:
    """One that holds two tensors, and hands every operator on to both."""
    table = torch.randn(SLOTS, 8, device=device)
    where = torch.tensor([3, 1], device=device)
    both = TwoTensor(table, table * 2)
    found = jitkern.indexing(both, where)
    assert isinstance(found, TwoTensor)
    assert same_bits(found.a, table[where]) and same_bits(found.b, table[where] * 2)
    rows = torch.ones(2, 8, device=device)
    jitkern.store_cache(both, None, where, rows)
    assert same_bits(both.a[where], rows) and same_bits(both.b[where], rows)


def test_a_gradient_of_what_writes_is_an_error_in_a_graph_too(device: torch.device) -> None:
    k_cache, v_cache, where, k, _ = inputs(device)
    wants = k.clone().requires_grad_()

    def store(new: Tensor) -> None:
        jitkern.store_cache(k_cache, v_cache, where, new, k)

    text = re.escape("store_cache: k: requires a gradient, expected none")
    with pytest.raises(RuntimeError, match=text):
        torch.compile(store, backend="eager")(wants)
    with pytest.raises(RuntimeError):
        torch.compile(store, backend="eager", fullgraph=True)(wants)


def test_tracing_can_be_refused_before_any_op_was_called() -> None:
    """TPEmbedding's first call in a process raised NameError."""
    done = forks.run("from jitkern.ops import dispatch\ndispatch.refuse_tracing('copy')\n")
    assert done.returncode == 0, done.stderr
