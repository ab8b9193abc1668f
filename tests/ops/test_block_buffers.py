"""copy_blocks between lists of buffers: layouts of engines, signals per layer, wrong lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
from buffers import INT_DTYPES, bytes_of, distinct, out_of_range, random_bytes, synchronize
from hypothesis import given
from hypothesis import strategies as st
from test_copy_blocks import CPU, DIRECTIONS, ways
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import jitkern
from jitkern import BlockBuffers, LayerSignals, copy_blocks
from jitkern.offload import PinnedPool

LAYERS, BLOCKS, HOST_BLOCKS = 5, 17, 29


def memory(device: torch.device, *shape: int, pinned: bool = False) -> Tensor:
    made = random_bytes(torch.Size(shape).numel(), sum(shape)).view(shape)
    return made.pin_memory() if pinned else made.to(device)


# Each makes a side of copy_blocks, and its layers as [blocks, bytes] tensors.
def make_list(device: torch.device, item: int, blocks: int = BLOCKS, pinned: bool = False) -> Any:
    layers = [memory(device, blocks, item + i % 2, pinned=pinned)[:, :item] for i in range(LAYERS)]
    return BlockBuffers(layers), layers


def make_k_and_v(device: torch.device, item: int, blocks: int, pinned: bool) -> Any:
    """One allocation has K and V of a block side by side."""
    both = [memory(device, blocks, 2, item, pinned=pinned) for _ in range(LAYERS)]
    lists = [one[:, 0] for one in both], [one[:, 1] for one in both]
    return BlockBuffers(*lists), [one[:, part] for one in both for part in (0, 1)]


def make_page_first(device: torch.device, item: int, blocks: int, pinned: bool) -> Any:
    """A tensor with blocks first: ``src_block_dim=0``."""
    pages = memory(device, blocks, LAYERS, item, pinned=pinned)
    return pages, list(pages.unbind(1))


def make_region(device: torch.device, item: int, blocks: int, pinned: bool) -> Any:
    """Views of one region with rows longer than all layers, as vLLM's shared one."""
    region = memory(device, blocks, LAYERS * item + 48, pinned=pinned)
    layers = [region[:, i * item : (i + 1) * item] for i in range(LAYERS)]
    return BlockBuffers(layers), layers


