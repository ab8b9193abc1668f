"""A record replays in another process and directory, and the cache is then the app's."""

from __future__ import annotations

import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fake_toolkit import calls
from needs import needs_cxx, needs_nvrtc
from tiny import SM_90, Use, compiles, write_lines

import jitkern.ops.store
from jitkern.cache.store import Cache
from jitkern.cli import main
from jitkern.jit.loader import load_aot, load_jit

Capture = pytest.CaptureFixture[str]

FILES = {
    "src/tiny.cu": """\
#include "half.cuh"
#include <jitkern/types.h>
#include "../inc/up.h"
#include <deep.h>
template <int N> struct Tiny {
  struct Params { int* out; };
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params& p) { p.out[threadIdx.x] = half(N) + UP + DEEP; }
};
""",
    "src/half.cuh": "__device__ inline int half(int n) { return n / 2; }  // \xe9\n",
    "src/scale.cc": """\
#include <deep.h>
#include "../inc/up.h"
#include <cstdint>
struct Any { int32_t type_index; int32_t padding; int64_t value; };
extern "C" __attribute__((visibility("default")))
int __tvm_ffi_scale(void*, const Any* args, int32_t, Any* result) {
  *result = {1, 0, args->value * FACTOR + UP + DEEP};
  return 0;
}
""",
    "src/single.cu": """\
#include <cuda_runtime.h>
#include <cstdint>
#include "../inc/up.h"
struct Any { int32_t type_index; int32_t padding; int64_t value; };
extern "C" __attribute__((visibility("default")))
int __tvm_ffi_arch(void*, const Any*, int32_t, Any* result) {
  *result = {1, 0, FAKE_ARCH + UP};
  return 0;
}
""",
    "inc/up.h": "#define UP 3\n",
    "more/deep.h": "#define DEEP 0\n",
    "most/deep.h": "#error behind more/deep.h\n",
}


class App:
    """A folder of sources, some found by links, and a program that compiles them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in FILES.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="latin-1")  # not UTF-8
        (root / "store").mkdir()
        for name in ("more", "src/scale.cc"):
            kept = root / "store" / Path(name).name
            (root / name).rename(kept)
            (root / name).symlink_to(os.path.relpath(kept, (root / name).parent))

    def kernel(self) -> None:
        how = {"device_wrappers": [("tiny", "Tiny<4>")], "extra_cuda_cflags": ["-lineinfo"]}
        where = {"device_files": ["src/tiny.cu"], "extra_include_paths": ["more", "most"]}
        load_jit("tiny", "4", **where, **how).image(SM_90)

    def own(self) -> None:
        jitkern.ops.store.kernel.cache_clear()
        jitkern.ops.store.kernel(656, 16, 4).image(SM_90)

    def library(self, **options: Any) -> None:
        flags = ["-Imore -O1", "-I", "most", "-DFACTOR=4"]
        module = load_aot("scale", "4", cpp_files=["src/scale.cc"], extra_cflags=flags, **options)
        assert module["scale"](10) == 43

    def cuda(self) -> None:
        module = load_jit("single", cuda_files=["src/single.cu"])
        assert module["arch"]() == 93


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> App:
    made = App(tmp_path / "home" / "app")
    monkeypatch.chdir(made.root)
    return made


def warm(capsys: Capture, *argv: object) -> tuple[int, list[tuple[str, str, str]], str]:
    """Return the status, (name, arch, source) of all but the host module, and the error."""
    status = main(["warm", *map(str, argv)])
    out, err = capsys.readouterr()
    head, *lines = out.splitlines()[:-1] or [""]  # the last line counts them
    starts = [head.find(column) for column in ("kernel", "arch", "source", " ms")]
    rows = []
    for line in lines:
        name, arch, source = (line[a:b].strip() for a, b in pairwise(starts))
        rows.append((name.partition("<")[0], arch.strip("-"), source.split()[0]))
    assert rows[:1] == ([("host module", "", rows[0][2])] if rows else [])
    return status, rows[1:], err


pytestmark = pytest.mark.usefixtures("host_module")


def entries(cache: Path) -> set[str]:
    return {path.parent.name for path in Cache(cache).root.glob("v1/*-*/*/")}


@needs_nvrtc
@needs_cxx
def test_all_routes_replay(
    *,
    capsys: Capture,
    tmp_path: Path,
    use: Use,
    app: App,
    fake_nvcc: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Libraries were built for no other arch, sources were looked for here, the app compiled."""
    record = tmp_path / "home" / "run.jsonl"
    use(CACHE_DIR=tmp_path / "cache", RECORD=record, ARCH="9.0")
    run = (app.kernel, app.own, app.library, app.cuda)
    for part in run:
        part()
    recorded = entries(tmp_path / "cache")
    assert len(recorded) == 4
    record.chmod(0o644)
    assert str(tmp_path) not in record.read_text()

    # The directory of the app and of its record has moved; another current directory and cache.
    here = tmp_path / "elsewhere"
    here.mkdir()
    monkeypatch.chdir(here)
    (tmp_path / "home").rename(tmp_path / "moved")
    record = tmp_path / "moved" / "run.jsonl"
    use(CACHE_DIR=tmp_path / "other", RECORD="")
    wanted = ["8.0", "9.0"]
    names = [
        ("tiny", True),
        ("jitkern_store_656B_v16_i32", True),
        ("scale", False),
        ("single", True),
    ]
    rows = [(name, arch) for name, cuda in names for arch in (wanted if cuda else [""])]
    for source, count in (("compiled", len(wanted)), ("cached", 0)):
        before = calls(fake_nvcc)
        status, jobs, err = warm(capsys, "--replay", record, "--arch", ",".join(wanted))
        assert (status, err) == (0, "")
        assert jobs == [(name, arch, source) for name, arch in rows]
        assert calls(fake_nvcc) - before == count
    assert os.listdir(here) == []
    assert recorded <= entries(tmp_path / "other")

    # The app again, with what the replay has brought into the cache.
    monkeypatch.chdir(tmp_path / "moved" / "app")
    compiled = compiles()
    for part in run:
        part()
    assert compiles() == compiled


