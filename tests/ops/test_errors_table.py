"""Every wrong argument of every op: the kind of exception and its exact text.

All messages have one form, `op: argument: what came, expected what`, wherever they come from.
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import jitkern

ROWS, SLOTS = 3, 50
Mistake = tuple[dict[str, Any], type[Exception], str]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def good_arguments(op: str) -> dict[str, Any]:
    cache, rows = zeros(SLOTS, 8), zeros(ROWS, 8)
    if op == "store_cache":
        k, v = rows, rows.clone()
        return {
            "k_cache": cache,
            "v_cache": cache.clone(),
            "indices": torch.arange(3),
            "k": k,
            "v": v,
        }
    if op == "indexing":
        return {"weights": cache, "indices": torch.arange(3), "output": rows, "vocab_range": None}
    if op == "fast_compare_key":
        return {"x": torch.arange(9), "y": torch.arange(5), "start": 0, "page_size": 1}
    pairs = torch.tensor([[0, 1], [2, 3]])
    good = {"src": rows, "dst": cache, "pairs": pairs, "num_sms": 2}
    if op == "d2h_scatter":
        return good
    flags = {"dedup": True, "reuse_resident": False, "record_source": False}
    return {**good, "slot_map": torch.arange(3), **flags}


def stride_text(argument: str, stride: int, dim: int, shape: list[int], expected: int) -> str:
    return (
        f"{argument}: stride {stride} in dimension {dim} of shape {shape}, expected contiguous "
        f"rows, stride {expected}; call .contiguous()"
    )


def count_text(argument: str, rows: int, shape: list[int], expected: int) -> str:
    return (
        f"{argument}: {rows} rows (shape {shape}), expected {expected} rows, one for each index in "
        "indices"
    )


def bytes_text(argument: str, row_bytes: int, shape: list[int], like: str) -> str:
    return (
        f"{argument}: rows of {row_bytes} bytes (shape {shape}), expected 32 bytes as in {like} "
        "(shape [50, 8])"
    )


def index_text(argument: str, value: int, position: int, bound: int) -> str:
    return (
        f"{argument}: index {value} at position {position}, expected below {bound}; nothing was "
        "written"
    )


class NotATensor:
    pass


def non_tensors(op: str, argument: str) -> list[Mistake]:
    """What is not a tensor at all, under the name that Python has for it."""
    values: dict[str, Any] = {
        "None": None,
        "int": 7,
        "int of more than 64 bits": 2**70,
        "float": 1.5,
        "bool": True,
        "str": "cache",
        "list": [1, 2],
        "dict": {},
        "bytes": b"row",
        "object": NotATensor(),
        "dtype": torch.float32,
        "function": zeros,
    }
    return [
        ({argument: value}, TypeError, f"{argument}: {came}, expected a tensor")
        for came, value in values.items()
        if not (value is None and argument in ("output", "slot_map"))
    ]


def unreadable(op: str, argument: str) -> list[Mistake]:
    """Tensors without plain memory behind them."""
    shape = good_arguments(op)[argument].shape
    dtype = good_arguments(op)[argument].dtype
    good = torch.zeros(shape, dtype=dtype)
    freed = torch.zeros(shape, dtype=dtype)
    freed.untyped_storage().resize_(0)
    cases = [
        (good.to("meta"), "device meta, expected cpu or cuda"),
        (good.to_sparse(), "layout sparse_coo, expected strided"),
        (freed, "no memory behind it, expected allocated memory"),
    ]
    if good.dim() == 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch: CSR is in beta state
            cases.append((good.to_sparse_csr(), "layout sparse_csr, expected strided"))
    if dtype == torch.float32:
        cases.append((good.to_mkldnn(), "layout _mkldnn, expected strided"))
        zero = torch._efficientzerotensor(shape)
        cases.append((zero, "no memory behind it, expected allocated memory"))
    return [({argument: tensor}, ValueError, f"{argument}: {text}") for tensor, text in cases]


def bad_indices(op: str, argument: str) -> list[Mistake]:
    good = good_arguments(op)[argument]
    mistakes: list[Mistake] = [
        ({argument: good.to(dtype)}, TypeError,
         f"{argument}: dtype {name}, expected int32 or int64")
        for name, dtype in [
            ("float32", torch.float32), ("bfloat16", torch.bfloat16), ("int16", torch.int16),
            ("uint8", torch.uint8), ("bool", torch.bool), ("uint32", torch.uint32),
            ("uint64", torch.uint64), ("complex64", torch.complex64),
        ]
    ]  # fmt: skip
    spread = torch.stack([good, good], dim=-1)[..., 0]
    last = good.dim() - 1
    came = f"not contiguous (stride 2 in dimension {last} of shape {list(good.shape)})"
    text = f"{argument}: {came}, expected a contiguous tensor; call .contiguous()"
    return [*mistakes, ({argument: spread}, ValueError, text)]


def store_mistakes() -> list[Mistake]:
    op = "store_cache"
    table: list[Mistake] = []
    for argument in ("k_cache", "v_cache", "indices", "k", "v"):
        table += non_tensors(op, argument) + unreadable(op, argument)
    table += bad_indices(op, "indices")
    halves = zeros(ROWS, 8, dtype=torch.float16)
    for argument in ("k", "v"):
        table += [
            ({argument: halves}, TypeError,
             f"{argument}: dtype float16, expected float32 as in k_cache"),
            ({argument: zeros(ROWS, 8, dtype=torch.int32)}, TypeError,
             f"{argument}: dtype int32, expected float32 as in k_cache"),
            ({argument: zeros(ROWS, 7)}, ValueError,
             bytes_text(argument, 28, [3, 7], "k_cache")),
            ({argument: zeros(4, 8)}, ValueError,
             count_text(argument, 4, [4, 8], 3)),
            ({argument: zeros(0, 8)}, ValueError,
             count_text(argument, 0, [0, 8], 3)),
            ({argument: zeros(8, ROWS).t()}, ValueError,
             stride_text(argument, 3, 1, [3, 8], 1)),
            ({argument: zeros(ROWS, 16)[:, ::2]}, ValueError,
             stride_text(argument, 2, 1, [3, 8], 1)),
            ({argument: zeros(ROWS, 1).expand(ROWS, 8)}, ValueError,
             stride_text(argument, 0, 1, [3, 8], 1)),
            ({argument: zeros(ROWS, 4, 3)[:, :, :2]}, ValueError,
             stride_text(argument, 3, 1, [3, 4, 2], 2)),
            ({argument: torch.tensor(1.0)}, ValueError,
             f"{argument}: shape [], expected at least 1 dimension"),
        ]  # fmt: skip
    table += [
        ({"v_cache": zeros(SLOTS, 8, dtype=torch.bfloat16)}, TypeError,
         "v_cache: dtype bfloat16, expected float32 as in k_cache"),
        ({"v_cache": zeros(SLOTS, 9)}, ValueError,
         bytes_text("v_cache", 36, [50, 9], "k_cache")),
        ({"v_cache": zeros(49, 8)}, ValueError,
         "v_cache: 49 rows (shape [49, 8]), expected 50 rows as in k_cache"),
        ({"v_cache": zeros(8, SLOTS).t()}, ValueError,
         stride_text("v_cache", 50, 1, [50, 8], 1)),
        ({"k_cache": torch.tensor(1.0)}, ValueError,
         "k_cache: shape [], expected at least 1 dimension"),
        ({"k_cache": zeros(8, SLOTS).t()}, ValueError,
         stride_text("k_cache", 50, 1, [50, 8], 1)),
        ({"indices": torch.zeros(3, 1, dtype=torch.int64)}, ValueError,
         "indices: shape [3, 1], expected 1 dimension"),
        ({"indices": torch.tensor(3)}, ValueError,
         "indices: shape [], expected 1 dimension"),
        ({"indices": torch.arange(4)}, ValueError,
         count_text("k", 3, [3, 8], 4)),
        ({"indices": torch.tensor([4, 50, 51])}, IndexError,
         index_text("indices", 50, 1, 50)),
        ({"indices": torch.tensor([-4, -50, 2**40])}, IndexError,
         index_text("indices", 1099511627776, 2, 50)),
    ]  # fmt: skip
    return table


def indexing_mistakes() -> list[Mistake]:
    op = "indexing"
    table: list[Mistake] = []
    for argument in ("weights", "indices", "output"):
        table += non_tensors(op, argument) + unreadable(op, argument)
    table += bad_indices(op, "indices")
    expected = "expected (start, length) with start >= 0 and 0 <= length <= 50, the rows of weights"
    equally_spaced = "expected equally spaced rows; call .contiguous()"
    table += [
        ({"output": zeros(ROWS, 8, dtype=torch.float16)}, TypeError,
         "output: dtype float16, expected float32 as in weights"),
        ({"output": zeros(4, 8)}, ValueError,
         "output: shape [4, 8], expected shape [3, 8]"),
        ({"output": zeros(ROWS, 9)}, ValueError,
         "output: shape [3, 9], expected shape [3, 8]"),
        ({"output": zeros(24)}, ValueError, "output: shape [24], expected shape [3, 8]"),
        ({"output": zeros(ROWS, 4, 2)}, ValueError,
         "output: shape [3, 4, 2], expected shape [3, 8]"),
        ({"output": zeros(8, ROWS).t()}, ValueError,
         stride_text("output", 3, 1, [3, 8], 1)),
        ({"output": zeros(2, 5, 8)[:, :3], "indices": torch.zeros(2, 3, dtype=torch.int32)},
         ValueError,
         f"output: stride 40 in dimension 0 of shape [2, 3, 8], {equally_spaced}"),
        ({"weights": torch.tensor(1.0)}, ValueError,
         "weights: shape [], expected at least 1 dimension"),
        ({"weights": zeros(8, SLOTS).t()}, ValueError,
         stride_text("weights", 50, 1, [50, 8], 1)),
        ({"vocab_range": (0, 51)}, ValueError, f"vocab_range: (0, 51), {expected}"),
        ({"vocab_range": (-1, 5)}, ValueError, f"vocab_range: (-1, 5), {expected}"),
        ({"vocab_range": (5, -1)}, ValueError, f"vocab_range: (5, -1), {expected}"),
        ({"vocab_range": 5}, TypeError, "vocab_range: 5, expected (start, length)"),
        ({"vocab_range": (5,)}, TypeError, "vocab_range: (5,), expected (start, length)"),
        ({"vocab_range": (1, 2, 3)}, TypeError,
         "vocab_range: (1, 2, 3), expected (start, length)"),
        ({"vocab_range": (None, 5)}, TypeError,
         "vocab_range: (None, 5), expected two ints"),
        ({"vocab_range": (None, None)}, TypeError,
         "vocab_range: (None, None), expected two ints"),
        ({"vocab_range": (0, None)}, TypeError,
         "vocab_range: (0, None), expected two ints"),
        ({"vocab_range": (0.0, 5)}, TypeError,
         "vocab_range[0]: float, expected an int"),
        ({"vocab_range": (0, 5.0)}, TypeError,
         "vocab_range[1]: float, expected an int"),
        ({"vocab_range": (True, 5)}, TypeError, "vocab_range[0]: bool, expected an int"),
        ({"vocab_range": ("0", 5)}, TypeError, "vocab_range[0]: str, expected an int"),
        ({"vocab_range": (2**63, 5)}, TypeError,
         "vocab_range[0]: int of more than 64 bits, expected an int"),
        ({"indices": torch.tensor([0, 50, 51])}, IndexError,
         index_text("indices", 50, 1, 50)),
    ]  # fmt: skip
    return table


def pair_mistakes(op: str) -> list[Mistake]:
    """What h2d_gather and d2h_scatter have in common."""
    table: list[Mistake] = []
    for argument in ("src", "dst", "pairs"):
        table += non_tensors(op, argument) + unreadable(op, argument)
    table += bad_indices(op, "pairs")
    wanted = "expected shape [..., 2] of (source row, destination row)"
    table += [
        ({"src": zeros(ROWS, 8, dtype=torch.float16)}, TypeError,
         "src: dtype float16, expected float32 as in dst"),
        ({"src": zeros(ROWS, 7)}, ValueError,
         bytes_text("src", 28, [3, 7], "dst")),
        ({"src": torch.tensor(1.0)}, ValueError,
         "src: shape [], expected at least 1 dimension"),
        ({"src": zeros(8, ROWS).t()}, ValueError,
         stride_text("src", 3, 1, [3, 8], 1)),
        ({"dst": torch.tensor(1.0)}, ValueError,
         "dst: shape [], expected at least 1 dimension"),
        ({"dst": zeros(8, SLOTS).t()}, ValueError,
         stride_text("dst", 50, 1, [50, 8], 1)),
        ({"pairs": torch.tensor(3)}, ValueError, f"pairs: shape [], {wanted}"),
        ({"pairs": torch.arange(3)}, ValueError, f"pairs: shape [3], {wanted}"),
        ({"pairs": torch.zeros(2, 3, dtype=torch.int32)}, ValueError,
         f"pairs: shape [2, 3], {wanted}"),
        ({"num_sms": 0}, ValueError, "num_sms: 0, expected at least 1"),
        ({"num_sms": -3}, ValueError, "num_sms: -3, expected at least 1"),
        ({"num_sms": 1.5}, TypeError, "num_sms: float, expected an int"),
        ({"num_sms": True}, TypeError, "num_sms: bool, expected an int"),
        ({"num_sms": "2"}, TypeError, "num_sms: str, expected an int"),
        ({"num_sms": 2**63}, TypeError,
         "num_sms: int of more than 64 bits, expected an int"),
        ({"num_sms": torch.tensor(2)}, TypeError, "num_sms: Tensor, expected an int"),
        ({"pairs": torch.tensor([[0, 1], [3, 3]])}, IndexError,
         index_text("pairs[..., 0]", 3, 1, 3)),
        ({"pairs": torch.tensor([[[0, 50]], [[0, 1]]])}, IndexError,
         index_text("pairs[..., 1]", 50, 0, 50)),
    ]  # fmt: skip
    return table


def h2d_gather_mistakes() -> list[Mistake]:
    op = "h2d_gather"
    of_map = "expected shape [3], one entry for each row of src"
    without = "expected a slot_map that says which rows are resident, or False"
    return [
        *pair_mistakes(op),
        *non_tensors(op, "slot_map"),
        *unreadable(op, "slot_map"),
        *bad_indices(op, "slot_map"),
        ({"slot_map": torch.arange(4)}, ValueError, f"slot_map: shape [4], {of_map}"),
        ({"slot_map": torch.zeros(3, 1, dtype=torch.int32)}, ValueError,
         f"slot_map: shape [3, 1], {of_map}"),
        ({"reuse_resident": True, "slot_map": None}, ValueError,
         f"reuse_resident: True without a slot_map, {without}"),
        ({"reuse_resident": True, "slot_map": torch.tensor([-1, -1, 50])}, IndexError,
         index_text("slot_map", 50, 2, 50)),
        ({"reuse_resident": "yes"}, TypeError, "reuse_resident: str, expected a bool"),
        ({"reuse_resident": None}, TypeError, "reuse_resident: None, expected a bool"),
        ({"reuse_resident": 1}, TypeError, "reuse_resident: int, expected a bool"),
    ]  # fmt: skip


def compare_key_mistakes() -> list[Mistake]:
    op = "fast_compare_key"
    table: list[Mistake] = []
    for argument in ("x", "y"):
        table += non_tensors(op, argument) + unreadable(op, argument) + bad_indices(op, argument)
        table += [
            ({argument: torch.tensor(3)}, ValueError,
             f"{argument}: shape [], expected 1 dimension"),
            ({argument: torch.zeros(3, 2, dtype=torch.int64)}, ValueError,
             f"{argument}: shape [3, 2], expected 1 dimension"),
        ]  # fmt: skip
    table += [
        ({"y": torch.arange(5, dtype=torch.int32)}, TypeError,
         "y: dtype int32, expected int64 as in x"),
        ({"start": -1}, ValueError, "start: -1, expected 0 to 9, the length of x"),
        ({"start": 10}, ValueError, "start: 10, expected 0 to 9, the length of x"),
        ({"start": None}, TypeError, "start: None, expected an int"),
        ({"start": 1.0}, TypeError, "start: float, expected an int"),
        ({"page_size": 0}, ValueError, "page_size: 0, expected at least 1"),
        ({"page_size": -16}, ValueError, "page_size: -16, expected at least 1"),
        ({"page_size": "16"}, TypeError, "page_size: str, expected an int"),
    ]  # fmt: skip
    return table


TABLES: dict[str, list[Mistake]] = {
    "store_cache": store_mistakes(),
    "indexing": indexing_mistakes(),
    "h2d_gather": h2d_gather_mistakes(),
    "d2h_scatter": pair_mistakes("d2h_scatter"),
    "fast_compare_key": compare_key_mistakes(),
}


@pytest.mark.parametrize(
    ("op", "change", "kind", "text"),
    [(op, *mistake) for op, table in TABLES.items() for mistake in table],
    ids=[f"{op}-{i}" for op, table in TABLES.items() for i in range(len(table))],
)
def test_mistake(op: str, change: dict[str, Any], kind: type[Exception], text: str) -> None:
    good = good_arguments(op)
    unchanged = {name: value.clone() for name, value in good.items() if torch.is_tensor(value)}
    with pytest.raises(kind) as caught:
        getattr(jitkern, op)(**{**good, **change})
    assert type(caught.value) is kind
    assert str(caught.value) == f"{op}: {text}"
    for name, before in unchanged.items():
        assert torch.equal(good[name], before)


@pytest.mark.parametrize("op", TABLES)
def test_the_table_has_every_argument(op: str) -> None:
    assert set(inspect.signature(getattr(jitkern, op)).parameters) == set(good_arguments(op))
    getattr(jitkern, op)(**good_arguments(op))  # and is otherwise right
    named = {re.match(r"\w+", text)[0] for _, _, text in TABLES[op]}  # type: ignore[index]
    only_truth_counts = {"dedup", "record_source"}
    assert named == set(good_arguments(op)) - only_truth_counts


def test_indexing_without_output_has_the_same_messages() -> None:
    """There the output is made in Python, before the checks in C++ can run."""
    for change, kind, text in TABLES["indexing"]:
        if "output" in change:
            continue
        with pytest.raises(kind) as caught:
            jitkern.indexing(**{**good_arguments("indexing"), "output": None, **change})
        came = str(caught.value).replace(": NotATensor,", ": object,")
        wanted = text.replace("int of more than 64 bits, expected a t", "int, expected a t")
        assert came == f"indexing: {wanted}"


MIXED: list[tuple[str, str, str, str]] = [
    *[("store_cache", name, "cpu", "cuda:0 as in k_cache") for name in ("v_cache", "k", "v")],
    ("store_cache", "indices", "cpu", "cuda:0 as in k_cache"),
    ("indexing", "indices", "cpu", "cuda:0 as in weights"),
    ("indexing", "output", "cpu", "cuda:0 as in weights"),
    ("h2d_gather", "pairs", "cpu", "cuda:0 as in dst"),
    ("h2d_gather", "slot_map", "cpu", "cuda:0 as in dst"),
]


@pytest.mark.cuda
@pytest.mark.parametrize(("op", "argument", "came", "expected"), MIXED)
def test_mixed_devices(op: str, argument: str, came: str, expected: str) -> None:
    arguments = {
        name: value.cuda() if torch.is_tensor(value) and name not in (argument, "src") else value
        for name, value in good_arguments(op).items()
    }
    with pytest.raises(ValueError, match="device") as caught:
        getattr(jitkern, op)(**arguments)
    assert str(caught.value) == f"{op}: {argument}: device {came}, expected {expected}"


@pytest.mark.cuda
def test_a_source_on_the_gpu() -> None:
    arguments = good_arguments("h2d_gather")
    arguments["src"] = arguments["src"].cuda()
    with pytest.raises(ValueError, match=r"^h2d_gather: src: device cuda:0, expected cpu$"):
        jitkern.h2d_gather(**arguments)


CHECK: list[tuple[Any, type[Exception], str]] = [
    ("mps", ValueError, "check: device: mps, expected a CUDA device or the CPU"),
    ("gpu", ValueError, "check: device: 'gpu', expected a CUDA device or the CPU"),
    ("", ValueError, "check: device: '', expected a CUDA device or the CPU"),
    (-1, ValueError, "check: device: -1, expected a CUDA device or the CPU"),
    (64, ValueError, "check: device: 64, expected a CUDA device or the CPU"),
    (2**70, ValueError, f"check: device: {2**70}, expected a CUDA device or the CPU"),
    (True, ValueError, "check: device: True, expected a CUDA device or the CPU"),
    (1.5, TypeError, "check: device: float, expected a CUDA device or the CPU"),
    ([], TypeError, "check: device: list, expected a CUDA device or the CPU"),
]


@pytest.mark.parametrize(("value", "kind", "text"), CHECK, ids=[str(case[0]) for case in CHECK])
def test_check_mistake(value: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        jitkern.check(value)
    assert str(caught.value) == text


@pytest.mark.parametrize("value", [None, "cpu", "cuda", 0, 63, torch.device("cpu"), "cuda:0"])
def test_check_where_nothing_is_wrong(value: Any) -> None:
    assert jitkern.check(value) is None


def test_wrong_number_of_arguments_is_a_type_error() -> None:
    for op in (*TABLES, "check"):
        call: Callable[..., object] = getattr(jitkern, op)
        with pytest.raises(TypeError, match=rf"{op}\(\)"):
            call(1, 2, 3, 4, 5, 6)
