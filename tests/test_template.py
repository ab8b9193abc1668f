"""Python values to C++ template arguments."""

from __future__ import annotations

import enum
from typing import Any

import pytest
import torch

from jitkern.jit.template import KernelConfig, make_cpp_args


@pytest.mark.parametrize(
    ("value", "literal"),
    [
        (True, "true"),
        (False, "false"),
        (-3, "-3"),
        (1 << 40, "1099511627776"),
        (-(1 << 63), "(-9223372036854775807 - 1)"),
        ((1 << 64) - 1, "18446744073709551615u"),
        (0.5, "0.5"),
        (1e-30, "1e-30"),
        (-2.0, "-2.0"),
        ("Op::kSum", "Op::kSum"),
        (torch.bool, "bool"),
        (torch.int64, "int64_t"),
        (torch.half, "__half"),
        (torch.bfloat16, "__nv_bfloat16"),
        (torch.float8_e4m3fn, "__nv_fp8_e4m3"),
    ],
)
def test_literals(value: Any, literal: str) -> None:
    assert make_cpp_args(value) == (literal,)


def test_a_list_of_template_arguments() -> None:
    args = make_cpp_args(656, 16, True)
    assert str(args) == f"{args}" == "656, 16, true"
    assert list(args) == ["656", "16", "true"]
    config = KernelConfig(num_threads=256, max_occupancy=2, use_pdl=True)
    assert config.template_args == "256, 2, true"
    assert str(make_cpp_args(656, config, 4)) == "656, 256, 2, true, 4"


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "value", [None, b"1", (1,), Number.ONE, torch.tensor(3), torch.complex64, 1 + 2j]
)
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match=r"make_cpp_args: argument 1: .*expected int, float, bool"):
        make_cpp_args(1, value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1 << 64, -(1 << 64)])
def test_values_without_a_literal_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="make_cpp_args: argument 0: "):
        make_cpp_args(value)


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (KernelConfig(256.0, 2, True), TypeError, "num_threads: float, expected an int"),  # type: ignore[arg-type]
        (KernelConfig(2048, 2, True), ValueError, "num_threads: 2048, expected 1 to 1024"),
        (KernelConfig(256, 0, True), ValueError, "max_occupancy: 0, expected at least 1"),
    ],
)
def test_a_launch_shape_is_one(config: KernelConfig, error: type[Exception], says: str) -> None:
    """256.0 became a template argument: an error of the compiler, 40 lines below it."""
    with pytest.raises(error, match=f"^KernelConfig: {says}$"):
        make_cpp_args(config)
