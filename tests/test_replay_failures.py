"""What a record holds, what cannot be recorded, and what of a record cannot be had."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from needs import needs_cxx, needs_nvrtc
from recorded_app import App, Capture, warm
from tiny import SM_90

from jitkern.files import sha256
from jitkern.host import module as host
from jitkern.jit import record as recording
from jitkern.jit.loader import load_aot, load_jit
from jitkern.jit.replay import replay


@pytest.fixture(scope="module", autouse=True)
def host_module(session_cache: Path) -> None:
    """Build the host module in the session's cache, not once more in each test's empty one."""
    host.module()


@needs_cxx
def test_a_source_is_in_a_record_once(tmp_path: Path, use: Callable[..., None], app: App) -> None:
    record = tmp_path / "run.jsonl"
    use(CACHE_DIR=tmp_path / "cache", RECORD=record)
    factor = {"extra_cflags": ["-DFACTOR=2"]}
    load_aot("first", cpp_files=["src/scale.cc"], extra_include_paths=["more"], **factor)
    load_aot("second", cpp_files=["src/scale.cc"], extra_include_paths=["more"], **factor)
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    assert [sorted(line)[0] for line in lines] == ["record", "record", "record", "arch", "arch"]
    assert all(str(tmp_path) not in json.dumps(line) for line in lines)
    assert sorted(lines[-1]["files"]) == ["./inc/up.h", "./more/deep.h", "./src/scale.cc"]


@needs_nvrtc
def test_what_cannot_be_recorded_is_said_and_stops_nothing(
    tmp_path: Path,
    use: Callable[..., None],
    app: App,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = tmp_path / "run.jsonl"
    use(CACHE_DIR=tmp_path / "cache", RECORD=record)
    monkeypatch.setattr(recording, "MAX_BYTES", 1000)
    how = {"device_wrappers": [("tiny", "Tiny<4>")], "extra_include_paths": ["more"]}
    module = load_jit("tiny", "4", device_files=["src/tiny.cu"], **how)
    with caplog.at_level(logging.WARNING, logger="jitkern"):
        assert module.image(SM_90).startswith(b"\x7fELF")
    (said,) = [line.getMessage() for line in caplog.records]
    reason = "it would have more than 1000 bytes, tiny<4> for 9.0 left out"
    assert said == f"jitkern: JITKERN_RECORD: cannot write {record}: {reason}"
    assert record.read_bytes() == b""


@needs_nvrtc
def test_a_record_that_is_begun_anew_has_all_its_texts(
    tmp_path: Path, use: Callable[..., None], app: App
) -> None:
    """As when a server's record is moved away: what comes later refers to texts that went."""
    record = tmp_path / "run.jsonl"
    use(CACHE_DIR=tmp_path / "cache", RECORD=record)
    how = {"device_files": ["src/tiny.cu"], "extra_include_paths": ["more"]}
    for n in (4, 5):
        module = load_jit("tiny", str(n), device_wrappers=[("tiny", f"Tiny<{n}>")], **how)
        module.image(SM_90)
        record.chmod(0o644)
        assert [str(one.used) for one in replay(record)] == [f"tiny<{n}> for 9.0"]
        record.unlink()


