"""Wrong arguments of store_rows and gather_rows, and the texts of their errors."""

from __future__ import annotations

from typing import Any

import mistakes as common
import torch
from mistakes import Mistake, zeros

NAMES = ("'fp8_ds_mla', 'fp8_index_k', 'fp8_ds_v41', 'fp8_ds_v41_paged', 'fp8', "
         "'fp8_per_token_head' or 'int8_per_token_head'")  # fmt: skip
LIST = "expected a tensor, or a list of one or two"
FLOAT_TYPES = "expected float32, float16 or bfloat16"
ROWS_APART = (
    "expected rows apart in a tensor that is written, as those of one that was expanded are not"
)


def no_list(good: dict[str, Any], name: str) -> list[Mistake]:
    """Return what is neither a tensor nor a list of one or two."""
    optional = name if name == "scales" else ""
    table = common.not_tensors(good, name, optional=optional)
    table = [mistake for mistake in table if not isinstance(mistake[0][name], list)]
    tensor = good[name]
    table += [
        ({name: [tensor] * 3}, ValueError, f"{name}: a list of 3, {LIST}"),
        ({name: [1, 2]}, TypeError, f"{name}[0]: int, expected a tensor"),
        ({name: [tensor, None]}, TypeError, f"{name}[1]: None, expected a tensor"),
        ({name: [None]}, TypeError, f"{name}: None, expected a tensor"),
    ]
    if not optional:
        table.append(({name: []}, ValueError, f"{name}: a list of 0, {LIST}"))
    return table


