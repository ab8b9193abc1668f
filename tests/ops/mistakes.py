"""Wrong arguments that several ops have, and the texts of their errors."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import tvm_ffi
from fake_gpu import OnCuda
from torch import Tensor

ROWS, SLOTS = 3, 50
COPY_FOR_READS = "; .contiguous() makes a copy"  # ends errors of tensors that are only read
Mistake = tuple[dict[str, Any], type[Exception], str]


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


def stride_text(
    argument: str, stride: int, dim: int, shape: list[int], expected: int, cure: str = ""
) -> str:
    return (
        f"{argument}: stride {stride} in dimension {dim} of shape {shape}, expected contiguous "
        f"rows, stride {expected}{cure}"
    )


def apart_text(argument: str, stride_bytes: int, shape: list[int]) -> str:
    """Return the error of rows of 32 bytes in a tensor that is written."""
    return (
        f"{argument}: rows of 32 bytes, {stride_bytes} bytes apart (shape {shape}), expected 32 or "
        "more in a tensor that is written, as one that was expanded is not"
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


def overlap_text(argument: str, written: str) -> str:
    return f"{argument}: overlaps {written}, expected memory of its own"


class NotATensor:
    pass


def on_cuda(tensor: Tensor) -> Any:
    """Return memory of the CPU that says that it is a GPU's: to be refused by its device."""
    return tvm_ffi.from_dlpack(OnCuda(tensor))


def non_tensors(argument: str, *, optional: bool = False) -> list[Mistake]:
    """What is not a tensor at all, under the name that Python has for it."""
    values: dict[str, Any] = {
        "None": None, "int": 7, "int of more than 64 bits": 2**70, "float": 1.5, "bool": True,
        "str": "cache", "list or tuple": [1, 2], "dict": {}, "bytes": b"row",
        "object": NotATensor(), "dtype": torch.float32, "function": zeros,
    }  # fmt: skip
    return [
        ({argument: value}, TypeError, f"{argument}: {came}, expected a tensor")
        for came, value in values.items()
        if not (value is None and optional)
    ]


