"""indexing against PyTorch, with every byte around the output accounted for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mistakes as common
import pytest
import torch
from buffers import INT_DTYPES, Buffer, host_buffer, make_buffer, out_of_range, to_index
from cache_layouts import BLOCKS, LAYOUTS, PAGE, SLOTS, paged_caches
from contract import Case, store_bits
from mistakes import Mistake, zeros
from ref import ref_indexing, same_bits
from stems import OpCheck, Rows
from torch import Tensor

from jitkern import check, indexing

VOCAB = 41


def tokens(device: torch.device, dtype: torch.dtype = torch.int64, count: int = 29) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    values = torch.randint(0, VOCAB, (count,), generator=generator)
    values[0], values[1 % count], values[2 % count] = VOCAB - 1, 0, -1
    return values.to(dtype).to(device)


def table(device: torch.device, row: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor:
    return make_buffer((VOCAB, *row), dtype, device).view


def compare_with_output(weights: Tensor, indices: Tensor, output: Buffer, **ranges: Any) -> None:
    """Run with a given output, and prove that nothing else of its memory has changed."""
    twin = output.twin()
    assert indexing(weights, indices, output=output.view, **ranges) is output.view
    store_bits(twin.view, ref_indexing(weights, indices, **ranges).reshape(twin.view.shape))
    assert output.same(twin)


@pytest.mark.parametrize("shape", [(), (1,), (6,), (2, 3), (1, 6), (6, 1), (2, 1, 3), (3, 0, 2)])
@pytest.mark.parametrize("row", [(), (8,), (2, 5)], ids=str)
def test_shapes(device: torch.device, shape: tuple[int, ...], row: tuple[int, ...]) -> None:
    weights = table(device, row, torch.float32)
    count = torch.Size(shape).numel()
    indices = tokens(device, count=max(count, 1))[:count].reshape(shape)
    result = indexing(weights, indices)
    assert result.shape == (*shape, *row)
    assert same_bits(result, ref_indexing(weights, indices))


def gather_pages(cache: Tensor, indices: Tensor, output: Buffer, **ranges: Any) -> None:
    """Gather rows out of pages, and compare with a gather out of a copy with equally spaced rows.

    With an `output` the shape of its rows tells pages from rows.
    """
    twin = output.twin()
    assert indexing(cache, indices, output=output.view, **ranges) is output.view
    expected = ref_indexing(cache.cpu().flatten(0, 1), indices.cpu(), **ranges)
    store_bits(twin.view, expected.to(cache.device))
    assert output.same(twin)


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(8, 256), (4, 33), (3, 5), (1, 656), (1, 1)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages(
    device: torch.device, layout: str, heads: int, dim: int, index_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(heads)
    indices = torch.randint(0, SLOTS, (2, 12), generator=generator)
    indices[0, :3] = torch.tensor([SLOTS - 1, -1, 0])
    for cache in paged_caches(layout, heads, dim, device):
        output = make_buffer((2, 12, heads, dim), device=device, seed=1)
        gather_pages(cache.view, indices.to(index_dtype).to(device), output)
    ranges = {"vocab_range": (3, SLOTS - 5), "added_range": (SLOTS, 4)}
    rows = make_buffer((24, heads, dim), device=device, seed=1, gap=9)
    gather_pages(cache.view, indices.view(24).to(device) + 2, rows, **ranges)


def test_pages_in_pinned_memory(device: torch.device) -> None:
    host = host_buffer((BLOCKS, 2, PAGE, 2, 48), torch.uint8, device)
    indices = torch.arange(SLOTS, device=device)
    output = make_buffer((SLOTS, 2, 48), device=device)
    indexing(host.view[:, 1], indices, output=output.view)
    assert same_bits(output.view.cpu(), host.view[:, 1].flatten(0, 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_index_past_the_last_page(device: torch.device, layout: str) -> None:
    cache, _ = paged_caches(layout, 2, 8, device)
    output = torch.empty(2, 2, 8, dtype=torch.uint8, device=device)
    with out_of_range(device, f"indexing: indices: index {SLOTS} at position 1, expected below"):
        indexing(cache.view, torch.tensor([0, SLOTS], device=device), output=output)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "step": lambda ids: ids[::2],
    "turned": lambda ids: ids.view(4, 6).t(),
    "shifted": lambda ids: ids.view(4, 6)[:, :-1],
    "none": lambda ids: ids.as_strided((0, 2), (1, 2)),  # contiguous to PyTorch, as all of 0 are
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_indices_that_are_not_contiguous(device: torch.device, view: Any) -> None:
    weights = table(device, (8,), torch.float32)
    indices = view(tokens(device)[:24])
    expected = ref_indexing(weights, indices)
    assert same_bits(indexing(weights, indices), expected)
    output = torch.empty_like(expected)
    assert same_bits(indexing(weights, indices, output=output), expected)


def test_output_with_rows_spaced_over_two_dimensions(device: torch.device) -> None:
    weights = table(device, (8,), torch.float32)
    flat = make_buffer((29, 8), torch.float32, device, seed=1, gap=5)
    output = flat.part(flat.view[:28].unflatten(0, (4, 7)))
    compare_with_output(weights, tokens(device)[:28].reshape(4, 7), output)


def test_a_new_output_is_of_the_allocator(device: torch.device) -> None:
    """So that record_stream() knows it; memory that came through DLPack is not."""
    output = indexing(torch.ones(5, 3, device=device), torch.tensor([1], device=device))
    assert output.untyped_storage().resizable()


@pytest.mark.cuda
def test_wrong_memory_of_a_table() -> None:
    table, indices = torch.zeros(5, 4), torch.tensor([1], device="cuda")
    with pytest.raises(ValueError, match=r"^indexing: weights: pageable host memory, expected pin"):
        indexing(table, indices)
    pinned, output = table.pin_memory(), torch.zeros(1, 4)
    text = r"^indexing: output: device cpu, expected cuda:0 as in indices$"
    with pytest.raises(ValueError, match=text):
        indexing(pinned, indices, output=output)
    check()


LAST = 2**63 - 1


def around(*ranges: tuple[int, int]) -> list[int]:
    """Return what lies at the ends of ranges, and what no range holds."""
    near = {end + step for start, length in ranges for end in (start, start + length)
            for step in (-1, 0, 1)}  # fmt: skip
    return [*sorted(near), -1, -7, -(2**31)]


@pytest.mark.parametrize("row_bytes", [1, 656, 8192])
@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("vocab_range", "added_range"),
    [
        ((0, 30), (100, 11)),
        ((0, 30), (30, 11)),  # one behind the other
        ((100, 30), (3, 11)),  # and in front of it
        ((11, 30), (0, 11)),
        ((7, 20), (50, 5)),  # rows to spare
        ((7, 0), (3, 9)),  # one range only, around the start of no range
        ((7, 9), (10, 0)),
        ((7, 0), (7, 0)),
        ((0, 20), (2**31 - 9, 9)),
        ((0, 0), None),
        ((7, 20), None),
        ((LAST - 20, 20), (0, 5)),
        ((0, 20), (LAST - 5, 5)),
        ((2**31 - 4, 20), (2**31 + 16, 20)),
        ((2**31 - 1, 1), (0, 1)),
        *(((start, VOCAB), None) for start in (0, 20, 2**31 - VOCAB, 2**40, LAST - VOCAB)),
    ],
)  # fmt: skip
def test_one_range_and_two(
    device: torch.device,
    row_bytes: int,
    index_dtype: torch.dtype,
    vocab_range: tuple[int, int],
    added_range: tuple[int, int] | None,
) -> None:
    weights = table(device, (row_bytes,))
    ends = around(vocab_range, added_range or vocab_range)
    lowest, highest = torch.iinfo(index_dtype).min, torch.iinfo(index_dtype).max
    extremes = [lowest, lowest + 1, lowest + VOCAB, highest - VOCAB, highest - 1, highest, 2**62]
    values = [value for value in (*ends, *extremes) if lowest <= value <= highest]
    indices = to_index(values, index_dtype, device)
    output = make_buffer((len(values), row_bytes), device=device, seed=1, gap=3)
    ranges: Any = {"vocab_range": vocab_range, "added_range": added_range}
    assert same_bits(indexing(weights, indices, **ranges), ref_indexing(weights, indices, **ranges))
    compare_with_output(weights, indices, output, **ranges)
    check(device)


@pytest.mark.parametrize("index_dtype", INT_DTYPES, ids=str)
@pytest.mark.parametrize("beyond", [0, 1, 2**31 - 1, 2**40, LAST])
@pytest.mark.parametrize("added_range", [None, (60, 4), (70, 0)])
def test_the_size_of_the_vocabulary(
    device: torch.device, index_dtype: torch.dtype, beyond: int, added_range: tuple[int, int] | None
) -> None:
    """Its last index is another rank's row, zeros here; the next one is a fault."""
    size, weights = 70, table(device, (40,))
    value = max(beyond, size + beyond) if beyond < 2 else beyond
    if value > torch.iinfo(index_dtype).max:
        pytest.skip("no such int32")
    ranges: Any = {"vocab_range": (7, 30), "added_range": added_range, "vocab_size": size}
    good = to_index([0, 6, 7, 36, 37, 59, 60, 63, 64, size - 1, -1, -5], index_dtype, device)
    expected = ref_indexing(weights, good, (7, 30), added_range)
    assert same_bits(indexing(weights, good, **ranges), expected)
    check(device)
    bad = good.clone()
    bad[9] = value
    output = make_buffer((12, 40), device=device, seed=1)
    twin = output.twin()
    text = f"indexing: indices: index {value} at position 9, expected below {size}"
    with out_of_range(device, text):
        indexing(weights, bad, output=output.view, **ranges)
    if device.type == "cuda":  # that row is zeros
        twin.view.copy_(expected)
    assert output.same(twin)