def rows_mistakes(good: dict[str, Any], name: str) -> list[Mistake]:
    """Return what store_rows and gather_rows have in common; `name` is `parts` or `outputs`."""
    slots = zeros(50, 8, dtype=torch.uint8)
    two = {"cache": [good["cache"], slots], name: [good[name], zeros(3, 2, 4)],
           "scales": [good["scales"], zeros(50, 2)]}  # fmt: skip
    mla = {"cache": zeros(50, 656, dtype=torch.uint8), "format": "fp8_ds_mla", "scales": None,
           name: [zeros(3, 512), zeros(3, 64).half()]}  # fmt: skip
    index_k = {"cache": zeros(5, 10, 132, dtype=torch.uint8), "format": "fp8_index_k",
               name: zeros(3, 128), "scales": None}  # fmt: skip
    given = {"format": "fp8", "scales": zeros(2)}
    v41 = {"format": "fp8_ds_v41", "scales": None}
    heads = f"{name}: shape %s, expected [rows, heads, dim] or [rows, dim]"
    aligned = "expected an address and strides that are multiples of 4 bytes"
    in_cache = "expected None: the scales of this format lie in the cache"
    one = "expected one tensor: this format has no bytes beside the values"
    apart = "expected [num_slots, 2] or [num_blocks, page, 2]"
    counts = "expected 1 element, or one for each of 2 heads"
    pages = "expected [num_blocks, page, 132]"
    table = no_list(good, "cache") + no_list(good, name) + no_list(good, "scales")
    table += common.read_only(good, "cache", name, "scales", "indices")
    table += common.not_tensors(good, "indices") + common.bad_indices("indices", good["indices"])
    table += [
        # cache
        ({"cache": zeros(50, 8)}, TypeError,
         "cache: dtype float32, expected uint8, or another dtype of one byte"),
        ({"cache": torch.tensor(1, dtype=torch.uint8)}, ValueError,
         "cache: shape [], expected at least 1 dimension"),
        ({"cache": zeros(5, 10, 2, 5, dtype=torch.uint8)}, ValueError,
         "cache: rows of 10 bytes (shape [5, 10, 2, 5]), expected 8 bytes for "
         f"{name} (shape [3, 2, 4])"),
        ({"cache": zeros(8, 50, dtype=torch.uint8).t()}, ValueError,
         common.stride_text("cache", 50, 1, [50, 8], 1)),
        ({**two, name: good[name]}, ValueError,
         f"{name}: one tensor, expected two, one for each cache"),
        ({**two, "cache": [good["cache"], slots[:49]]}, ValueError,
         "cache[1]: 49 rows (shape [49, 8]), expected 50 rows as in cache[0]"),
        ({**two, name: [good[name], zeros(3, 2, 5)]}, ValueError,
         f"cache[1]: rows of 8 bytes (shape [50, 8]), expected 10 bytes for {name}[1] "
         "(shape [3, 2, 5])"),
        ({**mla, "cache": zeros(50, 657, dtype=torch.uint8)}, ValueError,
         f"cache: rows of 657 bytes (shape [50, 657]), expected 656 bytes for {name}[0] "
         f"(shape [3, 512]) and {name}[1] (float16, shape [3, 64])"),
        ({**mla, "cache": zeros(50, 657, dtype=torch.uint8)[:, :656]}, ValueError,
         f"cache: scales that are not aligned to 4 bytes, {aligned}"),
        ({**mla, "cache": zeros(50 * 656 + 1, dtype=torch.uint8)[1:].view(50, 656)}, ValueError,
         f"cache: scales that are not aligned to 4 bytes, {aligned}"),
        ({**mla, "cache": zeros(5, 10, 1312, dtype=torch.uint8)[..., ::2]}, ValueError,
         "cache: rows that are not contiguous (shape [5, 10, 656]), expected contiguous rows"),
        ({**index_k, "cache": zeros(50, 132, dtype=torch.uint8)}, ValueError,
         f"cache: shape [50, 132], {pages}"),
        ({**index_k, "cache": zeros(5, 10, 133, dtype=torch.uint8)[..., :132]}, ValueError,
         "cache: stride 133 of dimension 1, expected contiguous pages, stride 132"),
        # values
        *(({name: zeros(3, 2, 4, dtype=dtype)}, TypeError,
           f"{name}: dtype {str(dtype).removeprefix('torch.')}, {FLOAT_TYPES}")
          for dtype in (torch.float64, torch.int32, torch.uint8, torch.float8_e4m3fn)),
        *(({name: zeros(n, 2, 4)}, ValueError, common.count_text(name, n, [n, 2, 4], 3))
          for n in (0, 4)),
        *(({name: torch.zeros(shape)}, ValueError, heads % list(shape))
          for shape in [(3,), (), (3, 1, 2, 4)]),
        *(({name: zeros(*shape)}, ValueError,
           f"{name}: shape {list(shape)}, expected rows of 1 value or more")
          for shape in [(3, 0), (3, 2, 0)]),
        ({name: zeros(3, 2, 8)[..., ::2]}, ValueError,
         common.stride_text(name, 2, 2, [3, 2, 4], 1)),
        ({name: [good[name], zeros(3, 8)]}, ValueError, f"{name}[1]: given, {one}"),
        ({**two, name: [good[name], zeros(4, 2, 4)]}, ValueError,
         common.count_text(f"{name}[1]", 4, [4, 2, 4], 3)),
        ({**v41, name: zeros(3, 500)}, ValueError,
         f"{name}: shape [3, 500], expected rows of a multiple of 32 values"),
        ({**mla, name: [zeros(3), zeros(3, 64)]}, ValueError,
         f"{name}[0]: shape [3], expected [rows, dim]"),
        # the rest of a row
        ({**mla, name: zeros(3, 512)}, ValueError,
         f"{name}: 528 bytes per row in this format (shape [3, 512]), expected 656 as in cache "
         "(shape [50, 656]); give a second tensor of 128 bytes per row"),
        ({**mla, name: zeros(3, 640)}, ValueError,
         f"cache: rows of 656 bytes (shape [50, 656]), expected 660 bytes for {name} (shape "
         "[3, 640])"),
        ({**mla, name: [zeros(3, 512), zeros(4, 64).half()]}, ValueError,
         common.count_text(f"{name}[1]", 4, [4, 64], 3)),
        ({**mla, name: [zeros(3, 512), zeros(3, 128).half()[:, ::2]]}, ValueError,
         common.stride_text(f"{name}[1]", 2, 1, [3, 64], 1)),
        # scales
        *(({"scales": scales}, ValueError, "scales: None, expected one for each cache")
          for scales in (None, [])),
        ({"scales": [good["scales"], zeros(50, 2)]}, ValueError,
         "scales: two tensors, expected one for each cache"),
        ({**two, "scales": good["scales"]}, ValueError,
         "scales: one tensor, expected one for each cache"),
        *(({"format": kept, "scales": zeros(1)}, ValueError, f"scales: one tensor, {in_cache}")
          for kept in ("fp8_ds_mla", "fp8_index_k", "fp8_ds_v41", "fp8_ds_v41_paged")),
        *(({"scales": good["scales"].to(dtype)}, TypeError,
           f"scales: dtype {str(dtype).removeprefix('torch.')}, expected float32")
          for dtype in (torch.float64, torch.bfloat16)),
        *(({"scales": zeros(*shape)}, ValueError, f"scales: shape {list(shape)}, {apart}")
          for shape in [(50, 3), (50,), (100,), (5, 10, 3), (5, 10, 2, 1)]),
        ({"scales": zeros(49, 2)}, ValueError,
         "scales: 49 rows (shape [49, 2]), expected 50 rows as in cache"),
        ({"scales": zeros(2, 50).t()}, ValueError,
         common.stride_text("scales", 50, 1, [50, 2], 1)),
        *(({**given, "scales": zeros(*shape)}, ValueError,
           f"scales: shape {list(shape)}, {counts}") for shape in [(0,), (3,), (2, 1), (50, 2)]),
        ({**given, "scales": zeros(2).half()}, TypeError,
         "scales: dtype float16, expected float32"),
        # indices
        *(({"indices": torch.zeros(shape, dtype=torch.int64)}, ValueError,
           f"indices: shape {shape}, expected 1 dimension") for shape in ([3, 1], [])),
        ({"indices": torch.arange(4)}, ValueError, common.count_text(name, 3, [3, 2, 4], 4)),
        ({"indices": torch.tensor([4, 50, 51])}, IndexError,
         common.index_text("indices", 50, 1, 50)),
    ]  # fmt: skip
    return table


