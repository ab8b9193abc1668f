"""Settings: defaults, what each variable does, and what a bad value says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from unittest import mock

import pytest
from tiny import Use

from jitkern import env
from jitkern.env import VARIABLES, Settings, settings


def parse(**environ: str) -> Settings:
    """The settings of an environment that holds nothing else."""
    with mock.patch.dict(os.environ, {"HOME": "/home/u", **environ}, clear=True):
        return settings.__wrapped__()


def test_defaults_of_an_unset_or_empty_variable() -> None:
    found = parse()
    assert (found.cache_dir, found.cache_path) == (Path("/home/u/.cache/jitkern"), ())
    assert (found.cache_max_bytes, found.faults, found.lock_timeout_s) == (4 << 30, "raise", 120)
    assert (found.freeze, found.log, found.record, found.nvrtc) == (None, False, None, None)
    assert (found.arch, found.cuda_home, found.cxx) == ((), None, None)
    assert parse(**dict.fromkeys(VARIABLES, "")) == found


CACHE = "JITKERN_CACHE_DIR"


@pytest.mark.parametrize(
    ("environ", "field", "expected"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "cache_dir", Path("/x/jitkern")),
        ({"XDG_CACHE_HOME": "relative"}, "cache_dir", Path("/home/u/.cache/jitkern")),
        ({CACHE: "/c", "XDG_CACHE_HOME": "/x"}, "cache_dir", Path("/c")),
        ({CACHE: "~/c"}, "cache_dir", Path("/home/u/c")),
        ({"CUDA_HOME": "/a", "CUDA_PATH": "/b"}, "cuda_home", Path("/a")),
        ({"CUDA_PATH": "/b"}, "cuda_home", Path("/b")),
        ({"JITKERN_CACHE_PATH": "/a::~/b:"}, "cache_path", (Path("/a"), Path("/home/u/b"))),
        ({"JITKERN_CACHE_MAX_BYTES": "0"}, "cache_max_bytes", 0),
        ({"JITKERN_CACHE_MAX_BYTES": "2k"}, "cache_max_bytes", 2048),
        ({"JITKERN_CACHE_MAX_BYTES": "4GiB"}, "cache_max_bytes", 4 << 30),
        ({"JITKERN_CACHE_MAX_BYTES": "1.5 GiB"}, "cache_max_bytes", 3 << 29),
        ({"JITKERN_FREEZE": "0"}, "freeze", None),
        ({"JITKERN_FREEZE": "1"}, "freeze", "raise"),
        ({"JITKERN_FREEZE": " warn "}, "freeze", "warn"),
    ],
)
def test_a_value_is_parsed(environ: dict[str, str], field: str, expected: object) -> None:
    assert getattr(parse(**environ), field) == expected


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("JITKERN_CACHE_MAX_BYTES", "4X", "a number of bytes such as"),
        ("JITKERN_FAULTS", "explode", "raise, warn or ignore"),
        ("JITKERN_FREEZE", "yes", "0, 1 or warn"),
        ("JITKERN_LOG", "2", "0 or 1"),
        ("JITKERN_LOCK_TIMEOUT_S", "-1", "a number of seconds, 0 or more"),
        ("JITKERN_LOCK_TIMEOUT_S", "nan", "a number of seconds, 0 or more"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}: '{value}', expected {expected}"):
        parse(**{name: value})


def test_a_relative_path_in_a_directory_that_was_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ValueError, match="JITKERN_CACHE_DIR: 'a', expected an absolute path: the"):
        parse(JITKERN_CACHE_DIR="a")


def test_settings_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    before = settings()
    monkeypatch.setenv("JITKERN_LOG", "1")
    assert settings() is before
    settings.cache_clear()
    assert settings().log


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("CACHEDIR", "did you mean JITKERN_CACHE_DIR?"),
        ("XYZ", f"there are {', '.join(VARIABLES)}"),
    ],
)
def test_an_unknown_variable_is_named_once(use: Use, name: str, hint: str) -> None:
    """It was ignored without a word."""
    use(**{name: "/x"})
    with pytest.warns(RuntimeWarning) as caught:
        assert settings() is settings()
    (warning,) = caught
    text = f"jitkern: JITKERN_{name}: no setting of this name, so it does nothing; {hint}"
    assert str(warning.message) == text


def test_the_known_variables_are_read_described_and_no_warning(
    use: Use, recwarn: pytest.WarningsRecorder
) -> None:
    read = set(re.findall(r'=_\w+\("(JITKERN_\w+)"', Path(env.__file__).read_text()))
    assert read | {CACHE} == set(VARIABLES)  # which has a default of two variables
    assert set(re.findall(r"``(JITKERN_[A-Z_]+)``:", Settings.__doc__ or "")) == set(VARIABLES)
    use(**{name.removeprefix("JITKERN_"): "" for name in VARIABLES})
    assert settings().arch == ()
    assert list(recwarn) == []


def test_a_relative_path_is_that_of_the_first_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that goes elsewhere wrote the rest of its record there."""
    monkeypatch.chdir(tmp_path)
    found = parse(JITKERN_RECORD="run.jsonl", JITKERN_CACHE_DIR="a", JITKERN_CACHE_PATH="/b:../c")
    assert (found.record, found.cache_dir) == (tmp_path / "run.jsonl", tmp_path / "a")
    assert found.cache_path == (Path("/b"), tmp_path / "../c")
