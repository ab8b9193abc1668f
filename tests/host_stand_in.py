"""Sources in the place of the host module's own, as a wheel brings them built, or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitkern.cache import get
from jitkern.env import settings
from jitkern.host import module as host
from jitkern.host.build import build_host_module

SOURCE = """\
#include <jitkern/answer.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tuple.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

namespace {
using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Function;
using tvm::ffi::String;
using tvm::ffi::Tuple;

Function& resolver() { static auto* f = new Function(); return *f; }
Function& fault_handler() { static auto* f = new Function(); return *f; }

int64_t answer() { return ANSWER; }
void set_resolver(Function f) { resolver() = f; }
void set_torch_state(int64_t, int64_t, int64_t) {}
void set_fault_handler(Function f) { fault_handler() = f; }
void set_tuner(Function) {}
void fault(String text) {
  if (fault_handler() == nullptr) TVM_FFI_THROW(IndexError) << text;
  fault_handler()(text);
}
int64_t demo(int64_t rows, int64_t bytes) {
  const Array<String> names{"rows", "bytes"};
  const auto [image, entries, config] = resolver()("demo", names, Array<int64_t>{rows, bytes}, 90)
      .cast<Tuple<Bytes, Array<String>, Array<int64_t>>>();
  return image.size() + 100 * entries.size() + 10000 * config[0];
}
}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(answer, answer);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_resolver, set_resolver);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_torch_state, set_torch_state);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_fault_handler, set_fault_handler);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(set_tuner, set_tuner);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(fault, fault);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(demo, demo);
"""

CFLAGS = ("-std=c++17", "-O0", "-fvisibility=hidden")  # compiles in half the time


def write_csrc(folder: Path, answer: int = 42) -> Path:
    (folder / "include" / "jitkern").mkdir(parents=True, exist_ok=True)
    (folder / "ops").mkdir(exist_ok=True)
    (folder / "host").mkdir(exist_ok=True)
    (folder / "host" / "precompiled.h").write_text("#pragma once\n#include <string>\n")
    (folder / "include" / "jitkern" / "answer.h").write_text(f"#define ANSWER {answer}\n")
    (folder / "ops" / "demo.cc").write_text(SOURCE)
    (folder / "ops" / "demo.cu").write_text("device code is of no concern here")
    return folder


def forget() -> None:
    host._found = None
    host._builders.clear()
    get._caches.cache_clear()
    settings.cache_clear()


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory into which the stand-in was built as for a wheel."""
    folder = tmp_path_factory.mktemp("host")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "CFLAGS", CFLAGS)
        csrc = write_csrc(folder / "src/jitkern/csrc")
        entry = build_host_module(folder / "_prebuilt", csrc)
    assert entry.artefact_name == "jitkern_host.so"
    return folder / "_prebuilt"


@pytest.fixture
def stand_in(tmp_path: Path, empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The stand-in sources in the place of jitkern's own, nothing shipped, nothing cached."""
    csrc = write_csrc(tmp_path / "src/jitkern/csrc")
    monkeypatch.setattr(host, "CSRC", csrc)
    monkeypatch.setattr(host, "CFLAGS", CFLAGS)
    monkeypatch.setattr(get, "SHIPPED", tmp_path / "nothing")
    kept = (host._found, dict(host._builders))
    forget()
    yield csrc
    forget()
    host._found = kept[0]
    host._builders.update(kept[1])


@pytest.fixture
def shipped(stand_in: Path, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The stand-in, with a copy of its shipped library."""
    place = tmp_path / "_prebuilt"
    shutil.copytree(built, place)
    monkeypatch.setattr(get, "SHIPPED", place)
    return place
