"""Benchmark cases and the files that hold them, for the full harness and the CI guard.

A file of cases holds functions under ``case``, or a function ``cases(ctx)`` that returns
``Case`` objects, or both.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jitkern.errors import JitkernError

if TYPE_CHECKING:
    import torch

Run = Callable[[Any], object]
Clock = Literal["device", "host"]


class CaseError(JitkernError):
    """A file of cases cannot be read, or what it gives is no case."""


@dataclass
class Impl:
    """One implementation of a case's job, built when its turn comes: an error becomes a row.

    Roles: ours, peer, ceiling (moves the same bytes in the easiest way), floor (does nothing).
    """

    name: str
    role: str
    build: Callable[[], Run]
    graph: bool = True
    check: bool = True
    returns: bool = False  # the result is what `build()(buffers)` returns, not the case's outputs
    bytes_moved: int | None = None  # where it differs from the case's


def _nothing(_: Any) -> tuple[torch.Tensor, ...]:
    return ()


@dataclass
class Case:
    """One job at one size: what to move, how to check it, who does it."""

    op: str
    name: str
    impls: list[Impl]
    params: dict[str, Any] = field(default_factory=dict)
    bytes_moved: int = 0
    make: Callable[[int], Any] = lambda _: None
    outputs: Callable[[Any], tuple[torch.Tensor, ...]] = _nothing
    reference: Callable[[Any], tuple[torch.Tensor, ...]] = _nothing
    calls: int = 1  # in one graph, rotating over the working sets
    touched_bytes: int | None = None  # by one call, for the rotation; default bytes_moved
    prepare: Callable[[Any], object] | None = None  # what outputs hold before the checked call
    clock: Clock = "device"  # "host": what a call costs the CPU, also where it launches a kernel

    @property
    def key(self) -> str:
        """What the case is called in a table, a baseline and a message."""
        return f"{self.op}: {self.name}"

    def ours(self) -> Impl:
        return next(impl for impl in self.impls if impl.role == "ours")

    def reference_impl(self) -> Impl:
        """Return the implementation that ours is held against: the first other one."""
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
    host_us: float | None = None
    against: str = ""  # of the ratio below: time of ours / time of it
    ratio_median: float | None = None  # the median over pairs that ran one after the other
    instructions: float | None = None  # of one call; exact
    bytes_moved: int | None = None
    note: str = ""
    error: str = ""

    @property
    def key(self) -> str:
        return f"{self.op}: {self.case}"


@dataclass(frozen=True)
class Context:
    """What every benchmark needs to know."""

    device: str  # "cuda" or "cpu"
    quick: bool = False
    say: Callable[[str], None] = lambda text: None

    @property
    def rounds(self) -> int:
        return 5 if self.quick else 11

    def sync(self) -> None:
        if self.device == "cuda":
            import torch

            torch.cuda.synchronize()


def error_text(error: BaseException) -> str:
    """Return what a row says of a figure that could not be had."""
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def error_row(case_op: str, case: str, impl: str, role: str, error: BaseException) -> Row:
    """Return the row that stands for a figure that could not be had."""
    return Row(case_op, case, impl, role, error=error_text(error))


Pair = tuple[Callable[[], object], Callable[[], object]]


@dataclass(frozen=True)
class CaseFunction:
    """What ``case`` makes of a function: its case, or none where it is for another device."""

    cases: Callable[[Context], list[Case]]


def _run_of(call: Callable[[], object]) -> Run:
    return lambda _: call()


def case(
    name: str,
    *,
    op: str = "",
    against: str = "reference",
    bytes_moved: int = 0,
    clock: Clock = "host",
    device: str = "",
) -> Callable[[Callable[[Context], Pair]], CaseFunction]:
    """Make a benchmark case of a function that returns two callables: ours, and its reference.

    The function gets a ``Context`` (``ctx.device`` is ``"cuda"`` or ``"cpu"``). `name` stands
    in tables and baselines, under the group `op`, by default the name of the file. `against` names
    the reference. `bytes_moved` are read and written, for GB/s. `clock`: ``"host"`` is the CPU's
    time for a call, ``"device"`` the GPU's. `device`: the only one that the case is for.

    Examples
    --------
    >>> @case("copy of 1 MB", against="clone")
    ... def copy(ctx):
    ...     x = torch.zeros(1 << 20, dtype=torch.uint8, device=ctx.device)
    ...     y = torch.empty_like(x)
    ...     return lambda: y.copy_(x), lambda: x.clone()
    """

    def decorate(function: Callable[[Context], Pair]) -> CaseFunction:
        def pair(ctx: Context) -> Pair:
            got = function(ctx)
            if not (isinstance(got, tuple) and len(got) == 2 and all(map(callable, got))):
                raise CaseError(
                    f"{name}: returned {got!r}, expected two callables, what is measured and what "
                    "it is measured against"
                )
            return got

        def cases(ctx: Context) -> list[Case]:
            if device and device != ctx.device:
                return []
            both = cache(lambda: pair(ctx))  # called once, when its turn comes
            impls = [
                Impl("measured", "ours", lambda: _run_of(both()[0]), check=False),
                Impl(against, "peer", lambda: _run_of(both()[1]), check=False),
            ]
            group = op or Path(function.__code__.co_filename).stem
            return [Case(group, name, impls, bytes_moved=bytes_moved, clock=clock)]

        return CaseFunction(cases)

    return decorate


def cases_of(path: Path, ctx: Context) -> list[Case]:
    """Return the cases of a file in its order; CaseError if it is none, raises or holds none."""
    spec = importlib.util.spec_from_file_location(f"_jitkern_cases_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise CaseError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    try:
        spec.loader.exec_module(module)
        functions = [one for one in vars(module).values() if isinstance(one, CaseFunction)]
        more: Callable[[Context], Iterable[Case]] | None = getattr(module, "cases", None)
        found = [one for function in functions for one in function.cases(ctx)]
        found += more(ctx) if more is not None else ()
    except CaseError:
        raise
    except Exception as error:
        raise CaseError(f"{path}: {type(error).__name__}: {error}") from error
    for one in found:
        if not isinstance(one, Case) or len(one.impls) < 2:
            raise CaseError(f"{path}: cases(): {one!r}, expected Case objects with two Impl each")
    if not functions and more is None:
        raise CaseError(f"{path}: no function under @jitkern.bench.case and no cases(ctx)")
    return found
