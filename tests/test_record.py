"""What a process writes about its loads: freeze, JITKERN_RECORD, JITKERN_LOG."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import needs_cxx, needs_nvrtc
from paths import python_path
from tiny import SM_90, compiles, tiny

import jitkern.ops.store
from jitkern.arch import Arch
from jitkern.cache import get
from jitkern.cache.get import freeze, unfreeze
from jitkern.env import settings
from jitkern.errors import FrozenError
from jitkern.jit import record
from jitkern.jit.loader import load_jit
from jitkern.jit.record import Specialisation, replay
from jitkern.warming import recorded_jobs

Fresh = Callable[..., "subprocess.CompletedProcess[str]"]


@needs_nvrtc
def test_frozen_misses_name_what_to_warm(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tiny().image(SM_90)
    freeze()
    assert tiny().image(SM_90) == kept
    with pytest.raises(FrozenError, match=r"tiny_5-.*jitkern warm --replay FILE --arch 9\.0"):
        tiny(5).image(SM_90)
    store = jitkern.ops.store.kernel(4304, 16, 4)  # which no other test has in this process
    with pytest.raises(
        FrozenError, match=r"jitkern warm --op store --element-size 4304 --arch 9\.0$"
    ):
        store.image(SM_90)
    unfreeze()
    assert tiny(5).image(SM_90)
    get._frozen = ""
    monkeypatch.setenv("JITKERN_FREEZE", "1")
    settings.cache_clear()
    with pytest.raises(FrozenError):
        tiny(6).image(SM_90)
    unfreeze()  # goes before the environment
    assert tiny(6).image(SM_90)


# -- JITKERN_RECORD --------------------------------------------------------------------------------


@needs_nvrtc
@needs_cxx
def test_record_and_replay(
    folder: Path, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "used.jsonl"
    monkeypatch.setenv("JITKERN_RECORD", str(file))
    settings.cache_clear()
    for n in (4, 5, 4):
        module = tiny(n, extra_cuda_cflags=["-lineinfo"])
        for _ in range(2):
            module.image(SM_90)
    module.image(Arch(8, 0))
    load_jit("scale", "4", cpp_files=["scale.cc"], cpp_wrappers=[("scale", "scale<4>")])
    recorded = replay(file)
    assert [str(one.used) for one in recorded] == [
        "tiny<4> for 9.0",
        "tiny<5> for 9.0",
        "tiny<4> for 8.0",
        "scale<4>",
    ]
    before = compiles()
    jobs = recorded_jobs(recorded, tmp_path / "replayed")
    assert [job.build().source for job in jobs] == ["cached"] * 4
    assert compiles() == before


@needs_nvrtc
def test_what_is_recorded_is_what_was_compiled(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Sources were read when the record was written: another text, or none any more."""
    file = tmp_path / "used.jsonl"
    monkeypatch.setenv("JITKERN_RECORD", str(file))
    settings.cache_clear()
    module = tiny()
    compiled = (folder / "tiny.cu").read_bytes()
    (folder / "tiny.cu").write_text("// edited\n")
    (folder / "half.cuh").unlink()
    module.image(SM_90)
    assert caplog.messages == []
    (one,) = replay(file)
    assert sorted(one.files) == ["./half.cuh", "./tiny.cu"]
    assert one.texts[one.files["./tiny.cu"]] == compiled


def of_library(folder: Path, name: str) -> Specialisation:
    return Specialisation("load_jit", (name,), {"cpp_files": [str(folder / "a.cc")]}, "")


def write_library(folder: Path, headers: int, lines: int) -> list[Path]:
    (folder / "a.cc").write_text("// a\n")
    made = [folder / f"{number}.h" for number in range(headers)]
    for file in made:
        file.write_text(f"// {file.name}\n" * lines)
    return made


def kinds_of(file: Path) -> list[str]:
    """Name of each specialisation, and first line of each text."""
    values = map(json.loads, file.read_bytes().splitlines())
    return sorted(v["text"].splitlines()[0] if "text" in v else v["args"][0] for v in values)


RANK = """
import sys
from pathlib import Path
from jitkern.jit.record import Specialisation, record
folder = Path(sys.argv[1])
sources = sorted(folder.glob("*.h"))
print(flush=True)
input()
for name in ("all", sys.argv[2]):
    used = Specialisation("load_jit", (name,), {"cpp_files": [str(folder / "a.cc")]}, "")
    record(used, sources, folder / "used.jsonl")
"""


