"""What a process says of its loads: freeze, JITKERN_RECORD, JITKERN_LOG."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import time
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
from jitkern.cache.store import Cache
from jitkern.env import settings
from jitkern.errors import FrozenError
from jitkern.jit import record
from jitkern.jit.loader import load_jit
from jitkern.jit.replay import replay
from jitkern.jit.specialisation import Specialisation
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


@needs_nvrtc
def test_frozen_takes_an_entry_of_another_compiler_rather_than_none(
    folder: Path, empty_cache: Path
) -> None:
    Cache(empty_cache).publish(tiny().key(SM_90), "nvrtc-99.9", {"tiny.cubin": b"foreign"})
    freeze()
    assert tiny().image(SM_90) == b"foreign"


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
        module.image(SM_90)
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
def test_many_processes_record_into_one_file(
    folder: Path, empty_cache: Path, tmp_path: Path
) -> None:
    file = tmp_path / "used.jsonl"
    code = """
import sys
from jitkern.jit.loader import load_jit
from jitkern.arch import Arch
for n in range(4, 8):
    load_jit("tiny", str(n), device_files=["tiny.cu"],
             device_wrappers=[("tiny", f"Tiny<{n}>")]).image(Arch(9, 0))
"""
    env = {**os.environ, "PYTHONPATH": python_path(), "JITKERN_RECORD": str(file)}
    children = [subprocess.Popen([sys.executable, "-c", code], env=env) for _ in range(4)]
    assert [child.wait() for child in children] == [0] * 4
    assert {str(one.used) for one in replay(file)} == {f"tiny<{n}> for 9.0" for n in range(4, 8)}


# -- turns -----------------------------------------------------------------------------------------

RANK = """
import sys
from pathlib import Path
from jitkern.jit import record
from jitkern.jit.specialisation import Specialisation
folder = Path(sys.argv[1])
sources = sorted(folder.glob("*.h"))
print(flush=True)
input()
for name in ("all", sys.argv[2]):
    used = Specialisation("load_jit", (name,), {"cpp_files": [str(folder / "a.cc")]}, "")
    record.record(used, sources, folder / "used.jsonl")
"""


def write_library(folder: Path, headers: int, lines: int) -> list[Path]:
    (folder / "a.cc").write_text("// a\n")
    made = [folder / f"{number}.h" for number in range(headers)]
    for file in made:
        file.write_text(f"// {file.name}\n" * lines)
    return made


def of_library(folder: Path, name: str) -> Specialisation:
    return Specialisation("load_jit", (name,), {"cpp_files": [str(folder / "a.cc")]}, "")


def kinds_of(file: Path) -> list[str]:
    """Name of each specialisation, and first line of each text."""
    values = map(json.loads, file.read_bytes().splitlines())
    return sorted(v["text"].splitlines()[0] if "text" in v else v["args"][0] for v in values)


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
        for number in range(8)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.readline()
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(b"\n")
        rank.stdin.close()
    assert [rank.wait(60) for rank in ranks] == [0] * 8
    for rank in ranks:
        assert rank.stdout is not None
        rank.stdout.close()
    file = tmp_path / "used.jsonl"
    names = ["all", *(f"rank{number}" for number in range(8))]
    texts = ["// a", *(f"// {number}.h" for number in range(40))]
    assert kinds_of(file) == sorted(names + texts)
    file.chmod(0o600)
    assert {one.used.args[0] for one in replay(file)} == set(names)


def test_what_another_process_has_added_is_not_added_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who had recorded something looked never again."""
    file = tmp_path / "used.jsonl"
    first, second = write_library(tmp_path, headers=2, lines=1)
    record.record(of_library(tmp_path, "mine"), [first], file)
    with monkeypatch.context() as another:
        another.setattr(record, "_seen", {})
        record.record(of_library(tmp_path, "theirs"), [second], file)
    for name in ("mine too", "theirs"):
        record.record(of_library(tmp_path, name), [second], file)
    assert kinds_of(file) == ["// 0.h", "// 1.h", "// a", "mine", "mine too", "theirs"]


