"""An app whose kernels and libraries are recorded, for the tests that replay them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import SM_90

import jitkern.ops.store
from jitkern.cli import main
from jitkern.env import settings
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
#include "../inc/up.h"
inline int64_t arch() { return FAKE_ARCH + UP; }
""",
    "inc/up.h": "#define UP 3\n",
    "more/deep.h": "#define DEEP 0\n",
    "most/deep.h": "#error behind more/deep.h\n",
}


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets variables, as another process would have them."""

    def put(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(f"JITKERN_{name}", str(value))
        settings.cache_clear()

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    yield put
    monkeypatch.undo()
    settings.cache_clear()


class App:
    """A folder of sources, and a program that compiles them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name, text in FILES.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="latin-1")  # not UTF-8

    def kernel(self) -> None:
        how = {"device_wrappers": [("tiny", "Tiny<4>")], "extra_cuda_cflags": ["-lineinfo"]}
        dirs = ["more", "most"]
        load_jit("tiny", "4", device_files=["src/tiny.cu"], extra_include_paths=dirs, **how).image(
            SM_90
        )

    def own(self) -> None:
        jitkern.ops.store.kernel.cache_clear()
        jitkern.ops.store.kernel(656, 16, 4).image(SM_90)

    def library(self, **options: Any) -> None:
        flags = ["-Imore -O1", "-I", "most", "-DFACTOR=4"]
        module = load_aot("scale", "4", cpp_files=["src/scale.cc"], extra_cflags=flags, **options)
        assert module["scale"](10) == 43

    def cuda(self) -> None:
        module = load_jit("single", cuda_files=["src/single.cu"], cuda_wrappers=[("arch", "arch")])
        assert module["arch"]() == 93


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> App:
    made = App(tmp_path / "home" / "app")
    monkeypatch.chdir(made.root)
    return made


def warm(capsys: Capture, *argv: object) -> tuple[int, list[tuple[str, str, str]], str]:
    """Status, (name, arch, source) of all but the host module, and what is said of it."""
    status = main(["warm", "--json", *map(str, argv)])
    out, err = capsys.readouterr()
    jobs = json.loads(out)["jobs"] if out else []
    rows = [(job["name"], job["arch"], job["source"]) for job in jobs]
    assert rows[:1] == ([("host module", "", rows[0][2])] if rows else [])
    return status, rows[1:], err