def test_ranks_that_record_at_once_write_each_text_once(tmp_path: Path) -> None:
    """Each had looked before the others wrote: eight times 15 MB, more than replay takes."""
    write_library(tmp_path, headers=40, lines=10_000)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), f"rank{number}"],
            env={**os.environ, "PYTHONPATH": python_path()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for number in range(4)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.readline()
    for rank in ranks:
        rank.communicate(b"\n", timeout=60)
        assert rank.returncode == 0
    file = tmp_path / "used.jsonl"
    names = ["all", *(f"rank{number}" for number in range(4))]
    texts = ["// a", *(f"// {number}.h" for number in range(40))]
    assert kinds_of(file) == sorted(names + texts)
    file.chmod(0o600)
    assert {one.used.args[0] for one in replay(file)} == set(names)


@pytest.mark.parametrize("held", [False, True])
def test_a_lock_that_cannot_be_had_stops_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """On a file system without locks, and where a debugger has stopped who holds it."""
    file = tmp_path / "used.jsonl"
    write_library(tmp_path, headers=0, lines=0)
    monkeypatch.setattr(record, "_LOCK_S", 0.02)
    with file.open("ab") as holder:
        if held:
            fcntl.flock(holder, fcntl.LOCK_EX)
        else:

            def flock(descriptor: int, how: int) -> None:
                raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

            monkeypatch.setattr("fcntl.flock", flock)
        for name in ("one", "two", "one"):
            record.record(of_library(tmp_path, name), [], file)
    assert kinds_of(file) == ["// a", "one", "two"]


def test_a_child_forked_meanwhile_does_not_hold_the_lock(tmp_path: Path) -> None:
    """It has the descriptor too: to close ours was not enough."""
    file = tmp_path / "used.jsonl"
    with record._locked(file) as descriptor:
        held = os.dup(descriptor)  # as a fork does
    with file.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(held)


def test_what_is_there_is_not_written_again(tmp_path: Path) -> None:
    """By whoever; and a record that was moved away gets the texts again."""
    file = tmp_path / "used.jsonl"
    (header,) = write_library(tmp_path, headers=1, lines=1)
    for names in (("one", "two", "one"), ("two",)):
        for name in names:
            record.record(of_library(tmp_path, name), [header], file)
        assert kinds_of(file) == sorted(["// 0.h", "// a", *set(names)])
        file.unlink()


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    """A writer that was killed; the next one's first line was part of it."""
    file = tmp_path / "used.jsonl"
    file.write_bytes(b'{"torn": ')
    record.record(Specialisation("load_jit", ("tiny", "4"), {}, "9.0"), [], file)
    torn, line, rest = file.read_bytes().split(b"\n")
    assert (torn, rest) == (b'{"torn": ', b"")
    assert json.loads(line)["args"] == ["tiny", "4"]


def test_what_cannot_be_recorded_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A source that is gone, a record that grows too large, a full disk; the next is written."""
    file = tmp_path / "used.jsonl"
    write_library(tmp_path, headers=0, lines=0)
    said = []

    def recorded(name: str, *read: Path) -> None:
        caplog.clear()
        record.record(of_library(tmp_path, name), read, file)
        said.append("\n".join(caplog.messages).replace(str(tmp_path), "."))

    recorded("gone", tmp_path / "gone.h")
    with monkeypatch.context() as patch:
        patch.setattr(record, "MAX_BYTES", 300)
        recorded("fits")
        recorded("large")
    with monkeypatch.context() as patch:
        patch.setattr(record.os, "write", lambda descriptor, data: 7)
        recorded("full")
    recorded("last")
    assert said == [
        "jitkern: JITKERN_RECORD: gone<> is left out: cannot read ./gone.h: No such file or "
        "directory",
        "",
        "jitkern: JITKERN_RECORD: cannot write ./used.jsonl: it would have more than 300 bytes, "
        "large<> left out",
        "jitkern: JITKERN_RECORD: cannot write ./used.jsonl: 7 of 195 bytes written, the disk is "
        "full",
        "",
    ]
    file.chmod(0o600)
    assert [one.used.args[0] for one in replay(file)] == ["fits", "last"]


# -- JITKERN_LOG -----------------------------------------------------------------------------------


@needs_nvrtc
def test_log_has_one_line_per_lookup(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JITKERN_LOG", "1")
    settings.cache_clear()
    with caplog.at_level(logging.INFO, logger="jitkern"):
        tiny().image(SM_90)
        tiny().image(SM_90)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert lines[0].startswith("jitkern: tiny_4-")
    assert ": compiled, " in lines[0]
    assert ": cached, " in lines[1]
    assert " ms (" in lines[1]


@needs_nvrtc
def test_log_goes_to_stderr_where_nobody_configured_logging(
    folder: Path, fresh_python: Fresh
) -> None:
    code = """
from jitkern.jit.loader import load_jit
from jitkern.arch import Arch
load_jit("tiny", "4", device_files=["tiny.cu"], device_wrappers=[("tiny", "Tiny<4>")]).image(
    Arch(9, 0))
"""
    assert "compiled" in fresh_python(code, env={"JITKERN_LOG": "1"}).stderr
