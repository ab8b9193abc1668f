"""Input that somebody else has written: of another type, endless, huge. Never fatal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from jitkern.fs import parse_json, read_regular
from jitkern.host.module import fits
from jitkern.jit.record import replay


@pytest.mark.parametrize("version", ["0.1.\N{SUPERSCRIPT TWO}", f"0.1.{'9' * 5000}", "0.1.-1", ""])
def test_a_version_that_is_no_number(version: str) -> None:
    assert not fits(version, "0.1.15")


def test_fifos_and_devices_are_no_recordings(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for file in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            replay(file)


def test_a_file_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(11))
    with pytest.raises(OSError, match="11 bytes, expected at most 10"):
        read_regular(tmp_path / "file", 10)
    assert read_regular(tmp_path / "file", 11) == bytes(11)
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="a symbolic link, which is not followed here"):
        read_regular(tmp_path / "link", 11)
    assert read_regular(tmp_path / "link", 11, follow=True) == bytes(11)


def test_plain_json_is_what_json_says() -> None:
    value = {"a": [1, 2.5, None, True, "é\ud800"], "b": {"c": {}}}
    assert parse_json(json.dumps(value).encode()) == value