def test_half_a_line_of_another_process_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """One without a lock, of a file system that has none."""
    file = tmp_path / "used.jsonl"
    (header,) = write_library(tmp_path, headers=1, lines=1)
    record.record(of_library(tmp_path, "mine"), [], file)
    whole = record._lines(of_library(tmp_path, "theirs"), [header], {})[1] + b"\n"
    with file.open("ab") as out:
        out.write(whole[:10])
    record.record(of_library(tmp_path, "mine"), [], file)
    with file.open("ab") as out:
        out.write(whole[10:])
    record.record(of_library(tmp_path, "mine too"), [header], file)
    assert kinds_of(file) == ["// 0.h", "// a", "mine", "mine too"]


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, how: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    write_library(tmp_path, headers=0, lines=0)
    for name in ("one", "two", "one"):
        record.record(of_library(tmp_path, name), [], tmp_path / "used.jsonl")
    assert kinds_of(tmp_path / "used.jsonl") == ["// a", "one", "two"]


def test_a_process_that_never_lets_go_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As one does that a debugger has stopped."""
    file = tmp_path / "used.jsonl"
    write_library(tmp_path, headers=0, lines=0)
    monkeypatch.setattr(record, "_patience_s", 0.2)
    with file.open("ab") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        start = time.monotonic()
        for number in range(20):
            record.record(of_library(tmp_path, f"n{number}"), [], file)
        assert 0.2 <= time.monotonic() - start < 2.0
    assert caplog.messages == [
        f"jitkern: JITKERN_RECORD: {file}: locked by another process for 0.2 s, not waited for any "
        "more: sources may be in it twice"
    ]
    assert len(kinds_of(file)) == 21


def test_a_child_forked_meanwhile_does_not_hold_the_lock(tmp_path: Path) -> None:
    """It has the descriptor too: to close ours was not enough."""
    file = tmp_path / "used.jsonl"
    held: list[int] = []
    with record._opened(file) as descriptor:
        held.append(os.dup(descriptor))  # as a fork does
    with file.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(held[0])


def test_a_record_that_is_moved_away_while_it_is_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "used.jsonl"
    write_library(tmp_path, headers=0, lines=0)
    args = (of_library(tmp_path, "one"), [], file)
    with file.open("ab") as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        waiting = threading.Thread(target=record.record, args=args)
        waiting.start()
        time.sleep(0.1)
        file.rename(tmp_path / "moved.jsonl")
    waiting.join()
    assert kinds_of(file) == ["// a", "one"]
    assert (tmp_path / "moved.jsonl").read_bytes() == b""


# -- a record that is changed ----------------------------------------------------------------------


def write_again(file: Path) -> None:
    """Longer than it was, and of the same inode."""
    file.write_bytes(b"\n" * 10_000)


def replace(file: Path) -> None:
    file.unlink()
    write_again(file)


@pytest.mark.parametrize("begin_anew", [Path.unlink, write_again, replace])
def test_a_record_that_is_begun_anew_gets_the_texts_again(
    tmp_path: Path, begin_anew: Callable[[Path], None]
) -> None:
    """Another rank may have made it as long as it was: what followed lacked its texts."""
    file = tmp_path / "used.jsonl"
    source = tmp_path / "tiny.cu"
    source.write_text("// one\n")
    options = {"device_files": [str(source)]}
    for n in (4, 5):
        record.record(Specialisation("load_jit", ("tiny", str(n)), options, "9.0"), [], file)
        before = file.read_bytes()
        record.record(Specialisation("load_jit", ("tiny", str(n)), options, "9.0"), [], file)
        assert file.read_bytes() == before  # each once
        if n == 4:
            begin_anew(file)
    file.chmod(0o600)  # one that is written anew has the umask's
    (one,) = replay(file)
    assert list(one.texts.values()) == [b"// one\n"]


def test_half_a_line_spoils_no_other(tmp_path: Path) -> None:
    """A writer that was killed; the next one's first line was part of it."""
    file = tmp_path / "used.jsonl"
    file.write_bytes(b'{"torn": ')
    record.record(Specialisation("load_jit", ("tiny", "4"), {}, "9.0"), [], file)
    torn, line, rest = file.read_bytes().split(b"\n")
    assert (torn, rest) == (b'{"torn": ', b"")
    assert json.loads(line)["args"] == ["tiny", "4"]


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


def test_a_source_that_cannot_be_read_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The record was blamed."""
    used = Specialisation("load_jit", ("tiny", "4"), {"cpp_files": [str(tmp_path / "gone.cc")]}, "")
    record.record(used, [], tmp_path / "used.jsonl")
    assert caplog.messages == [
        f"jitkern: JITKERN_RECORD: tiny<4> is left out: cannot read {tmp_path}/gone.cc: "
        "No such file or directory"
    ]
    assert not (tmp_path / "used.jsonl").exists()


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
    assert fresh_python(code).stderr == ""
