"""``jitkern clangd``: tell an editor's clangd where headers are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from jitkern.cli import ui

SUMMARY = "write a .clangd, by which editors find the headers of kernels"
DESCRIPTION = """\
Write DIR/.clangd, from which clangd, and so most editors, knows how the C++ and CUDA sources in and
below DIR are compiled: for kernels of your own, or in a checkout of jitkern for its own."""
EXAMPLE = """
jitkern clangd
jitkern clangd my_kernels/
"""

_FIRST_LINE = "# Written by `jitkern clangd`, for this machine; write it anew after an upgrade."
# Any arch that each clang of the last years knows: nothing is compiled.
_ARCH = "sm_80"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "directory",
        type=Path,
        nargs="?",
        default=Path(),
        metavar="DIR",
        help="where the sources are; default: the current directory",
    )


def run(args: argparse.Namespace) -> int:
    """Write the file, unless there is one of somebody else."""
    from jitkern.compilers.find_cuda import find_cuda_home
    from jitkern.errors import ToolchainError
    from jitkern.fs import write_whole

    if not args.directory.is_dir():
        raise ui.UsageError(f"clangd: {args.directory}: no directory, expected that of sources")
    file = args.directory.absolute() / ".clangd"
    if file.exists() and not file.read_text(errors="replace").startswith(_FIRST_LINE):
        raise ui.UsageError(
            f"clangd: {file}: written by somebody else, expected none: move it away"
        )
    try:
        toolkit = find_cuda_home().path
    except ToolchainError:
        toolkit = None
    write_whole(file, _text(toolkit).encode(), mode=0o644)
    ui.say(f"wrote {file}")
    if toolkit is None:
        ui.say("without a CUDA toolkit clangd does not know names such as threadIdx")
    return 0


def _text(toolkit: Path | None) -> str:
    from jitkern.compilers import cxx
    from jitkern.compilers.sources import DEVICE_STD, INCLUDE_DIRS
    from jitkern.jit.native import PRELUDE

    includes = [f"-I{path}" for path in (*INCLUDE_DIRS, *cxx.tvm_ffi_include_dirs())]
    # What load_jit puts in front of sources with host code.
    prelude = [f"-include{header}" for header in PRELUDE]
    cpp = ["-xc++", *cxx.CFLAGS[:1], *includes, *prelude]
    cuda = ["-xcuda", DEVICE_STD, f"--cuda-gpu-arch={_ARCH}", *includes, *prelude]
    # A clang may be older than the toolkit, of which it wants to know the version.
    cuda += [f"--cuda-path={toolkit}", "-Wno-unknown-cuda-version"] if toolkit else ["-nocudainc"]
    cuda.append("-nocudalib")
    parts = [_part(r".*\.(cc|cpp|cxx|h|hpp)", cpp), _part(r".*\.(cu|cuh)", cuda)]
    return f"{_FIRST_LINE}\n" + "---\n".join(parts)


def _part(files: str, flags: list[str]) -> str:
    # YAML reads JSON's strings as they are.
    lines = ["If:", f"  PathMatch: {json.dumps(files)}", "CompileFlags:", "  Add:"]
    return "\n".join([*lines, *(f"    - {json.dumps(flag)}" for flag in flags)]) + "\n"