@needs_nvrtc
def test_what_a_full_disk_has_refused_is_written_with_the_next(
    tmp_path: Path,
    use: Callable[..., None],
    app: App,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = tmp_path / "run.jsonl"
    use(CACHE_DIR=tmp_path / "cache", RECORD=record)

    def full(descriptor: int, data: bytes, file: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    how = {"device_files": ["src/tiny.cu"], "extra_include_paths": ["more"]}
    for n in (4, 5):
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="jitkern"):
            if n == 4:
                patch.setattr(recording, "append", full)
            module = load_jit("tiny", str(n), device_wrappers=[("tiny", f"Tiny<{n}>")], **how)
            module.image(SM_90)
    assert [line.getMessage() for line in caplog.records] == [
        f"jitkern: JITKERN_RECORD: cannot write {record}: No space left on device"
    ]
    record.chmod(0o644)
    assert [str(one.used) for one in replay(record)] == ["tiny<5> for 9.0"]


# -- failures --------------------------------------------------------------------------------------

GOOD = """\
struct Good {
  struct Params { int* out; };
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params& p) { *p.out = 1; }
};
"""


def lines_of(name: str, text: str, **changes: Any) -> list[dict[str, Any]]:
    place = f"./{name}.cu"
    line = {
        "record": 2,
        "function": "load_jit",
        "args": [name],
        "arch": "9.0",
        "options": {"device_files": [place], "device_wrappers": [[name, "Good"]]},
        "files": {place: sha256(text.encode())},
    }
    return [{"record": 2, "text": text}, {**line, **changes}]


def record_of(file: Path, *groups: list[dict[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(line)}\n" for group in groups for line in group))
    file.chmod(0o644)
    return file


@needs_nvrtc
@needs_cxx
def test_failures_are_listed_and_the_rest_is_built(
    capsys: Capture, tmp_path: Path, use: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that failed ended the command; some of the others gave tracebacks."""
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))  # no toolkit
    use(CACHE_DIR=tmp_path / "cache")
    computed, bad = "#include HEADER\nstruct Good {};\n", "struct Good { not C++ };\n"
    cxx = {"options": {"cpp_files": ["./bad_library.cu"]}, "arch": "", "function": "load_aot"}
    cuda = {"options": {"cuda_files": ["./single.cu"]}}
    option = {"device_files": ["./option.cu"], "device_wrappers": [["option", "Good"]]}
    folder = {**option, "device_files": ["./folder.cu"]}
    own = {"options": {**option, "device_files": ["jitkern:ops/gone.cu"]}, "files": {}}
    file = record_of(
        tmp_path / "run.jsonl",
        lines_of("bad_library", bad, **cxx),
        lines_of("single", GOOD, **cuda),
        lines_of("bad", bad),
        lines_of("computed", computed),
        lines_of("option", GOOD, options={**option, "extra_cuda_cflags": ["--frob"]}),
        lines_of("folder", GOOD, options={**folder, "extra_cuda_cflags": ["-I/"]}),
        lines_of("newer", GOOD, arch="99.0"),
        lines_of("own", GOOD, **own),
        lines_of("good", GOOD),
    )
    status, found, err = warm(capsys, "--replay", file)
    assert status == 1
    sources = {name: source for name, _, source in found}
    assert [name for name, source in sources.items() if source == "compiled"] == ["good"]
    assert set(sources.values()) == {"compiled", "failed"}
    assert err.startswith("jitkern: error: 8 of 10 failed:\n  bad_library: ")
    failed = {name for name, source in sources.items() if source == "failed"}
    listed = {line.split(":")[0].split()[0] for line in err.splitlines()[1:9]}
    assert listed == failed
    for text in (
        "newer for 99.0: arch: '99.0', expected one of 7.5, ",
        "gone.cu: this version of jitkern has no such source",
        "expected extra_include_paths for headers",
        "holds no CUDA toolkit",
    ):
        assert text in err
    assert "Traceback" not in err
    again = warm(capsys, "--replay", file, "--arch", "8.0")[1]
    assert ("good", "8.0", "compiled") in again
    assert ("newer", "8.0", "compiled") in again


@needs_nvrtc
def test_one_failure_has_the_whole_log(
    capsys: Capture, tmp_path: Path, use: Callable[..., None]
) -> None:
    use(CACHE_DIR=tmp_path / "cache")
    file = record_of(tmp_path / "run.jsonl", lines_of("bad", "struct Good { not C++ };\n"))
    status, found, err = warm(capsys, "--replay", file, "--arch", "8.0,9.0")
    assert (status, found) == (1, [("bad", "8.0", "failed"), ("bad", "9.0", "failed")])
    assert err.startswith("jitkern: error: 2 of 3 failed:")
    assert "not C++" in err  # the compiler's whole log and the source


def test_an_empty_record_and_a_foreign_file_are_errors(
    capsys: Capture, tmp_path: Path, use: Callable[..., None]
) -> None:
    """An empty one was "1 cached", and status 0."""
    use(CACHE_DIR=tmp_path / "cache")
    empty, foreign = (
        record_of(tmp_path / "empty.jsonl"),
        record_of(tmp_path / "foreign.jsonl", [{}]),
    )
    assert warm(capsys, "--replay", empty) == (
        1,
        [],
        f"jitkern: error: --replay: {empty}: nothing is recorded in it; record a run with "
        "JITKERN_RECORD=FILE and build it beforehand with: jitkern warm --replay FILE\n",
    )
    assert warm(capsys, "--replay", foreign) == (
        1,
        [],
        f"jitkern: error: --replay: {foreign}:1: not a recorded specialisation: record: None, "
        "expected 2\n",
    )
