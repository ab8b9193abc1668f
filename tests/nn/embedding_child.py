"""One rank of the tests of embeddings in peer memory: does what its standard input says.

{"do": "evaluate", "code": "module.method"}   ->   {"value": "peer"}   or   {"error": "..."}
"""

from __future__ import annotations

import copy  # noqa: F401
import gc
import io  # noqa: F401
import json
import pickle  # noqa: F401
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import shared_gpu
import torch
import torch.distributed as dist
from ref import ref_indexing, same_bits
from torch import Tensor

import jitkern  # noqa: F401
from jitkern.comm import TorchCommunicator, peer_memory
from jitkern.nn import TPEmbedding, tp_embedding

torch.set_num_threads(1)  # ranks share the cores of a small machine

device = torch.device("cpu")
comm: Recording
module: Any = None
machine = peer_memory._machine


class Recording:
    """The ranks' communicator, which counts its sums."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.num_sums = 0

    def all_reduce(self, x: Tensor, op: str = "sum") -> None:
        self.num_sums += 1
        self.inner.all_reduce(x, op)


def table_of(rows: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return a table of any bits, NaN payloads and -0.0 among them, the same in all ranks."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, hidden * dtype.itemsize)
    table = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)
    if dtype != torch.float8_e4m3fn:
        table[0] = -0.0
        table[1] = torch.nan
    return table


def make(vocab: int, hidden: int, dtype: str = "float32", **options: Any) -> TPEmbedding:
    """Make the module of all ranks."""
    global module
    comm.num_sums = 0
    given = {"group": dist.group.WORLD, "timeout_s": 30, "device": device, **options}
    module = TPEmbedding(vocab, hidden, comm=comm, dtype=getattr(torch, dtype), **given)
    return module


def do_be_on(kind: str) -> None:
    global comm, device
    if kind == "cuda":
        from jitkern.comm import init_pynccl

        rank, size = dist.get_rank(), dist.get_world_size()
        device = shared_gpu.take(rank)
        group = dist.group.WORLD
        comm = Recording(init_pynccl(tp_rank=rank, tp_size=size, tp_cpu_group=group))
    else:
        comm = Recording(TorchCommunicator(timeout_s=30))


def do_make(vocab: int, hidden: int, dtype: str = "float32", **options: Any) -> list[Any]:
    """Answer what it is, and what it holds."""
    made = make(vocab, hidden, dtype, **options)
    held = made.weight[sum(one[1] for one in (made.vocab_range, made.added_range)) :]
    # PyTorch knows not all dtypes on a GPU.
    assert not held.detach().view(torch.uint8).any(), "not zeros behind its rows"
    return [made.method, len(made.weight), [*made.vocab_range], [*made.added_range]]


def do_look_up(**options: Any) -> None:
    """Every row, of ids of both types and in any shape, with no sum."""
    whole = table_of(*module.full_shape, module.weight.dtype)
    theirs = torch.nn.Embedding.from_pretrained(whole)
    module.load_full(whole)
    rows = len(whole)
    for dtype in (torch.int32, torch.int64):
        # Each rank has ids of its own, and as many calls as it likes.
        ids = torch.randint(-2, rows, (3, 5 + comm.rank), dtype=dtype)
        for one in (torch.arange(rows, dtype=dtype).flip(0), ids, ids.t(), ids[:0], ids[0, 0]):
            for grad in (torch.no_grad(), torch.inference_mode()):
                with grad:
                    found = module(one.to(device)).cpu()
                assert same_bits(found, ref_indexing(whole, one))
                if one.numel() and one.min() >= 0:
                    assert same_bits(found, theirs(one).detach())
    module.weight.requires_grad_(False)
    assert same_bits(module(torch.arange(rows, device=device)).cpu(), whole)
    module.weight.requires_grad_(True)
    assert comm.num_sums == 0


def do_sums() -> None:
    """Every row and a single one, which may be of any number of bytes, by sums."""
    whole = table_of(*module.full_shape, module.weight.dtype)
    module.load_full(whole)
    ids = torch.arange(len(whole)).flip(0)
    with torch.no_grad():
        for one in (ids, ids[:1]):
            assert same_bits(module(one.to(device)).cpu(), whole[one])
    assert comm.num_sums == 2


def do_gradient() -> None:
    """That of nn.Embedding, over the communicator; and rows without one, which need none."""
    torch.manual_seed(0)
    theirs = torch.nn.Embedding(*module.full_shape, padding_idx=module.padding_idx)
    module.load_state_dict(theirs.state_dict())
    ids = torch.randperm(len(theirs.weight), generator=torch.Generator().manual_seed(1))[:9]
    factor = torch.arange(float(ids.numel())).unsqueeze(1)
    theirs_rows, rows = theirs(ids), module(ids.to(device))
    assert comm.num_sums == 1 and rows.requires_grad and same_bits(rows.cpu(), theirs_rows)
    (theirs_rows * factor).sum().backward()
    (rows * factor.to(device)).sum().backward()
    expected, row = torch.zeros(module.weight.shape), 0
    for start, length in (module.vocab_range, module.added_range):
        expected[row : row + length] = theirs.weight.grad[start : start + length]
        row += length
    assert torch.equal(module.weight.grad.cpu(), expected)
    for optimizer in (torch.optim.SGD([one.weight], lr=0.5) for one in (module, theirs)):
        module.fence()
        optimizer.step()
        module.fence()
    with torch.no_grad():
        assert same_bits(module(ids.to(device)).cpu(), theirs(ids))
    assert comm.num_sums == 1


def do_state_dicts() -> None:
    """Of the whole table and of a part, assigned or not: the memory is the same one."""
    at, whole = module.weight.data_ptr(), table_of(*module.full_shape, module.weight.dtype, 1)
    ids = torch.arange(len(whole), device=device)
    model = torch.nn.ModuleDict({"a": module})
    for assign in (False, True):
        for source in ({"a.weight": whole}, {"a.weight": whole.clone()}):
            keys = model.load_state_dict(source, assign=assign)
            assert not keys.missing_keys and not keys.unexpected_keys
        assert set(model.state_dict()) == {"a.weight"}
        mine = {key: value.clone() for key, value in model.state_dict().items()}
        module.load_full(torch.zeros(module.full_shape))
        model.load_state_dict(mine, assign=assign)
        model.load_state_dict(model.state_dict(), assign=assign)  # of itself
        with torch.no_grad():
            assert same_bits(module(ids).cpu(), whole)
    torch.__future__.set_swap_module_params_on_conversion(True)
    model.load_state_dict(mine)
    torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.load_state_dict({}, strict=False).missing_keys == ["a.weight"]
    more = {**mine, "a.more": whole}
    assert model.load_state_dict(more, strict=False).unexpected_keys == ["a.more"]
    assert module.weight.data_ptr() == at and module.weight.requires_grad
    with torch.no_grad():
        assert same_bits(module(ids).cpu(), whole)


def do_compiled(backend: str) -> None:
    whole = table_of(*module.full_shape, module.weight.dtype)
    module.load_full(whole)
    torch.compiler.reset()
    ids = torch.tensor([0, len(whole) - 2, 3], device=device)
    run = torch.compile(lambda ids: module(ids + 1), backend=backend, fullgraph=True)
    with torch.no_grad():
        assert same_bits(run(ids).cpu(), whole[(ids + 1).cpu()])
        module.load_full(whole.flip(0))  # what is compiled reads what is there
        assert same_bits(run(ids).cpu(), whole.flip(0)[(ids + 1).cpu()])
    module.weight.requires_grad_(False)
    assert same_bits(run(ids).cpu(), whole.flip(0)[(ids + 1).cpu()])
    module.weight.requires_grad_(True)
    assert comm.num_sums == 0


def rows() -> list[float]:
    """What all rows hold, each number once."""
    with torch.no_grad():
        found: Tensor = module(torch.arange(module.full_shape[0], device=device))
        return found.cpu().unique().tolist()


def load(value: float, by: str) -> None:
    """Have rows of one number."""
    if by == "load_full":
        module.load_full(torch.full(module.full_shape, value))
    elif by == "load_state_dict":
        module.load_state_dict({"weight": torch.full(module.full_shape, value)})
    elif by == "reset_parameters":
        with constant(value):
            module.reset_parameters()
    else:
        with torch.no_grad():
            module.fence()
            module.weight.fill_(value)
            module.fence()


@contextmanager
def constant(value: float) -> Iterator[None]:
    """Draw nothing but this."""
    real = Tensor.normal_
    Tensor.normal_ = lambda self: self.fill_(value)  # type: ignore[method-assign]
    yield
    Tensor.normal_ = real  # type: ignore[method-assign]


def do_load(value: float, by: str = "load_full") -> list[float]:
    """Load; answer what there is at once."""
    load(value, by)
    return rows()


def do_load_late(value: float, by: str, wait_s: float) -> list[float]:
    """Read for a while first; answer what was seen until then."""
    until, seen = time.monotonic() + wait_s, set(rows())
    while time.monotonic() < until:
        seen.update(rows())
    load(value, by)
    assert rows() == [value]
    return sorted(seen)


def do_load_slowly(value: float, wait_s: float) -> list[float]:
    """Be the last to write; answer what there is then."""
    real = tp_embedding._write

    def slowly(*args: Any) -> None:
        time.sleep(wait_s)
        real(*args)

    tp_embedding._write = slowly
    load(value, "load_full")
    tp_embedding._write = real
    return rows()


def do_fail_to_write() -> None:
    """Raise between the two meetings."""

    def fail(*_: Any) -> None:
        raise OSError("no rows")

    real, tp_embedding._write = tp_embedding._write, fail
    try:
        load(1.0, "load_full")
    finally:
        tp_embedding._write = real


def do_be_elsewhere(where: str = "") -> None:
    """Be on another host than the other ranks."""
    peer_memory._machine = (lambda: where) if where else machine


def do_join(path: str, rank: int, size: int) -> None:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=60),
    )


def do_reset() -> None:
    """As after the imports, for the next test."""
    global module, comm, device
    module = comm = None  # type: ignore[assignment]
    device = torch.device("cpu")
    do_be_elsewhere()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


def do_evaluate(code: str) -> Any:
    value = eval(code, globals())
    return value if isinstance(value, int | float | str | list | dict | None) else repr(value)


def main() -> None:
    for line in sys.stdin:
        config = json.loads(line)
        start = time.monotonic()
        answer: dict[str, Any] = {}
        try:
            answer["value"] = globals()[f"do_{config.pop('do')}"](**config)
        except BaseException as error:
            answer["error"] = f"{type(error).__name__}: {error}"
            answer["missing"] = getattr(error, "missing", None)
            if isinstance(error, AssertionError):
                traceback.print_exc()
        answer["seconds"] = time.monotonic() - start
        print(json.dumps(answer, default=repr), flush=True)


if __name__ == "__main__":
    main()
