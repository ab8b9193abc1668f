"""Wrong arguments of merge_states and merge_state, and the texts of their errors."""

from __future__ import annotations

from typing import Any

import mistakes as common
import torch
from mistakes import Mistake, zeros
from torch import Tensor

SHAPE, LSE_SHAPE = (4, 2, 8), (4, 2)
FP8 = torch.float8_e4m3fn
FLOATS = "float32, float16 or bfloat16"
OWN = "expected memory of its own"
OWN_OR_SAME = f"{OWN}, or exactly that of a partial, to merge in place"
LIST = "expected a list of tensors, or one stacked tensor"
COUNT = "expected 1 to 64 partial results"
APART = "expected rows apart in a tensor that is written, as those of one that was expanded are not"


Wrong = tuple[Any, type[Exception], str]  # value of one argument


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def not_partials(name: str, good: Tensor | None = None) -> list[Mistake]:
    """What is no tensor, under Python's name for it: these are looked at there once a call failed.

    With `good`, also tensors that cannot be read.
    """
    table = []
    for change, kind, text in common.non_tensors(name):
        for name_of_ffi, name_of_python in (
            (" object,", " NotATensor,"), (" of more than 64 bits", ""), (" or tuple,", ","),
        ):  # fmt: skip
            text = text.replace(name_of_ffi, name_of_python)
        table.append((change, kind, text))
    return table if good is None else table + common.unreadable(name, good)


def layouts_text(argument: str, came: list[int], like: str, *, heads_first: bool = False) -> str:
    """Return the error of an lse that does not fit tensors of SHAPE."""
    fits, other, fits_other = (
        ("[2, 4] of (heads, tokens)", "tokens_heads", "[4, 2] of (tokens, heads)")
        if heads_first
        else ("[4, 2] of (tokens, heads)", "heads_tokens", "[2, 4] of (heads, tokens)")
    )
    return (
        f"{argument}: shape {came}, expected {fits}, as {like} has shape {list(SHAPE)}; or with "
        f'lse_layout="{other}" {fits_other}'
    )


def shared_text(argument: str, row_bytes: int, token: int, head: int, shape: list[int]) -> str:
    return (
        f"{argument}: rows of {row_bytes} bytes that overlap, {token} and {head} bytes apart "
        f"(shape {shape}), {APART}"
    )


def of_dtypes(name: str, good: Tensor, dtypes: list[torch.dtype], expected: str) -> list[Wrong]:
    return [
        (good.to(dtype), TypeError, f"{name}: dtype {dtype_name(dtype)}, expected {expected}")
        for dtype in dtypes
    ]


def mistakes_of_partials(partials: list[Tensor], lses: list[Tensor]) -> list[Mistake]:
    """Mistakes in a partial that is not the first."""
    given, wrong = {"partials": partials, "lses": lses}, dict[str, list[Wrong]]()
    for name, good in (("partials", partials[1]), ("lses", lses[1])):
        one = f"{name}[1]"
        wrong[name] = [(change[one], kind, text) for change, kind, text in not_partials(one, good)]
        odd, other = [torch.float64, torch.int32, FP8], [torch.float16, torch.bfloat16]
        is_lse = name == "lses"
        wrong[name] += of_dtypes(one, good, odd, "float32" if is_lse else FLOATS)
        wrong[name] += of_dtypes(
            one, good, other, "float32" if is_lse else "float32 as in partials[0]"
        )
    for shape in ([4, 2, 9], [4, 3, 8], [3, 2, 8], [2, 4, 8], [4, 2], [1, 4, 2, 8], [], [4, 2, 0]):
        text = f"partials[1]: shape {shape}, expected shape [4, 2, 8] as in partials[0]"
        wrong["partials"].append((torch.zeros(shape), ValueError, text))
    for shape in ([2, 4], [4, 3], [4], [4, 2, 1], [0, 2], []):
        text = layouts_text("lses[1]", shape, "partials[0]")
        wrong["lses"].append((torch.zeros(shape), ValueError, text))
    step, same, far = zeros(4, 2, 16)[..., ::2], zeros(4, 2, 1).expand(SHAPE), zeros(8, 4, 2)
    for strided, stride in ((step, 2), (same, 0), (far.permute(1, 2, 0), 8)):
        text = common.stride_text("partials[1]", stride, 2, [4, 2, 8], 1)
        wrong["partials"].append((strided, ValueError, text))
    return [
        ({name: [given[name][0], value, given[name][2]]}, kind, text)
        for name, table in wrong.items()
        for value, kind, text in table
    ]


