"""The table of the ops, which the package, its tests and its benchmarks read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

# Formats of rows, in the order of Format in csrc/ops/formats.h.
FormatName = Literal[
    "fp8_ds_mla",
    "fp8_index_k",
    "fp8_ds_v41",
    "fp8_ds_v41_paged",
    "fp8",
    "fp8_per_token_head",
    "int8_per_token_head",
]
FORMATS: tuple[str, ...] = get_args(FormatName)


class Size(NamedTuple):
    """A size, or the name of a format, that kernels are compiled for."""

    name: str  # the argument of ``jitkern.warm``, a plural
    option: str  # the option of ``jitkern warm``
    meaning: str
    unit: str
    limit: int = 0  # each size is below
    limit_text: str = ""
    example: str = ""  # a list of sizes
    older_option: str = ""  # the same as `option`
    choices: tuple[str, ...] = ()  # names, in the place of a size

    @property
    def expected(self) -> str:
        """What values are right, for errors."""
        return ", ".join(self.choices) or f"{self.meaning}, 1 or more and under {self.limit_text}"

    def accepts(self, value: Any) -> bool:
        return value in self.choices or (type(value) is int and 1 <= value < self.limit)


SIZES = (
    # The largest row is the limit in pairs.cuh, the largest head 2^30 bytes in fp32.
    Size(
        "row_bytes",
        "--row-bytes",
        "bytes per row",
        "BYTES",
        limit=1 << 30,
        limit_text="1 GiB",
        example="656,64k",
        older_option="--element-size",
    ),
    Size(
        "head_dims",
        "--head-dim",
        "elements per head",
        "DIM",
        limit=1 << 28,
        limit_text="2**28",
        example="64,128",
    ),
    Size("formats", "--format", "format of rows", "FORMAT", choices=FORMATS),
)


class Op(NamedTuple):
    """One op. Everything else about it is in the files of its stem."""

    stem: str  # the name of its files: ``ops/store.py``, ``csrc/ops/store.cc``, ...
    function: str  # its public function in ``ops/<stem>.py``, exported by ``jitkern``
    more: tuple[str, ...] = ()  # other public functions there
    has_kernels: bool = True  # its module has ``kernels`` and ``OVERLOADS``
    sized_by: str = "row_bytes"  # the name of the Size that ``kernels`` takes


class TorchOverload(NamedTuple):
    """An operator ``torch.ops.jitkern.*``. ``OVERLOADS`` in an op's module lists its operators.

    `one_by_one` replaces the operator in graphs by operators that write one tensor each, if the
    written tensors share an allocation, such as a pool of K and V. PyTorch's inductor would write
    one of them in place, and the other to a copy of the allocation; in torch 2.11 it copies from
    the wrong address.
    """

    schema: str  # "store_cache.v(Tensor(a!) v_cache, Tensor indices, Tensor v) -> ()"
    run: Callable[..., Any]  # takes all arguments, in the schema's order
    fake: Callable[..., Any]  # takes the same; returns results for tensors without memory
    one_by_one: Callable[..., None] | None = None


def no_result(*_: Any, **__: Any) -> None:
    """Return nothing: the fake of an operator that only writes."""


OPS = (
    Op("store", "store_cache"),
    Op("index", "indexing"),
    Op("h2d_gather", "h2d_gather"),
    Op("d2h_scatter", "d2h_scatter"),
    Op("copy_blocks", "copy_blocks"),
    Op("store_rows", "store_rows", sized_by="formats"),
    Op("gather_rows", "gather_rows", sized_by="formats"),
    Op("unpack", "unpack"),
    Op("merge", "merge_states", more=("merge_state",), sized_by="head_dims"),
    Op("memcpy_2d", "memcpy_2d_async", has_kernels=False),  # runs on the copy engine
    Op("compare_key", "fast_compare_key", has_kernels=False),
)
# Methods with kernels: ``offload.ResidencyMap`` has them, the package does not export them.
METHODS = (Op("residency", "swap_in", more=("resolve",)),)
KERNEL_OPS = tuple(op for op in (*OPS, *METHODS) if op.has_kernels)


def op_names() -> dict[str, str]:
    """Return {name: stem} of all that has kernels, by public name and by stem."""
    return {name: op.stem for op in KERNEL_OPS for name in (op.function, *op.more, op.stem)}


def op_sizes() -> dict[str, Size]:
    """Return {name: the Size that its kernels are compiled for}, by the same names."""
    sizes = {size.name: size for size in SIZES}
    size_of = {op.stem: sizes[op.sized_by] for op in KERNEL_OPS}
    return {name: size_of[stem] for name, stem in op_names().items()}
