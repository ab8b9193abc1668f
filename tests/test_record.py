"""What a process says of its loads: freeze, JITKERN_RECORD, JITKERN_LOG."""

from __future__ import annotations

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
