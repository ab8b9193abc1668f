"""A kernel that includes what it is told to; a machine with CUDA headers where one wants."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from jitkern.compilers import find
from jitkern.env import settings
from jitkern.errors import ToolchainError
from jitkern.jit.loader import load_jit

KERNEL = """\
{includes}
struct Kernel {{
  struct Params {{ {type}* out; }};
  static constexpr int kNumThreads = 32, kMinBlocks = 1;
  static __device__ void run(const Params& p) {{ {body}; }}
}};
"""


def load(folder: Path, *includes: str, type: str = "int", body: str = "", **options: Any) -> Any:  # noqa: A002
    lines = "\n".join(f"#include {name}" for name in includes)
    (folder / "own.cu").write_text(KERNEL.format(includes=lines, type=type, body=body))
    file = str(folder / "own.cu")
    wrappers = [("kernel", "Kernel")]
    return load_jit("own", device_files=[file], device_wrappers=wrappers, **options)


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Path]]:
    """A machine without CUDA's headers; `bare_machine(**variables)` sets its environment."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    with suppress(ToolchainError):
        monkeypatch.setenv("JITKERN_NVRTC", str(find.find_nvrtc().path))
    monkeypatch.setattr(find, "SYSTEM_CUDA", tmp_path / "usr-local-cuda")
    monkeypatch.setattr(find, "site_directories", lambda: (str(tmp_path / "site"),))
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "conda"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))

    def configure(**variables: object) -> Path:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        settings.cache_clear()
        return tmp_path

    configure()
    yield configure
    monkeypatch.undo()
    settings.cache_clear()


def put(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def toolkit(include: Path, version: int = 12080, *names: str) -> Path:
    put(include / "cuda_runtime.h")
    put(include / "cuda_runtime_api.h", f"\n#define CUDART_VERSION  {version}\n")
    for name in names:
        put(include / name, "#define FROM_TOOLKIT 1\n")
    return include
