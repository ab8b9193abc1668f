"""Calls through the host module: Python's builders, its errors, what it says of faults."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
from needs import needs_cxx

from jitkern.arch import Arch
from jitkern.env import settings
from jitkern.errors import CompileError, FrozenError, ToolchainError
from jitkern.host import module as host

pytestmark = needs_cxx


class Kernels:
    exports = ("one", "two")
    launch_config = (7, 8)

    def __init__(self, image: bytes | Exception) -> None:
        self.answer = image

    def image(self, arch: Arch) -> bytes:
        assert arch == Arch(9, 0)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_ops_resolve_through_python(shipped: Path) -> None:
    seen: list[dict[str, int]] = []

    def kernel(**spec: int) -> Kernels:
        seen.append(spec)
        return Kernels(b"12345")

    demo = host.op("demo", kernel)
    assert demo(656, 16) == 70205  # image, entry points and configuration
    assert seen == [{"rows": 656, "bytes": 16}]
    assert all(type(name) is str and type(value) is int for name, value in seen[0].items())


def test_a_builder_that_knows_other_parameters_is_refused(shipped: Path) -> None:
    demo = host.op("demo", lambda bytes_, lines: Kernels(b""))
    with pytest.raises(TypeError, match="unexpected keyword argument 'rows'"):
        demo(656, 16)


@pytest.mark.parametrize(
    "error",
    [
        CompileError("demo: failed", command="nvrtc", log="line 1", source="text"),
        FrozenError("demo: missing"),
        ToolchainError("no NVRTC; install it"),
    ],
)
def test_exceptions_survive_the_way_through_cxx(shipped: Path, error: Exception) -> None:
    demo = host.op("demo", lambda **_: Kernels(error))
    with pytest.raises(type(error)) as caught:
        demo(1, 2)
    assert caught.value is error
    assert host.ThroughCpp.waiting == {}


def test_two_threads_may_fail_with_the_same_words() -> None:
    errors = [FrozenError("demo: missing") for _ in range(2)]
    words = []
    for error in errors:
        with pytest.raises(host.ThroughCpp) as caught, host._through_cpp():
            raise error
        words.append(str(caught.value))
    assert [host.ThroughCpp(text) for text in words] == errors
    assert host.ThroughCpp.waiting == {}


@pytest.mark.parametrize(
    ("mode", "outcome"),
    [
        ("raise", pytest.raises(IndexError, match="row 3 was skipped")),
        ("warn", pytest.warns(RuntimeWarning, match="row 3 was skipped")),
        ("ignore", nullcontext()),
    ],
)
def test_what_python_says_of_faults_is_what_cxx_does(
    shipped: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    outcome: AbstractContextManager[object],
) -> None:
    monkeypatch.setenv("JITKERN_FAULTS", mode)
    settings.cache_clear()
    module = host.module()
    with outcome:
        module["fault"]("row 3 was skipped")


def test_what_cxx_refuses_is_raised(shipped: Path) -> None:
    with pytest.raises(ValueError, match="demo: x: wrong"):
        host.module()["refuse"](1)
