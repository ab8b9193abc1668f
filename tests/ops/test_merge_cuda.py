"""merge_states on a GPU: graphs, streams, host memory, far offsets, and the CPU beside it."""

from __future__ import annotations

import pytest
import torch
from merge_reference import BF16, F32, FP8, TYPES, assert_merged, assert_same, partials

import jitkern
from jitkern import merge_state, merge_states

pytestmark = pytest.mark.cuda
GPU, CPU = torch.device("cuda"), torch.device("cpu")
GIB = 1 << 30


@pytest.mark.parametrize("n", [2, 5, 17])
def test_replays_with_other_contents(n: int) -> None:
    """All that is read is read at the replay: partials and scale."""
    outs, lses = partials(GPU, n, 20, 4, 128, BF16)
    scale = torch.ones(1, device=GPU)
    out, lse = torch.zeros_like(outs[0], dtype=FP8), torch.zeros_like(lses[0])
    in_place, its_lse = outs[0].clone(), lses[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_states(outs, lses, output=out, lse=lse, scale=scale)
        merge_state(in_place, its_lse, outs[1], lses[1], output=in_place, lse=its_lse)
    for seed in range(1, 6):
        new_outs, new_lses = partials(GPU, n, 20, 4, 128, BF16, seed=seed)
        outs.copy_(new_outs), lses.copy_(new_lses)
        scale.fill_(0.01 * seed)
        in_place.copy_(outs[0]), its_lse.copy_(lses[0])
        graph.replay()
        torch.cuda.synchronize()
        assert_merged((out, lse), outs, lses, scale=scale)
        assert_merged((in_place, its_lse), outs[:2], lses[:2])
    jitkern.check()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", [9, 16, 17, 64])
def test_groups(n: int, dtype: torch.dtype) -> None:
    """More than 8 partials are those of 8 each, merged into fp32, and then merged."""
    outs, lses = partials(GPU, n, 37, 3, 128, dtype, seed=n)
    merged = [
        merge_states(outs[i : i + 8], lses[i : i + 8], output=torch.empty_like(outs[0], dtype=F32))
        for i in range(0, n, 8)
    ]
    groups, group_lses = zip(*merged, strict=True)
    wanted = merge_states(groups, group_lses, output=torch.empty_like(outs[0]))
    assert_same(merge_states(outs, lses), wanted)
    assert_merged(wanted, outs, lses)
    for out_at, lse_at in ((0, n - 1), (n - 1, 0), (7, 8), (8, 8)):  # in place
        new_outs, new_lses = outs.clone(), lses.clone()
        out, lse = new_outs[out_at], new_lses[lse_at]
        merge_states(list(new_outs), list(new_lses), output=out, lse=lse)
        assert_same((out, lse), wanted)
        out.copy_(outs[out_at]), lse.copy_(lses[lse_at])
        assert_same((new_outs, new_lses), (outs, lses))  # no other partial has changed


def test_calls_that_depend_on_each_other() -> None:
    """Programmatic dependent launches: a kernel's writes are seen by the next one's first read."""
    outs, lses = partials(GPU, 41, 64, 8, 128)
    out, lse = outs[0].clone(), lses[0].clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(1, 41):
            merge_state(out, lse, outs[i], lses[i], output=out, lse=lse)
    graph.replay()
    torch.cuda.synchronize()
    there, logs = outs[0].clone(), lses[0].clone()
    for i in range(1, 41):
        there, logs = merge_state(there, logs, outs[i], lses[i])
        torch.cuda.synchronize()
    assert_same((out, lse), (there, logs))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("n", [2, 3, 12])
def test_partials_in_pinned_host_memory(n: int, dtype: torch.dtype) -> None:
    outs, lses = partials(GPU, n, 33, 3, 40, dtype)
    wanted = merge_states(outs, lses)
    whole = torch.zeros(n, 33, 3, 56, dtype=dtype).pin_memory()
    whole[..., 8:-8] = outs.cpu()
    far, far_lses = whole[..., 8:-8], lses.cpu().pin_memory()
    for from_host in ([1], [*range(1, n)], [n - 1]):
        some = [far[i] if i in from_host else outs[i] for i in range(n)]
        logs = [far_lses[i] if i in from_host else lses[i] for i in range(n)]
        assert_same(merge_states(some, logs), wanted)
        assert_same(merge_states(some, list(lses)), wanted)
        assert_same(merge_states(list(outs), logs), wanted)
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    assert_same(merge_states(far, far_lses, output=out, lse=lse), wanted)
    turned = far_lses[1].t().contiguous().pin_memory().t()
    assert_same(
        merge_states([outs[0], far[1]], [lses[0], turned]), merge_states(outs[:2], lses[:2])
    )


@pytest.fixture
def memory() -> torch.Tensor:
    """12 GiB in one allocation, of which little is used."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 16 * GIB:
        pytest.skip("needs 16 GiB of free GPU memory")
    return torch.empty(12 * GIB, dtype=torch.uint8, device=GPU)


@pytest.mark.parametrize("by", ["tokens", "heads"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_strides_beyond_2_32_bytes(memory: torch.Tensor, dtype: torch.dtype, by: str) -> None:
    """Rows of each tensor, also of lses and results, are 1.2 GB apart."""
    outs, lses = partials(CPU, 3, 5, 5, 64, dtype)
    far, near = 2**30 + 2**27, 2048

    def placed(values: torch.Tensor, first_bytes: int) -> torch.Tensor:
        size = values.itemsize
        strides = (far // size, near // size) if by == "tokens" else (near // size, far // size)
        strides = (*strides, 1)[: values.ndim]
        view = memory.view(values.dtype).as_strided(values.shape, strides, first_bytes // size)
        return view.copy_(values)

    assert 4 * far > 2**32
    some = [placed(out, 20_000 * i) for i, out in enumerate(outs)]
    logs = [placed(lse, 100_000 + 20_000 * i) for i, lse in enumerate(lses)]
    out, lse = placed(outs[0] * 0, 200_000), placed(lses[0] * 0, 220_000)
    result = merge_states(some, logs, output=out, lse=lse)
    assert_merged(result, outs, lses)
    assert_same(result, merge_states(outs.cuda(), lses.cuda()))
    merge_states(some, logs, output=some[1], lse=logs[2])
    assert_same((some[1].contiguous(), logs[2].contiguous()), result)
