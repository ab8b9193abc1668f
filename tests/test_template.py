"""Python values to C++ template arguments."""

from __future__ import annotations

import enum
import shutil
import subprocess
from pathlib import Path
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


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiler_reads_the_same_values(tmp_path: Path) -> None:
    values = (True, 656, -(1 << 63), (1 << 64) - 1, -7, 0.1, -1e300)
    shown = "\n".join(f"std::cout << ({text}) << '\\n';" for text in make_cpp_args(*values))
    source = tmp_path / "a.cc"
    source.write_text(f"#include <iostream>\nint main() {{ std::cout.precision(17);\n{shown}\n}}\n")
    subprocess.run(["g++", "-Wall", "-Werror", source, "-o", tmp_path / "a"], check=True)
    out = subprocess.run([tmp_path / "a"], check=True, capture_output=True, text=True).stdout
    assert [float(line) for line in out.split()] == [float(value) for value in values]
    assert [int(line) for line in out.split()[:5]] == [int(value) for value in values[:5]]
