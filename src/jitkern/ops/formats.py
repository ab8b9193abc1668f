"""The formats of rows that engines keep, and the kernels that store and gather them.

``csrc/ops/formats.h`` describes each format: groups, scales, where scales lie.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from jitkern.args import choice_arg
from jitkern.jit.device import DeviceModule
from jitkern.jit.template import KernelConfig, make_cpp_args
from jitkern.ops._ops import FORMATS
from jitkern.ops.common import INDEX_BYTES, load_entries

# Groups, values of a group, bytes of the rest of a row that `jitkern warm` compiles for: Format of
# csrc/ops/formats.h, in its order. DeepSeek V3.2 and GLM-5; its index keys; DeepSeek V4.1; 8, 4 and
# 1 heads of 128 for K and V.
_HEADS = ((8, 128, 0), (4, 128, 0), (1, 128, 0))
_SHAPES: dict[str, tuple[tuple[int, int, int], ...]] = {
    "fp8_ds_mla": ((4, 128, 128),),
    "fp8_index_k": ((1, 128, 0),),
    "fp8_ds_v41": ((16, 32, 0),),
    "fp8_ds_v41_paged": ((16, 32, 0),),
    "fp8": _HEADS,
    "fp8_per_token_head": _HEADS,
    "int8_per_token_head": _HEADS,
}

# On an H200, 131,072 rows of fp8_ds_mla, with the best number of blocks: 1, 2, 4 vectors of a lane
# (kLaneVecs of csrc/ops/formats.h) take 74.5, 71.1, 74.1 us for a store, 65.3, 63.9, 71.0 for a
# gather. More blocks spill a store's registers: with 12 it takes 95.4 us.
CONFIGS = {
    "store_rows": KernelConfig(num_threads=128, max_occupancy=8, use_pdl=True),
    "gather_rows": KernelConfig(num_threads=128, max_occupancy=12, use_pdl=True),
}
_TYPE_NAMES = {"store_rows": "StoreRowsKernel", "gather_rows": "GatherRowsKernel"}
_TYPES = ("f32", "f16", "bf16")  # FloatType of csrc/ops/floats.h, in its order
_BF16 = 2
_MOST_ELEMS = 16  # values of a lane's vector, as in csrc/ops/formats.cc

# Numbers of Format for C++: names would take 0.1 us more.
NUMBERS: dict[str | None, int] = {name: number for number, name in enumerate(FORMATS)}
NO_FORMAT = -1  # kNoFormat of csrc/ops/formats_host.h


def number_of(op: str, format: Any) -> int:  # noqa: A002 - the argument's name
    """Return the number of a format. TypeError or ValueError for what names none."""
    if format is None and op == "gather_rows":
        *others, last = map(repr, FORMATS)
        expected = f"{', '.join(others)} or {last}; without a format: indexing"
        raise TypeError(f"{op}: format: None, expected {expected}")
    return NO_FORMAT if format is None else NUMBERS[choice_arg(op, "format", format, FORMATS)]


@cache
def kernel(
    op: str,
    format: int,  # noqa: A002 - the name in csrc/ops/formats.cc
    groups: int,
    group: int,
    rest_bytes: int,
    value_type: int,
    elems: int,
    index_bytes: int,
) -> DeviceModule:
    """Return the device module of one format, shape of rows, and type of values."""
    config = CONFIGS[op]
    spec = (format, groups, group, rest_bytes, value_type, elems, index_bytes)
    args = make_cpp_args(*spec, *config)
    shape = f"{groups}x{group}" + (f"+{rest_bytes}B" if rest_bytes else "")
    types = f"{_TYPES[value_type]}_v{elems}_i{8 * index_bytes}"
    name = f"jitkern_{op}_{FORMATS[format]}_{shape}_{types}".replace("+", "_")
    entry = (name, f"{_TYPE_NAMES[op]}<{args}>", config)
    return load_entries(op, f"ops/{op}.cu", [entry], args, (1, 1))


def kernels(op: str, name: str) -> list[DeviceModule]:
    """Return the kernels for contiguous bf16 rows in the format `name`."""
    return [
        kernel(op, FORMATS.index(name), *shape, _BF16, _MOST_ELEMS, index_bytes)
        for shape in _SHAPES[name]
        for index_bytes in INDEX_BYTES
    ]
