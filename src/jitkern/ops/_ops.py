"""The table of the ops: what lists them, in the package, its tests and its benchmarks, reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Size(NamedTuple):
    """Something that kernels are compiled for a value of."""

    name: str  # with an s, the argument of ``jitkern.warm``
    meaning: str
    unit: str
    largest: int

    @property
    def option(self) -> str:
        """The option of ``jitkern warm``."""
        return f"--{self.name.replace('_', '-')}"


SIZES = (
    Size("element_size", "bytes of a row", "BYTES", (1 << 30) - 1),  # as pairs.cuh asserts
    Size("head_dim", "elements of a head", "DIM", (1 << 28) - 1),  # as many bytes in fp32
)


class Op(NamedTuple):
    """One op. Whatever else is particular to it lies in the files of its stem."""

    stem: str  # of its files: ``ops/store.py``, ``csrc/ops/store.cc``, ...
    function: str  # the public one, which ``ops/<stem>.py`` defines and ``jitkern`` shows
    more: tuple[str, ...] = ()  # public functions beside it
    has_kernels: bool = True  # its module has ``kernels`` and ``OVERLOADS``
    sized_by: str = "element_size"  # the one of `SIZES` that ``kernels`` takes


class TorchOverload(NamedTuple):
    """An operator ``torch.ops.jitkern.*``; ``OVERLOADS`` of an op's module lists its operators.

    `one_by_one` does the same as the operator by operators that write one tensor each, for tensors
    that share an allocation, such as a pool of K and V: PyTorch's inductor writes only one of them
    in place, and the other to a copy of the allocation; in torch 2.11 it copies from the wrong
    address.
    """

    schema: str  # "store_cache.v(Tensor(a!) v_cache, Tensor indices, Tensor v) -> ()"
    run: Callable[..., Any]  # takes the arguments of the schema, in its order
    fake: Callable[..., Any]  # the same for tensors without memory
    one_by_one: Callable[..., None] | None = None


def no_result(*_: Any, **__: Any) -> None:
    """Return nothing: the fake of an operator that only writes."""


OPS = (
    Op("store", "store_cache"),
    Op("index", "indexing"),
    Op("h2d_gather", "h2d_gather"),
    Op("d2h_scatter", "d2h_scatter"),
    Op("copy_blocks", "copy_blocks"),
    Op("unpack", "unpack"),
    Op("merge", "merge_states", more=("merge_state",), sized_by="head_dim"),
    Op("memcpy_2d", "memcpy_2d_async", has_kernels=False),  # by the copy engine
    Op("compare_key", "fast_compare_key", has_kernels=False),
)


def op_names() -> dict[str, str]:
    """Return the stem of each op that has kernels by its names: the public one, and the stem."""
    with_kernels = [op for op in OPS if op.has_kernels]
    return {name: op.stem for op in with_kernels for name in (op.function, *op.more, op.stem)}


def op_sizes() -> dict[str, Size]:
    """Return what each op that has kernels is compiled for, by the same names."""
    sizes = {size.name: size for size in SIZES}
    of_stem = {op.stem: sizes[op.sized_by] for op in OPS}
    return {name: of_stem[stem] for name, stem in op_names().items()}
