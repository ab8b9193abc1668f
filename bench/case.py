"""What a benchmark consists of: a case, its implementations, and the rows that come of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

Run = Callable[[Any], object]
Clock = Literal["device", "host"]


@dataclass
class Impl:
    """One implementation of a case's job. `build` runs when it is measured: an error becomes a row.

    Roles: ours, peer, ceiling (moves the same bytes in the easiest way), floor (does nothing).
    """

    name: str
    role: str
    build: Callable[[], Run]
    graph: bool = True
    check: bool = True
    returns: bool = False  # the result is what `build()(buffers)` returns, not the case's outputs
    bytes_moved: int | None = None  # default: those of the case


def _nothing(_: Any) -> tuple[torch.Tensor, ...]:
    return ()


@dataclass
class Case:
    """One job at one size: its buffers, its reference and its implementations."""

    op: str
    name: str
    impls: list[Impl]
    params: dict[str, Any] = field(default_factory=dict)
    bytes_moved: int = 0
    make: Callable[[int], Any] = lambda _: None
    outputs: Callable[[Any], tuple[torch.Tensor, ...]] = _nothing
    reference: Callable[[Any], tuple[torch.Tensor, ...]] = _nothing
    calls: int = 1  # in one graph, rotating over the working sets
    touched_bytes: int | None = None  # per call, for the rotation; default: bytes_moved
    is_warm: bool = False  # no rotation: all calls use the same buffers, which stay in the cache
    prepare: Callable[[Any], object] | None = None  # fills the outputs before the checked call
    restore: Callable[[], object] = lambda: None  # before the checked call and each replay, untimed
    clock: Clock = "device"  # "host": the CPU time of a call, also if it launches a kernel

    @property
    def key(self) -> str:
        """The name in tables, baselines and messages."""
        return f"{self.op}: {self.name}"

    def ours(self) -> Impl:
        return next(impl for impl in self.impls if impl.role == "ours")

    def reference_impl(self) -> Impl:
        """Return the implementation that ours is compared with: the first other one."""
        return next(impl for impl in self.impls if impl is not self.ours())


@dataclass
class Row:
    """One measured figure, as it goes into the JSON. Times in microseconds per call."""

    op: str
    case: str
    impl: str
    role: str
    params: dict[str, Any] = field(default_factory=dict)
    median_us: float | None = None
    iqr_us: float | None = None
    gb_s: float | None = None
    ratio_to_best_peer: float | None = None  # ours only; above 1 is faster
    percent_of_ceiling: float | None = None
    against: str = ""  # the reference of the guard
    ratio_median: float | None = None  # time of ours / time of `against`, in the same run
    instructions: float | None = None  # per call
    bytes_moved: int | None = None
    note: str = ""
    error: str = ""

    @property
    def key(self) -> str:
        return f"{self.op}: {self.case}"


@dataclass(frozen=True)
class Context:
    """The options of a run."""

    device: str  # "cuda" or "cpu"
    quick: bool = False
    say: Callable[[str], None] = lambda text: None

    @property
    def rounds(self) -> int:
        return 5 if self.quick else 11

    def sync(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def error_text(error: BaseException) -> str:
    """Return the text of a row whose figure could not be measured."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def error_row(case_op: str, case: str, impl: str, role: str, error: BaseException) -> Row:
    """Return a row for a figure that could not be measured."""
    return Row(case_op, case, impl, role, error=error_text(error))
