"""``nvcc -cubin``, chosen by ``JITKERN_COMPILER=nvcc``: compiles the same source as NVRTC.

For a toolkit that is newer than the installed NVRTC, and to profile by source line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from jitkern.arch import Arch
from jitkern.compilers.cxx import ninja_build, ninja_rule, run_ninja
from jitkern.compilers.find import CudaHeaders, find_nvcc
from jitkern.compilers.nvrtc import Image
from jitkern.compilers.sources import DEVICE_STD, check_options, with_defaults, words
from jitkern.env import CXX_HEADERS, NVCC_FLAGS
from jitkern.errors import CompileError
from jitkern.fs import scratch_folder

# nvcc and its preprocessor read options and headers from these; no key would hold them.
_UNSET = (*NVCC_FLAGS, *CXX_HEADERS, "CCC_OVERRIDE_OPTIONS")

BASE_OPTIONS = (DEVICE_STD, "-lineinfo", "-Xptxas=-v")
"""Given to every compile: line numbers for the profiler, the resource report in the log."""


def compile_with_nvcc(
    source: str,
    *,
    name: str,
    headers: Mapping[str, str],
    arch: Arch,
    options: Sequence[str] = (),
    cuda_headers: CudaHeaders = CudaHeaders(),  # noqa: B008 - a NamedTuple
) -> Image:
    """Compile device code to a cubin with nvcc. Parameters, result and errors as `nvrtc.compile`.

    nvcc finds the toolkit's own headers by itself; its version in the key stands for them.
    """
    options = words(options)
    check_options(options)
    nvcc = find_nvcc()
    flags = [f"-arch={arch.sm}", *with_defaults(BASE_OPTIONS, options), "-I", "include"]
    flags += [f"-I{directory}" for directory in cuda_headers.directories]
    command = [*nvcc.command, "-cubin", *flags, "$in", "-o", "$out"]
    unit, output = f"{Path(name).stem}.cu", "out.cubin"
    build = ninja_rule("nvcc", command, depfile=False) + ninja_build(output, "nvcc", [unit])
    texts = {unit: source, "build.ninja": build}
    texts |= {f"include/{path}": text for path, text in headers.items()}
    with scratch_folder("nvcc") as root:
        for path, text in texts.items():
            file = root / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8", errors="surrogateescape", newline="")
        try:
            log = run_ninja(name, root, _UNSET)
        except CompileError as error:
            error.message, error.source = f"{name}: {nvcc.id} for {arch} failed", source
            raise
        return Image((root / output).read_bytes(), "cubin", log)
