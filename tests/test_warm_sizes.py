"""What `jitkern warm` builds of ops that are compiled by different things: rows, or heads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from needs import needs_nvrtc
from stems import ON_GPU
from tiny import SM_90

import jitkern
from jitkern.cli import _parser, main
from jitkern.host import module as host
from jitkern.jit import device
from jitkern.jit.device import DeviceModule
from jitkern.ops import device_ops
from jitkern.ops._ops import op_names, op_sizes
from jitkern.warming import Outcome, op_jobs

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module", autouse=True)
def host_module(session_cache: Path) -> None:
    """Build the host module in the session's cache, not once more in each test's empty one."""
    host.module()


def sized(outcomes: list[Outcome]) -> set[tuple[str, str]]:
    """Each op and its first parameter."""
    return {(one.name, one.parameters.partition(",")[0]) for one in outcomes[1:]}


def test_ops_of_which_no_size_is_given_are_not_built(empty_cache: Path) -> None:
    how: dict[str, Any] = {"archs": ["9.0"], "check": True}
    by_rows = sized(jitkern.warm(element_sizes=[60488], **how))
    by_dim = sized(jitkern.warm(head_dims=[120, 136], **how))
    assert by_rows >= {("store", "60488"), ("index", "60488")}
    assert by_dim == {("merge", "120"), ("merge", "136")}
    both = sized(jitkern.warm(element_sizes=[60488], head_dims=[120, 136], **how))
    assert both == by_rows | by_dim
    sizes: dict[str, Any] = {"element_sizes": iter([60488]), "head_dims": iter([120])}
    some = sized(jitkern.warm(iter(["store", "merge_state"]), **sizes, **how))  # type: ignore[arg-type]
    assert some == {("store", "60488"), ("merge", "120")}


@needs_nvrtc
def test_command_of_an_op_that_is_compiled_by_the_head(capsys: Capture, empty_cache: Path) -> None:
    def run(*argv: str) -> tuple[int, str, str]:
        status = main(["warm", "--arch", "9.0", *argv])
        return status, *capsys.readouterr()

    options = ("--op", "merge_state", "--head-dim", "44", "--head-dim", "52", "--json")
    assert run(*options, "--check")[0] == 1
    status, out, err = run(*options)
    assert (status, err) == (0, "")
    jobs = json.loads(out)["jobs"][1:]
    assert {(job["name"], job["source"]) for job in jobs} == {("merge", "compiled")}
    assert {job["parameters"].partition(",")[0] for job in jobs} == {"44", "52"}
    assert run("--head-dim", "44,52", "--check")[0] == 0


def kernels_of(op: str) -> list[DeviceModule]:
    """What `jitkern warm` builds for one size."""
    module = device_ops()[op]
    of_size = [module.kernel(*spec) for spec in module.specialisations(656)]
    return of_size + getattr(module, "shared_kernels", list)()


@pytest.mark.parametrize("op", ON_GPU)
def test_what_a_missing_kernel_advises_builds_it(op: str) -> None:
    """Some named an op that there is not."""
    for kernel in kernels_of(op):
        command = kernel.hint(SM_90).partition("jitkern ")[2].split()
        args = _parser().parse_args(command)
        sizes = op_sizes()
        ops = [op_names()[name] for name in args.op or [op]]
        wanted = [(one, size) for one in ops for size in getattr(args, sizes[one].name)]
        built = map(str, op_jobs(wanted, args.arch))
        assert f"{kernel.op}<{', '.join(kernel.args)}> for 9.0" in built, command


def test_kernels_that_no_size_builds_are_to_be_recorded() -> None:
    merge = device_ops()["merge"]
    spec = merge.specialisations(128)[0]
    usual = merge.kernel(*spec).hint(SM_90)
    assert re.search(r"warm --op merge --head-dim 128 --arch 9\.0$", usual)
    dim, elems, in_type, out_type, *rest = spec
    for other in ((dim, elems // 2, in_type, out_type, *rest), (dim, elems, in_type, 3, *rest)):
        assert merge.kernel(*other).hint(SM_90) == device.record_hint(SM_90)
