"""Settings: defaults, what each variable does, and what a bad value says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jitkern import env
from jitkern.arch import requested_archs
from jitkern.env import NOBODY, VARIABLES, Settings, Trust, settings


def parse(**environ: str) -> Settings:
    return Settings.from_environ({"HOME": "/home/u", **environ})


def test_defaults() -> None:
    found = parse()
    assert found.cache_dir == Path("/home/u/.cache/jitkern")
    assert found.cache_path == ()
    assert found.cache_trust == NOBODY
    assert found.cache_max_bytes == 4 << 30
    assert found.compiler == "nvrtc"
    assert found.lock_timeout_s > 0
    assert found.faults == "raise"
    assert (found.freeze, found.log, found.record, found.nvrtc) == (None, False, None, None)
    assert (found.arch, found.cuda_home, found.cxx) == ((), None, None)


def test_empty_means_unset() -> None:
    names = ("CACHE_DIR", "CACHE_PATH", "CACHE_MAX_BYTES", "ARCH", "COMPILER", "NVRTC", "FREEZE")
    names += ("LOCK_TIMEOUT_S", "RECORD", "LOG", "FAULTS", "CACHE_TRUST")
    assert parse(**{f"JITKERN_{name}": "" for name in names}) == parse()


@pytest.mark.parametrize(
    ("text", "mode"), [("0", None), ("1", "raise"), (" warn ", "warn"), ("", None)]
)
def test_freeze(text: str, mode: str | None) -> None:
    assert parse(JITKERN_FREEZE=text).freeze == mode


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "/x/jitkern"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/u/.cache/jitkern"),
        ({"JITKERN_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"}, "/c"),
        ({"JITKERN_CACHE_DIR": "~/c"}, "/home/u/c"),
    ],
)
def test_cache_dir(environ: dict[str, str], expected: str) -> None:
    assert parse(**environ).cache_dir == Path(expected)


def test_paths_of_the_environment() -> None:
    assert parse(CUDA_HOME="/a", CUDA_PATH="/b").cuda_home == Path("/a")
    assert parse(CUDA_PATH="/b").cuda_home == Path("/b")
    assert parse(JITKERN_CACHE_PATH="/a::~/b:").cache_path == (Path("/a"), Path("/home/u/b"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1001, 1002,", Trust(frozenset({1001, 1002}))),
        ("everyone", Trust(everyone=True)),
        ("1001,everyone", Trust(frozenset({1001}), everyone=True)),
    ],
)
def test_cache_trust(text: str, expected: Trust) -> None:
    assert parse(JITKERN_CACHE_TRUST=text).cache_trust == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("123", 123), ("2k", 2048), ("512M", 512 << 20), ("4GiB", 4 << 30), ("1T", 1 << 40)],
)
def test_cache_max_bytes(text: str, expected: int) -> None:
    assert parse(JITKERN_CACHE_MAX_BYTES=text).cache_max_bytes == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("JITKERN_CACHE_MAX_BYTES", "much", "a number of bytes such as"),
        ("JITKERN_CACHE_MAX_BYTES", "4X", "a number of bytes such as"),
        ("JITKERN_CACHE_TRUST", "alice", "numbers of users, separated by commas, or everyone"),
        ("JITKERN_CACHE_TRUST", "-1", "numbers of users, separated by commas, or everyone"),
        ("JITKERN_COMPILER", "clang", "nvrtc or nvcc"),
        ("JITKERN_FAULTS", "explode", "raise, warn or ignore"),
        ("JITKERN_FREEZE", "yes", "0, 1 or warn"),
        ("JITKERN_LOG", "2", "0 or 1"),
        ("JITKERN_PYNCCL_MAX_BUFFER_SIZE", "1X", "a number of bytes such as"),
        ("JITKERN_LOCK_TIMEOUT_S", "-1", "a number of seconds, 0 or more"),
        ("JITKERN_LOCK_TIMEOUT_S", "nan", "a number of seconds, 0 or more"),
    ],
)
def test_bad_value_is_named(name: str, value: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: '{value}', expected {expected}"):
        parse(**{name: value})


def test_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings()
    monkeypatch.setenv("JITKERN_LOG", "1")
    assert settings() is before
    settings.cache_clear()
    assert settings().log
    monkeypatch.undo()
    settings.cache_clear()


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Sets a variable that the settings have not been read with."""

    def put(name: str, value: str) -> None:
        monkeypatch.setenv(name, value)
        settings.cache_clear()

    yield put
    monkeypatch.undo()
    settings.cache_clear()


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("JITKERN_CACHEDIR", "did you mean JITKERN_CACHE_DIR?"),
        ("JITKERN_ARCHS", "did you mean JITKERN_ARCH?"),
        ("JITKERN_X", f"there are {', '.join(VARIABLES)}"),
    ],
)
def test_a_variable_that_is_no_setting_is_named_once(
    environ: Callable[[str, str], None], name: str, hint: str
) -> None:
    """It was ignored without a word."""
    environ(name, "/x")
    with pytest.warns(RuntimeWarning) as caught:
        assert settings() is settings()
    (warning,) = caught
    assert (
        str(warning.message)
        == f"jitkern: {name}: no setting of this name, so it does nothing; {hint}"
    )


def test_settings_that_are_there_are_no_warning(
    environ: Callable[[str, str], None], recwarn: pytest.WarningsRecorder
) -> None:
    for name in VARIABLES:
        environ(name, "")
    assert settings().arch == ()
    assert list(recwarn) == []


def test_the_known_variables_are_those_that_are_read_and_described() -> None:
    read = set(re.findall(r'environ,\s+"(JITKERN_\w+)"', Path(env.__file__).read_text()))
    assert read == set(VARIABLES)
    assert set(re.findall(r"``(JITKERN_[A-Z_]+)``:", Settings.__doc__ or "")) == read


def test_bad_arch_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JITKERN_ARCH", "9.0, 99")
    settings.cache_clear()
    with pytest.raises(ValueError, match=r"^JITKERN_ARCH: '99', expected one of 7\.5, "):
        requested_archs()
    monkeypatch.setenv("JITKERN_ARCH", "9.0, sm_100")
    settings.cache_clear()
    assert [str(arch) for arch in requested_archs()] == ["9.0", "10.0"]
    monkeypatch.undo()
    settings.cache_clear()


def test_a_relative_path_is_that_of_the_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that goes elsewhere wrote the rest of its record there."""
    monkeypatch.chdir(tmp_path)
    found = parse(JITKERN_RECORD="run.jsonl", JITKERN_CACHE_DIR="a", JITKERN_CACHE_PATH="/b:../c")
    assert (found.record, found.cache_dir) == (tmp_path / "run.jsonl", tmp_path / "a")
    assert found.cache_path == (Path("/b"), tmp_path / "../c")
