"""``jitkern clangd``: what it writes is what sources are compiled with."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from needs import needs_cxx

import jitkern
from jitkern.cli import main
from jitkern.compilers import find_cuda
from jitkern.compilers.find import find_cxx
from jitkern.errors import ToolchainError

CSRC = Path(jitkern.__file__).parent / "csrc"
KERNEL_CC = """
#include <jitkern/check.h>
int64_t rows(tvm::ffi::TensorView x) { return jitkern::Rows("rows", "x", x).num_rows; }
"""


def flags_in(file: Path) -> dict[str, list[str]]:
    """Flags by the pattern of the files that they are for."""
    found = {}
    for part in file.read_text().split("---\n"):
        pattern = part.partition("PathMatch: ")[2].partition("\n")[0]
        lines = [line.strip() for line in part.partition("Add:\n")[2].splitlines()]
        found[json.loads(pattern)] = [json.loads(line.removeprefix("- ")) for line in lines]
    return found


@needs_cxx
def test_a_compiler_takes_a_users_source_with_these_flags(tmp_path: Path) -> None:
    (tmp_path / "kernel.cc").write_text(KERNEL_CC)
    assert main(["clangd", str(tmp_path)]) == 0
    flags = flags_in(tmp_path / ".clangd")[r".*\.(cc|cpp|cxx|h|hpp)"]
    # In g++'s spelling; clang takes both.
    flags = [word for flag in flags for word in flag.replace("-include", "-include ").split()]
    command = [*find_cxx().command, *flags, "-fsyntax-only", str(tmp_path / "kernel.cc")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_where_the_headers_are_for_device_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing() -> None:
        raise ToolchainError("none")

    monkeypatch.setattr(find_cuda, "find_cuda_home", missing)
    monkeypatch.chdir(tmp_path)
    assert main(["clangd"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"wrote {tmp_path / '.clangd'}\nwithout a CUDA toolkit clangd does not")
    flags = flags_in(tmp_path / ".clangd")[r".*\.(cu|cuh)"]
    assert flags[:2] == ["-xcuda", "-std=c++17"]
    assert {f"-I{CSRC}", f"-I{CSRC / 'include'}", "-nocudainc"} <= set(flags)


def test_with_a_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = find_cuda.CudaHome(Path("/opt/cuda"), Path("/opt/cuda/bin/nvcc"), (), Path("/"), "x")
    monkeypatch.setattr(find_cuda, "find_cuda_home", lambda: home)
    assert main(["clangd", str(tmp_path)]) == 0
    flags = flags_in(tmp_path / ".clangd")[r".*\.(cu|cuh)"]
    assert "--cuda-path=/opt/cuda" in flags and "-nocudainc" not in flags


def test_its_own_file_is_written_anew_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / ".clangd"
    assert main(["clangd", str(tmp_path)]) == main(["clangd", str(tmp_path)]) == 0
    file.write_text("CompileFlags:\n")
    capsys.readouterr()
    assert main(["clangd", str(tmp_path)]) == 2
    text = (
        f"jitkern: error: clangd: {file}: written by somebody else, expected none: move it away "
        "(see: jitkern clangd --help)\n"
    )
    assert capsys.readouterr().err == text
    assert file.read_text() == "CompileFlags:\n"
    assert main(["clangd", str(file)]) == 2
    assert "no directory, expected that of sources" in capsys.readouterr().err