def store_rows_mistakes(good: dict[str, Any]) -> list[Mistake]:
    table = rows_mistakes(good, "parts")
    slots, memory = zeros(50, 8, dtype=torch.uint8), torch.zeros(100, dtype=torch.int64)
    # In one memory: a cache, and what may not lie in it.
    cache, values = memory.view(torch.uint8)[:400].view(50, 8), memory.view(torch.float32)
    scales, rows = values[:100].view(50, 2), values[50:74].view(3, 2, 4)
    where = memory[30:33]
    two = {"cache": [good["cache"], slots], "parts": [good["parts"], zeros(3, 2, 4)],
           "scales": [good["scales"], zeros(50, 2)]}  # fmt: skip
    plain = {"format": None, "scales": None}
    parts = {**plain, "cache": zeros(50, 8), "parts": [zeros(3, 6), zeros(3, 2)]}
    table += [
        *common.not_words("format", NAMES, "mxfp4", "FP8", optional=True, a_list="list"),
        ({"format": "fp8_dsmla"}, ValueError,
         f"format: 'fp8_dsmla', expected {NAMES}; did you mean 'fp8_ds_mla'?"),
        *common.not_words("scale_rule", "'pow2' or 'fp32'", "fp16", optional=True),
        *common.not_ints("skip", optional=True),
        *(({"scale_rule": rule}, ValueError,
           "scale_rule: given, expected None: this format has one rule")
          for rule in ("pow2", "fp32")),
        # expanded
        ({"cache": zeros(1, 10, 2, 4, dtype=torch.uint8).expand(5, 10, 2, 4)}, ValueError,
         f"cache: rows of 8 bytes that overlap (shape [5, 10, 2, 4]), {ROWS_APART}"),
        *(({name: tensor[:1].expand(50, -1)}, ValueError,
           common.apart_text(name, 0, [50, tensor.shape[1]]).replace("32", "8"))
          for name, tensor in (("cache", slots), ("scales", good["scales"]))),
        # overlap
        ({"cache": cache, "parts": rows}, ValueError, common.overlap_text("parts", "cache")),
        ({"cache": cache, "indices": where}, ValueError, common.overlap_text("indices", "cache")),
        ({"cache": cache, "scales": scales}, ValueError, common.overlap_text("scales", "cache")),
        ({"scales": scales, "parts": rows}, ValueError, common.overlap_text("parts", "scales")),
        ({"scales": scales, "indices": where}, ValueError,
         common.overlap_text("indices", "scales")),
        ({"cache": cache, "format": "fp8", "scales": values[:2]}, ValueError,
         common.overlap_text("scales", "cache")),
        ({**two, "cache": [cache, cache]}, ValueError, common.overlap_text("cache[1]", "cache[0]")),
        ({**two, "cache": [slots, cache], "parts": [rows, good["parts"]]}, ValueError,
         common.overlap_text("parts[0]", "cache[1]")),
        ({**two, "scales": [scales, scales]}, ValueError,
         common.overlap_text("scales[1]", "scales[0]")),
        ({**two, "cache": [cache, slots], "scales": [good["scales"], scales]}, ValueError,
         common.overlap_text("scales[1]", "cache[0]")),
        # without a format
        ({"format": None}, ValueError, "scales: given without a format, expected None"),
        ({**plain, "scale_rule": "fp32"}, ValueError,
         "scale_rule: given without a format, expected None"),
        ({**plain, "cache": zeros(50, 8), "parts": zeros(3, 7)}, ValueError,
         common.bytes_text("parts", 28, [3, 7], "cache")),
        ({**plain, "cache": zeros(50, 4, 2), "parts": zeros(3, 1, 2)}, ValueError,
         "parts: rows of 8 bytes (shape [3, 1, 2]), expected 32 bytes as in cache (shape "
         "[50, 4, 2])"),
        ({**parts, "cache": zeros(50, 9)}, ValueError,
         "cache: rows of 36 bytes (shape [50, 9]), expected 32 bytes, those of the parts together"),
        ({**parts, "cache": zeros(5, 10, 656, dtype=torch.uint8)}, ValueError,
         "cache: rows of 6560 bytes (shape [5, 10, 656]), expected 32 bytes, those of the parts "
         "together; without format= the parts are stored as they are (rows of 656 bytes: "
         "format='fp8_ds_mla')"),
        ({**parts, "cache": zeros(5, 2, 10, 4).transpose(1, 2),
          "parts": [zeros(3, 2, 3), zeros(3, 2, 1)]}, ValueError,
         "cache: rows that are not contiguous (shape [5, 10, 2, 4]), expected contiguous rows"),
        ({**parts, "cache": zeros(1, 8).expand(50, 8)}, ValueError,
         common.apart_text("cache", 0, [50, 8])),
        ({**parts, "parts": [zeros(3, 6), zeros(4, 2)]}, ValueError,
         common.count_text("parts[1]", 4, [4, 2], 3)),
        ({**parts, "parts": [zeros(3, 12)[:, ::2], zeros(3, 2)]}, ValueError,
         common.stride_text("parts[0]", 2, 1, [3, 6], 1, common.COPY_FOR_READS)),
        ({**parts, "cache": [zeros(50, 6), zeros(49, 2)]}, ValueError,
         "cache[1]: 49 rows (shape [49, 2]), expected 50 rows as in cache[0]"),
        ({**parts, "cache": values[:80].view(10, 8),
          "parts": [zeros(3, 6), values[9:15].view(3, 2)]}, ValueError,
         common.overlap_text("parts[1]", "cache")),
    ]  # fmt: skip
    return table