def test_no_indices_no_rows_no_vocabulary(device: torch.device) -> None:
    empty: Any = {"vocab_range": (0, 0), "added_range": (0, 0), "vocab_size": 0}
    weights = table(device, (40,))[:0]
    assert indexing(weights, to_index([-1, -9], torch.int32, device), **empty).eq(0).all()
    assert indexing(weights, to_index([], torch.int64, device), **empty).shape == (0, 40)
    with out_of_range(device, "index 0 at position 1, expected below 0"):
        indexing(weights, to_index([-1, 0], torch.int64, device), **empty)


def test_ranges_of_a_table_in_host_memory(device: torch.device) -> None:
    weights = host_buffer((VOCAB, 5), torch.float32, device).view
    indices = torch.arange(100, device=device) * 7 % 80 - 3
    ranges: Any = {"vocab_range": (30, 20), "added_range": (5, 21), "vocab_size": 77}
    expected = ref_indexing(weights, indices.cpu(), (30, 20), (5, 21))
    assert same_bits(indexing(weights, indices, **ranges), expected)
    check(device)


_RANGE = "expected (start, length) with start >= 0, start + length < 2^63 and 0 <= length <= "
_OF_50 = f"{_RANGE}50, the rows of weights"
_OF_20 = f"{_RANGE}20, the rows of weights behind those of vocab_range"
_PART = {"vocab_range": (10, 30)}