def mistakes_of_overlaps(partials: list[Tensor], lses: list[Tensor]) -> list[Mistake]:
    """Results and `scale` in memory of a partial or of each other."""
    memory, logs = torch.zeros(80), torch.zeros(20)
    values, numbers = memory[:64].view(SHAPE), logs[:8].view(LSE_SHAPE)
    of_out = {"partials": [partials[0], values, partials[2]]}
    of_lse = {"lses": [lses[0], numbers, lses[2]]}
    across = {"lses": [lses[0], memory[60:68].view(LSE_SHAPE), lses[2]]}
    no_scale = {"scale": None}
    return [
        ({**of_out, "output": memory[1:65].view(SHAPE), **no_scale}, ValueError,
         f"output: overlaps partials[1], {OWN_OR_SAME}"),
        ({**of_out, "output": memory.view(FP8)[:64].view(SHAPE)}, ValueError,
         f"output: overlaps partials[1], {OWN_OR_SAME}"),  # at its place, of other rows
        ({**across, "output": values, **no_scale}, ValueError, f"output: overlaps lses[1], {OWN}"),
        ({**of_lse, "lse": logs[1:9].view(LSE_SHAPE)}, ValueError,
         f"lse: overlaps lses[1], {OWN_OR_SAME}"),
        ({**of_out, "lse": memory[30:38].view(LSE_SHAPE)}, ValueError,
         f"lse: overlaps partials[1], {OWN}"),
        ({"output": values, "lse": memory[63:71].view(LSE_SHAPE), **no_scale}, ValueError,
         f"lse: overlaps output, {OWN}"),
        ({"output": memory.view(FP8)[:64].view(SHAPE), "scale": memory[15]}, ValueError,
         f"scale: overlaps output, {OWN}"),
        ({"lse": numbers, "scale": logs[7:8]}, ValueError, f"scale: overlaps lse, {OWN}"),
        ({"output": memory.view(FP8)[:64].view(1, 8, 8)[:, :2].expand(SHAPE)}, ValueError,
         shared_text("output", 8, 0, 8, [4, 2, 8])),
        ({"lse": numbers[:1].expand(4, 2)}, ValueError, shared_text("lse", 4, 0, 4, [4, 2])),
    ]  # fmt: skip


def mistakes_of_results() -> list[Mistake]:
    """Mistakes in `output`, `lse` and `scale`, apart from overlaps."""
    table: list[Mistake] = []
    odd = [torch.float64, torch.int32, torch.float8_e5m2, torch.bool]
    for name, good, other, expected in (
        ("output", zeros(*SHAPE), [], f"{FLOATS.replace(' or', ',')} or float8_e4m3fn"),
        ("lse", zeros(*LSE_SHAPE), [torch.float16], "float32"),
        ("scale", zeros(1), [], "float32"),
    ):
        choices = "a tensor, None or False" if name == "lse" else "a tensor"
        table += [
            (value, kind, text.replace("a tensor", choices))
            for value, kind, text in common.non_tensors(name, optional=True)
        ]
        table += common.unreadable(name, good)
        wrong = of_dtypes(name, good, [*odd, *other], expected)
        table += [({name: value}, kind, text) for value, kind, text in wrong]
    for shape in ([4, 2, 9], [4, 3, 8], [3, 2, 8], [2, 4, 8], [4, 16], [1, 4, 2, 8], []):
        fits = "shape [4, 2, 8] as in partials[0]" if len(shape) == 3 else "[tokens, heads, dim]"
        text = f"output: shape {shape}, expected {fits}"
        table.append(({"output": torch.zeros(shape).to(FP8)}, ValueError, text))
    for shape in ([2, 4], [4, 3], [4], [4, 2, 1], []):
        text = layouts_text("lse", shape, "output")
        table.append(({"lse": torch.zeros(shape)}, ValueError, text))
    table += [
        ({"output": zeros(4, 2, 16).to(FP8)[..., ::2]}, ValueError,
         common.stride_text("output", 2, 2, [4, 2, 8], 1)),
        ({"scale": None}, ValueError,
         "scale: None, expected a float32 tensor of 1 element, as output is float8_e4m3fn"),
        *(({"scale": torch.ones(n)}, ValueError, f"scale: shape [{n}], expected 1 element")
          for n in (0, 2)),
        ({"output": None}, ValueError, "scale: a tensor, expected None, as output is float32"),
        *(({"output": zeros(*SHAPE, dtype=dtype)}, ValueError,
           f"scale: a tensor, expected None, as output is {dtype_name(dtype)}")
          for dtype in (torch.float32, torch.float16, torch.bfloat16)),
    ]  # fmt: skip
    for name, known in (("base", ("e", "2")), ("lse_layout", ("tokens_heads", "heads_tokens"))):
        words = ("10", "E", "heads", known[0] + " ")
        expected = f"'{known[0]}' or '{known[1]}'"
        table += common.not_words(name, expected, *words, optional=True)
    return table