@needs_cxx
def test_the_build_directory_is_not_written_again(
    capsys: Capture, tmp_path: Path, use: Use, app: App
) -> None:
    record = tmp_path / "run.jsonl"
    use(CACHE_DIR=tmp_path / "cache", RECORD=record)
    app.library(build_directory="build")
    shutil.rmtree(app.root / "build")
    record.chmod(0o644)
    assert warm(capsys, "--replay", record)[:2] == (0, [("scale", "", "cached")])
    assert not (app.root / "build").exists()


GOOD = """\
struct Good {
  struct Params { int* out; };
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params& p) { *p.out = 1; }
};
"""


def line_of(folder: Path, name: str, text: str | None = GOOD, **changes: Any) -> dict[str, Any]:
    """A line that names a source beside the record; with no text there is none."""
    if text is not None:
        (folder / f"{name}.cu").write_text(text)
    return {
        "record": 3,
        "function": "load_jit",
        "args": [name],
        "arch": "9.0",
        "options": {"device_files": [f"{name}.cu"], "device_wrappers": [[name, "Good"]]},
        **changes,
    }


@needs_nvrtc
@needs_cxx
def test_failures_are_listed_and_the_rest_is_built(
    capsys: Capture, tmp_path: Path, use: Use
) -> None:
    """A library that failed ended the command; some of the others gave tracebacks."""
    use(CACHE_DIR=tmp_path / "cache")
    bad = "struct Good { not C++ };\n"
    cxx = {"options": {"cpp_files": ["bad_library.cc"]}, "arch": "", "function": "load_aot"}
    (tmp_path / "bad_library.cc").write_text(bad)
    file = write_lines(
        tmp_path / "run.jsonl",
        line_of(tmp_path, "bad_library", **cxx),
        line_of(tmp_path, "bad", bad),
        line_of(tmp_path, "newer", arch="99.0"),
        line_of(tmp_path, "deleted", None),
        line_of(tmp_path, "good"),
    )
    status, found, err = warm(capsys, "--replay", file)
    assert status == 1
    sources = {name: source for name, _, source in found}
    assert [name for name, source in sources.items() if source == "compiled"] == ["good"]
    assert set(sources.values()) == {"compiled", "failed"}
    assert err.startswith("jitkern: error: 4 of 6 failed:\n  bad_library: ")
    failed = {name for name, source in sources.items() if source == "failed"}
    listed = {line.split(":")[0].split()[0] for line in err.splitlines()[1:5]}
    assert listed == failed
    for text in (
        "newer for 99.0: arch: '99.0', expected one of 8.0, ",
        f"'{tmp_path}/deleted.cu' does not exist, tried ",
    ):
        assert text in err
    assert "Traceback" not in err
    assert "not C++" in err  # the compiler's whole log and the source
    again = warm(capsys, "--replay", file, "--arch", "8.0")[1]
    assert ("good", "8.0", "compiled") in again
    assert ("newer", "8.0", "compiled") in again