def _no_ranges(name: str, change: dict[str, object]) -> list[Mistake]:
    wrong: list[tuple[Any, str]] = [
        (5, ": int, expected (start, length)"),
        *(((one[name], 5), f"[0]{one_text.removeprefix(name)}")
          for one, _, one_text in common.not_ints(name)),
        ((0, 5.0), "[1]: float, expected an int"),
        ((0, None), "[1]: None, expected an int"),
    ]  # fmt: skip
    table: list[Mistake]
    table = [({**change, name: value}, TypeError, f"{name}{text}") for value, text in wrong]
    text = f"{name}: a list of 1, expected (start, length)"
    return [*table, ({**change, name: (5,)}, ValueError, text)]


def mistakes_of_ranges() -> list[Mistake]:
    table = _no_ranges("vocab_range", {}) + _no_ranges("added_range", _PART)
    table += [
        *(({"vocab_range": wrong}, ValueError, f"vocab_range: {wrong}, {_OF_50}")
          for wrong in ((0, 51), (-1, 5), (5, -1), (LAST - 2, 3))),
        *(({**_PART, "added_range": wrong}, ValueError, f"added_range: {wrong}, {_OF_20}")
          for wrong in ((40, 21), (-1, 5), (90, -1))),
        ({"added_range": (50, 0)}, ValueError,
         "added_range: given without vocab_range, expected both"),
        ({"vocab_size": 50}, ValueError, "vocab_size: given without vocab_range, expected both"),
        ({"vocab_size": 39, **_PART}, ValueError,
         "vocab_size: 39, expected at least 40, the end of vocab_range"),
        ({"vocab_size": -1, "vocab_range": (0, 0)}, ValueError,
         "vocab_size: -1, expected at least 0, the end of vocab_range"),
        ({"vocab_size": 64, **_PART, "added_range": (60, 5)}, ValueError,
         "vocab_size: 64, expected at least 65, the end of added_range"),
        *(({**_PART, **change}, kind, text)
          for change, kind, text in common.not_ints("vocab_size", optional=True)),
        ({"vocab_size": 40, **_PART, "indices": torch.tensor([-3, 40, 39])}, IndexError,
         common.index_text("indices", 40, 1, 40)),
        *(({**_PART, "added_range": added}, ValueError,
           f"added_range: {added}, expected no index of vocab_range (10, 30)")
          for added in ((39, 1), (10, 1), (0, 11), (0, 20), (20, 5), (39, 20))),
    ]  # fmt: skip
    return table