def mistakes_of_lists(partials: list[Tensor], lses: list[Tensor]) -> list[Mistake]:
    """Mistakes in lists and stacked tensors as such."""
    stack, logs = torch.stack(partials), torch.stack(lses)
    table: list[Mistake] = []
    for name in ("partials", "lses"):
        for value in (None, 7, "partials", {0: stack}, iter(partials), torch.tensor(1.0)):
            text = f"{name}: {type(value).__name__}, {LIST}"
            table.append(({name: value}, TypeError, text.replace("NoneType", "None")))
        table.append(({name: [7, 7, 7]}, TypeError, f"{name}[0]: int, expected a tensor"))
    for number in (0, 65, 100):
        few = {"partials": [partials[0]] * number, "lses": [lses[0]] * number}
        table.append((few, ValueError, f"partials: a list of {number}, {COUNT}"))
    return [
        *table,
        ({"partials": stack[:0], "lses": logs[:0]}, ValueError, f"partials: a list of 0, {COUNT}"),
        ({"lses": logs[:2]}, ValueError, "lses: a list of 2, expected 3, as many as partials"),
        ({"partials": tuple(partials[:1])}, ValueError,
         "lses: a list of 3, expected 1, as many as partials"),
        ({"lses": logs.mT}, ValueError, layouts_text("lses[0]", [2, 4], "partials[0]")),
        ({"lse_layout": "heads_tokens"}, ValueError,
         layouts_text("lses[0]", [4, 2], "partials[0]", heads_first=True)),
        ({"partials": stack[..., :0]}, ValueError, "partials[0]: dim 0, expected 1 to 268435455"),
        ({"partials": stack[:, 0]}, ValueError,
         "partials[0]: shape [2, 8], expected [tokens, heads, dim]"),
        ({"output": None, "partials": stack.to("meta")}, ValueError,
         "partials[0]: device meta, expected cpu or cuda"),
    ]  # fmt: skip


def mistakes_of_many(good: dict[str, Any]) -> list[Mistake]:
    lists = good["partials"], good["lses"]
    return [
        *mistakes_of_lists(*lists),
        *mistakes_of_partials(*lists),
        *mistakes_of_overlaps(*lists),
        *mistakes_of_results(),
    ]


def mistakes_of_two() -> list[Mistake]:
    """The checks are those of lists: what is shown is that each has the right name."""
    table: list[Mistake] = [
        ({"partial_b": zeros(*SHAPE).half()}, TypeError,
         "partial_b: dtype float16, expected float32 as in partial_a"),
        ({"lse_b": zeros(*LSE_SHAPE).half()}, TypeError, "lse_b: dtype float16, expected float32"),
        ({"partial_b": zeros(4, 2, 9)}, ValueError,
         "partial_b: shape [4, 2, 9], expected shape [4, 2, 8] as in partial_a"),
        ({"lse_b": zeros(4, 3)}, ValueError, layouts_text("lse_b", [4, 3], "partial_a")),
        ({"partial_a": zeros(0, 2, 2**28)}, ValueError,
         "partial_a: dim 268435456, expected 1 to 268435455"),
    ]  # fmt: skip
    for name in ("partial_a", "lse_a", "partial_b", "lse_b"):
        table += not_partials(name, zeros(*(SHAPE if "out" in name else LSE_SHAPE)))
    prefill = "prefill_tokens_with_context"
    table += [
        ({prefill: value}, ValueError, f"{prefill}: {value}, expected 0 or more")
        for value in (-1, -(2**63))
    ]
    return table + common.not_ints(prefill, optional=True)