def unreadable(argument: str, like: Tensor) -> list[Mistake]:
    """Tensors without plain memory behind them."""
    shape, dtype = like.shape, like.dtype
    good = torch.zeros(shape, dtype=dtype)
    freed = torch.zeros(shape, dtype=dtype)
    freed.untyped_storage().resize_(0)
    cases = [
        (good.to("meta"), "device meta, expected cpu or cuda"),
        (good.to_sparse(), "layout sparse_coo, expected strided"),
        (freed, "no memory behind it, expected allocated memory"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch: nested tensors are a prototype
        jagged = torch.nested.nested_tensor([good.reshape(-1)], layout=torch.jagged)
        cases.append((jagged, "layout jagged, expected strided"))
    if good.dim() == 2:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch: CSR is in beta state
            cases.append((good.to_sparse_csr(), "layout sparse_csr, expected strided"))
    if dtype == torch.float32:
        cases.append((good.to_mkldnn(), "layout _mkldnn, expected strided"))
        zero = torch._efficientzerotensor(shape)
        cases.append((zero, "no memory behind it, expected allocated memory"))
    return [({argument: tensor}, ValueError, f"{argument}: {text}") for tensor, text in cases]


def not_ints(*arguments: str, optional: bool = False) -> list[Mistake]:
    """What is no int."""
    values = [
        ("float", 1.0), ("bool", True), ("str", "2"), ("int of more than 64 bits", 2**63),
        ("Tensor", torch.tensor(2)), *[("None", None)] * (not optional),
    ]  # fmt: skip
    return [
        ({name: value}, TypeError, f"{name}: {came}, expected an int")
        for name in arguments
        for came, value in values
    ]


def not_rows(
    name: str, shape: list[int], *, written: bool = False, like: str = "", cure: str = ""
) -> list[Mistake]:
    """What is no table of contiguous rows, or not `like` that other one of float32."""
    rows, items = shape
    table: list[Mistake] = [
        ({name: torch.tensor(1.0)}, ValueError, f"{name}: shape [], expected at least 1 dimension"),
        ({name: zeros(items, rows).t()}, ValueError, stride_text(name, rows, 1, shape, 1, cure)),
    ]
    if written:
        expanded = zeros(1, items).expand(shape)
        table.append(({name: expanded}, ValueError, apart_text(name, 0, shape)))
    if like:
        text = f"{name}: dtype float16, expected float32 as in {like}"
        table.append(({name: zeros(rows, items).half()}, TypeError, text))
    return table


def not_num_sms() -> list[Mistake]:
    few = [({"num_sms": n}, ValueError, f"num_sms: {n}, expected at least 1") for n in (0, -3)]
    return few + not_ints("num_sms", optional=True)


def not_words(
    name: str, expected: str, *wrong: str, optional: bool = False, a_list: str = "list or tuple"
) -> list[Mistake]:
    """Return what is none of an argument's words: these, nothing, and what is no str."""
    values = [
        ("bool", True), ("int", 2), ("float", 1.5), ("bytes", b"2"), (a_list, ["e"]),
        ("Tensor", torch.ones(2)), *[("None", None)] * (not optional),
    ]  # fmt: skip
    words = [({name: word}, ValueError, f'{name}: {word!r}, expected {expected}')
             for word in (*wrong, "")]  # fmt: skip
    return words + [
        ({name: value}, TypeError, f"{name}: {came}, expected {expected}") for came, value in values
    ]


def read_only(good: dict[str, Any], *arguments: str) -> list[Mistake]:
    """NumPy arrays that DLPack does not export."""
    table: list[Mistake] = []
    for name in arguments:
        array = good[name].numpy().copy()
        array.flags.writeable = False
        text = f"{name}: a read-only array, expected a writable one; .copy() one that is only read"
        table.append(({name: array}, ValueError, text))
    return table


def bad_indices(argument: str, good: Tensor, cure: str = COPY_FOR_READS) -> list[Mistake]:
    """Indices of a wrong dtype, and some that are not contiguous."""
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
    text = f"{argument}: {came}, expected a contiguous tensor{cure}"
    return [*mistakes, ({argument: spread}, ValueError, text)]


def not_tensors(good: dict[str, Any], *arguments: str, optional: str = "") -> list[Mistake]:
    """What is no tensor, or none that can be read, in the place of each of these arguments."""
    return [
        mistake
        for name in arguments
        for mistake in (
            *non_tensors(name, optional=name == optional),
            *unreadable(name, good[name]),
        )
    ]


def good_pair_arguments() -> dict[str, Any]:
    pairs = torch.tensor([[0, 1], [2, 3]])
    tensors = {"src": zeros(ROWS, 8), "dst": zeros(SLOTS, 8), "pairs": pairs}
    return {**tensors, "num_sms": 2, "order": "auto", "method": "auto"}


def pair_mistakes(good: dict[str, Any], host: str) -> list[Mistake]:
    """What the ops of pairs have in common; `host` is the argument that is in host memory."""
    table = not_tensors(good, "src", "dst", "pairs") + bad_indices("pairs", good["pairs"])
    table += read_only(good, "src", "dst", "pairs")
    wanted = "expected shape [..., 2] of (source row, destination row)"
    memory = torch.zeros(SLOTS, 4, dtype=torch.int64)
    table += [
        *not_rows("src", [ROWS, 8], like="dst"),
        *not_rows("dst", [SLOTS, 8], written=True),
        ({"src": zeros(ROWS, 7)}, ValueError, bytes_text("src", 28, [3, 7], "dst")),
        ({"pairs": torch.tensor(3)}, ValueError, f"pairs: shape [], {wanted}"),
        ({"pairs": torch.arange(3)}, ValueError, f"pairs: shape [3], {wanted}"),
        ({"pairs": (torch.arange(3), torch.arange(3))}, TypeError,
         "pairs: list or tuple, expected a tensor, such as torch.stack((src, dst), 1)"),
        ({"pairs": torch.zeros(2, 3, dtype=torch.int32)}, ValueError,
         f"pairs: shape [2, 3], {wanted}"),
        ({"pairs": torch.zeros(3, 2, dtype=torch.int32).T}, ValueError,
         f"pairs: shape [2, 3], {wanted}"),
        ({"dst": memory.view(torch.float32), "pairs": memory[7].view(2, 2)}, ValueError,
         overlap_text("pairs", "dst")),
        ({"src": good["dst"][47:], "dst": good["dst"]}, ValueError, overlap_text("dst", "src")),
        *not_num_sms(),
        ({host: on_cuda(good[host])}, ValueError,
         f"{host}: device cuda:0, expected cpu, in the order (src, dst, pairs)"),
        *not_words("order", "'auto', 'given' or 'sorted'", "source", "Auto", optional=True),
        ({"pairs": torch.tensor([[0, 1], [3, 3]])}, IndexError,
         index_text("pairs[..., 0]", 3, 1, 3)),
        ({"pairs": torch.tensor([[[0, 50]], [[0, 1]]])}, IndexError,
         index_text("pairs[..., 1]", 50, 0, 50)),
    ]  # fmt: skip
    return table
