"""A kernel that includes what it is told to; a machine with compilers and headers of one's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from needs import has

from jitkern.compilers import find
from jitkern.env import settings
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


NVRTC = str(find.find_nvrtc().path) if has(find.find_nvrtc) else ""


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """An empty machine: no pip packages, no CUDA; `machine(**variables)` sets its environment."""
    (tmp_path / "bin").mkdir()
    # What the real machine has in these places is not on this one.
    monkeypatch.setattr(find, "SYSTEM_CUDA", tmp_path / "usr-local-cuda")
    monkeypatch.setattr(find, "_SYSTEM_LIBS", (tmp_path / "usr-lib",))
    monkeypatch.setattr(find, "site_directories", lambda: (str(tmp_path / "site"),))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "JITKERN_NVRTC", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)

    def configure(**variables: object) -> Path:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        settings.cache_clear()
        return tmp_path

    configure(PATH=tmp_path / "bin")
    return configure


@pytest.fixture
def bare_machine(machine: Callable[..., Path]) -> Callable[..., Path]:
    """The same, with NVRTC and without CUDA's headers."""
    machine(JITKERN_NVRTC=NVRTC)
    return machine


def put(file: Path | str, text: str = "") -> Path:
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def toolkit(include: Path, *names: str) -> Path:
    put(include / "cuda_runtime.h")
    for name in names:
        put(include / name, "#define FROM_TOOLKIT 1\n")
    return include