def make_factor(device: torch.device, item: int, blocks: int, pinned: bool) -> Any:
    """Each block of the tensor is three of the other side's."""
    whole = -(-blocks // 3)
    layers = [
        memory(device, whole, 3, item + 16, pinned=pinned)[:, :, :item] for _ in range(LAYERS)
    ]
    return BlockBuffers(layers, num_block_dims=2), [one.reshape(-1, item) for one in layers]


Case = tuple[Any, Any, Callable[[], list[Tensor]], Callable[[], list[Tensor]]]
"""A source, a destination, and what reads the layers of each, copied, on the CPU."""


def case_of(direction: str, far: Any, near: Any) -> Case:
    """Return the case of two sides, each given with its layers and their number of blocks."""

    def reader(layers: list[Tensor], blocks: int) -> Callable[[], list[Tensor]]:
        return lambda: [layer.cpu().clone().reshape(blocks, -1) for layer in layers]

    made = [(side, reader(layers, blocks)) for side, layers, blocks in (far, near)]
    (src, read_src), (dst, read_dst) = made if direction != "d2h" else made[::-1]
    return src, dst, read_src, read_dst


def sides(
    device: torch.device, direction: str, host: Callable[..., Any], item: int, **how: Any
) -> Case:
    pinned = device.type == "cuda" and direction != "d2d"
    far, far_layers = host(device if direction == "d2d" else CPU, item, HOST_BLOCKS, pinned)
    near, near_layers = how.get("near", make_list)(device, item, BLOCKS, False)
    return case_of(
        direction, (far, far_layers, len(far_layers[0])), (near, near_layers, len(near_layers[0]))
    )


def make_pairs(src_blocks: int, dst_blocks: int, dtype: torch.dtype = torch.int64) -> Tensor:
    count = min(src_blocks, dst_blocks) - 2
    pairs = torch.tensor([distinct(count, src_blocks), distinct(count, dst_blocks, 1)]).T
    pairs = pairs.contiguous()
    pairs[3, 0], pairs[5, 1] = -1, -7
    return pairs.to(dtype)


def expect(read_src: Any, before: list[Tensor], pairs: Tensor) -> list[Tensor]:
    for source, target in zip(read_src(), before, strict=True):
        for a, b in pairs.tolist():
            if a >= 0 and b >= 0:
                target[b] = source[a]
    return before


def run(device: torch.device, case: Case, pairs: Tensor, passed: Any = None, **how: Any) -> None:
    src, dst, read_src, read_dst = case
    expected = expect(read_src, read_dst(), pairs.cpu())
    for name, side in (("src", src), ("dst", dst)):
        if isinstance(side, Tensor):
            how[f"{name}_block_dim"] = 0
    assert copy_blocks(src, dst, pairs if passed is None else passed, **how) is None
    synchronize(device)
    for layer, (came, wanted) in enumerate(zip(read_dst(), expected, strict=True)):
        assert torch.equal(came, wanted), layer


def run_all_ways(device: torch.device, case: Case) -> None:
    src_blocks, dst_blocks = (len(read()[0]) for read in case[2:])
    for i, (on, method) in enumerate(ways(device)):
        pairs = make_pairs(src_blocks, dst_blocks, INT_DTYPES[i % 2]).to(on)
        run(device, case, pairs, method=method)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("host", [make_page_first, make_region, make_factor, make_k_and_v])
@pytest.mark.parametrize("item", [16, 24, 656, 4096])
def test_layouts_of_engines(device: torch.device, item: int, host: Any, direction: str) -> None:
    near = make_k_and_v if host is make_k_and_v else make_list
    run_all_ways(device, sides(device, direction, host, item, near=near))


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_page_head(device: torch.device, direction: str) -> None:
    """A token is a row per head on the host, and contiguous on the GPU."""
    pages, heads, page_size, dim = 6, 4, 3, 32
    host = memory(CPU, pages, heads, page_size, LAYERS, dim, pinned=device.type == "cuda")
    far = [host[:, :, :, i].permute(0, 2, 1, 3) for i in range(LAYERS)]
    near = [memory(device, 20, heads, dim) for _ in range(LAYERS)]
    far_side = (BlockBuffers(far, num_block_dims=2), far, pages * page_size)
    run_all_ways(device, case_of(direction, far_side, (BlockBuffers(near), near, 20)))


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_layers_of_different_sizes(device: torch.device, direction: str) -> None:
    sizes, pinned = [4096, 16, 656, 32, 8192], device.type == "cuda"
    far = [memory(CPU, HOST_BLOCKS, size, pinned=pinned) for size in sizes]
    near = [memory(device, BLOCKS, size) for size in sizes]
    of_lists = [(BlockBuffers(layers), layers, len(layers[0])) for layers in (far, near)]
    run_all_ways(device, case_of(direction, *of_lists))


@pytest.mark.parametrize("dtype", INT_DTYPES, ids=str)
def test_pairs_as_two_vectors(device: torch.device, dtype: torch.dtype) -> None:
    for host in (make_page_first, make_region):
        case = sides(device, "h2d", host, 96)
        for on, method in ways(device):
            pairs = make_pairs(HOST_BLOCKS, BLOCKS, dtype).to(on)
            vectors = tuple(pairs.unbind(1)[i].contiguous() for i in (0, 1))
            run(device, case, pairs, vectors, method=method)
    # The same with tensors.
    src, dst = torch.arange(12.0).view(1, 6, 2), torch.zeros(1, 6, 2)
    copy_blocks(src, dst, (torch.tensor([4]), torch.tensor([1])))
    assert dst[0, 1].tolist() == [8, 9]


def test_count_and_range(device: torch.device) -> None:
    src, dst, read_src, read_dst = sides(device, "h2d", make_region, 64)
    pairs = make_pairs(HOST_BLOCKS, BLOCKS)
    pairs[6:] = 2**40
    before = read_dst()
    count = torch.tensor([6], device=device)
    copy_blocks(src, dst, pairs.to(device), count=count)
    synchronize(device)
    expected = expect(read_src, before, pairs[:6])
    assert all(map(torch.equal, read_dst(), expected))
    pairs[6:] = -1
    pairs[6] = torch.tensor([2, BLOCKS])
    note = "; nothing was written" if device.type == "cpu" else ""
    text = f"index {BLOCKS} at position 6, expected below {BLOCKS}{note}"
    with out_of_range(device, f"copy_blocks: pairs[..., 1]: {text}"):
        copy_blocks(src, dst, pairs.to(device))
    with out_of_range(device, f"copy_blocks: pairs[1]: {text}"):
        copy_blocks(src, dst, tuple(one.contiguous() for one in pairs.to(device).unbind(1)))
    with pytest.raises(IndexError, match=re.escape(text.partition(";")[0])):
        copy_blocks(src, dst, pairs)


def test_within_one_list(device: torch.device) -> None:
    cache, layers = make_list(device, 48)
    before = [layer.clone() for layer in layers]
    copy_blocks(cache, cache, torch.tensor([[4, 2], [0, 6]], device=device))
    for layer, old in zip(layers, before, strict=True):
        old[[2, 6]] = old[[4, 0]]
        assert torch.equal(layer, old)


def test_trusted_addresses(device: torch.device) -> None:
    _, layers = make_list(device, 64)
    layers = [layer.contiguous() for layer in layers]
    addresses = torch.tensor([layer.data_ptr() for layer in layers], device=device)
    trusted = BlockBuffers.from_trusted_addresses(addresses, 64, BLOCKS, device=device)
    pool = memory(CPU, HOST_BLOCKS, LAYERS, 64, pinned=device.type == "cuda")
    copy_blocks(pool, trusted, torch.tensor([[8, 3]], device=device), src_block_dim=0)
    assert all(torch.equal(layers[i][3].cpu(), pool[8, i]) for i in range(LAYERS))
    assert len(trusted) == LAYERS


def rows(*shape: int, **how: Any) -> Tensor:
    return torch.zeros(*shape, **how)


WRONG_LISTS: list[tuple[Sequence[Any], dict[str, Any], type[Exception], str]] = [
    ([[]], {}, ValueError, "tensors: none, expected at least one"),
    ([[rows(3, 4)], []], {}, ValueError, "tensors: lists of 1, 0, expected equal lengths"),
    ([[rows(3, 4)]], {"num_block_dims": 3}, ValueError, "num_block_dims: 3, expected 1 or 2"),
    ([[torch.zeros(1).expand(1 << 17, 1 << 16, 1)]], {"num_block_dims": 2}, ValueError,
     "tensors[0]: [131072, 65536] blocks, expected at most 4294967296 in two dimensions"),
    ([[rows(3)]], {"num_block_dims": 2}, ValueError,
     "tensors[0]: shape [3], expected at least 2 dimensions"),
    ([[rows(3, 4), rows(3, 4).half()]], {}, TypeError,
     "tensors[1]: dtype float16, expected float32 as in tensors[0]"),
    ([[rows(3, 4), rows(2, 4)]], {}, ValueError,
     "tensors[1]: 2 blocks (shape [2, 4]), expected 3 as in tensors[0]"),
    ([[rows(3, 4, 5, 8)[:, ::2, ::2]]], {}, ValueError,
     "tensors[0]: strides that make rows of no equal distance of each block (shape [3, 2, 3, 8]), "
     "expected blocks that are contiguous, or contiguous rows at one distance"),
    ([[rows(3, 4, requires_grad=True)]], {}, ValueError,
     "tensors[0]: requires a gradient, expected none; pass .detach()"),
    ([[rows(3, 4, dtype=torch.complex64).conj()]], {}, ValueError,
     "tensors[0]: a lazy view of conj() or neg(), expected the values in memory; "
     ".resolve_conj().resolve_neg() makes a copy, for tensors that are only read"),
    *(([[item]], {}, TypeError, f"tensors[0]: {came}, expected a tensor")
      for item, came in ((None, "None"), (3, "int"), ("x", "str"), ([rows(3)], "list or tuple"))),
    *(([lists], {}, TypeError, f"tensors: {came}, expected a list of tensors, one per layer")
      for lists, came in ((None, "None"), ("x", "str"), (3, "int"), ({1: rows(3)}, "dict"))),
    ([rows(3, 4), rows(3, 4)], {}, TypeError,
     "tensors: Tensor, expected a list of tensors, one per layer: BlockBuffers([a, b, c]), or "
     "list(tensor)"),
]  # fmt: skip


@pytest.mark.parametrize(("lists", "how", "kind", "text"), WRONG_LISTS)
def test_wrong_lists(lists: Any, how: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=f"^{re.escape('BlockBuffers: ' + text)}$"):
        BlockBuffers(*lists, **how)


def test_wrong_calls() -> None:
    cache = BlockBuffers([rows(4, 8) for _ in range(2)])
    pairs = torch.tensor([[0, 1]])
    shared, first = rows(5, 8), rows(4, 8)
    cases: list[tuple[Any, Any, dict[str, Any], type[Exception], str]] = [
        (rows(3, 9, 8), cache, {}, ValueError,
         "src: 3 layers (shape [3, 9, 8]), expected 2 layers as in dst"),
        (rows(2, 9, 7), cache, {}, ValueError,
         "src: blocks of 28 bytes a layer (shape [2, 9, 7]), expected blocks of 32 bytes a layer "
         "as in dst"),
        (rows(2, 9, 8).int(), cache, {}, TypeError, "src: dtype int32, expected float32 as in dst"),
        (cache, BlockBuffers([shared[:4], shared[1:]]), {}, ValueError,
         "dst: buffer 1, which overlaps buffer 0, expected memory of its own for each block that "
         "is written"),
        (cache, BlockBuffers([rows(1, 8).expand(4, 8), rows(4, 8)]), {}, ValueError,
         "dst: buffer 0, whose blocks overlap, expected memory of its own for each block that is "
         "written"),
        (BlockBuffers([first, rows(4, 8)]), BlockBuffers([first, rows(4, 8)]), {}, ValueError,
         "dst: overlaps src, expected memory of its own"),
        (cache, rows(2, 9, 8), {"signals": LayerSignals(3, device="cpu")}, ValueError,
         "signals: 3 layers, expected a number that divides the 2 of dst"),
        (cache, rows(2, 9, 8), {"signals": LayerSignals(2, device="cpu"), "method": "engine"},
         ValueError,
         """signals: with method="engine", expected 'auto' or 'sm', whose kernel sets them"""),
        (cache, rows(2, 9, 8), {"signals": 3}, TypeError, "signals: int, expected LayerSignals"),
        (cache, rows(2, 9, 8), {"src_block_dim": 0}, ValueError,
         "src_block_dim: 0, expected none, as src is BlockBuffers"),
        (rows(2, 9, 8), cache, {"dst_block_dim": 2}, ValueError,
         "dst_block_dim: 2, expected none, as dst is BlockBuffers"),
        (cache, rows(2, 9, 8), {"src_block_dim": None}, TypeError,
         "src_block_dim: None, expected an int"),
        ([rows(9, 8)], cache, {}, TypeError,
         "src: list or tuple, expected a tensor, or BlockBuffers(list) for a list of tensors"),
    ]  # fmt: skip
    for src, dst, how, kind, text in cases:
        with pytest.raises(kind, match=f"^{re.escape('copy_blocks: ' + text)}$"):
            copy_blocks(src, dst, pairs, **how)
    for wrong, kind, text in (
        ((pairs[0],), TypeError, "pairs: list or tuple, expected a tensor"),
        (([7], [0]), TypeError, "pairs[0]: list or tuple, expected a tensor"),
        ((pairs[0], 0), TypeError, "pairs[1]: int, expected a tensor"),
        ((pairs[0], pairs[0, :1]), ValueError, "pairs[1]: 1 blocks, expected 2 as in pairs[0]"),
        (
            (pairs[0], pairs[0].int()),
            TypeError,
            "pairs[1]: dtype int32, expected int64 as in pairs[0]",
        ),
    ):
        with pytest.raises(kind, match=f"^{re.escape('copy_blocks: ' + text)}$"):
            copy_blocks(rows(2, 9, 8), cache, wrong)


def test_repr(device: torch.device) -> None:
    layers = [torch.zeros(20, 4, 64, dtype=torch.float16, device=device) for _ in range(2)]
    uneven = [layers[0], layers[1][:, :1]]
    trusted = BlockBuffers.from_trusted_addresses([4096, 8192], 512, 7, device=device)
    for buffers, text in (
        (BlockBuffers(layers), "20 blocks of 512 bytes, float16"),
        (BlockBuffers(layers, num_block_dims=2), "80 blocks of 128 bytes, float16"),
        (BlockBuffers(uneven), "20 blocks of 128 to 512 bytes, float16"),
        (trusted, "7 blocks of 512 bytes, trusted addresses"),
    ):
        assert repr(buffers) == f"BlockBuffers(2 buffers on {layers[0].device}, {text})"


def test_wrong_addresses_and_signals() -> None:
    name, make = "BlockBuffers.from_trusted_addresses", BlockBuffers.from_trusted_addresses
    with pytest.raises(ValueError, match=f"{name}: addresses: none, expected at least one"):
        make([], 8, 2, device="cpu")
    with pytest.raises(ValueError, match=f"{name}: block_bytes: 2 values, expected 1 as in"):
        make([4096], [8, 8], 2, device="cpu")
    with pytest.raises(ValueError, match=rf"{name}: block_stride_bytes\[0\]: 0, expected at"):
        make([4096], 8, 2, device="cpu", block_stride_bytes=[0])
    for (*wrong, place), text in (
        ((None, 8, 2, "cpu"), "addresses: None, expected ints"),
        (([True], 8, 2, "cpu"), "addresses[0]: bool, expected an int"),
        (([4096], 8, True, "cpu"), "num_blocks: bool, expected an int"),
        (([4096], 8, 2, "meta"), "device: 'meta', expected 'cpu', 'cuda' or 'cuda:N'"),
        (([4096], 8, 2, "xpu"), "device: 'xpu', expected 'cpu', 'cuda' or 'cuda:N'"),
    ):
        with pytest.raises((TypeError, ValueError), match=f"^{re.escape(f'{name}: {text}')}$"):
            make(*wrong, device=place)
    wrong_signals: list[tuple[Any, Any, type[Exception], str]] = [
        (0, "cpu", ValueError, "num_layers: 0, expected at least 1"),
        (2, "meta", ValueError, "device: 'meta', expected 'cpu', 'cuda' or 'cuda:N'"),
    ]
    for num_layers, device, kind, text in wrong_signals:
        with pytest.raises(kind, match=f"^LayerSignals: {re.escape(text)}$"):
            LayerSignals(num_layers, device=device)
    with torch.device("meta"):  # torch's default device
        signals = LayerSignals(numpy.int64(2), device="cpu")
    signals.is_done(numpy.int64(1))
    for layer, kind in ((2, IndexError), (-1, IndexError), (1.0, TypeError), (None, TypeError)):
        for call in (signals.is_done, signals.wait):
            with pytest.raises(kind, match=r"^LayerSignals\.(is_done|wait): layer: .*, expected"):
                call(layer)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^LayerSignals\.wait: stream: int, expected a torch.cuda"):
        signals.wait(0, 7)  # type: ignore[arg-type]


def test_a_list_keeps_the_memory_of_its_tensors() -> None:
    tensor = torch.ones(4, 1 << 20)
    cache, out = BlockBuffers([tensor]), torch.zeros(4, 1 << 20)
    tensor.data = torch.full((4, 1 << 20), 7.0)
    torch.full((4, 1 << 20), 8.0)  # would take memory that is free
    copy_blocks(cache, BlockBuffers([out]), torch.tensor([[0, 1]]))
    assert out[1].eq(1).all()


def test_lists_of_many_buffers_are_compared_in_order() -> None:
    """20,000 buffers each took 4.6 s, as each was compared with each."""
    near, far = ([torch.zeros(2, 8) for _ in range(20_000)] for _ in "nf")
    copy_blocks(BlockBuffers(far), BlockBuffers(near), torch.tensor([[0, 1]]))
    near[17] = near[19_000]
    text = "dst: buffer 19000, which overlaps buffer 17,"
    with pytest.raises(ValueError, match=text):
        copy_blocks(BlockBuffers(far), BlockBuffers(near), torch.tensor([[0, 1]]))


@given(data=st.data())
def test_buffers_that_overlap_are_refused(data: st.DataObject) -> None:
    """Rows of blocks of parts at any strides, against sets of addresses."""
    draw, memory = data.draw, torch.arange(200).to(torch.uint8)
    layers = []
    for _ in range(3):
        shape = (draw(st.integers(1, 3)), 2, draw(st.integers(1, 2)), draw(st.integers(1, 3)))
        shape = (2, 2, layers[0].shape[2], layers[0].shape[3]) if layers else (2, *shape[1:])
        strides = (
            layers[0].stride()[:3] if layers else tuple(draw(st.integers(1, 20)) for _ in "abc")
        )
        layers.append(memory.as_strided(shape, (*strides, 1), draw(st.integers(0, 100))))
    try:
        near, far = (
            BlockBuffers(layers[:2], num_block_dims=2),
            BlockBuffers(layers[2:] * 2, num_block_dims=2),
        )
    except ValueError:
        return  # strides that are no rows
    written = [byte for layer in layers[:2] for byte in bytes_of(layer)]
    pairs = torch.tensor([[0, 0]])
    if len(set(written)) < len(written):
        with pytest.raises(ValueError, match=r"^copy_blocks: dst: buffer"):
            copy_blocks(far, near, pairs)
    elif set(written) & set(bytes_of(layers[2])):
        with pytest.raises(ValueError, match=r"^copy_blocks: dst: overlaps src"):
            copy_blocks(far, near, pairs)
    else:
        copy_blocks(far, near, pairs)


def test_a_graph_of_pytorch_refuses_lists() -> None:
    cache, pairs, signals = (
        BlockBuffers([rows(4, 8)]),
        torch.tensor([[0, 1]]),
        LayerSignals(1, device="cpu"),
    )
    src, dst = rows(1, 4, 8), rows(1, 4, 8)
    with TorchDispatchMode():
        with pytest.raises(TypeError, match="copy_blocks: dst: BlockBuffers, expected a tensor"):
            copy_blocks(src, cache, pairs)
        text = "copy_blocks: signals: LayerSignals while PyTorch traces or differentiates"
        with pytest.raises(RuntimeError, match=text):
            copy_blocks(src, dst, pairs, signals=signals)


@pytest.mark.cuda
def test_memory_that_a_gpu_cannot_read() -> None:
    device = torch.device("cuda")
    cache, _ = make_list(device, 64)
    pairs = torch.tensor([[0, 1]], device=device)
    pageable = BlockBuffers([torch.zeros(4, 64, dtype=torch.uint8) for _ in range(LAYERS)])
    with pytest.raises(ValueError, match=r"copy_blocks: src\[0\]: pageable host memory"):
        copy_blocks(pageable, cache, pairs)
    pool = PinnedPool(LAYERS * 4 * 64)
    far = BlockBuffers(list(pool.tensor((LAYERS, 4, 64), torch.uint8).unbind(0)))
    copy_blocks(far, cache, pairs)
    pool.close()
    with pytest.raises(ValueError, match=r"src\[0\]: pageable host memory"):
        copy_blocks(far, cache, pairs)
    jitkern.check(device)


@pytest.mark.cuda
def test_first_use_in_a_capture_is_refused() -> None:
    device = torch.device("cuda")
    src, dst, *_ = sides(device, "h2d", make_region, 64)
    pairs = torch.tensor([[0, 1]], device=device)
    graph = torch.cuda.CUDAGraph()
    text = "a list that was never used on this GPU, while a"
    with torch.cuda.graph(graph), pytest.raises(ValueError, match=text):
        copy_blocks(src, dst, pairs)
