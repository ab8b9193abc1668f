"""Every wrong argument of every op: the kind of exception and its exact text.

All messages have one form, `op: argument: what came, expected what`, wherever they come from. What
is wrong with the arguments of an op lies in its own tests: `good_arguments`, `mistakes`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from mistakes import Mistake
from ref import flat, replaced, same_bits
from stems import FUNCTIONS, own_tests

import jitkern
from jitkern.host import library as host

TABLES: dict[str, list[Mistake]] = {op: own_tests(FUNCTIONS[op]).mistakes() for op in FUNCTIONS}


def good_arguments(op: str) -> dict[str, Any]:
    return own_tests(FUNCTIONS[op]).good_arguments()


@pytest.mark.parametrize(
    ("op", "change", "kind", "text"),
    [(op, *mistake) for op, table in TABLES.items() for mistake in table],
    ids=[f"{op}-{i}" for op, table in TABLES.items() for i in range(len(table))],
)
def test_mistake(op: str, change: dict[str, Any], kind: type[Exception], text: str) -> None:
    good = good_arguments(op)
    before = {name: tensor.clone() for name, tensor in flat(good).items()}
    versions = [tensor._version for tensor in flat(good).values()]
    with pytest.raises(kind) as caught:
        getattr(jitkern, op)(**{**good, **change})
    assert type(caught.value) is kind
    assert str(caught.value) == f"{op}: {text}"
    assert [tensor._version for tensor in flat(good).values()] == versions
    for name, tensor in flat(good).items():
        assert same_bits(tensor, before[name])


@pytest.mark.parametrize(
    "op", [op for op in TABLES if hasattr(own_tests(FUNCTIONS[op]), "RESULTS")]
)
def test_without_results_the_messages_are_the_same(op: str) -> None:
    """There they are made in Python, before the checks in C++ can run."""
    results = own_tests(FUNCTIONS[op]).RESULTS
    for change, kind, text in TABLES[op]:
        if results & set(change):
            continue
        with pytest.raises(kind) as caught:
            getattr(jitkern, op)(**{**good_arguments(op), **dict.fromkeys(results), **change})
        actual, wanted = str(caught.value), f"{op}: {text}"
        if wanted.endswith("expected a tensor"):  # Python names these in its own way
            wanted = wanted.replace(": object,", ": NotATensor,").replace(" or tuple,", ",")
            wanted = wanted.replace(" of more than 64 bits", "")
        assert actual == wanted


LAZY = [
    (op, name)
    for op in FUNCTIONS
    for name, tensor in flat(good_arguments(op)).items()
    if tensor.dtype == torch.float32 and op != "merge_states"  # which refuses complex numbers
]


@pytest.mark.parametrize(("op", "name"), LAZY)
def test_a_lazy_view_is_refused(op: str, name: str) -> None:
    """Its memory holds the values before conj() or neg(), which were copied."""
    for view in (torch.conj, lambda z: z.conj().imag):  # the second is negated

        def lazy(n: str, t: torch.Tensor, view: Any = view) -> torch.Tensor:
            numbers = t.to(torch.complex64) if t.dtype == torch.float32 else t
            if t.dtype == torch.float32 and view is not torch.conj:
                numbers = numbers if n == name else numbers.real
            return view(numbers) if n == name else numbers

        text = rf"^{op}: {name}: a lazy view of conj\(\) or neg\(\), expected the values in memory"
        with pytest.raises(ValueError, match=text):
            getattr(jitkern, op)(**replaced(good_arguments(op), lazy))


@pytest.mark.parametrize("op", TABLES)
def test_the_table_has_every_argument(op: str) -> None:
    assert set(inspect.signature(getattr(jitkern, op)).parameters) == set(good_arguments(op))
    getattr(jitkern, op)(**good_arguments(op))  # and is otherwise right
    named = {re.match(r"\w+", text)[0] for _, _, text in TABLES[op]}  # type: ignore[index]
    unchecked = getattr(own_tests(FUNCTIONS[op]), "UNCHECKED", set())
    assert named == set(good_arguments(op)) - unchecked


MIXED = [
    (name, argument, "cpu", expected)
    for name, op in FUNCTIONS.items()
    for argument, expected in getattr(own_tests(op), "MIXED_DEVICES", ())
]


@pytest.mark.cuda
@pytest.mark.parametrize(("op", "argument", "came", "expected"), MIXED)
def test_mixed_devices(op: str, argument: str, came: str, expected: str) -> None:
    arguments = replaced(
        good_arguments(op),
        lambda n, one: one if n.partition("[")[0] in (argument, "src") else one.cuda(),
    )
    with pytest.raises(ValueError, match="device") as caught:
        getattr(jitkern, op)(**arguments)
    assert str(caught.value) == f"{op}: {argument}: device {came}, expected {expected}"


@pytest.mark.parametrize("value", ["mps", "gpu", "", -1, 2**70, True, 1.5, []])
def test_check_mistake(value: Any) -> None:
    with pytest.raises(ValueError) as caught:
        jitkern.check(value)
    assert str(caught.value) == f"check: device: {value!r}, expected 'cpu', 'cuda' or 'cuda:N'"
    for right in (None, "cpu", torch.device("cpu")):
        jitkern.check(right)


def test_check_of_a_gpu_that_is_not_there() -> None:
    count = torch.cuda.device_count()
    expected = f"below cuda:{count}" if count else "the CPU: PyTorch sees no GPU"
    for device in (63, "cuda:63", torch.device("cuda:63")):
        with pytest.raises(ValueError) as caught:
            jitkern.check(device)
        assert str(caught.value) == f"check: device: {device}, expected {expected}"
    for device in ("cuda", 0, "cuda:0"):
        with nullcontext() if count else pytest.raises(ValueError, match="PyTorch sees no GPU"):
            jitkern.check(device)


def test_wrong_number_of_arguments_is_a_type_error() -> None:
    for op in (*TABLES, "check"):
        call: Callable[..., object] = getattr(jitkern, op)
        with pytest.raises(TypeError, match=rf"{op}\(\)"):
            call(1, 2, 3, 4, 5, 6)


def test_a_tvm_ffi_that_passes_no_big_ints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 0.1.15 an int beyond 64 bits is an OverflowError that names no argument."""
    compare_key = host.module()["compare_key"]

    def refusing(*args: Any) -> Any:
        if any(isinstance(arg, int) and arg >= 2**63 for arg in args):
            raise OverflowError("Python int too large to convert to C long")
        return compare_key(*args)

    monkeypatch.setattr(host, "_passes_big_ints", lambda: False)
    with pytest.raises(TypeError, match=r"^fast_compare_key: y: int of more than 64 bits"):
        host.takes_big_ints(refusing)(torch.zeros(2, dtype=torch.int64), 2**70, 0, 1)