class Index(Case):
    function, argument = staticmethod(indexing), "indices"
    rows, tables, columns = (VOCAB,), (0, None), (0,)
    count = 29
    large = (2000,), 4003, 1657

    def call(self, tables: Sequence[Tensor], indices: Tensor, **_: Any) -> None:
        weights, output = tables
        assert indexing(weights, indices, output=output) is output

    def reference(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        weights, output = tables
        store_bits(output, ref_indexing(weights, indices.to(weights.device)))

    def check_more(self, tables: Sequence[Tensor], indices: Tensor) -> None:
        weights, output = tables
        found = indexing(weights, indices)
        assert found.device == indices.device
        assert same_bits(found, output)


class IndexOfATableInHostMemory(Index):
    on_host = (0,)


CASES = [Index(), IndexOfATableInHostMemory()]


def good_arguments() -> dict[str, Any]:
    ranges = {"vocab_range": None, "added_range": None, "vocab_size": None}
    return {"weights": zeros(50, 8), "indices": torch.arange(3), "output": zeros(3, 8), **ranges}


def mistakes() -> list[Mistake]:
    good = good_arguments()
    table = common.not_tensors(good, "weights", "indices", "output", optional="output")
    table += common.bad_indices("indices", good["indices"])[:-1]  # they need not be contiguous
    equally_spaced = "expected equally spaced rows"
    memory = torch.zeros(3, 4, dtype=torch.int64)
    table += [
        ({"output": zeros(3, 8, dtype=torch.float16)}, TypeError,
         "output: dtype float16, expected float32 as in weights"),
        *(({"output": zeros(*shape)}, ValueError,
           f"output: shape {shape}, expected shape [3, 8]")
          for shape in ([4, 8], [3, 9], [24], [3, 4, 2])),
        ({"weights": zeros(50, 4, 2), "output": zeros(3, 1, 2)}, ValueError,
         "output: shape [3, 1, 2], expected shape [3, 4, 2]"),
        ({"output": zeros(8, 3).t()}, ValueError,
         common.stride_text("output", 3, 1, [3, 8], 1)),
        ({"output": zeros(2, 5, 8)[:, :3], "indices": torch.zeros(2, 3, dtype=torch.int32)},
         ValueError,
         f"output: stride 40 in dimension 0 of shape [2, 3, 8], {equally_spaced}"),
        ({"output": zeros(1, 8).expand(3, 8)}, ValueError, common.apart_text("output", 0, [3, 8])),
        ({"output": good["weights"][4:7], "weights": good["weights"]}, ValueError,
         common.overlap_text("output", "weights")),
        *common.not_rows("weights", [50, 8]),
        ({"output": memory.view(torch.float32), "indices": memory[1, :3]}, ValueError,
         common.overlap_text("indices", "output")),
        ({"indices": torch.tensor([0, 50, 51])}, IndexError,
         common.index_text("indices", 50, 1, 50)),
        ({"weights": zeros(5, 10, 8), "indices": torch.tensor([4, 49]), "output": None}, IndexError,
         "indices: index 49 at position 1, expected below 5; for slots of pages pass output="),
        ({"weights": zeros(5, 10, 8), "indices": torch.tensor([4, 50]), "output": None}, IndexError,
         common.index_text("indices", 50, 1, 5)),
    ]  # fmt: skip
    return table + mistakes_of_ranges()


RESULTS = {"output"}
MIXED_DEVICES = [(name, "cuda:0 as in weights") for name in ("indices", "output")]


def opchecks(rows: Rows, slots: int, where: Tensor) -> Iterator[OpCheck]:
    table = rows(slots)
    yield "default", (table, where), {}
    yield "default", (table, where), {"vocab_range": [3, 20]}
    ranges = {"vocab_range": [9, slots - 9], "added_range": [0, 9], "vocab_size": 99}
    yield "default", (table, where), ranges
    yield "out", (table, where), {"output": rows(len(where)), **ranges}
    yield "out", (table, where), {"output": rows(len(where))}
